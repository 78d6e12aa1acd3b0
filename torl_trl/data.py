"""Load problems with known answers: from the Hub, or from JSONL, JSON, CSV and parquet files, here or at a URL.

    report = LoadReport("train")
    dataset = load_problems("math.jsonl", template=TORL_TEMPLATE, tokenizer=tokenizer, grader=grader, report=report)

The result has the columns `prompt` (rendered text), `solution`, `problem`, `problem_id` and, where the data tells it,
`source`. ToRL's own parquet schema is recognised. Nothing is dropped without a counted log line.
"""

import csv
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import datasets
import httpx
import pyarrow
import pyarrow.parquet
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from torl_grading import Grader
from torl_trl.errors import UserError
from torl_trl.prompts import render_prompt

logger = logging.getLogger(__name__)

Row = dict[str, Any]

SOURCE_COLUMNS = ("source", "family", "data_source")
"""The first of these that the data has becomes `source`."""
KNOWN_ROWS = {"https://raw.githubusercontent.com/GAIR-NLP/ToRL/main/data/torl_data/train.parquet": 28_740}
"""Numbers of rows that data at a URL should have: the paper's training set (its section 2.1)."""
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "eval", "dev")

MISSING = "missing problem or answer"
DUPLICATE = "duplicate of an earlier problem"
TOO_LONG = "prompt too long"
BAD_SOLUTION = "answer the verifier cannot use"


class DataError(UserError):
    """The user's data cannot be used: the message says what, with which value, and what to do."""


@dataclass(slots=True)
class LoadReport:
    """What `load_problems` read, kept and dropped; `dropped` maps a reason to a number of rows."""

    name: str
    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


def load_problems(
    name_or_path: str,
    *,
    template: str,
    tokenizer: Callable[..., Any],
    grader: Grader,
    split: str = "train",
    subset: str | None = None,
    problem_column: str = "problem",
    answer_column: str = "answer",
    max_prompt_length: int = 400,
    max_problems: int | None = None,
    name: str = "train",
    report: LoadReport | None = None,
) -> datasets.Dataset:
    """Read problems, drop what cannot be trained on, and return the first `max_problems` of the rest, in order.

    `name_or_path` is a file, its URL, a folder, or a Hub id (with `subset` for its configuration); a relative path is
    taken from the working directory. `max_prompt_length` is in tokens (released code: 400). `name` stands in messages;
    `report` is filled in. Raises `DataError` for whatever the user can mend.
    """
    report = report if report is not None else LoadReport(name)
    rows = read_rows(name_or_path, split=split, subset=subset)
    report.rows = len(rows)
    if (known := KNOWN_ROWS.get(name_or_path, len(rows))) != len(rows):
        logger.warning("%s data: %d rows instead of %d: %s has changed.", name, len(rows), known, name_or_path)
    problems, missing = _read_problems(rows, name_or_path, problem_column, answer_column)
    _drop(report, MISSING, missing)
    problems = _distinct(problems, report)
    problems = _short_enough(problems, template, tokenizer, max_prompt_length, report)
    problems = _gradable(problems, grader, max_problems, report)
    if not problems:
        counts = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items()) or "it is empty"
        raise DataError(
            f"The {name} data {name_or_path!r} has {len(rows)} rows and none can be used ({counts}): "
            "check the file, the column names and max_prompt_length."
        )
    report.kept = len(problems)
    logger.info("%s data: %d of %d problems from %s.", name, report.kept, report.rows, name_or_path)
    return datasets.Dataset.from_list(problems)


T = TypeVar("T")


def on_main_process(load: Callable[[], T]) -> T:
    """Call `load` on the main process and give its result to all: a verdict that ran out of time on one rank alone
    would give the ranks different problems."""
    box = [load() if PartialState().is_main_process else None]
    return broadcast_object_list(box)[0]


def _drop(report: LoadReport, reason: str, count: int) -> None:
    if count:
        report.dropped[reason] = report.dropped.get(reason, 0) + count
        logger.info("%s data: dropped %d of %d rows: %s.", report.name, count, report.rows, reason)


