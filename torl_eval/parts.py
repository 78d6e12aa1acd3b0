"""Partial results of an evaluation: one JSON line per finished rollout, appended by each process to a file of its own.

    with Parts(folder, rank) as parts:
        parts.read()                 # what earlier runs and the other processes have written, since the last call
        parts.add(key, row)
        parts.rows[key]

A killed evaluation goes on from them: only whole lines count. Processes share nothing but the folder, so that an
engine may have torch.distributed for itself, and any number of processes can go on with what others began.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, str, int]
"""Benchmark, problem_id, number of the sample."""


class Parts(contextlib.AbstractContextManager):
    """The lines of all processes under `folder`, and the file of this one (`rank`)."""

    def __init__(self, folder: Path, rank: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: dict[Key, dict[str, Any]] = {}
        self._folder = folder
        self._read_to: dict[Path, int] = {}
        path = folder / f"rank_{rank:04d}.jsonl"
        _cut_half_line(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """Write a finished rollout, unless it is there."""
        if key not in self.rows:
            self.rows[key] = dict(row)
            self._file.write(json.dumps({"key": key, "row": row}, ensure_ascii=False) + "\n")
            self._file.flush()

    def read(self) -> None:
        """Take in the whole lines that were written since the last call; the first of a key counts."""
        for path in sorted(self._folder.glob("rank_*.jsonl")):
            start = self._read_to.get(path, 0)
            if path.stat().st_size == start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                text = file.read()
            end = text.rfind(b"\n") + 1
            self._read_to[path] = start + end
            for line in text[:end].decode("utf-8").split("\n")[:-1]:
                part = json.loads(line)
                benchmark, problem_id, sample = part["key"]
                self.rows.setdefault((benchmark, problem_id, sample), part["row"])

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _cut_half_line(path: Path) -> None:
    """A line that a kill left without its end would spoil the next one."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)
