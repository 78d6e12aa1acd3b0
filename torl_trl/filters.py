"""Which rollouts and groups of a step train: pure rules on finished rollouts and their rewards.

A rollout that is left out trains nothing and counts in no denominator of the loss: the trainer hands TRL an all-zero
mask for it. Its reward stays in the baseline of its group, except where it has none (its interpreter failed).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, stdev
from typing import Any

from torl_grading.extraction import extract_answer
from torl_trl.metrics import Ratio, texts_before_calls
from torl_trl.prompts import code_block_spans
from torl_trl.rollout import Rollout

SAME = 1e-6
"""Rewards that are closer to the mean of their group than this give no advantage."""


class Drop(StrEnum):
    """Why a rollout trains nothing. The first that applies, in this order."""

    INTERPRETER_FAILED = "interpreter_failed"
    TRUNCATED = "truncated"
    """It did not end with EOS (TRL's `mask_truncated_completions`)."""
    VOID_TURN = "void_turn"
    """One of its turns has neither a complete code block nor a boxed answer (SimpleTIR)."""
    OUT_OF_BAND = "out_of_band"
    """The share of right answers in its group is outside of `accuracy_band` (SimpleTIR, ZeroTIR)."""
    DEAD_GROUP = "dead_group"
    """Nobody in its group has an advantage and trains (DAPO's dynamic sampling)."""
    SURPLUS = "surplus"
    """The step was full before its group was needed."""


@dataclass(slots=True)
class Sample:
    """One rollout of a step: the dataset row that it answers, what it got, and whether it trains."""

    row: dict[str, Any]
    rollout: Rollout
    place: int
    """Among all rollouts of the step, over ranks; those of a group are consecutive."""
    scores: list[float] = field(default_factory=list)
    """Of each reward function, NaN for None; empty until it is scored."""
    advantage: float = 0.0
    dropped: Drop | None = None

    @property
    def training_mask(self) -> list[int]:
        """The mask TRL trains with: `env_mask`, or all zero."""
        return [0] * len(self.rollout.env_mask) if self.dropped else self.rollout.env_mask


Group = list[Sample]


@dataclass(frozen=True, slots=True)
class Filters:
    """The switches. A rollout whose interpreter failed is always left out."""

    truncated: bool = False
    void_turns: bool = False
    dead_groups: bool = False
    accuracy_band: tuple[float, float] | None = None
    """Lowest and highest share of right answers, both included, of a group that trains."""

    @property
    def drops_groups(self) -> bool:
        return self.dead_groups or self.accuracy_band is not None

    def drop_rollouts(self, samples: Sequence[Sample]) -> None:
        """Mark the rollouts that are left out for themselves."""
        for sample in samples:
            sample.dropped = self._reason(sample.rollout)

    def drop_group(self, group: Group, weights: Sequence[float], *, normalize_each: bool = False) -> None:
        """Mark the rest of a group that is left out as a whole; `weights` are those of the reward functions.

        `normalize_each`: their rewards are normalized before they are added (TRL's `normalize_then_sum`).
        """
        reason = None
        if self.accuracy_band is not None and not self._in_band(group):
            reason = Drop.OUT_OF_BAND
        elif self.dead_groups:
            rewards = [sample.scores for sample in group]
            totals = [total_reward(row, weights) for row in (_normalized(rewards) if normalize_each else rewards)]
            reason = None if _anyone_learns(group, totals) else Drop.DEAD_GROUP
        if reason is not None:
            leave_out(group, reason)

    def _reason(self, rollout: Rollout) -> Drop | None:
        if rollout.interpreter_failed:
            return Drop.INTERPRETER_FAILED
        if self.truncated and rollout.truncated:
            return Drop.TRUNCATED
        return Drop.VOID_TURN if self.void_turns and has_void_turn(rollout) else None

    def _in_band(self, group: Group) -> bool:
        right = [sample.rollout.verdict.correct for sample in group if sample.rollout.verdict is not None]
        low, high = self.accuracy_band
        return bool(right) and low <= sum(right) / len(right) <= high


def has_void_turn(rollout: Rollout) -> bool:
    """Whether one of its turns has neither a complete code block nor a boxed answer (SimpleTIR, arXiv 2509.02479).

    An observation is not the model's, so it saves no turn; a turn that the token budget cut off is one like any other.
    """
    return any(
        not code_block_spans(text)[0] and extract_answer([text]) is None for text in texts_before_calls(rollout)
    )


def total_reward(scores: Sequence[float], weights: Sequence[float]) -> float:
    """TRL's sum: weighted, without the functions that gave None (NaN); NaN where all did."""
    given = [score * weight for score, weight in zip(scores, weights, strict=True) if not math.isnan(score)]
    return sum(given) if given else math.nan


def groups_of(samples: Sequence[Sample], size: int) -> list[Group]:
    """Cut samples whose groups are consecutive."""
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def trains(group: Group) -> bool:
    """Whether any rollout of the group does."""
    return any(sample.dropped is None for sample in group)


def leave_out(group: Group, reason: Drop) -> None:
    """Mark those of the group that still train."""
    for sample in group:
        sample.dropped = sample.dropped or reason


def filter_metrics(step: Sequence[Sample], left_out: Sequence[Sample], group_size: int) -> dict[str, Ratio]:
    """What the filters did on this rank: `step` are the rollouts of its step, `left_out` those sampled beyond.

    `filter/<reason>`: share of all rollouts. `filter/full`: share of the step's groups with a rollout that trains;
    none where ranks share a group.
    `filter/extra_generation`: rollouts sampled beyond the step's own, for each of those.
    """
    reasons = [sample.dropped for sample in (*step, *left_out)]
    groups = groups_of(step, group_size) if len(step) % group_size == 0 else []
    return {f"filter/{reason}": Ratio(reasons.count(reason), len(reasons)) for reason in Drop} | {
        "filter/full": Ratio(sum(map(trains, groups)), len(groups)),
        "filter/extra_generation": Ratio(len(left_out), len(step)),
    }


def _normalized(rewards: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Rewards (rollouts, functions) of a group with mean 0 and deviation 1 for each function, as TRL makes them."""
    columns = []
    for values in zip(*rewards, strict=True):
        known = [value for value in values if not math.isnan(value)]
        # The reward of one rollout alone has no deviation, and counts as none.
        mean, deviation = (fmean(known), stdev(known)) if len(known) > 1 else (math.nan, 0.0)
        columns.append([(value - mean) / (deviation + 1e-4) for value in values])
    return list(zip(*columns, strict=True))


def _anyone_learns(group: Group, totals: Sequence[float]) -> bool:
    """Whether a rollout trains whose reward is not the mean of the group's (NaN: it has none)."""
    known = [total for total in totals if not math.isnan(total)]
    mean = sum(known) / len(known) if known else math.nan
    return any(
        sample.dropped is None and abs(total - mean) > SAME for sample, total in zip(group, totals, strict=True)
    )
