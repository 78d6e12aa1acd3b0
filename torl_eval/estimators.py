r"""Estimates from tables of samples: avg@k with its standard errors, unbiased pass@k, maj@n.

A table `correct` has a row for each problem and in it a bool for each of the n samples. No estimate depends on the
order of problems or of samples.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torl_grading import Grader

Table = Sequence[Sequence[bool]]
Equal = Callable[[list[tuple[str, str]]], list[bool]]
"""Says for each pair of answers whether they are the same answer."""


@dataclass(frozen=True, slots=True)
class Average:
    """avg@n, in 0..1, and its standard errors.

    `se_problems` is for problems drawn from more of their kind: it tells how far another set, or a comparison of
    models, may be off; it contains the noise of sampling. None for one problem. `se_samples` is for new samples of
    these same problems: how far a second run may be off. None for one sample, greedy ones too.
    """

    value: float
    se_problems: float | None
    se_samples: float | None


def average(correct: Table) -> Average:
    """Return the mean over samples, then over problems. Raises `ValueError` for an empty or ragged table."""
    n = _samples(correct)
    means = [sum(row) / n for row in correct]
    se_problems = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    # p (1 - p) n / (n - 1) is the unbiased variance of a sample, and its n-th part that of the problem's mean
    variances = [mean * (1 - mean) / (n - 1) for mean in means] if n > 1 else None
    se_samples = math.sqrt(math.fsum(variances)) / len(means) if variances else None
    return Average(math.fsum(means) / len(means), se_problems, se_samples)


def pass_at(correct: Table) -> dict[int, float]:
    """Return unbiased pass@k for k = 1, 2, 4, ... and n: the chance that k of a problem's n samples, drawn without
    putting back, hold a right one, on average over problems."""
    n = _samples(correct)
    ks = sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})
    rights = Counter(sum(row) for row in correct)
    return {k: math.fsum(count * _pass_at(n, c, k) for c, count in rights.items()) / len(correct) for k in ks}


def _pass_at(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), from integers, so that it is rounded once."""
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def majority(classes: Sequence[Sequence[int | None]], correct: Table) -> float:
    """Return maj@n, the share of problems whose most frequent answer is right.

    `classes` says for each sample which answer it gave; None gives no vote. Where several answers have the most votes,
    a fair draw decides: the problem counts by its expected value, the share of right ones among the tied. A problem
    without any vote counts 0.
    """
    _samples(correct)
    return math.fsum(_majority(*row) for row in zip(classes, correct, strict=True)) / len(correct)


def _majority(classes: Sequence[int | None], correct: Sequence[bool]) -> float:
    votes = Counter(answer for answer in classes if answer is not None)
    right = {answer for answer, ok in zip(classes, correct, strict=True) if ok}
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(answer in right for answer in top) / len(top) if top else 0.0


def answer_classes(answers: Sequence[str | None], correct: Sequence[bool], equal: Equal) -> list[int | None]:
    """Return for each of a problem's answers a number that equal answers share; None for no box or an empty one.

    Right answers are all 0: they equal the solution. The others are taken from the shortest on (then by text), each
    joining the first class whose first member it is `equal` to. So the classes do not depend on the order of samples,
    although equality need not be transitive.
    """
    texts = [answer.strip() if answer else "" for answer in answers]
    known = {text: 0 for text, ok in zip(texts, correct, strict=True) if ok}
    waiting = sorted(set(texts) - known.keys() - {""}, key=lambda text: (len(text), text))
    number = 0
    while waiting:
        number += 1
        first, *others = waiting
        same = equal([(first, other) for other in others]) if others else []
        members = {first} | {other for other, joins in zip(others, same, strict=True) if joins}
        known |= dict.fromkeys(members, number)
        waiting = [text for text in waiting if text not in members]
    return [known.get(text) for text in texts]


def graders_equal(grader: Grader) -> Equal:
    r"""Return `grader`'s equality of two answers.

    Grading is not symmetric: a solution's answer must be worked out, so `1+41` is wrong for 42, while 42 is right for
    `1+41`. Here two answers are equal when either is right for the other.
    """

    def equal(pairs: list[tuple[str, str]]) -> list[bool]:
        both = [
            (grader.submit([f"\\boxed{{{answer}}}"], other), grader.submit([f"\\boxed{{{other}}}"], answer))
            for answer, other in pairs
        ]
        return [one.result().correct or other.result().correct for one, other in both]

    return equal


def _samples(correct: Table) -> int:
    """Return n, the same for every problem."""
    lengths = {len(row) for row in correct}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"The problems have {sorted(lengths)} samples: every problem needs the same number, above 0.")
    return lengths.pop()
