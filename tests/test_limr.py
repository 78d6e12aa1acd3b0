"""LIMR's scores against an independent implementation, their edge cases, and selection."""

import math
import random

import numpy as np
import pytest

from torl_data.limr import accuracy_table, in_band, lim_scores, pass_rates, select, whole_epochs

NAN = float("nan")


def plain_scores(rollouts, epochs):
    """The released code's procedure in plain Python, from its description: dictionaries, sums and -1 for missing."""
    sequences = {}
    for name in sorted({name for name, _, _ in rollouts}):
        sequence = []
        for k in range(epochs):
            values = [value for other, epoch, value in rollouts if other == name and math.floor(epoch) == k]
            sequence.append(sum(values) / len(values) if values else -1)
        for k in range(epochs - 1):
            if sequence[k] == -1 and sequence[k + 1] != -1:
                sequence[k] = sequence[k + 1]
        if -1 not in sequence:
            sequences[name] = sequence
    averages = [math.fsum(sequence[k] for sequence in sequences.values()) / len(sequences) for k in range(epochs)]
    best = math.fsum((1 - average) ** 2 for average in averages)
    return {
        name: 1 - math.fsum((value - average) ** 2 for value, average in zip(sequence, averages, strict=True)) / best
        for name, sequence in sequences.items()
    }


def table_of(rows):
    """A table from accuracies, a list a problem; None where it was not seen."""
    entries = [(f"p{i}", k, value) for i, row in enumerate(rows) for k, value in enumerate(row) if value is not None]
    return accuracy_table(*zip(*entries, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_scores_match_an_independent_implementation(seed):
    rng = random.Random(seed)
    epochs, problems = rng.randint(2, 21), rng.randint(2, 40)
    share_missing = rng.choice([0.0, 0.05, 0.3])
    rollouts = []
    for i in range(problems):
        skill = rng.choice([0.0, 1.0, rng.random()])
        for k in range(epochs):
            if rng.random() >= share_missing:
                right = min(1.0, skill * (0.5 + k / epochs))
                rollouts += [(f"p{i:02}", k + rng.random() * 0.99, float(rng.random() < right)) for _ in range(8)]
    rng.shuffle(rollouts)
    expected = plain_scores(rollouts, epochs)
    scores = lim_scores(accuracy_table(*zip(*rollouts, strict=True)), epochs)
    assert scores.keys() == expected.keys()
    assert all(abs(scores[name] - expected[name]) <= 1e-12 for name in expected)


def test_a_score_by_hand():
    # averages 1/4 and 3/4; the denominator is 9/16 + 1/16
    scores = lim_scores(table_of([[0.0, 0.5], [0.5, 1.0]]))
    assert scores == pytest.approx({"p0": 1 - (1 / 16 + 1 / 16) / (10 / 16), "p1": 1 - (1 / 16 + 1 / 16) / (10 / 16)})


def test_always_right_scores_zero_and_never_right_depends_on_the_average():
    scores = lim_scores(table_of([[1, 1, 1], [0, 0, 0], [0.5, 1, 1], [0.8, 0.9, 1]]))
    assert scores["p0"] == pytest.approx(0, abs=1e-15)
    assert scores["p1"] < 0 < scores["p2"]
    low = lim_scores(table_of([[0, 0], [0, 0], [0.1, 0.3]]))
    assert low["p0"] > 0.9  # the average is nearly never right too: such problems are left out by pass rate


def test_a_missing_epoch_takes_the_next_one_in_one_pass():
    full = [[0.2, 0.4, 0.6, 0.8], [0.1, 0.1, 0.5, 0.5]]
    assert lim_scores(table_of([*full, [None, 0.3, 0.4, 0.5]])) == lim_scores(table_of([*full, [0.3, 0.3, 0.4, 0.5]]))
    # Of two missing in a row the first stays missing, and a last one has no next: no score, and not in the average.
    for gaps in ([None, None, 0.4, 0.5], [0.3, 0.3, 0.4, None], [0.3, None, None, 0.5]):
        assert lim_scores(table_of([*full, gaps]), 4) == lim_scores(table_of(full))


def test_a_last_epoch_that_was_only_begun_is_left_out():
    rows = [[0.2, 0.4, 0.6], [0.1, 0.1, None], [0.3, 0.3, None], [0.3, 0.9, None]]
    assert whole_epochs(table_of(rows)) == 2
    assert lim_scores(table_of(rows)) == lim_scores(table_of([row[:2] for row in rows]))
    assert list(lim_scores(table_of(rows), 3)) == ["p0"]  # asked for, it costs the others their score


def test_epochs_are_whole_numbers_of_fractions_and_rollouts_without_a_verdict_do_not_count():
    table = accuracy_table(["a", "a", "a", "b", "a"], [0.0, 0.99, 0.9999999999, 1.5, 0.5], [1, 0, 1, 1, NAN])
    assert table.problem_ids == ("a", "b")
    assert table.rollouts.tolist() == [[2, 1], [0, 1]]
    np.testing.assert_array_equal(table.accuracy, [[0.5, 1.0], [NAN, 1.0]])
    assert pass_rates(table) == {"a": pytest.approx(2 / 3), "b": 1.0}


@pytest.mark.parametrize(
    ("rows", "epochs", "message"),
    [
        ([[0.5], [0.2]], None, "at least 2 epochs and the rollouts have 1: train for more"),
        ([[0.5, 0.6], [0.2, 0.3]], 3, "at least 2 epochs, 3 were asked for, and the rollouts have 2"),
        ([[1, 1], [1, 1]], None, "always right"),
        ([[0.5, None], [None, None], [0.1, None], [None, 0.5]], 2, None),
        ([[0.5, None, None], [0.1, None, None], [None, None, 0.5]], 3, "seen in every epoch"),
    ],
)
def test_what_cannot_be_scored_is_one_sentence(rows, epochs, message):
    if message is None:
        assert lim_scores(table_of(rows), epochs) == {"p3": 1.0}
        return
    with pytest.raises(ValueError, match=message) as raised:
        lim_scores(table_of(rows), epochs)
    assert "\n" not in str(raised.value)


def test_an_empty_table_has_no_epochs():
    table = accuracy_table([], [], [])
    assert whole_epochs(table) == 0
    assert pass_rates(table) == {}
    with pytest.raises(ValueError, match="have 0"):
        lim_scores(table)


def test_selection_by_threshold_or_by_count():
    scores = {"a": 0.6, "b": 0.59, "c": 0.9, "d": 0.6}
    assert select(scores, threshold=0.6) == {"a", "c", "d"}
    assert select(scores, count=2) == {"c", "a"}
    assert select(scores, count=9) == set(scores)
    with pytest.raises(ValueError, match="give one of them"):
        select(scores)
    with pytest.raises(ValueError, match="give one of them"):
        select(scores, threshold=0.1, count=1)


def test_the_band_leaves_out_what_is_always_or_never_solved():
    rates = {"never": 0.0, "rarely": 0.1, "half": 0.5, "always": 1.0}
    assert in_band(rates) == {"rarely", "half"}
    assert in_band(rates, 0.1, 0.9) == {"half"}
