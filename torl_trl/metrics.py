"""Metrics of rollouts, as pairs of numerator and denominator that add up over ranks and logging steps.

    totals = rollout_metrics(rollouts)    # on each rank, at each step: the same names in the same order
    ...                                   # the caller adds up the pairs of each name
    logs = metric_values(totals)          # only now divided; empty ratios are left out

The first six are the curves of the paper's Figure 5 (definitions in its section 3.3.1). A *block* is a complete
```python block in the model's own text; a call is *executed* when the interpreter gave back a result, whatever its
status. A malformed call executed nothing.

A rollout whose interpreter failed was cut short by us: it counts where its part so far speaks truly (code ratio, the
calls that were executed, statuses, stop reasons) and is left out where a finished rollout is meant (accuracy, pass
ratio by outcome, executed and before-answer ratio, call frequency, observation tokens). Leaving it out of the code
ratio too would lower that ratio with the interpreter's luck, for every such rollout had written code.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torl_interpreters.base import ExecutionStatus
from torl_trl import prompts
from torl_trl.progress import RolloutStats
from torl_trl.rollout import Rollout, StopReason, ToolCall
from torl_trl.sentinels import SENTINELS, find_sentinels

CALL_STATUSES = (*(str(status) for status in ExecutionStatus), "malformed", "interpreter_failed")
"""Every value of `ToolCall.status`."""

_COUNT_PREFIX = "tools/status/"

METRIC_NAMES: tuple[str, ...] = (
    "tools/code_ratio",
    "tools/pass_ratio",
    "tools/pass_ratio_correct",
    "tools/pass_ratio_incorrect",
    "tools/executed_code_ratio",
    "tools/code_before_answer_ratio",
    "accuracy",
    "tools/accuracy_with_code",
    "tools/accuracy_without_code",
    "tools/call_frequency",
    "tools/malformed_call",
    "tools/hallucinated_output",
    "tools/interpreter_failure",
    "tools/observation_tokens",
    "repetition",
    "tools/seconds_mean",
    "tools/queue_seconds_mean",
    *(f"{_COUNT_PREFIX}{status}" for status in CALL_STATUSES),
    *(f"stop/{reason}" for reason in StopReason),
    *(f"sentinel/{name}" for name in SENTINELS),
)
"""Every metric, in the one order that all ranks use; an empty one is there with denominator 0."""

_BOXED = "\\boxed{"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A numerator and a denominator kept apart, so that ratios of parts add up to the ratio of the whole."""

    numerator: float = 0.0
    denominator: float = 0.0

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Ratio]:
    """Measure finished, graded rollouts; the keys are `METRIC_NAMES`, also without any rollout.

    Raises `ValueError` on a rollout that is not finished, or has no verdict although its interpreter did not fail.
    """
    totals = dict.fromkeys(METRIC_NAMES, Ratio())
    for rollout in rollouts:
        for name, ratio in _measure(rollout).items():
            totals[name] += ratio
    return totals


def stats_metrics(stats: RolloutStats) -> dict[str, Ratio]:
    """Where the time of a rollout phase went, seconds per phase and rank, and how well the engine was used.

    `rollout/engine_idle_share`: of the phase, outside the engine: it had nothing to do or, in process, waited for us.
    `rollout/tool_wait_share`: of the life of a rollout, it waited for its calls.
    `rollout/prefill_recomputed_tokens`: per rollout, known prefix that was computed again after a call.
    `rollout/resampled`: share of rollouts that were sampled again because their interpreter had failed.
    """
    return {
        "time/generating": Ratio(stats.generating_seconds, 1),
        "time/waiting": Ratio(stats.waiting_seconds, 1),
        "rollout/tokens_per_second": Ratio(stats.sampled_tokens, stats.seconds),
        "rollout/engine_idle_share": Ratio(stats.seconds - stats.generating_seconds, stats.seconds),
        "rollout/tool_wait_share": Ratio(stats.tool_seconds, stats.rollout_seconds),
        "rollout/prefill_recomputed_tokens": Ratio(stats.recomputed_tokens, stats.rollouts),
        "rollout/resampled": Ratio(stats.resampled, stats.rollouts),
    }


def metric_values(metrics: Mapping[str, Ratio]) -> dict[str, float]:
    """Divide, and leave empty ratios out.

    `tools/status/...` are plain counts: the number of calls with that status in all that was added up, all ranks and
    steps since the last log (their denominator only says that there were rollouts at all).
    """
    return {
        name: ratio.numerator if name.startswith(_COUNT_PREFIX) else ratio.numerator / ratio.denominator
        for name, ratio in metrics.items()
        if ratio.denominator
    }


