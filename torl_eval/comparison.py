"""Is B better than A? Two evaluations compared problem by problem.

    comparison = compare(a, b)  # the contents of two evaluation.json
    print(comparison)

Both answered the same problems, so the noise of which problems were drawn cancels in the differences of a problem's
accuracy (its mean over samples), whose mean gets a percentile bootstrap interval over problems. Of few problems, as in
AIME, such an interval is somewhat too narrow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torl_trl.errors import UserError

Evaluation = Mapping[str, Any]
"""The content of an evaluation.json, as `torl_eval.results` makes it."""

LEVEL = 95
"""The interval's coverage, in percent."""


@dataclass(frozen=True, slots=True)
class Difference:
    """B - A on the problems that both have: accuracies in 0..1, the difference `value` and its interval.

    `won` counts problems on which B is better; `only_a` and `only_b` those that one evaluation has alone.
    """

    title: str
    a: float
    b: float
    value: float
    low: float
    high: float
    won: int
    lost: int
    tied: int
    only_a: int = 0
    only_b: int = 0

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """`benchmarks` by name; `mean` is their unweighted mean, in which each counts the same whatever its size.

    `uncompared` names benchmarks that only one evaluation has, or of which they share no problem. `settings` are
    those that differ, as (of A, of B).
    """

    benchmarks: dict[str, Difference]
    mean: Difference
    uncompared: tuple[str, ...]
    settings: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        """A table for the console, in percent."""
        lines = [f"{'':<16}{'A':>7}{'B':>7}{'B - A':>8}  {f'{LEVEL} % interval':<18}{'won':>5}{'lost':>6}{'tied':>6}"]
        for row in (*self.benchmarks.values(), self.mean):
            interval = f"[{100 * row.low:+.1f}, {100 * row.high:+.1f}]{' *' if row.excludes_zero else ''}"
            lines.append(
                f"{row.title[:16]:<16}{100 * row.a:>7.1f}{100 * row.b:>7.1f}{100 * row.value:>+8.1f}  {interval:<18}"
                f"{row.won:>5}{row.lost:>6}{row.tied:>6}"
            )
        lines.append("* the interval excludes 0")
        lines += [
            f"{row.title}: {row.only_a} problems only in A and {row.only_b} only in B are left out"
            for row in self.benchmarks.values()
            if row.only_a or row.only_b
        ]
        if self.uncompared:
            lines.append(f"not in both, left out: {', '.join(self.uncompared)}")
        lines += [f"differs: {name}: {_short(a)} in A, {_short(b)} in B" for name, (a, b) in self.settings.items()]
        return "\n".join(lines)


def compare(a: Evaluation, b: Evaluation, *, resamples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare two evaluations. Raises `UserError` if they have no problem in common."""
    random = np.random.default_rng(seed)
    names = [*a["benchmarks"], *(name for name in b["benchmarks"] if name not in a["benchmarks"])]
    benchmarks: dict[str, Difference] = {}
    drawn = []
    for name in names:
        scores = [_scores(evaluation["benchmarks"].get(name)) for evaluation in (a, b)]
        common = sorted(scores[0].keys() & scores[1].keys())
        if not common:
            continue
        left, right = (np.array([score[problem] for problem in common]) for score in scores)
        means = _resampled_means(right - left, resamples, random)
        drawn.append(means)
        benchmarks[name] = Difference(
            a["benchmarks"][name]["title"],
            float(left.mean()),
            float(right.mean()),
            float((right - left).mean()),
            *_interval(means),
            won=int((right > left).sum()),
            lost=int((right < left).sum()),
            tied=int((right == left).sum()),
            only_a=len(scores[0]) - len(common),
            only_b=len(scores[1]) - len(common),
        )
    if not benchmarks:
        held = " and ".join(", ".join(evaluation["benchmarks"]) or "none" for evaluation in (a, b))
        raise UserError(f"The evaluations have no problem in common ({held}): compare runs of the same benchmarks.")
    uncompared = tuple(name for name in names if name not in benchmarks)
    return Comparison(benchmarks, _mean(list(benchmarks.values()), drawn), uncompared, _differing(a, b))


def _scores(benchmark: Mapping[str, Any] | None) -> dict[str, float]:
    """Map each problem to the mean over its samples."""
    problems = benchmark["problems"] if benchmark else {}
    return {name: sum(problem["correct"]) / len(problem["correct"]) for name, problem in problems.items()}


def _resampled_means(differences: np.ndarray, resamples: int, random: np.random.Generator) -> np.ndarray:
    """Draw as many problems as there are, with putting back, and take the mean; `resamples` times.

    How often each value is drawn is multinomial, which is the same draw in less memory: values are few.
    """
    values, counts = np.unique(differences, return_counts=True)
    draws = random.multinomial(len(differences), counts / len(differences), size=resamples)
    return draws @ values / len(differences)


def _interval(means: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def _mean(rows: list[Difference], drawn: list[np.ndarray]) -> Difference:
    def mean(name: str) -> float:
        return sum(getattr(row, name) for row in rows) / len(rows)

    counts = {name: sum(getattr(row, name) for row in rows) for name in ("won", "lost", "tied", "only_a", "only_b")}
    interval = _interval(np.mean(drawn, axis=0))
    return Difference("mean", mean("a"), mean("b"), mean("value"), *interval, **counts)


def _differing(a: Evaluation, b: Evaluation) -> dict[str, tuple[Any, Any]]:
    left, right = a["settings"], b["settings"]
    pairs = {name: (left.get(name), right.get(name)) for name in dict(left) | dict(right)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
