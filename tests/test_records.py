"""Rollouts on disk."""

import pickle
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl.records import SCHEMA, read_rollouts, rollout_row, rollouts_path, segment_texts, write_rollouts
from torl_trl.rollout import Rollout, Segment, StopReason, ToolCall

FACTS = {
    "step": 10,
    "epoch": 0.5,
    "split": "train",
    "problem_id": "gcd-17",
    "group_id": 3,
    "generation_index": 1,
    "rank": 0,
    "prompt": "What is 1?",
    "solution": "1",
    "reward": 0.5,
    "rewards": {"accuracy": 1.0, "executability": -0.5},
    "advantage": 0.25,
    "dropped": "void_turn",
    "engine": "scripted",
    "seed": 42,
    "full": True,
}


def executed_rollout():
    """One executed call, then a right answer: 2 model tokens, 1 inserted, 1 model token."""
    result = ExecutionResult(ExecutionStatus.OK, "1\n", "", seconds=0.5, queue_seconds=0.25)
    return Rollout(
        index=0,
        prompt_ids=[1, 2],
        completion_ids=[3, 4, 5, 6],
        logprobs=[-1.0, -1.0, 0.0, -1.0],
        env_mask=[1, 1, 0, 1],
        segments=[
            Segment(0, 2, False, "```python\nprint(1)\n```\n```output"),
            Segment(2, 3, True, "\n1\n```\n"),
            Segment(3, 4, False, "\\boxed{1}"),
        ],
        calls=[ToolCall("print(1)", result, "1")],
        stop_reason=StopReason.EOS,
        verdict=SimpleNamespace(correct=True, score=1.0, extracted="1", reason="equal"),
    )


def test_a_full_row_comes_back_as_it_was_written(tmp_path):
    rollout = executed_rollout()
    write_rollouts(tmp_path / "a.parquet", [rollout_row(rollout, **FACTS)])
    (row,) = read_rollouts(tmp_path / "a.parquet").to_pylist(maps_as_pydicts="strict")
    assert list(row) == SCHEMA.names
    assert {name: row[name] for name in FACTS} == FACTS
    assert row["completion"] == rollout.completion
    assert (row["prompt_ids"], row["completion_ids"]) == (rollout.prompt_ids, rollout.completion_ids)
    assert row["env_mask"] == [1, 1, 0, 1]
    assert row["calls"] == [
        {
            "code": "print(1)",
            "observation": "1",
            "status": "ok",
            "seconds": 0.5,
            "queue_seconds": 0.25,
            "failures": 0,
        }
    ]
    assert (row["correct"], row["extracted"], row["reason"], row["stop_reason"]) == (True, "1", "equal", "eos")
    assert segment_texts(row) == [(segment.inserted, segment.text) for segment in rollout.segments]


def test_an_older_file_is_read_and_says_that_it_has_no_segments(tmp_path):
    write_rollouts(tmp_path / "a.parquet", [rollout_row(executed_rollout(), **FACTS)])
    pq.write_table(pq.read_table(tmp_path / "a.parquet").drop_columns(["segments"]), tmp_path / "old.parquet")
    (row,) = read_rollouts(tmp_path / "old.parquet").to_pylist(maps_as_pydicts="strict")
    with pytest.raises(ValueError, match="without its segments"):
        segment_texts(row)


def test_a_row_that_is_not_full_keeps_ids_and_reward_and_leaves_the_heavy_columns_null(tmp_path):
    rollout = executed_rollout()
    write_rollouts(tmp_path / "a.parquet", [rollout_row(rollout, **(FACTS | {"full": False}))])
    (row,) = read_rollouts(tmp_path / "a.parquet").to_pylist(maps_as_pydicts="strict")
    heavy = {"prompt", "completion", "prompt_ids", "completion_ids", "env_mask", "segments", "calls"}
    assert {name for name, value in row.items() if value is None} == heavy
    assert (row["problem_id"], row["reward"], row["full"]) == ("gcd-17", 0.5, False)


def test_a_rollout_whose_interpreter_failed_has_null_rewards_and_keeps_its_true_mask(tmp_path):
    rollout = executed_rollout()
    rollout.calls = [ToolCall(None, observation="no code"), ToolCall("print(1)", failures=3)]
    rollout.stop_reason, rollout.verdict = StopReason.INTERPRETER_FAILED, None
    facts = FACTS | {"reward": float("nan"), "rewards": {"accuracy": None, "executability": float("nan")}}
    write_rollouts(tmp_path / "a.parquet", [rollout_row(rollout, **facts)])
    (row,) = read_rollouts(tmp_path / "a.parquet").to_pylist(maps_as_pydicts="strict")
    assert (row["reward"], row["correct"], row["reason"]) == (None, None, None)
    assert row["rewards"] == {"accuracy": None, "executability": None}
    assert row["env_mask"] == [1, 1, 0, 1]
    assert [(call["code"], call["status"], call["seconds"], call["failures"]) for call in row["calls"]] == [
        (None, "malformed", None, 0),
        ("print(1)", "interpreter_failed", None, 3),
    ]


def test_rows_are_plain_and_travel_between_ranks():
    row = rollout_row(executed_rollout(), **FACTS)
    assert pickle.loads(pickle.dumps(row)) == row


def test_every_file_has_the_same_schema_also_without_rows(tmp_path):
    write_rollouts(tmp_path / "empty.parquet", [])
    write_rollouts(tmp_path / "one.parquet", [rollout_row(executed_rollout(), **(FACTS | {"full": False}))])
    tables = [read_rollouts(tmp_path / f"{name}.parquet") for name in ("empty", "one")]
    assert pa.concat_tables(tables).num_rows == 1


def test_file_names_tell_step_and_split(tmp_path):
    assert rollouts_path(tmp_path, 10, "train") == tmp_path / "rollouts" / "step_000010.parquet"
    assert rollouts_path(tmp_path, 10, "eval") == tmp_path / "rollouts" / "eval_step_000010.parquet"


def test_writing_makes_the_folder_and_leaves_only_the_finished_file(tmp_path):
    path = rollouts_path(tmp_path, 1, "train")
    for _ in range(2):
        write_rollouts(path, [rollout_row(executed_rollout(), **FACTS)])
    assert [file.name for file in path.parent.iterdir()] == ["step_000001.parquet"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.parquet"
    row = rollout_row(executed_rollout(), **FACTS)
    write_rollouts(path, [row])
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError)):
        write_rollouts(path, [row | {"step": "ten"}])
    assert read_rollouts(path).num_rows == 1


def test_a_newer_schema_and_a_foreign_file_are_refused(tmp_path):
    newer = SCHEMA.with_metadata({b"torl_trl.schema_version": b"99"})
    pq.write_table(newer.empty_table(), tmp_path / "newer.parquet")
    with pytest.raises(ValueError, match=r"schema version 99.*update"):
        read_rollouts(tmp_path / "newer.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(ValueError, match="not a file of rollouts"):
        read_rollouts(tmp_path / "foreign.parquet")
