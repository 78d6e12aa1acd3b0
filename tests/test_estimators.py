"""avg@k, pass@k and maj@n against independent computations, and that no order matters."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torl_eval.estimators import answer_classes, average, graders_equal, majority, pass_at
from torl_grading import Grader


def random_table(problems: int, samples: int, seed: int) -> list[list[bool]]:
    draw = random.Random(seed)
    return [[draw.random() < chance for _ in range(samples)] for chance in (draw.random() for _ in range(problems))]


TABLES = [random_table(*sizes) for sizes in ((30, 32, 0), (500, 1, 1), (7, 2, 2), (2, 5, 3), (40, 3, 4))]


def naive_variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


@pytest.mark.parametrize("correct", TABLES)
def test_the_average_and_its_errors_are_those_of_the_textbook(correct):
    problems, samples = len(correct), len(correct[0])
    estimate = average(correct)
    means = [sum(row) / samples for row in correct]
    assert estimate.value == pytest.approx(sum(map(sum, correct)) / (problems * samples), abs=1e-12)
    assert estimate.se_problems == pytest.approx((naive_variance(means) / problems) ** 0.5, abs=1e-12)
    if samples == 1:
        assert estimate.se_samples is None
    else:
        expected = sum(naive_variance([float(ok) for ok in row]) / samples for row in correct) ** 0.5 / problems
        assert estimate.se_samples == pytest.approx(expected, abs=1e-12)


def test_one_problem_says_nothing_about_others():
    assert average([[True, False]]).se_problems is None


def test_the_sampling_error_is_what_repeated_runs_vary_by():
    draw = random.Random(0)
    chances = [0.1, 0.5, 0.9, 0.3]
    runs = [average([[draw.random() < chance for _ in range(8)] for chance in chances]) for _ in range(2000)]
    spread = naive_variance([run.value for run in runs])
    assert sum(run.se_samples**2 for run in runs) / len(runs) == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples):
    for right in range(samples + 1):
        row = [True] * right + [False] * (samples - right)
        for k, value in pass_at([row]).items():
            subsets = list(itertools.combinations(row, k))
            assert value == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_given_for_powers_of_two_and_n():
    assert [list(pass_at([[True] * n])) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_pass_at_k_stays_exact_for_many_samples():
    correct = [[True] + [False] * 4095]
    assert pass_at(correct)[1] == 1 / 4096
    assert pass_at(correct)[2048] == 0.5


def test_every_problem_needs_as_many_samples():
    for correct in ([[True], [True, False]], [[]], []):
        for estimate in (average, pass_at, lambda table: majority(table, table)):
            with pytest.raises(ValueError, match="same number"):
                estimate(correct)


@pytest.mark.parametrize(
    ("classes", "correct", "value"),
    [
        ([0, 0, 1], [True, True, False], 1.0),
        ([0, 1, 1], [True, False, False], 0.0),
        ([0, 1, None], [True, False, False], 0.5),
        ([0, 1, 2], [True, False, False], 1 / 3),
        ([1, 2, None], [False, False, False], 0.0),
        ([None, None, None], [False, False, False], 0.0),
        ([None, None, 0], [False, False, True], 1.0),
    ],
)
def test_the_majority_counts_votes_and_a_tie_by_its_fair_draw(classes, correct, value):
    assert majority([classes], [correct]) == pytest.approx(value, abs=1e-12)
    assert majority([classes, [0, 0, 0]], [correct, [True] * 3]) == pytest.approx((value + 1) / 2, abs=1e-12)


answers = st.lists(st.tuples(st.sampled_from([None, "1", "2", "3", "4", ""]), st.booleans()), min_size=1, max_size=9)


def as_problem(drawn: list[tuple[str | None, bool]]) -> tuple[list[str | None], list[bool]]:
    """Answers of one problem, of which "1" and perhaps "2" are right."""
    also = any(ok for _, ok in drawn)
    return [text for text, _ in drawn], [text == "1" or (also and text == "2") for text, _ in drawn]


def odd_equals_even(pairs: list[tuple[str, str]]) -> list[bool]:
    return [{a, b} == {"3", "4"} for a, b in pairs]


@given(st.data())
def test_no_estimate_depends_on_the_order_of_samples_or_problems(data):
    samples = data.draw(st.integers(1, 6))
    problem = st.lists(st.booleans(), min_size=samples, max_size=samples)
    correct = data.draw(st.lists(problem, min_size=1, max_size=6))
    mixed = data.draw(st.permutations([data.draw(st.permutations(row)) for row in correct]))
    for estimate in (lambda table: average(table).value, lambda table: average(table).se_problems, pass_at):
        assert estimate(mixed) == pytest.approx(estimate(correct), abs=1e-12)
    passes = pass_at(correct)
    assert passes[1] == pytest.approx(average(correct).value, abs=1e-12)
    assert list(passes.values()) == sorted(passes.values())
    assert all(0 <= value <= 1 for value in passes.values())


@given(answers, st.randoms())
def test_a_vote_does_not_depend_on_the_order_of_samples(drawn, shuffler):
    texts, correct = as_problem(drawn)
    places = list(range(len(texts)))
    shuffler.shuffle(places)
    classes = answer_classes(texts, correct, odd_equals_even)
    shuffled_correct = [correct[place] for place in places]
    shuffled = answer_classes([texts[place] for place in places], shuffled_correct, odd_equals_even)
    assert shuffled == [classes[place] for place in places]
    value = majority([classes], [correct])
    assert 0 <= value <= 1
    assert majority([shuffled], [shuffled_correct]) == value


def test_right_answers_are_one_class_and_equal_wrong_ones_another():
    asked = []

    def equal(pairs):
        asked.extend(pairs)
        return [{a, b} == {"0.5", "1/2"} for a, b in pairs]

    texts = ["2", "1/2", None, "4/2", " 0.5", "", "1/2", "7"]
    correct = [True, False, False, True, False, False, False, False]
    assert answer_classes(texts, correct, equal) == [0, 2, None, 0, 2, None, 2, 1]
    assert asked == [("7", "0.5"), ("7", "1/2"), ("0.5", "1/2")], "not with itself, nor with what is right"


def test_the_grader_groups_wrong_answers_by_value():
    with Grader(num_workers=2) as grader:
        equal = graders_equal(grader)
        texts = [r"\frac{\sqrt{12}}{2}", r"\sqrt{3}", "0.5", r"\frac12", "1+41", "42", "x"]
        classes = answer_classes(texts, [False] * len(texts), equal)
    assert classes[0] == classes[1]
    assert classes[2] == classes[3]
    assert classes[4] == classes[5], "equality of votes is symmetric, where grading is not"
    assert len(set(classes)) == 4