def _measure(rollout: Rollout) -> dict[str, Ratio]:
    """Return what one rollout adds to each metric that it touches."""
    if rollout.stop_reason is None:
        raise ValueError(f"Rollout {rollout.index} is not finished: measure rollouts that `run_rollouts` returned.")
    spans = [prompts.code_block_spans(text) for text in texts_before_calls(rollout)]
    blocks = sum(len(complete) for complete, _ in spans)
    executed = [call for call in rollout.calls if call.result is not None]
    statuses = [call.status for call in rollout.calls]
    measured = {
        "tools/code_ratio": Ratio(blocks > 0, 1),
        "tools/pass_ratio": _passed(executed),
        "tools/malformed_call": Ratio(statuses.count("malformed"), 1),
        "tools/hallucinated_output": Ratio(rollout.hallucinated_outputs, 1),
        "tools/interpreter_failure": Ratio(rollout.interpreter_failed, 1),
        "tools/seconds_mean": Ratio(sum(call.result.seconds for call in executed), len(executed)),
        "tools/queue_seconds_mean": Ratio(sum(call.result.queue_seconds for call in executed), len(executed)),
    }
    measured |= {f"{_COUNT_PREFIX}{status}": Ratio(statuses.count(status), 1) for status in CALL_STATUSES}
    measured |= {f"stop/{reason}": Ratio(rollout.stop_reason == reason, 1) for reason in StopReason}
    if rollout.interpreter_failed:
        return measured
    if rollout.verdict is None:
        raise ValueError(f"Rollout {rollout.index} has no verdict: grade it before it is measured.")
    correct = bool(rollout.verdict.correct)
    tripped = find_sentinels(rollout)
    measured |= {f"sentinel/{name}": Ratio(name in tripped, 1) for name in SENTINELS}
    return measured | {
        "accuracy": Ratio(correct, 1),
        f"tools/accuracy_{'with' if executed else 'without'}_code": Ratio(correct, 1),
        f"tools/pass_ratio_{'correct' if correct else 'incorrect'}": _passed(executed),
        "tools/executed_code_ratio": Ratio(len(executed), blocks),
        "tools/code_before_answer_ratio": Ratio(_blocks_before_answer(rollout), blocks),
        "tools/call_frequency": Ratio(len(executed), 1),
        "tools/observation_tokens": Ratio(rollout.env_mask.count(0), 1),
        "repetition": Ratio(ends_in_a_loop(rollout.model_texts[-1] if rollout.model_texts else ""), 1),
    }


def ends_in_a_loop(text: str) -> bool:
    """Whether the text ends with the same piece of up to 256 characters four times in a row, 65 characters or more.

    The last piece may be cut off. What repeats with small changes, such as a counter, is not seen.
    """
    tail = text.rstrip()[-1024:]
    before = tail.rfind(tail[-64:], 0, -1)  # where the last 64 characters stood once more
    period = len(tail) - 64 - before
    return before >= 0 and 0 < 4 * period <= len(tail) and tail[-4 * period : -period] == tail[-3 * period :]


def _passed(executed: Iterable[ToolCall]) -> Ratio:
    statuses = [call.status for call in executed]
    return Ratio(statuses.count("ok"), len(statuses))


def texts_before_calls(rollout: Rollout) -> list[str]:
    """Return the model's text, a string per turn, without the marker that asked for a call.

    Where the block before it is still open, the marker at the start of a line would pass for its closing fence, and
    a malformed call for complete code. (Turns that end at a code fence have a fence after any marker: not cut.)
    """
    texts = rollout.model_texts
    for turn in range(min(len(rollout.calls), len(texts))):  # each call ends a turn, in order
        before, marker, after = texts[turn].rpartition(prompts.OUTPUT_MARKER)
        if marker and prompts.FENCE not in after:
            texts[turn] = before
    return texts


def _blocks_before_answer(rollout: Rollout) -> int:
    r"""Count the blocks written before the first `\boxed{` outside of code; all of them when there is none."""
    before = 0
    for text in texts_before_calls(rollout):
        spans, prose_end = prompts.code_block_spans(text)
        position = 0
        for start, end in spans:
            if _BOXED in text[position:start]:
                return before
            before, position = before + 1, end
        if _BOXED in text[position:prose_end]:
            return before
    return before
