"""The steps of data preparation: each reads one parquet file and writes the next, in batches, in several processes.

A step looks at batches of rows in worker processes (`examine`) and decides row by row, in order, in the main one
(`decide`), so what it remembers of earlier rows is in one place. Its file carries a checksum of everything that it
depends on: a step whose checksum stands is not done again.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from torl_data import curation
from torl_trl.data import Row
from torl_trl.errors import UserError

SCHEMA = pa.schema(
    [
        (name, pa.string())
        for name in ("problem", "answer", "source", "origin", "problem_id", "raw_id", "question_type")
    ]
    + [("lim_score", pa.float64()), ("pass_rate", pa.float64())]
)
_REPORT_KEY = b"torl_trl.step"
_BATCH = 1000
_CODE = "".join(
    hashlib.sha256(Path(file).read_bytes()).hexdigest()
    for file in (curation.__file__, __file__, Path(__file__).with_name("sources.py"))
)
"""A step is done again when the rules have changed."""


@dataclass(slots=True)
class Step:
    """A step. `examine` returns one value a row, and is a function of a module unless it runs `here`, in the main
    process. `decide` returns the reason to drop a row or None, and may change the row. `options` is plain, and all
    that the result depends on beside the rows. `notes` collects what `decide` wants listed in the report."""

    name: str
    title: str
    examine: Callable[[Sequence[Row]], Sequence[Any]]
    decide: Callable[[Row, Any], str | None]
    options: dict[str, Any] = field(default_factory=dict)
    here: bool = False
    notes: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class StepReport:
    """What a step did; `dropped` maps a reason to a number of rows, `seconds` is wall time."""

    name: str
    title: str
    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)
    examples: list[dict[str, str]] = field(default_factory=list)
    key: str = ""
    reused: bool = False


class Workers:
    """Processes that examine batches. They start before the rows are read, and run nothing but our own Python code, so
    that on Linux they can be forked: spawned ones would import what the training stack imports, gigabytes of it."""

    def __init__(self, number: int, benchmarks: curation.Benchmarks):
        _start(benchmarks)
        self._number = number
        self._pool = None
        if number > 1:
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
            self._pool = ProcessPoolExecutor(number, context, initializer=_start_worker, initargs=(benchmarks,))
            self._pool.submit(len, ()).result()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self, examine: Callable[[Sequence[Row]], Sequence[Any]], batches: Iterable[Sequence[Row]], here: bool = False
    ) -> Iterator[tuple[Sequence[Row], Sequence[Any]]]:
        """Yield each batch with its examination, in order; two batches a process are in memory at a time."""
        if self._pool is None or here:
            yield from ((batch, examine(batch)) for batch in batches)
            return
        batches = iter(batches)
        pending: deque[tuple[Sequence[Row], Future]] = deque()
        try:
            while True:
                for batch in islice(batches, 2 * self._number - len(pending)):
                    pending.append((batch, self._pool.submit(examine, batch)))
                if not pending:
                    return
                batch, future = pending.popleft()
                yield batch, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "A worker process was killed, perhaps for its memory: give a smaller --num_proc."
            ) from error


def run_step(
    step: Step, source: Path | Iterable[Row], key: str, work: Path, workers: Workers
) -> tuple[Path, StepReport]:
    """Do a step, unless its file is there with the same checksum. `source` is the file of the step before, or rows;
    `key` is a checksum of it. Returns the step's file and report; `report.key` is its checksum."""
    text = json.dumps([key, step.name, step.options, _CODE], sort_keys=True)
    report = StepReport(step.name, step.title, key=hashlib.sha256(text.encode()).hexdigest())
    path = work / f"{step.name}.parquet"
    if (done := read_report(path)) is not None and done.key == report.key:
        return path, done
    total = pq.read_metadata(source).num_rows if isinstance(source, Path) else None
    rows = read_rows_of(source) if isinstance(source, Path) else source
    started = time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    dropped: Counter[str] = Counter()
    with (
        pq.ParquetWriter(aside, SCHEMA, compression="zstd") as writer,
        tqdm(total=total, desc=step.title, unit=" rows", disable=None) as bar,
    ):
        for batch, values in workers.map(step.examine, _batched(rows), step.here):
            kept = []
            for row, value in zip(batch, values, strict=True):
                if (reason := step.decide(row, value)) is None:
                    kept.append(row)
                    continue
                dropped[reason] += 1
                if dropped[reason] <= 3:
                    shown = {"problem": (row["problem"] or "")[:300], "answer": (row["answer"] or "")[:100]}
                    report.examples.append({"reason": reason, "problem_id": row["problem_id"], **shown})
            writer.write_table(pa.Table.from_pylist(kept, schema=SCHEMA))
            report.rows += len(batch)
            report.kept += len(kept)
            bar.update(len(batch))
        report.dropped, report.notes = dict(dropped), step.notes
        report.seconds = round(time.monotonic() - started, 1)
        writer.add_key_value_metadata({_REPORT_KEY.decode(): json.dumps(asdict(report))})
    os.replace(aside, path)
    return path, report


def read_report(path: Path) -> StepReport | None:
    """Return the report in a step's file, None if there is no such file or it is not whole."""
    try:
        report = json.loads(pq.read_metadata(path).metadata[_REPORT_KEY])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    return StepReport(**report | {"reused": True})


def read_rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a step's file, a batch in memory at a time."""
    for batch in pq.ParquetFile(path).iter_batches(batch_size=_BATCH):
        yield from batch.to_pylist()


def _batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


# --- What workers do ------------------------------------------------------------------------------------------------

_benchmarks: curation.Benchmarks


def _start(benchmarks: curation.Benchmarks) -> None:
    global _benchmarks
    _benchmarks = benchmarks


def _start_worker(benchmarks: curation.Benchmarks) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says it once
    _start(benchmarks)


def examine_open(rows: Sequence[Row]) -> list[bool]:
    return [curation.is_open(row["problem"], row["answer"], row["question_type"]) for row in rows]


def examine_choice(rows: Sequence[Row]) -> list[bool]:
    return [curation.is_multiple_choice(row["problem"], row["answer"], row["question_type"]) for row in rows]


def examine_parts(rows: Sequence[Row]) -> list[bool]:
    return [curation.has_parts(row["problem"], row["answer"]) for row in rows]


def examine_sketch(rows: Sequence[Row]) -> list[curation.Sketch]:
    return [curation.sketch(row["problem"], row["answer"]) for row in rows]


def examine_contamination(rows: Sequence[Row]) -> list[curation.Hit | None]:
    return [_benchmarks.find(row["problem"]) for row in rows]
