"""The rollouts that a page shows: read whole groups, label them, and choose those that fit a budget of bytes.

    stored = read_groups(run_folder)
    chosen = choose_groups(stored.groups, budget=6_000_000)

A group is the rollouts of one prompt in one step; only those with text can be shown. Groups are kept compressed from
the moment they are read, so that a run with gigabytes of text fits into memory.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from torl_report.behaviours import LABELS, find_labels
from torl_trl.prompts import code_block_spans
from torl_trl.records import read_rollouts, segment_texts
from torl_trl.run_folder import ROLLOUTS_NAME

EXAMPLES = 3
"""So many groups of each label are kept before all others."""

TEXT, CODE, INSERTED = 0, 1, 2
"""Kinds of a piece of a completion: what the model wrote, its complete ```python blocks, and what was inserted."""

_STEP_FILE = re.compile(r"(\w+_)?step_\d+$")
_NOT_SHOWN = ("prompt_ids", "completion_ids", "env_mask")


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt in one step, as compressed JSON for the page; `labels` are those that any has."""

    split: str
    step: int
    rollouts: int
    labels: frozenset[str]
    packed: bytes

    def text(self) -> str:
        """The JSON object that the page reads."""
        return zlib.decompress(self.packed).decode()


@dataclass(slots=True)
class StoredRollouts:
    """What a run recorded. `labelled` counts rollouts with text at each (split, step): of each label, and "all"."""

    recorded: int = 0
    with_text: int = 0
    without_segments: int = 0
    groups: list[Group] = field(default_factory=list)
    labelled: dict[tuple[str, int], Counter] = field(default_factory=dict)


def read_groups(run_folder: Path, run: int = 0) -> StoredRollouts:
    """Read every parquet file under rollouts/; `run` is the run's place in the page. Raises what `read_rollouts` does.

    Rollouts without text are only counted, and those of an older version, whose text has no segments, as well.
    """
    stored = StoredRollouts()
    for path in sorted((run_folder / ROLLOUTS_NAME).glob("*.parquet")):
        table = read_rollouts(path).drop_columns(_NOT_SHOWN)
        stored.recorded += len(table)
        full = table.filter(table["full"])
        table = full.filter(pc.is_valid(full["segments"]))
        stored.without_segments += len(full) - len(table)
        rows = table.sort_by([("step", "ascending"), ("group_id", "ascending")]).to_pylist(maps_as_pydicts="strict")
        stored.with_text += len(rows)
        for _, members in groupby(rows, key=lambda row: (row["step"], row["group_id"])):
            group = list(members)
            split = group[0]["split"] if _STEP_FILE.match(path.stem) else path.stem  # an evaluation's: the benchmark
            labels = [find_labels(row) for row in group]
            stored.groups.append(_pack(run, split, group, labels))
            counts = stored.labelled.setdefault((split, group[0]["step"]), Counter())
            counts["all"] += len(group)
            counts.update(label for found in labels for label in found)
    stored.groups.sort(key=lambda group: (group.step, group.split))
    return stored


def choose_groups(groups: Sequence[Group], budget: int) -> list[Group]:
    """Return those groups, in their order, whose compressed texts have together at most `budget` bytes.

    First come `EXAMPLES` of each label, then one group of every step, then another, until the next does not fit. Steps
    are taken in an order that is spread over the run at every length, so that a small budget shows all of it too.
    """
    chosen: set[int] = set()
    for place in _examples(groups):
        size = len(groups[place].packed)
        if size <= budget and place not in chosen:
            chosen.add(place)
            budget -= size
    for place in _round_robin(groups):
        if place in chosen:
            continue
        if len(groups[place].packed) > budget:
            break
        chosen.add(place)
        budget -= len(groups[place].packed)
    return [groups[place] for place in sorted(chosen)]


def label_lines(stored: StoredRollouts) -> list[dict[str, Any]]:
    """The share of each label at each step, as lines of metrics: {"step", "split", label: share}."""
    return [
        {"step": step, "split": split} | {label: counts[label] / counts["all"] for label in LABELS}
        for (split, step), counts in sorted(stored.labelled.items(), key=lambda item: item[0][1])
    ]


def _pack(run: int, split: str, rows: Sequence[Mapping[str, Any]], labels: Sequence[Sequence[str]]) -> Group:
    first = rows[0]
    data = {
        "run": run,
        "split": split,
        "step": first["step"],
        "group": first["group_id"],
        "problem": first["problem_id"],
        "prompt": first["prompt"],
        "solution": first["solution"],
        "rollouts": [_rollout(row, found) for row, found in zip(rows, labels, strict=True)],
    }
    packed = zlib.compress(json.dumps(data, ensure_ascii=False).encode(), level=1)
    return Group(split, first["step"], len(rows), frozenset(label for found in labels for label in found), packed)


def _rollout(row: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    names = ("reward", "rewards", "advantage", "correct", "reason", "extracted", "sentinels")
    return {name: row[name] for name in names} | {
        "index": row["generation_index"],
        "stop": row["stop_reason"],
        "labels": labels,
        "calls": [[call["status"], call["seconds"], call["queue_seconds"]] for call in row["calls"]],
        "pieces": list(_pieces(row)),
    }


def _pieces(row: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The completion as (kind, text), in order."""
    for inserted, text in segment_texts(row):
        if inserted:
            yield INSERTED, text
            continue
        position = 0
        for start, end in code_block_spans(text)[0]:
            yield from ((TEXT, text[position:start]), (CODE, text[start:end]))
            position = end
        yield TEXT, text[position:]


def _examples(groups: Sequence[Group]) -> Iterator[int]:
    for label in LABELS:
        places = [place for place, group in enumerate(groups) if label in group.labels]
        yield from {places[len(places) * number // EXAMPLES] for number in range(EXAMPLES)} if places else ()


def _round_robin(groups: Sequence[Group]) -> Iterator[int]:
    steps: dict[tuple[int, str], list[int]] = {}
    for place, group in enumerate(groups):
        steps.setdefault((group.step, group.split), []).append(place)
    keys = sorted(steps)
    for turn in zip_longest(*(steps[keys[place]] for place in _spread(len(keys)))):
        yield from (place for place in turn if place is not None)


def _spread(count: int) -> list[int]:
    """0 to count - 1, each next one far from those before: by their binary digits read backwards."""
    digits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{digits}b}"[::-1])
