"""Labels of rollouts: what shows a behaviour of the paper, and what only looks like it."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from toys import FakeInterpreter, byte_level_tokenizer, ok

from torl_grading import Grader
from torl_interpreters.base import ExecutionResult, ExecutionStatus, InterpreterUnavailable
from torl_report.behaviours import BEHAVIOURS, LABELS, find_labels
from torl_trl.records import read_rollouts, rollout_row, write_rollouts
from torl_trl.rollout import RolloutConfig, run_rollouts

FACTS = {"step": 1, "epoch": 0.0, "split": "train", "problem_id": "p", "group_id": 0, "generation_index": 0, "rank": 0}
FACTS |= {"prompt": "?", "reward": 1.0, "rewards": {}, "advantage": 0.0, "engine": "scripted", "seed": 0}


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


@pytest.fixture
def row(grader):
    """Makes the row of a rollout from what the model writes and what its programs end with, in order."""

    def make(text, *results, solution="16", full=True, **config):
        tokenizer, left = byte_level_tokenizer(), list(results)
        engine = ScriptedEngine([tokenizer.encode(text)], tokenizer, eos_token_id=0, vocab_size=len(tokenizer))
        config = RolloutConfig(max_tool_calls=4, max_completion_length=3000, **{"interpreter_retries": 0} | config)
        with FakeInterpreter(lambda code: left.pop(0)) as interpreter:
            (rollout,) = run_rollouts([[1]], engine, interpreter, tokenizer, config)
        assert not left
        if not rollout.interpreter_failed:
            rollout.verdict = grader.submit(rollout.model_texts, solution).result()
        return rollout_row(rollout, full=full, solution=solution, **FACTS)

    return make


def program(code: str) -> str:
    return f"\n```python\n{code}\n```\n```output\n"


def error(stderr="TypeError: 'int' object is not subscriptable", status=ExecutionStatus.ERROR):
    return ExecutionResult(status, "", stderr, 0.01)


def test_every_label_says_its_rule_in_a_sentence_and_the_behaviours_of_the_paper_come_first():
    assert list(LABELS) == [
        *BEHAVIOURS,
        "wrong_although_code_right",
        "right_without_code",
        "code_changed_after_error",
    ]
    assert all(rule.endswith(".") and rule.count(". ") == 0 for rule in LABELS.values())


def test_table_5_an_error_is_mended(row):
    text = f"Horner.{program('f = 7; f[0]')}Mend it.{program('print(325.4, -7)')}So \\boxed{{325.4}}."
    assert find_labels(row(text, error(), ok("325.4\n"), solution="325.4")) == [
        "code_corrected",
        "code_changed_after_error",
    ]


def test_figure_1_code_contradicts_the_text_and_the_model_checks_again(row):
    text = f"So the sum is \\boxed{{-9}}.{program('a')}Check.{program('b')}Therefore \\boxed{{16}}."
    assert find_labels(row(text, ok("16\n"), ok("16.0\n"))) == ["disagreement_rechecked"]


def test_table_6_code_contradicts_a_list_and_the_model_takes_the_code_s(row):
    text = f"The balls are \\boxed{{2, 10, 13}}.{program('a')}So they are \\boxed{{3, 10, 12}}."
    assert find_labels(row(text, ok("[3, 10, 12]\n"), solution="3, 10, 12")) == ["disagreement_rechecked"]


@pytest.mark.parametrize("said", ["the answer is 5.", "The final answer is: $x = 5$.", "Thus the answer is \\(5\\)"])
def test_an_answer_may_be_stated_without_a_box(row, said):
    assert "disagreement_rechecked" in find_labels(row(f"{said}{program('a')}So \\boxed{{16}}.", ok("16")))


@pytest.mark.parametrize(
    "text",
    [
        f"If the answer is 5, then so.{program('a')}So \\boxed{{16}}.",
        f"The answer is 5 more than that.{program('a')}So \\boxed{{16}}.",
        f"x = 5{program('a')}So \\boxed{{16}}.",
        f"{program('# the answer is 5.')}So \\boxed{{16}}.",
        f"```python\nprint('\\boxed{{5}}')\n```{program('a')}So \\boxed{{16}}.",
        f"So \\boxed{{5}}.{program('a')}I stay with \\boxed{{5}}.",
        f"So \\boxed{{5}}.{program('a')}Hm.",
        f"So \\boxed{{16.0}}.{program('a')}So \\boxed{{5}}.",
    ],
)
def test_no_disagreement_without_a_stated_answer_or_without_a_change(row, text):
    assert "disagreement_rechecked" not in find_labels(row(text, ok("16")))


@pytest.mark.parametrize(
    ("stated", "printed"),
    [
        ("5", "True"),
        ("5", ""),
        ("5", "16 17"),
        ("(3, 4)", "4"),
        ("10\\%", "0.1"),
        ("\\pi", "3.14"),
        ("\\frac{\\sqrt{3}}{2}", "sqrt(3)/2"),
        ("\\frac{1}{3}", "0.3333333333333333"),
        ("5", "The sum is big\n1234...5678"),
    ],
)
def test_what_cannot_be_compared_is_no_disagreement(row, stated, printed):
    text = f"So \\boxed{{{stated}}}.{program('a')}Again.{program('b')}So \\boxed{{16}}."
    assert "disagreement_rechecked" not in find_labels(row(text, ok(printed), ok("")))


def test_a_shortened_line_is_no_result_and_the_whole_line_after_one_is(row):
    text = f"So \\boxed{{5}}.{program('a')}So \\boxed{{16}}."
    long = "1" * 500
    assert "disagreement_rechecked" not in find_labels(row(text, ok(long)))
    assert "disagreement_rechecked" in find_labels(row(text, ok(f"{long}\n16")))


def test_the_same_program_once_more_neither_corrects_nor_rechecks(row):
    text = f"So \\boxed{{5}}.{program('a')}{program('a')}{program('a')}So \\boxed{{5}}."
    assert find_labels(row(text, error(), ok("16"), ok("16"))) == ["wrong_although_code_right"]


@pytest.mark.parametrize("status", [status for status in ExecutionStatus if status != "ok"])
def test_every_way_to_fail_can_be_corrected(row, status):
    text = program("a") + program("b") + program("c")
    assert "code_corrected" in find_labels(row(text, error(status=status), error(), ok("")))
    labels = find_labels(row(text, error(status=status), error(), error()))
    assert labels == ["code_changed_after_error"]


def test_what_ran_before_the_error_or_was_never_executed_corrects_nothing(row):
    assert find_labels(row(program("a") + program("b"), ok(""), error())) == []
    assert find_labels(row(program("a") + "```output\n" + program("b") + "x", error(), ok(""))) == [
        "code_corrected",
        "code_changed_after_error",
    ]  # a malformed call between them
    assert find_labels(row(program("a") + program("b"), error(), InterpreterUnavailable("gone"))) == []


@pytest.mark.parametrize("printed", ["16", "sum: 3\nx = 16", "[16]", "The answer is 16.0", "\\boxed{16}", "x: 16"])
def test_a_boxed_answer_is_verified_by_what_a_program_prints_last(row, printed):
    text = f"So \\boxed{{16}}. Verify.{program('a')}Yes."
    assert find_labels(row(text, ok(printed))) == ["answer_verified_by_code"]


@pytest.mark.parametrize("printed", ["17", "", "16\n17", "True", "x = 17", "16...16", "16:17"])
def test_other_output_verifies_nothing(row, printed):
    assert find_labels(row(f"So \\boxed{{16}}. Verify.{program('a')}Yes.", ok(printed))) == []


def test_an_answer_that_comes_from_the_program_is_not_verified_by_it(row):
    assert find_labels(row(f"Compute.{program('a')}So \\boxed{{16}}.", ok("16"))) == []
    assert find_labels(row(f"The answer is 16.{program('a')}So \\boxed{{16}}.", ok("16"))) == []
    again = f"Compute.{program('a')}So \\boxed{{16}}.{program('b')}Yes."
    assert find_labels(row(again, ok("16"), ok("16"))) == ["answer_verified_by_code"]


def test_a_wrong_answer_beside_right_code(row):
    text = f"{program('a')}So \\boxed{{15}}."
    assert find_labels(row(text, ok("16"))) == ["wrong_although_code_right"]
    assert find_labels(row(text, ok("14"))) == []
    assert find_labels(row(text, ok("15"), solution="15")) == []


def test_right_without_code_means_that_nothing_was_executed(row):
    assert find_labels(row("So \\boxed{16}.")) == ["right_without_code"]
    assert find_labels(row("```output\nSo \\boxed{16}.")) == ["right_without_code"]  # a malformed call
    assert find_labels(row("So \\boxed{15}.")) == []
    assert find_labels(row(f"{program('a')}So \\boxed{{16}}.", ok(""))) == []


def test_the_fence_trigger_gives_the_same_labels(row):
    text = "So \\boxed{5}.\n```python\na\n```So \\boxed{16}."
    assert find_labels(row(text, ok("16"), tool_trigger="code_fence")) == ["disagreement_rechecked"]


def test_a_rollout_whose_interpreter_failed_is_neither_right_nor_wrong(row):
    failed = row(f"{program('a')}{program('b')}So \\boxed{{16}}.", ok("16"), InterpreterUnavailable("gone"))
    assert failed["correct"] is None and find_labels(failed) == []


def test_rows_without_texts_or_segments_have_no_labels(row):
    full = row("So \\boxed{16}.")
    assert find_labels(full)
    assert find_labels(row("So \\boxed{16}.", full=False)) == find_labels(full | {"segments": None}) == []


def test_a_row_from_disk_has_the_same_labels(row, tmp_path):
    written = row(f"So \\boxed{{5}}.{program('a')}So \\boxed{{16}}.", ok("16"))
    write_rollouts(tmp_path / "a.parquet", [written])
    (read,) = read_rollouts(tmp_path / "a.parquet").to_pylist(maps_as_pydicts="strict")
    assert find_labels(read) == find_labels(written) == ["disagreement_rechecked"]


PIECES = st.sampled_from(
    ["\\boxed{5} ", "\\boxed{", "the answer is 5.", "```", "\n", "16", "...", "[1, 2]", "x = ", "é"]
)
CALLS = st.fixed_dictionaries(
    {
        "code": st.sampled_from(["a", "b", ""]),
        "observation": st.lists(PIECES, max_size=5).map("".join),
        "status": st.sampled_from(["ok", "error", "timeout", "malformed", "interpreter_failed"]),
    }
)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(PIECES, max_size=6).map("".join)), max_size=6),
    st.lists(CALLS, max_size=4),
    st.sampled_from([True, False, None]),
)
def test_any_row_gets_labels_in_order_and_some_exclude_each_other(segments, calls, correct):
    row = {
        "full": True,
        "completion": "".join(text for _, text in segments),
        "segments": [{"inserted": inserted, "tokens": 1, "chars": len(text)} for inserted, text in segments],
        "calls": calls[: sum(not inserted for inserted, _ in segments)],  # each ends a turn of the model
        "solution": "5",
        "correct": correct,
    }
    labels = find_labels(row)
    assert labels == [label for label in LABELS if label in labels]
    statuses = {call["status"] for call in row["calls"]}
    if "code_corrected" in labels or "code_changed_after_error" in labels:
        assert statuses & {"error", "timeout"}
    if {"code_corrected", "disagreement_rechecked", "answer_verified_by_code"} & set(labels):
        assert "ok" in statuses
    assert not {"wrong_although_code_right", "right_without_code"} <= set(labels)


def test_labels_cost_at_most_a_few_milliseconds_a_row(row):
    rows = [
        row(f"So \\boxed{{{n}}}.{program(str(n))}Check.{program('b')}So \\boxed{{16}}.", ok(f"[{n}]"), ok("16"))
        for n in range(40)
    ]
    started = time.process_time()
    for _ in range(25):
        for each in rows:
            find_labels(each)
    assert time.process_time() - started < 3  # for a thousand rows; measured 0.1 s
