"""Problems from the Hub and from files, streamed as rows of one shape.

A source is written `[name=]place[:subset][@split]`: `place` is a file, a folder or a Hub id, or one of `SOURCES`.
Which columns hold the problem and its answer is found out; a data set without an answer column has it boxed in its
solution (NuminaMath-CoT, MATH).
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet as pq

from torl_eval.benchmarks import (
    ANSWER_COLUMNS,
    BENCHMARKS,
    PAPER_BENCHMARKS,
    PROBLEM_COLUMNS,
    SOLUTION_COLUMN,
    answer_of,
    problem_of,
)
from torl_trl.data import (
    READERS,
    SOURCE_COLUMNS,
    DataError,
    Row,
    first_line,
    problem_id,
    read_file,
)

SOURCES = {
    "numinamath-cot": "AI-MO/NuminaMath-CoT",
    "numinamath-1.5": "AI-MO/NuminaMath-1.5",
    "math": "DigitalLearningGmbH/MATH-lighteval",
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset",
    "gsm8k": "openai/gsm8k:main",
}
"""Short names. ToRL took NuminaMath, MATH and DeepScaleR (paper, section 2.1)."""

_READ = {
    *PROBLEM_COLUMNS,
    *ANSWER_COLUMNS,
    *SOURCE_COLUMNS,
    SOLUTION_COLUMN,
    "prompt",
    "reward_model",
    "question_type",
}
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Source:
    """Where problems come from. `subset` and `split` are of Hub data sets and folders."""

    name: str
    place: str
    subset: str | None = None
    split: str = "train"

    def title(self) -> str:
        """Return what a card may show: the Hub id, or the name of a local file without its folders."""
        if Path(self.place).exists():
            return Path(self.place).name
        return self.place + (f":{self.subset}" if self.subset else "") + f"@{self.split}"


def parse_source(text: str) -> Source:
    """Read `[name=]place[:subset][@split]`, or one of the short names."""
    name, place = "", text
    if match := re.fullmatch(r"([\w.-]+)=(.+)", text):
        name, place = match.groups()
    elif text in SOURCES and not Path(text).exists():
        name, place = text, SOURCES[text]
    subset, split = "", ""
    if not Path(place).exists():
        place, _, split = place.partition("@")
        place, _, subset = place.partition(":")
    path = Path(place)
    return Source(
        name or (path.stem if path.suffix in READERS else path.name), place, subset or None, split or "train"
    )


def parse_benchmarks(texts: list[str]) -> list[Source]:
    """Return the five benchmarks of the paper, from which the training data must be free, and those of `texts`; a
    text with the name of one of the five says where that is."""
    sources = {name: parse_source(benchmark_place(name)) for name in PAPER_BENCHMARKS}
    return list((sources | {source.name: source for source in map(parse_source, texts)}).values())


def benchmark_place(name: str) -> str:
    """Where a benchmark is, as a source is written."""
    benchmark = BENCHMARKS[name]
    subset = f":{benchmark.subset}" if benchmark.subset else ""
    return f"{name}={benchmark.hub}{subset}@{benchmark.split}"


def open_source(source: Source, extra_columns: set[str]) -> tuple[str, Iterator[Row]]:
    """Return a checksum of the source's content and its rows, streamed, with the columns that are of use.

    Raises `DataError` for whatever the user can mend, also while the rows are read.
    """
    path = Path(source.place).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
        files = [file for file in files if file.stem.startswith(source.split)] or files
    else:
        files = [path] if path.is_file() else []
    if files:
        digests = []
        for file in files:
            with file.open("rb") as content:
                digests.append(hashlib.file_digest(content, "sha256").hexdigest())
        return "".join(digests), (row for file in files for row in _stream(file, _READ | extra_columns))
    if path.is_dir() or path.suffix in READERS or path.is_absolute() or source.place.startswith((".", "~")):
        raise DataError(
            f"Source {source.place!r} is no file and no folder with one of {', '.join(READERS)}: check it."
        )
    try:
        data = datasets.load_dataset(source.place, source.subset, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"Source {source.title()!r} is no local file, and the Hub did not give it ({first_line(error)}): "
            f"check the name, the split and the network, or give a file as {source.name}=PATH."
        ) from error
    data = data.select_columns([column for column in data.column_names if column in _READ | extra_columns])
    return data._fingerprint, iter(data)


def _stream(file: Path, columns: set[str]) -> Iterator[Row]:
    """The rows of a file. JSONL and parquet, the formats of large data, are never in memory as a whole."""
    try:
        if file.suffix.lower() == ".parquet":
            table = pq.ParquetFile(file)
            names = [name for name in table.schema_arrow.names if name in columns]
            for batch in table.iter_batches(batch_size=_BATCH, columns=names):
                yield from batch.to_pylist()
        elif file.suffix.lower() == ".jsonl":
            with file.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        if not isinstance(row := json.loads(line), dict):
                            raise ValueError(f"line {number} is no object")
                        yield row
        else:
            yield from read_file(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Data file {file.name!r} cannot be read ({error}): repair or convert it.") from error


def to_row(row: Row, source: Source, problem_column: str | None, answer_column: str | None) -> Row:
    """Return a source's row in the shape of the steps; without a problem or an answer those are None."""
    problem = problem_of(row, problem_column)
    identity = problem_id(problem) if problem else ""
    return {
        "problem": problem,
        "answer": answer_of(row, answer_column),
        "source": next((str(row[name]) for name in SOURCE_COLUMNS if row.get(name)), source.name),
        "origin": source.name,
        "problem_id": identity,
        "raw_id": identity,
        "question_type": str(row.get("question_type") or ""),
    }


_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad")) | {0xA0: " ", 0x3000: " ", 0x2028: "\n"}
_HEADING = re.compile(
    r"(?i)\A(?:#+\s*(?:problem|task|exercise|question)[^\n]*\n"
    r"|\**(?:problem|exercise|question|example|task)\s*\d+(?:\.\d+)*\**\s*[.:)]+\**\s*"
    r"|\d{1,3}(?:\.\d+)*[.)]\s+(?=(?-i:[A-Z$\\(]))|[(\[]\s*\d+\s*(?:points?|pts?|marks?)\s*[)\]]\s*)+"
)


def normalise_problem(text: str) -> str:
    """Return the problem without invisible characters, trailing blanks, its number and its points; maths untouched."""
    text = unicodedata.normalize("NFC", text).translate(_INVISIBLE).replace("\r\n", "\n")
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()
    return _HEADING.sub("", text).strip() or text
