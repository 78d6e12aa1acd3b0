"""Metrics of hand-made rollouts, with numbers worked out by hand."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl import prompts
from torl_trl.metrics import (
    CALL_STATUSES,
    METRIC_NAMES,
    Ratio,
    metric_values,
    rollout_metrics,
)
from torl_trl.rollout import Rollout, Segment, StopReason, ToolCall

BLOCK = "```python\nprint(1)\n```\n"
CALL_TURN = BLOCK + "```output"


def make_rollout(turns, calls=(), *, correct=False, stop_reason=StopReason.EOS, hallucinated=0, inserted_tokens=3):
    """A rollout of 10 tokens a turn, an observation of `inserted_tokens` between turns, `calls` as status names."""
    rollout = Rollout(index=0, prompt_ids=[1], stop_reason=stop_reason, hallucinated_outputs=hallucinated)
    for turn, text in enumerate(turns):
        for inserted, tokens, piece in [(True, inserted_tokens, "\n1\n```\n")] * (turn > 0) + [(False, 10, text)]:
            start = len(rollout.completion_ids)
            rollout.completion_ids += [7] * tokens
            rollout.logprobs += [0.0 if inserted else -1.0] * tokens
            rollout.env_mask += [0 if inserted else 1] * tokens
            rollout.segments.append(Segment(start, start + tokens, inserted, piece))
    for status in calls:
        if status == "malformed":
            rollout.calls.append(ToolCall(None))
        elif status == "interpreter_failed":
            rollout.calls.append(ToolCall("print(1)", failures=3))
        else:
            result = ExecutionResult(ExecutionStatus(status), "1\n", "", seconds=0.5, queue_seconds=0.25)
            rollout.calls.append(ToolCall("print(1)", result))
    if stop_reason != StopReason.INTERPRETER_FAILED:
        rollout.verdict = SimpleNamespace(correct=correct, score=1.0 if correct else -1.0, extracted="1", reason="")
    return rollout


def values_of(*rollouts):
    return metric_values(rollout_metrics(rollouts))


def test_the_figure_5_ratios_of_four_rollouts_are_those_worked_out_by_hand():
    values = values_of(
        make_rollout(["Just \\boxed{1}"], correct=False),
        make_rollout([CALL_TURN, "so \\boxed{1}"], ["ok"], correct=True),
        # one block runs with an error, two more come after the limit, the last of them after the answer
        make_rollout([CALL_TURN, f"{BLOCK}\\boxed{{2}} check: {BLOCK}"], ["error"], correct=False),
        make_rollout([CALL_TURN, CALL_TURN, "\\boxed{1}"], ["timeout", "ok"], correct=True),
    )
    assert values["accuracy"] == 2 / 4
    assert values["tools/code_ratio"] == 3 / 4
    assert values["tools/pass_ratio"] == 2 / 4
    assert values["tools/pass_ratio_correct"] == 2 / 3
    assert values["tools/pass_ratio_incorrect"] == 0 / 1
    assert values["tools/executed_code_ratio"] == 4 / 6
    assert values["tools/code_before_answer_ratio"] == 5 / 6
    assert values["tools/call_frequency"] == 4 / 4
    assert values["tools/accuracy_with_code"] == 2 / 3
    assert values["tools/accuracy_without_code"] == 0 / 1
    assert values["tools/observation_tokens"] == (0 + 3 + 3 + 6) / 4
    assert values["tools/seconds_mean"] == 0.5
    assert values["tools/queue_seconds_mean"] == 0.25
    assert values["tools/status/ok"] == 2
    assert values["tools/status/error"] == 1
    assert values["tools/status/timeout"] == 1
    assert values["tools/status/memory"] == 0
    assert values["stop/eos"] == 1


def test_ratios_without_anything_in_them_are_left_out():
    values = values_of(make_rollout(["\\boxed{1}"], correct=True))
    assert values["tools/code_ratio"] == 0
    assert values["accuracy"] == 1
    for absent in ("pass_ratio", "pass_ratio_correct", "executed_code_ratio", "code_before_answer_ratio",
                   "accuracy_with_code", "seconds_mean"):  # fmt: skip
        assert f"tools/{absent}" not in values
    assert metric_values(rollout_metrics([])) == {}


def test_a_rank_without_rollouts_has_the_same_keys_in_the_same_order():
    assert tuple(rollout_metrics([])) == METRIC_NAMES
    assert tuple(rollout_metrics([make_rollout([CALL_TURN, "x"], ["ok"])])) == METRIC_NAMES


def test_a_malformed_call_is_no_executed_and_no_complete_code():
    values = values_of(make_rollout(["```python\nprint(1)\n```output", "\\boxed{1}"], ["malformed"]))
    assert values["tools/malformed_call"] == 1
    assert values["tools/status/malformed"] == 1
    assert values["tools/code_ratio"] == 0
    assert values["tools/call_frequency"] == 0
    assert "tools/pass_ratio" not in values


def test_a_turn_that_ends_at_the_code_fence_keeps_its_block_after_a_marker_of_its_own():
    values = values_of(make_rollout([f"```output\n1\n```\n{BLOCK}", "\\boxed{1}"], ["ok"], hallucinated=1))
    assert values["tools/executed_code_ratio"] == 1
    assert values["tools/hallucinated_output"] == 1


def test_a_box_inside_code_is_no_answer():
    printing = "```python\nprint('\\boxed{1}')\n```\n"
    assert values_of(make_rollout([f"{printing}{BLOCK}\\boxed{{1}}"]))["tools/code_before_answer_ratio"] == 1
    assert values_of(make_rollout([f"{printing}\\boxed{{1}}{BLOCK}"]))["tools/code_before_answer_ratio"] == 0.5


def test_a_box_in_one_turn_is_before_the_code_of_the_next():
    rollout = make_rollout(["\\boxed{1} check " + CALL_TURN, f"{BLOCK}"], ["ok"])
    assert values_of(rollout)["tools/code_before_answer_ratio"] == 0


def test_without_an_answer_all_code_is_before_it():
    assert values_of(make_rollout([f"{BLOCK}{BLOCK}"]))["tools/code_before_answer_ratio"] == 1


def test_a_box_in_an_observation_is_no_answer():
    rollout = make_rollout([CALL_TURN, BLOCK], ["ok"])
    rollout.segments[1] = Segment(10, 13, True, "\n\\boxed{1}\n```\n")
    assert values_of(rollout)["tools/code_before_answer_ratio"] == 1


def test_a_failed_interpreter_takes_the_rollout_out_of_accuracy_but_not_out_of_the_code_ratio():
    failed = make_rollout(
        [CALL_TURN, CALL_TURN], ["ok", "interpreter_failed"], stop_reason=StopReason.INTERPRETER_FAILED
    )
    values = values_of(failed, make_rollout(["\\boxed{1}"], correct=True))
    assert values["accuracy"] == 1
    assert values["tools/code_ratio"] == 0.5
    assert values["tools/pass_ratio"] == 1
    assert values["tools/interpreter_failure"] == 0.5
    assert values["tools/status/interpreter_failed"] == 1
    assert values["tools/call_frequency"] == 0
    assert values["tools/observation_tokens"] == 0
    assert "tools/executed_code_ratio" not in values
    assert values["stop/interpreter_failed"] == 0.5


def test_stop_reasons_are_shares_of_all_completions():
    values = values_of(
        make_rollout(["a"]),
        make_rollout(["a"], stop_reason=StopReason.LENGTH),
        make_rollout([CALL_TURN], ["ok"], stop_reason=StopReason.OBSERVATION_OVERFLOW),
        make_rollout(["a"]),
    )
    assert [values[f"stop/{reason}"] for reason in StopReason] == [0.5, 0.25, 0.25, 0]


def test_a_rollout_that_is_not_graded_or_not_finished_is_refused():
    ungraded = make_rollout(["a"])
    ungraded.verdict = None
    with pytest.raises(ValueError, match="no verdict"):
        rollout_metrics([ungraded])
    with pytest.raises(ValueError, match="not finished"):
        rollout_metrics([Rollout(0, [1])])


def test_statuses_are_every_status_a_call_can_have():
    assert set(CALL_STATUSES) == {str(status) for status in ExecutionStatus} | {"malformed", "interpreter_failed"}


def test_a_ratio_adds_by_parts():
    assert Ratio(1, 2) + Ratio(0, 2) == Ratio(1, 4)
    assert metric_values({"a": Ratio(1, 4), "b": Ratio()}) == {"a": 0.25}


TURNS = st.sampled_from(["text", BLOCK, "\\boxed{1}", CALL_TURN, f"\\boxed{{1}}{CALL_TURN}", "```python\nx```output"])


@st.composite
def rollouts(draw):
    turns = draw(st.lists(TURNS, min_size=1, max_size=4))
    calls = draw(st.lists(st.sampled_from(CALL_STATUSES[:-1]), max_size=len(turns)))
    return make_rollout(turns, calls, correct=draw(st.booleans()), stop_reason=draw(st.sampled_from(list(StopReason))))


@given(st.lists(st.tuples(rollouts(), st.integers(0, 3)), max_size=12))
def test_any_partition_into_ranks_gives_the_same_metrics(placed):
    ranks = [rollout_metrics([rollout for rollout, rank in placed if rank == number]) for number in range(4)]
    added = {name: sum((rank[name] for rank in ranks), Ratio()) for name in METRIC_NAMES}
    whole = rollout_metrics([rollout for rollout, _ in placed])
    assert metric_values(added) == metric_values(whole)


PIECES = st.sampled_from(["```python\n", "```python", "```", "```output", "\n", "x", " ", "\\boxed{1}"])


@given(st.lists(PIECES, max_size=12).map("".join))
def test_block_spans_start_and_end_with_a_fence_and_do_not_overlap(text):
    spans, prose_end = prompts.code_block_spans(text)
    assert all(text[start:end].startswith("```python") and text[start:end].endswith("```") for start, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= prose_end


def test_metrics_and_records_need_neither_torch_nor_trl():
    code = (
        "import sys, torl_trl.metrics, torl_trl.records, torl_trl.run_folder\n"
        "loaded = {'torch', 'trl', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
