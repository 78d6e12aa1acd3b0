"""Saved rollouts graded or executed once more: what is the same, what differs, and what is passed over."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scripted_engine import ScriptedEngine
from stand_in_sandbox_fusion import SandboxFusionStandIn
from toys import FakeInterpreter, byte_level_tokenizer, ok

from torl_grading import Grader
from torl_report import replay
from torl_report.replay import reexecute, regrade, replay_table, write_replay
from torl_trl.errors import UserError
from torl_trl.interpreters import EmbeddedInterpreter, Interpreter, InterpreterUnavailable, SandboxFusionInterpreter
from torl_trl.records import rollout_row, rollouts_path, write_rollouts
from torl_trl.rewards import AccuracyReward
from torl_trl.rollout import RolloutConfig, run_rollouts

MAX_CHARS = 60


def program(code: str) -> str:
    return f"Compute.\n```python\n{code}\n```\n```output\n"


ENDINGS = (
    "print(6 * 7)",
    "print(1)\nraise ValueError('bad')",
    "x = 1",
    "print('9' * 500)",
    "print(sorted({'b', 'a'}), {'b', 'a'})",
    "import sympy\nprint(sympy.sqrt(8))",
    "1 +",
    "import sys\nsys.exit(3)",
    "while True: pass",
)
"""Programs that end in every usual way, and always in the same."""


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


@pytest.fixture(scope="module")
def embedded() -> Iterator[Interpreter]:
    with EmbeddedInterpreter(slots=2, timeout_seconds=1) as interpreter:
        yield interpreter


def fake(answer) -> FakeInterpreter:
    return FakeInterpreter(answer)


@pytest.fixture
def record(grader, tmp_path) -> Callable[..., Path]:
    """Runs and records what a model would write as a step of a run folder, and returns the folder."""

    def make(texts, interpreter, *, solution="42", grade_text="own", full=True, step=1) -> Path:
        tokenizer = byte_level_tokenizer()
        scripts = [tokenizer.encode(text) for text in texts]
        engine = ScriptedEngine(scripts, tokenizer, eos_token_id=0, vocab_size=len(tokenizer))
        config = RolloutConfig(
            max_tool_calls=2, max_completion_length=2000, max_observation_chars=MAX_CHARS, interpreter_retries=0
        )
        rollouts = run_rollouts([[1]] * len(texts), engine, interpreter, tokenizer, config)
        solutions = [solution] * len(texts)
        scores = AccuracyReward(grader, grade_text)([], [], rollouts=rollouts, solution=solutions)
        rows = [
            rollout_row(
                rollout,
                full=full,
                prompt="?",
                reward=score,
                rewards={"accuracy_reward": score},
                advantage=0.0,
                **{"step": step, "epoch": 0.0, "split": "train", "problem_id": f"p{index}", "solution": solution},
                **{"group_id": index, "generation_index": 3, "rank": 0, "engine": "scripted", "seed": 0},
            )
            for index, (rollout, score) in enumerate(zip(rollouts, scores, strict=True))
        ]
        write_rollouts(rollouts_path(tmp_path, step, "train"), rows)
        return tmp_path

    return make


GRADED = (
    program(r"print('\\boxed{42}')") + "Done.",
    "So \\boxed{42}.",
    program("print(42)") + "So \\boxed{41}.",
    program(r"# \boxed{42}") + "No box.",
    "So \\boxed{\\frac{84}{2}}.",
    "",
)
"""The first boxes nothing itself and its program prints the box, the fourth boxes in a comment of its code."""


def boxes(code: str):
    return ok("\\boxed{42}\n" if "print" in code else "")


@pytest.mark.parametrize("grade_text", ["own", "full"])
def test_the_same_grader_finds_no_difference(record, grader, grade_text):
    run_folder = record(GRADED, fake(boxes), grade_text=grade_text)
    result = regrade(run_folder, grade_text=grade_text, grader=grader)
    assert (result.checked, result.skipped, result.differences) == (len(GRADED), {}, [])


def test_grading_the_full_text_flips_exactly_what_code_and_tools_boxed(record, grader):
    run_folder = record(GRADED, fake(boxes))
    result = regrade(run_folder, grade_text="full", grader=grader)
    assert [difference.group_id for difference in result.differences] == [0, 3]
    first = result.differences[0]
    assert (first.file, first.step, first.generation_index, first.problem_id) == ("step_000001.parquet", 1, 3, "p0")
    assert (first.correct_before, first.extracted_before, first.reason_before) == (False, None, "no_box")
    assert (first.correct_after, first.extracted_after, first.reason_after) == (True, "42", "equal")
    assert first.solution == "42"
    back = regrade(record(GRADED, fake(boxes), grade_text="full"), grade_text="own", grader=grader)
    assert [(difference.group_id, difference.correct_after) for difference in back.differences] == [
        (0, False),
        (3, False),
    ]


def test_what_cannot_be_graded_is_counted_by_its_reason(record, grader):
    record(["So \\boxed{42}."] * 2, fake(boxes), step=1)
    record(["So \\boxed{42}."] * 3, fake(boxes), step=2, full=False)
    run_folder = record([program("x"), "So \\boxed{1}."], fake(lambda code: InterpreterUnavailable("gone")), step=3)
    old = rollouts_path(run_folder, 1, "train")
    pq.write_table(pq.read_table(old).drop_columns(["segments"]), old)
    result = regrade(run_folder, grade_text="own", grader=grader)
    assert result.checked == 1
    assert result.skipped == {
        "rollouts from before segments were recorded": 2,
        "rollouts without texts": 3,
        "rollouts without a verdict (the interpreter failed)": 1,
    }


def test_training_and_evaluation_are_both_replayed(record, grader):
    run_folder = record(GRADED[:1], fake(boxes))
    rollouts_path(run_folder, 1, "eval").write_bytes(rollouts_path(run_folder, 1, "train").read_bytes())
    result = regrade(run_folder, grade_text="full", grader=grader)
    assert [difference.file for difference in result.differences] == [
        "eval_step_000001.parquet",
        "step_000001.parquet",
    ]


def test_a_folder_without_rollouts_is_refused(tmp_path, grader):
    with pytest.raises(UserError, match=r"no rollouts/\*.parquet: give the output_dir"):
        regrade(tmp_path, grade_text="own", grader=grader)
    with pytest.raises(UserError, match=r"no rollouts/\*.parquet: give the output_dir"):
        reexecute(tmp_path, interpreter=fake(boxes), max_observation_chars=MAX_CHARS)


def test_deterministic_programs_end_as_before(record, embedded):
    run_folder = record([program(code) for code in ENDINGS] * 2, embedded)
    result = reexecute(run_folder, interpreter=embedded, max_observation_chars=MAX_CHARS)
    assert result.differences == []
    assert (result.checked, result.programs, result.interpreter_failures) == (2 * len(ENDINGS), len(ENDINGS), 0)


@pytest.mark.slow
def test_another_kind_of_interpreter_ends_them_as_before(record, embedded):
    run_folder = record([program(code) for code in ENDINGS], embedded)
    with (
        SandboxFusionStandIn() as stand_in,
        SandboxFusionInterpreter(url=stand_in.url, slots=2, timeout_seconds=3) as interpreter,
    ):
        result = reexecute(run_folder, interpreter=interpreter, max_observation_chars=MAX_CHARS)
    assert (result.checked, result.differences) == (len(ENDINGS), [])


def test_an_interpreter_that_answers_otherwise_is_found_out(record):
    text = program("print(1)") + program("print(2)") + "So \\boxed{42}."
    run_folder = record([text, "No code."], fake(lambda code: ok("1\n")))
    other = fake(lambda code: ok("2\n" if "2" in code else "1\n"))
    result = reexecute(run_folder, interpreter=other, max_observation_chars=MAX_CHARS)
    (difference,) = result.differences
    assert (difference.group_id, difference.call, difference.code) == (0, 1, "print(2)\n")
    assert (difference.status_before, difference.status_after) == ("ok", "ok")
    assert (difference.observation_before, difference.observation_after) == ("1", "2")
    assert difference.unstable is False


def test_an_equal_program_runs_once_and_a_changed_one_twice(record):
    run_folder = record([program("print(1)")] * 3 + [program("print(2)")] * 2, fake(lambda code: ok("1\n")))
    other = fake(lambda code: ok("2\n" if "2" in code else "1\n"))
    result = reexecute(run_folder, interpreter=other, max_observation_chars=MAX_CHARS)
    assert sorted(other.codes) == ["print(1)\n", "print(2)\n", "print(2)\n"]
    assert (result.checked, result.programs, len(result.differences)) == (5, 2, 2)


def test_a_program_that_never_ends_twice_alike_is_marked_unstable(record, embedded):
    codes = ("import time\nprint(time.time_ns())", "import random\nprint(random.random())")
    run_folder = record([program(code) for code in codes], embedded)
    result = reexecute(run_folder, interpreter=embedded, max_observation_chars=MAX_CHARS)
    assert [difference.unstable for difference in result.differences] == [True, True]


def test_a_failing_interpreter_is_counted_and_makes_no_difference(record, caplog):
    run_folder = record([program("good")] + [program("bad")] * 2, fake(lambda code: ok("1\n")))
    other = fake(lambda code: InterpreterUnavailable("gone") if "bad" in code else ok("1\n"))
    with caplog.at_level(logging.WARNING):
        result = reexecute(run_folder, interpreter=other, max_observation_chars=MAX_CHARS)
    assert (result.checked, result.interpreter_failures, result.differences) == (1, 2, [])
    assert "failed on 1 of 2 programs, first: gone" in caplog.text


def test_a_second_run_that_fails_leaves_open_whether_a_program_is_stable(record):
    run_folder = record([program("x")], fake(lambda code: ok("1\n")))
    answers = [ok("2\n"), InterpreterUnavailable("gone")]
    result = reexecute(run_folder, interpreter=fake(lambda code: answers.pop(0)), max_observation_chars=MAX_CHARS)
    assert [difference.unstable for difference in result.differences] == [None]


def test_calls_that_executed_nothing_are_counted_by_their_reason(record):
    record(["```output\n", program("x")], fake(lambda code: InterpreterUnavailable("gone")))
    run_folder = record(["No code."], fake(boxes), step=2, full=False)
    result = reexecute(run_folder, interpreter=fake(boxes), max_observation_chars=MAX_CHARS)
    assert result.checked == result.programs == 0
    assert result.skipped == {
        "calls that ended malformed": 1,
        "calls that ended interpreter_failed": 1,
        "rollouts without texts": 1,
    }


def test_no_more_programs_wait_than_the_window_holds(record, monkeypatch):
    monkeypatch.setattr(replay, "WINDOW", 3)
    run_folder = record([program(f"print({n})") for n in range(20)], fake(lambda code: ok(code)))
    waiting, most = set(), 0

    class Watched(FakeInterpreter):
        def submit(self, code):
            nonlocal most
            future = super().submit(code)
            waiting.add(future)
            most = max(most, sum(not future.done() for future in waiting))
            return future

    result = reexecute(
        run_folder, interpreter=Watched(lambda code: ok(code), seconds=0.002), max_observation_chars=MAX_CHARS
    )
    assert result.checked == 20 and result.differences == []
    assert most <= 3


def test_a_result_is_written_beside_the_run_and_shown_as_a_short_table(record, grader):
    run_folder = record(list(GRADED[:1]) * 30, fake(boxes))
    result = regrade(run_folder, grade_text="full", grader=grader)
    path = write_replay(result, run_folder)
    assert path == run_folder / "regrade.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["grade_text"], written["checked"], len(written["differences"])) == ("full", 30, 30)
    assert written["differences"][0]["extracted_after"] == "42"
    lines = replay_table(result, path).splitlines()
    assert lines[0] == "30 rollouts graded again (grade_text full): 30 became correct, 0 became wrong."
    assert lines[1].split() == ["file", "group", "rollout", "before", "now"]
    assert "no_box: None" in lines[2] and lines[2].endswith("equal: 42")
    assert len(lines) == 23 and lines[-1] == f"... and 10 more in {path}"


def test_a_table_says_what_was_skipped_and_stays_on_the_line(record):
    record(["No code."], fake(boxes), step=2, full=False)
    run_folder = record([program("x")], fake(lambda code: ok("1\n2\n" * 9)))
    result = reexecute(run_folder, interpreter=fake(lambda code: ok("é" * 99)), max_observation_chars=MAX_CHARS)
    path = write_replay(result, run_folder)
    assert path.name == "reexecute.json" and "é" in path.read_text(encoding="utf-8")
    lines = replay_table(result, path).splitlines()
    assert lines[0] == "1 calls (1 different programs) executed again: 1 ended otherwise, 0 of them unstable."
    assert lines[1] == "Skipped: 1 rollouts without texts."
    assert len(lines) == 4 and max(map(len, lines)) < 120
    assert "ok: 1 2 1 2" in lines[3]