# --- Rows, from wherever they are -----------------------------------------------------------------------------------


def read_rows(name_or_path: str, *, split: str = "train", subset: str | None = None) -> list[Row]:
    """Read a file, here or at a URL, the files of a folder, or a Hub data set, as dicts. Raises `DataError`."""
    if name_or_path.startswith(("http://", "https://")):
        return read_file(fetch(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return [row for file in _files_of(path, split) for row in read_file(file)]
    if path.exists():
        return read_file(path)
    if path.suffix in READERS or path.is_absolute() or name_or_path.startswith((".", "~")) or len(path.parts) > 2:
        raise DataError(f"Data file {name_or_path!r} does not exist: check the path.")
    try:
        return datasets.load_dataset(name_or_path, subset, split=split).to_list()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"Data {name_or_path!r} (split {split!r}) is no local file or folder, and the Hub did not give it "
            f"({first_line(error)}): check the name, the split and the network."
        ) from error


def fetch(url: str) -> Path:
    """Return the file at a URL, kept in the cache of `datasets` from the first time on. Raises `DataError`."""
    name = url.partition("?")[0].rpartition("/")[2]
    path = Path(datasets.config.HF_DATASETS_CACHE, f"torl-{hashlib.sha1(url.encode()).hexdigest()[:12]}-{name}")
    if path.exists():
        return path
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as answer, aside.open("wb") as file:
            answer.raise_for_status()
            for chunk in answer.iter_bytes():
                file.write(chunk)
        aside.replace(path)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        aside.unlink(missing_ok=True)
        raise DataError(
            f"Data {url!r} cannot be fetched ({first_line(error)}): check the address and the network, or fetch the "
            "file where there is one and give its path instead."
        ) from error
    logger.info("Fetched %s to %s.", url, path)
    return path


def read_file(path: Path) -> list[Row]:
    """Read one file by its suffix. Raises `DataError` for another suffix and for content that cannot be read."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"Data file {str(path)!r} has an unknown type: use one of {', '.join(READERS)}.")
    try:
        return reader(path)
    except (OSError, ValueError, csv.Error, pyarrow.ArrowException) as error:
        kind = path.suffix.lower()[1:]
        raise DataError(
            f"Data file {str(path)!r} cannot be read as {kind} ({first_line(error)}): repair or convert it."
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, for a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _files_of(folder: Path, split: str) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise DataError(f"Data folder {str(folder)!r} has no file of type {', '.join(READERS)}: check the path.")
    chosen = [file for file in files if file.stem.lower().startswith(split)]
    if not chosen and any(file.stem.lower().startswith(SPLIT_NAMES) for file in files):
        names = ", ".join(file.name for file in files)
        raise DataError(f"Data folder {str(folder)!r} has no file for the split {split!r}, it has {names}: name one.")
    return chosen or files


def _read_jsonl(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return _as_rows(rows)


def _read_json(path: Path) -> list[Row]:
    return _as_rows(json.loads(path.read_text(encoding="utf-8-sig")))


def _as_rows(value: Any) -> list[Row]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError("not a list of objects")
    return value


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines, strict=True))
    for number, row in enumerate(rows, start=2):
        if None in row:  # an unquoted comma would move the answer
            raise ValueError(f"line {number} has more fields than the header")
    return rows


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": lambda path: pyarrow.parquet.read_table(path).to_pylist(),
}


# --- Problems, from rows --------------------------------------------------------------------------------------------


def _read_problems(rows: list[Row], origin: str, problem_column: str, answer_column: str) -> tuple[list[Row], int]:
    """Return problems (`problem`, `problem_id`, `solution`, perhaps `source`) and the number of rows without one."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    verl = problem_column not in columns and {"prompt", "reward_model"} <= set(columns)
    absent = [] if verl else [column for column in (problem_column, answer_column) if column not in columns]
    if rows and absent:
        raise DataError(
            f"Data {origin!r} has no column {' and no column '.join(map(repr, absent))}, it has "
            f"{', '.join(map(repr, columns))}: set problem_column and answer_column."
        )
    source_column = next((column for column in SOURCE_COLUMNS if column in columns), None)
    problems = []
    for row in rows:
        problem = user_message(row.get("prompt")) if verl else row.get(problem_column)
        answer = ground_truth(row.get("reward_model")) if verl else row.get(answer_column)
        solution = solution_text(answer)
        if not isinstance(problem, str) or not problem.strip() or solution is None:
            continue
        entry = {"problem": problem.strip(), "problem_id": problem_id(problem), "solution": solution}
        if source_column is not None:
            entry["source"] = str(row.get(source_column) or "")
        problems.append(entry)
    return problems, len(rows) - len(problems)


def user_message(messages: Any) -> str | None:
    """Return the last user message of a chat: ToRL's template takes the problem only, not the system message."""
    if not isinstance(messages, list):
        return None
    messages = [message for message in messages if isinstance(message, dict)]
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    return texts[-1] if texts else None


def ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def problem_id(problem: str) -> str:
    """Return 12 hex digits that depend on the problem's words and signs only, so they last over runs and files."""
    return hashlib.sha1(" ".join(problem.split()).encode()).hexdigest()[:12]


def solution_text(answer: Any) -> str | None:
    """Return a known answer as text, or None if there is none: numbers, a list of one, GSM8K's `... #### 72`."""
    if isinstance(answer, Sequence) and not isinstance(answer, str) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, bool):
        return None
    if isinstance(answer, int):
        return str(answer)
    if isinstance(answer, float):
        if not math.isfinite(answer):
            return None
        return str(int(answer)) if answer.is_integer() else format(Decimal(repr(answer)), "f")
    if not isinstance(answer, str):
        return None
    text = answer.rpartition("####")[2].strip()
    whole, point, fraction = text.partition(".")
    if point and whole.lstrip("-").isdecimal() and fraction and not fraction.strip("0"):
        return whole  # "27.0", as tables write integers
    return text or None


