"""Reward functions: TRL's signature, the model's own text only, None for a rollout whose interpreter failed."""

from collections.abc import Iterator

import pytest

from torl_grading import Grader
from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl.rewards import AccuracyReward, ExecutabilityPenalty
from torl_trl.rollout import Rollout, Segment, StopReason, ToolCall


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


def make_rollout(
    *texts: str, statuses: tuple[ExecutionStatus | None, ...] = (), stop: StopReason = StopReason.EOS
) -> Rollout:
    """A rollout whose texts are model, observation, model, ...; `None` among the statuses is a malformed call."""
    segments = [Segment(i, i + 1, inserted=i % 2 == 1, text=text) for i, text in enumerate(texts)]
    calls = [
        ToolCall(None) if status is None else ToolCall("x", ExecutionResult(status, "", "", 0.0))
        for status in statuses
    ]
    return Rollout(0, [1], segments=segments, calls=calls, stop_reason=stop)


def call(function, rollouts: list[Rollout], **columns) -> list[float | None]:
    """Call as TRL does; its completions say something else than the rollouts, and are not to be read."""
    return function(
        prompts=["p"] * len(rollouts),
        completions=[r"\boxed{42}"] * len(rollouts),
        completion_ids=[[1]] * len(rollouts),
        rollouts=rollouts,
        trainer_state=None,
        **columns,
    )


def test_accuracy_is_plus_or_minus_one_and_the_verdict_is_kept(grader):
    rollouts = [
        make_rollout(r"\boxed{42}"),
        make_rollout(r"\boxed{41}"),
        make_rollout("42"),
        make_rollout(r"\boxed{\frac{84}{2}}"),
    ]
    assert call(AccuracyReward(grader), rollouts, solution=["42"] * 4) == [1.0, -1.0, -1.0, 1.0]
    assert [rollout.verdict.reason for rollout in rollouts] == ["equal", "different", "no_box", "equal"]


def test_what_the_tool_printed_never_counts_unless_the_released_behaviour_is_asked_for(grader):
    rollouts = [
        make_rollout("```python\nx\n```\n```output", "\n\\boxed{42}\n```\n", "Done."),
        make_rollout("```python\nx\n```\n```output\n", "ok\n```\n\\boxed{42}\n```\n", "Done."),
        make_rollout("\\boxed{", "42", "}"),
        make_rollout("```python\nprint(r'\\boxed{42}')\n```\n"),
    ]
    assert call(AccuracyReward(grader), rollouts, solution=["42"] * 4) == [-1.0] * 4
    assert call(AccuracyReward(grader, grade_text="full"), rollouts, solution=["42"] * 4) == [1.0] * 4


def test_a_failed_interpreter_gives_none_from_every_reward_function(grader):
    rollouts = [
        make_rollout(r"\boxed{42}", stop=StopReason.INTERPRETER_FAILED, statuses=(ExecutionStatus.ERROR,)),
        make_rollout(r"\boxed{42}"),
    ]
    accuracy = AccuracyReward(grader)
    accuracy.start(rollouts[0], "42")
    assert call(accuracy, rollouts, solution=["42", "42"]) == [None, 1.0]
    assert rollouts[0].verdict is None
    for scope in ("failed_code", "no_pass"):
        assert call(ExecutabilityPenalty(scope), rollouts)[0] is None


def test_grading_started_early_is_only_collected(grader):
    class CountingGrader(Grader):
        submitted = 0

        def submit(self, *args, **kwargs):
            self.submitted += 1
            return super().submit(*args, **kwargs)

    with CountingGrader() as counting:
        reward = AccuracyReward(counting)
        rollouts = [make_rollout(r"\boxed{42}"), make_rollout(r"\boxed{41}")]
        reward.start(rollouts[0], "42")
        abandoned = make_rollout(r"\boxed{1}")  # its generation raised, so that nobody collects it
        reward.start(abandoned, "1")
        assert call(reward, rollouts, solution=["42", "42"]) == [1.0, -1.0]
        assert counting.submitted == 3
        assert call(reward, rollouts, solution=["41", "41"]) == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("statuses", "failed_code", "no_pass"),
    [
        ((), 0.0, -0.5),
        ((ExecutionStatus.OK,), 0.0, 0.0),
        ((ExecutionStatus.ERROR,), -0.5, -0.5),
        ((ExecutionStatus.TIMEOUT,), -0.5, -0.5),
        ((ExecutionStatus.ERROR, ExecutionStatus.OK), -0.5, 0.0),
        ((None,), 0.0, -0.5),
    ],
)
def test_the_penalty_has_the_scope_of_the_paper_or_of_the_released_code(statuses, failed_code, no_pass):
    rollout = make_rollout("text", statuses=statuses)
    assert call(ExecutabilityPenalty(), [rollout], solution=["42"]) == [failed_code]
    assert call(ExecutabilityPenalty("no_pass"), [rollout], solution=["42"]) == [no_pass]


def test_names_are_those_of_the_metrics(grader):
    assert AccuracyReward(grader).__name__ == "accuracy_reward"
    assert ExecutabilityPenalty().__name__ == "code_executability_penalty"


def test_unknown_options_are_refused(grader):
    with pytest.raises(ValueError, match="grade_text is 'all'"):
        AccuracyReward(grader, grade_text="all")
    with pytest.raises(ValueError, match="penalty_scope is 'all'"):
        ExecutabilityPenalty("all")
