"""Reward functions in TRL's signature. They read the `Rollout` records, which TRL hands on as a column.

TRL's own `completions` are never looked at: their text contains the observations, so a box that a program printed
would count. A rollout whose interpreter failed gets None from every function: only then TRL leaves its row out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, get_args

from torl_grading import Grader, Verdict
from torl_interpreters.base import ExecutionStatus
from torl_trl.rollout import Rollout

GradeText = Literal["own", "full"]
PenaltyScope = Literal["failed_code", "no_pass"]

EXECUTABILITY_PENALTY = -0.5


class AccuracyReward:
    """+1.0 for a right answer, -1.0 for any other (paper section 2.2), None for `interpreter_failed`.

    `grade_text="own"` looks at the model's own text outside fences; `"full"` looks at the whole completion, code and
    observations included, as the released code does: there a program that prints the box earns the reward.
    """

    def __init__(self, grader: Grader, grade_text: GradeText = "own"):
        if grade_text not in get_args(GradeText):
            raise ValueError(f"grade_text is {grade_text!r}: give one of {', '.join(get_args(GradeText))}.")
        self.__name__ = "accuracy_reward"
        self.grader = grader
        self.grade_text = grade_text
        # By id; the rollout is kept beside its future, so that ids stay unique.
        self._started: dict[int, tuple[Rollout, Future[Verdict]]] = {}

    def start(self, rollout: Rollout, solution: str) -> None:
        """Begin to grade a finished rollout, while others are still being generated. Never blocks."""
        if not rollout.interpreter_failed:
            self._started[id(rollout)] = (rollout, self._submit(rollout, solution))

    def _submit(self, rollout: Rollout, solution: str) -> Future[Verdict]:
        if self.grade_text == "full":
            return self.grader.submit([rollout.completion], solution, keep_fences=True)
        return self.grader.submit(rollout.model_texts, solution)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        *,
        rollouts: Sequence[Rollout],
        solution: Sequence[str],
        **columns: Any,
    ) -> list[float | None]:
        """Set `rollout.verdict` and return the scores, in order. Raises `GraderError` when grading itself fails."""
        for rollout, answer in zip(rollouts, solution, strict=True):
            if id(rollout) not in self._started:
                self.start(rollout, answer)
        scores: list[float | None] = []
        for rollout in rollouts:
            if rollout.interpreter_failed:
                scores.append(None)
                continue
            rollout.verdict = self._started[id(rollout)][1].result()
            scores.append(rollout.verdict.score)
        self._started.clear()  # with what was started for a generation that never got here
        return scores


class Penalty(ABC):
    """Takes from the reward of each rollout by itself; None for `interpreter_failed`, which nobody earned."""

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        *,
        rollouts: Sequence[Rollout],
        **columns: Any,
    ) -> list[float | None]:
        return [None if rollout.interpreter_failed else self._penalty(rollout) for rollout in rollouts]

    @abstractmethod
    def _penalty(self, rollout: Rollout) -> float: ...


class ExecutabilityPenalty(Penalty):
    """-0.5 for code that does not run, else 0.0 (paper section 2.2; off in its main runs). None for
    `interpreter_failed`.

    `scope="failed_code"`, the paper's text: at least one executed program failed. A malformed call executed nothing
    and is not punished. `scope="no_pass"`, the released code: no program ran well, text without code included.
    """

    def __init__(self, scope: PenaltyScope = "failed_code"):
        if scope not in get_args(PenaltyScope):
            raise ValueError(f"penalty_scope is {scope!r}: give one of {', '.join(get_args(PenaltyScope))}.")
        self.__name__ = "code_executability_penalty"
        self.scope = scope

    def _penalty(self, rollout: Rollout) -> float:
        passed = [call.result.status == ExecutionStatus.OK for call in rollout.calls if call.result is not None]
        punished = not all(passed) if self.scope == "failed_code" else not any(passed)
        return EXECUTABILITY_PENALTY if punished else 0.0


class OverlongPenalty(Penalty):
    """0.0 for a rollout with room to spare, falling to -1.0 over the last `tokens` of the budget (DAPO, section 3.4).

    Only tokens that the model wrote count: how long its programs ran, waited or printed is not punished. None for
    `interpreter_failed`.
    """

    def __init__(self, tokens: int, max_completion_length: int):
        self.__name__ = "overlong_penalty"
        self.tokens = tokens
        self.free_tokens = max_completion_length - tokens

    def _penalty(self, rollout: Rollout) -> float:
        beyond = sum(rollout.env_mask) - self.free_tokens
        return -min(1.0, max(0, beyond) / self.tokens)


def score(
    functions: Sequence[Callable[..., list[float | None]]],
    rows: Sequence[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
    **more: Any,
) -> list[list[float]]:
    """Each rollout's reward from each function, NaN for None, as TRL calls them: dataset columns are keywords.

    TRL's `log_extra` and `log_metric` are not handed on: they would count rollouts that are left out of the step.
    """
    if not rows:
        return []
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "rollouts"}
    columns |= {
        "prompts": columns.pop("prompt"),
        "completions": [rollout.completion for rollout in rollouts],
        "completion_ids": [rollout.completion_ids for rollout in rollouts],
        "rollouts": rollouts,
    }
    scores = [function(**columns, **more) for function in functions]
    return [[math.nan if value is None else value for value in values] for values in zip(*scores, strict=True)]
