"""LIMR: select the problems whose learning follows the average of the run (arXiv 2502.11886), or a band of pass rates.

    table = accuracy_table(problem_ids, epochs, correct)       from the records of a run, one entry a rollout
    scores = lim_scores(table)
    kept = select(scores, threshold=0.6)

With r[i, k] the accuracy of problem i in epoch k (share of its rollouts that are correct) and r_avg[k] its mean over
problems, the score of LIMR's released code is

    s[i] = 1 - sum_k (r[i, k] - r_avg[k])^2 / sum_k (1 - r_avg[k])^2

The best improve with the average. A problem that is always right scores 0. One that is never right scores below 0
where the average is over a half, and high where it is low: leave it out by pass rate when the run solves little. LIMR
trained a 7B model for 21 epochs to get its scores. ToRL does not say how it made its own; the stand-in is to take the
accuracies of one's own run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class AccuracyTable:
    """Accuracies in 0 to 1, one row a problem and one column an epoch, in order; NaN where a problem was not seen."""

    problem_ids: tuple[str, ...]
    accuracy: np.ndarray
    rollouts: np.ndarray
    """How many rollouts stand behind each accuracy."""


def accuracy_table(problem_ids: Sequence[str], epochs: Sequence[float], correct: Sequence[float]) -> AccuracyTable:
    """Return the table of rollouts. `epochs` may be fractions as trainers log them: 2.75 is in the third, number 2.
    `correct` is 1 or 0, or a share; NaN, a rollout without a verdict, does not count."""
    values = np.asarray(correct, dtype=np.float64)
    seen = ~np.isnan(values)
    names, rows = np.unique(np.asarray(problem_ids, dtype=str)[seen], return_inverse=True)
    # A step that opens an epoch may be logged a rounding error before it.
    numbers = np.floor(np.asarray(epochs, dtype=np.float64)[seen] + 1e-6).astype(np.int64)
    total = np.zeros((len(names), int(numbers.max(initial=-1)) + 1))
    count = np.zeros_like(total)
    np.add.at(total, (rows, numbers), values[seen])
    np.add.at(count, (rows, numbers), 1)
    accuracy = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return AccuracyTable(tuple(names.tolist()), accuracy, count.astype(np.int64))


def whole_epochs(table: AccuracyTable) -> int:
    """Return how many epochs can be used: a last one in which less than half of the problems were seen is not whole,
    and would cost all others their score."""
    covered = (table.rollouts > 0).mean(axis=0) if len(table.problem_ids) else np.zeros(0)
    return len(covered) - (len(covered) > 0 and covered[-1] < 0.5)


def lim_scores(table: AccuracyTable, epochs: int | None = None) -> dict[str, float]:
    """Return LIMR's score of each problem, from the first `epochs` epochs (default: all whole ones).

    As in the released code: a missing epoch takes the next one's accuracy, in one pass from the first to the last, so
    the second of two missing is filled and the first is not; a problem still without an epoch has no score and is not
    in the average. Raises `ValueError` for fewer than two epochs, where nothing is learnt, and when all problems are
    always right, where the formula divides by zero.
    """
    accuracy = table.accuracy[:, : whole_epochs(table) if epochs is None else epochs].copy()
    if accuracy.shape[1] < max(2, epochs or 0):
        raise ValueError(
            f"LIMR compares at least 2 epochs{f', {epochs} were asked for,' if epochs else ''} and the rollouts have "
            f"{accuracy.shape[1]}: train for more, or select by pass rate."
        )
    for k in range(accuracy.shape[1] - 1):
        missing = np.isnan(accuracy[:, k])
        accuracy[missing, k] = accuracy[missing, k + 1]
    scored = ~np.isnan(accuracy).any(axis=1)
    accuracy = accuracy[scored]
    if not len(accuracy):
        raise ValueError(
            "No problem was seen in every epoch, so LIMR has nothing to compare: train on fewer problems."
        )
    average = accuracy.mean(axis=0)
    best = ((1 - average) ** 2).sum()
    if best == 0:
        raise ValueError("Every problem is always right, so LIMR has nothing to tell apart: take harder problems.")
    scores = 1 - ((accuracy - average) ** 2).sum(axis=1) / best
    return dict(zip(np.asarray(table.problem_ids)[scored].tolist(), scores.tolist(), strict=True))


def pass_rates(table: AccuracyTable) -> dict[str, float]:
    """Return the share of all rollouts of each problem that are correct."""
    correct = np.nansum(table.accuracy * table.rollouts, axis=1)
    rates = correct / np.maximum(table.rollouts.sum(axis=1), 1)
    return dict(zip(table.problem_ids, rates.tolist(), strict=True))


def select(scores: Mapping[str, float], *, threshold: float | None = None, count: int | None = None) -> set[str]:
    """Return the problems with a score of at least `threshold`, or the `count` best; of equal scores the first ids."""
    if (threshold is None) == (count is None):
        raise ValueError(f"threshold={threshold!r}, count={count!r}: give one of them.")
    if count is not None:
        return set(sorted(scores, key=scores.__getitem__, reverse=True)[:count])
    return {problem_id for problem_id, score in scores.items() if score >= threshold}


def in_band(rates: Mapping[str, float], low: float = 0.0, high: float = 1.0) -> set[str]:
    """Return the problems whose pass rate lies strictly between `low` and `high`: by default all that a probe run
    solved sometimes, since groups of equal rewards train nothing."""
    return {problem_id for problem_id, rate in rates.items() if low < rate < high}