def _distinct(problems: list[Row], report: LoadReport) -> list[Row]:
    first: dict[str, Row] = {}
    for problem in problems:
        first.setdefault(problem["problem_id"], problem)
    _drop(report, DUPLICATE, len(problems) - len(first))
    return list(first.values())


def _short_enough(
    problems: list[Row], template: str, tokenizer: Callable[..., Any], max_prompt_length: int, report: LoadReport
) -> list[Row]:
    if not problems:
        return []
    prompts = [render_prompt(template, problem["problem"]) for problem in problems]
    lengths = [len(token_ids) for token_ids in tokenizer(prompts)["input_ids"]]
    kept = [
        {"prompt": prompt, **problem}
        for prompt, problem, length in zip(prompts, problems, lengths, strict=True)
        if length <= max_prompt_length
    ]
    _drop(report, f"{TOO_LONG} (over {max_prompt_length} tokens)", len(problems) - len(kept))
    return kept


def _gradable(problems: list[Row], grader: Grader, limit: int | None, report: LoadReport) -> list[Row]:
    """Return the first `limit` problems whose solution can be graded against; those after them are not looked at."""
    kept: list[Row] = []
    bad = 0
    limit = len(problems) if limit is None else limit
    for start in range(0, len(problems), max(limit, 1)):
        if len(kept) >= limit:
            break
        block = problems[start : start + limit]
        reasons = check_solutions((problem["solution"] for problem in block), grader)
        for problem in block:
            if (reason := reasons[problem["solution"]]) is None:
                kept.append(problem)
            else:
                bad += 1
                logger.debug("%s data: answer %r: %s.", report.name, problem["solution"], reason)
    _drop(report, BAD_SOLUTION, bad)
    return kept[:limit]


def check_solutions(solutions: Iterable[str], grader: Grader) -> dict[str, str | None]:
    """Map each distinct solution to why it cannot be used, or None. Algebra does about 100 a second and worker."""
    pending: dict[str, Future[str | None]] = {}
    for solution in solutions:
        if solution not in pending:
            pending[solution] = grader.check_solution(solution)
    return {solution: future.result() for solution, future in pending.items()}
