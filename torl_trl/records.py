"""Rollouts on disk: one parquet file a step, with a schema version.

Each rank turns its rollouts into plain rows (`rollout_row`), rank 0 gathers and writes them (`write_rollouts`):

    rollouts/step_000010.parquet         training, the step's number in six digits
    rollouts/eval_step_000010.parquet    evaluation at that step

Problem ids, reward and other small facts are there at every step. The heavy columns (prompt, completion, token ids,
mask, segments, calls) are null unless the row is `full`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torl_trl.errors import UserError
from torl_trl.rollout import Rollout, ToolCall
from torl_trl.run_folder import ROLLOUTS_NAME
from torl_trl.sentinels import find_sentinels

SCHEMA_VERSION = 1
"""Raised when a column changes its name, type or meaning; a new column alone does not raise it."""

_VERSION_KEY = b"torl_trl.schema_version"

_CALL = pa.struct(
    [
        ("code", pa.string()),  # null for a malformed call
        ("observation", pa.string()),
        ("status", pa.string()),
        ("seconds", pa.float64()),  # null when nothing was executed, like the next
        ("queue_seconds", pa.float64()),
        ("failures", pa.int32()),
    ]
)

_SEGMENT = pa.struct([("inserted", pa.bool_()), ("tokens", pa.int32()), ("chars", pa.int32())])

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.float64()),
        ("split", pa.string()),
        ("problem_id", pa.string()),
        ("group_id", pa.int64()),
        ("generation_index", pa.int32()),
        ("rank", pa.int32()),
        ("full", pa.bool_()),
        ("prompt", pa.string()),
        ("solution", pa.string()),
        ("completion", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("env_mask", pa.list_(pa.int8())),
        ("segments", pa.list_(_SEGMENT)),  # in order; they cover the completion, EOS has a token and no text
        ("calls", pa.list_(_CALL)),
        ("reward", pa.float64()),  # the weighted total; null where the rollout has none
        ("rewards", pa.map_(pa.string(), pa.float64())),  # by reward function
        ("correct", pa.bool_()),
        ("reason", pa.string()),  # the grader's
        ("extracted", pa.string()),
        ("advantage", pa.float64()),
        ("dropped", pa.string()),  # why it trains nothing (torl_trl.filters.Drop); null where it trains
        ("stop_reason", pa.string()),
        ("sentinels", pa.list_(pa.string())),  # those it tripped
        ("engine", pa.string()),
        ("seed", pa.int64()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


def rollout_row(
    rollout: Rollout,
    *,
    full: bool,
    prompt: str,
    reward: float | None,
    rewards: Mapping[str, float | None],
    advantage: float | None,
    **facts: Any,
) -> dict[str, Any]:
    """Return the row of one rollout: plain picklable values under the names of `SCHEMA`.

    `rewards` holds each reward function's value; a reward or advantage that is NaN becomes null. `facts` are the
    columns that say where the rollout belongs: step, epoch, split ("train" or "eval"), problem_id, solution, group_id
    and generation_index (its place in the step), rank, dropped, engine, seed.
    """
    verdict = rollout.verdict
    row = facts | {
        "full": full,
        "reward": _number(reward),
        "rewards": {name: _number(value) for name, value in rewards.items()},
        "correct": None if verdict is None else bool(verdict.correct),
        "reason": None if verdict is None or verdict.reason is None else str(verdict.reason),
        "extracted": None if verdict is None or verdict.extracted is None else str(verdict.extracted),
        "advantage": _number(advantage),
        "stop_reason": None if rollout.stop_reason is None else str(rollout.stop_reason),
        "sentinels": find_sentinels(rollout),
    }
    if full:
        row |= {
            "prompt": prompt,
            "completion": rollout.completion,
            "prompt_ids": list(rollout.prompt_ids),
            "completion_ids": list(rollout.completion_ids),
            "env_mask": list(rollout.env_mask),
            "segments": [
                {"inserted": segment.inserted, "tokens": segment.end - segment.start, "chars": len(segment.text)}
                for segment in rollout.segments
            ],
            "calls": [_call(call) for call in rollout.calls],
        }
    return {name: row.get(name) for name in SCHEMA.names}


def segment_texts(row: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """The stretches of a full row as (inserted, text), in order. Raises `UserError` on one from before segments."""
    if row["segments"] is None:
        raise UserError("This rollout was recorded without its segments, by an older version: record it again.")
    texts, start = [], 0
    for segment in row["segments"]:
        texts.append((segment["inserted"], row["completion"][start : start + segment["chars"]]))
        start += segment["chars"]
    return texts


def rollouts_path(run_folder: Path, step: int, split: str) -> Path:
    """Return where the rollouts of a step belong."""
    prefix = "" if split == "train" else f"{split}_"
    return run_folder / ROLLOUTS_NAME / f"{prefix}step_{step:06d}.parquet"


def write_rollouts(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of `rollout_row` to `path`; a reader sees the whole file or none (written aside, then renamed).

    Raises pyarrow's `ArrowInvalid` or `ArrowTypeError` on a value that does not fit its column.
    """
    columns = []
    for column in SCHEMA:
        values = [row[column.name] for row in rows]
        if pa.types.is_map(column.type):
            values = [list(value.items()) for value in values]
        columns.append(pa.array(values, column.type))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), aside, compression="zstd")
    os.replace(aside, path)


def read_rollouts(path: Path) -> pa.Table:
    """Read a file of rollouts. Raises `UserError` if it is none, or of a newer schema than this package knows."""
    try:
        table = pq.read_table(path, partitioning=None)
    except pa.ArrowException as error:
        raise UserError(f"{str(path)!r} is not a file of rollouts ({error}): remove it.") from error
    version = (table.schema.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise UserError(f"{str(path)!r} is not a file of rollouts: it names no schema version, remove it.")
    if int(version) > SCHEMA_VERSION:
        raise UserError(
            f"{str(path)!r} has rollouts of schema version {int(version)}, this package reads up to {SCHEMA_VERSION}: "
            "update torl-trl."
        )
    for column in SCHEMA:  # those that came later are null in older files
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    return table


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "code": call.code,
        "observation": call.observation,
        "status": call.status,
        "seconds": call.result.seconds if call.result else None,
        "queue_seconds": call.result.queue_seconds if call.result else None,
        "failures": call.failures,
    }


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
