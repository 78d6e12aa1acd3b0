r"""The benchmarks by name: where they are on the Hub, how many problems they have, and is this the right copy?

    loaded = load_benchmark("aime24")                           # from the Hub
    loaded = load_benchmark("aime24", folder=Path("benchmarks"))  # from benchmarks/aime24.jsonl
    loaded = load_benchmark("mine=data/mine.jsonl")             # a set of one's own

Columns are found by their usual names, as those of the Hub's copies are (`problem`, `question`; `answer`,
`final_answer`, or the box in `solution`). No row is ever dropped: each one counts.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets

from torl_grading.extraction import last_boxed
from torl_trl.data import (
    READERS,
    DataError,
    Row,
    ground_truth,
    problem_id,
    read_file,
    read_rows,
    solution_text,
    user_message,
)
from torl_trl.prompts import render_prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set as people compare on it. `checksums` are those of its known copies, as `checksum` makes them."""

    title: str
    hub: str
    rows: int
    checksums: tuple[str, ...]
    subset: str | None = None
    split: str = "test"


BENCHMARKS = {
    # Not loaded from the Hub here: columns and splits are from cards and from code that loads these ids. Checksums
    # of aime25 (its second) and math500 are of files with the Hub's own sha256, those of gsm8k and hmmt of their
    # GitHub copies, the others of Qwen2.5-Math's files, which the Hub's were made of.
    "aime24": Benchmark("AIME24", "math-ai/aime24", 30, ("eec59d26e89e16ac",)),
    "aime25": Benchmark("AIME25", "math-ai/aime25", 30, ("d2e50134aab20b7a", "c747b25d2e501b33")),
    "math500": Benchmark("MATH500", "HuggingFaceH4/MATH-500", 500, ("b5a7cd459c21457a",)),
    # 675 rows by its card, as in the paper's time; math-ai/olympiadbench, its source, is said to have 674 now.
    "olympiadbench": Benchmark("OlympiadBench", "zkshan2002/olympiad_bench", 675, ("6ced09295ce3a2f8",)),
    "amc23": Benchmark("AMC23", "math-ai/amc23", 40, ("aecb7f15ce201fb7",)),
    "minerva_math": Benchmark("Minerva Math", "math-ai/minervamath", 272, ("9d0a1728c087320a",)),
    "gsm8k": Benchmark("GSM8K", "openai/gsm8k", 1319, ("152b84cd1d78ad67",), subset="main"),
    "hmmt_feb_2025": Benchmark("HMMT Feb 2025", "MathArena/hmmt_feb_2025", 30, ("4186b805d206e917",), split="train"),
}
PAPER_BENCHMARKS = ("aime24", "aime25", "math500", "olympiadbench", "amc23")
"""The five of the paper, in the order of its Table 3."""

_NAMED = re.compile(r"([\w.-]+)=(.+)")

PROBLEM_COLUMNS = ("problem", "question")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth")
SOLUTION_COLUMN = "solution"


@dataclass(frozen=True, slots=True)
class LoadedBenchmark:
    """A benchmark's problems, rows of `problem`, `problem_id` and `solution`, in the order of the data.

    `check` says what is wrong with a registered benchmark's copy, in a sentence; None where it is right, and for a
    set of one's own, of which nothing is known.
    """

    name: str
    title: str
    problems: list[Row]
    checksum: str
    check: str | None


def load_benchmark(place: str, *, folder: Path | None = None) -> LoadedBenchmark:
    """Load `[name=]place[:subset][@split]`: a name of `BENCHMARKS`, a file, a folder or a Hub id.

    A name alone is taken from `folder`, or without one from the Hub. A set that is given a registered name is checked
    against it, wherever it is. The split of a Hub id is `test` unless given. Raises `DataError`.
    """
    name, place, subset, split = _parse(place)
    benchmark = BENCHMARKS.get(place) or BENCHMARKS.get(name)
    if place not in BENCHMARKS:
        rows = read_rows(place, split=split or "test", subset=subset)
    elif folder is None:
        rows = read_rows(benchmark.hub, split=benchmark.split, subset=benchmark.subset)
    else:
        rows = read_file(_file_in(folder, place))
    problems = _problems(rows, name)
    found = checksum(problems)
    check = _check(name, benchmark, len(problems), found) if benchmark else None
    return LoadedBenchmark(name, benchmark.title if benchmark else name, problems, found, check)


def load_benchmarks(places: Sequence[str], *, folder: Path | None = None) -> list[LoadedBenchmark]:
    """`load_benchmark` for each, with a warning where one is no known copy. Raises `DataError` for a name twice."""
    loaded = [load_benchmark(place, folder=folder) for place in places]
    for benchmark in loaded:
        if benchmark.check:
            logger.warning("%s", benchmark.check)
    if twice := [name for name, count in Counter(benchmark.name for benchmark in loaded).items() if count > 1]:
        raise DataError(f"Two benchmarks are called {twice[0]!r}: name one as NAME=PLACE.")
    return loaded


def benchmark_names(text: str) -> list[str] | None:
    """The benchmarks that an `eval_dataset_name` lists, or None where it is other data."""
    names = text.split(",")
    return names if len(names) > 1 or names[0] in BENCHMARKS or _NAMED.fullmatch(text) else None


def evaluation_dataset(names: Sequence[str], template: str, *, max_problems: int | None = None) -> datasets.Dataset:
    """Return the first `max_problems` of each benchmark as `ToRLTrainer` evaluates on them; their names are logged.

    The columns are those of `torl_trl.data.load_problems`, and `benchmark`. Raises `DataError`.
    """
    rows = []
    for loaded in load_benchmarks(names):
        logger.info("%s: %d problems.", loaded.title, len(loaded.problems[:max_problems]))
        rows += [
            row | {"prompt": render_prompt(template, row["problem"]), "benchmark": loaded.name}
            for row in loaded.problems[:max_problems]
        ]
    return datasets.Dataset.from_list(rows)


def _parse(text: str) -> tuple[str, str, str | None, str | None]:
    """Return the name, the place, the subset and the split of `[name=]place[:subset][@split]`."""
    name, place, subset, split = "", text, "", ""
    if match := _NAMED.fullmatch(text):
        name, place = match.groups()
    if place not in BENCHMARKS and not Path(place).expanduser().exists():
        place, _, split = place.partition("@")
        place, _, subset = place.partition(":")
        if "/" not in place and Path(place).suffix.lower() not in READERS:
            raise DataError(
                f"Benchmark {place!r} is unknown: name one of {', '.join(BENCHMARKS)}, a file, or a Hub id "
                "(owner/name[:subset][@split])."
            )
    path = Path(place)
    return name or (path.stem if path.suffix.lower() in READERS else path.name), place, subset or None, split or None


def _file_in(folder: Path, name: str) -> Path:
    """Return the file of a benchmark: the one that has its name, or the only one whose name starts with it."""
    if not folder.is_dir():
        raise DataError(f"The folder of benchmarks {str(folder)!r} does not exist: check the path.")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in READERS and path.stem.startswith(name))
    files = [path for path in files if path.stem == name] or files
    if len(files) != 1:
        found = f"{len(files)} files ({', '.join(path.name for path in files)})" if files else "no file"
        raise DataError(
            f"The folder {str(folder)!r} has {found} for the benchmark {name!r}: have one named {name}.jsonl, or "
            f"{', '.join(suffix for suffix in READERS if suffix != '.jsonl')}."
        )
    return files[0]


def _problems(rows: Sequence[Row], name: str) -> list[Row]:
    problems: list[Row] = []
    seen: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        problem, solution = problem_of(row), answer_of(row)
        if problem is None or solution is None:
            lacks = "problem" if problem is None else "single known answer"
            raise DataError(
                f"Row {number} of benchmark {name!r} has no {lacks} (its columns are {', '.join(row)}): "
                "mend the row, for every row counts in the result."
            )
        identity = problem_id(problem)
        seen[identity] += 1
        suffix = f"-{seen[identity]}" if seen[identity] > 1 else ""
        problems.append({"problem": problem, "problem_id": identity + suffix, "solution": solution})
    if not problems:
        raise DataError(f"Benchmark {name!r} has no rows: check the file.")
    return problems


def problem_of(row: Row, column: str | None = None) -> str | None:
    """Return the problem's text: `column`, a usual column, or the last user message of a chat (verl's schema)."""
    value = next((row[name] for name in (column, *PROBLEM_COLUMNS) if row.get(name)), None)
    value = user_message(row.get("prompt")) if value is None else value
    return value.strip() or None if isinstance(value, str) else None


def answer_of(row: Row, column: str | None = None) -> str | None:
    """Return the one known answer as text: `column`, a usual column, verl's ground truth, or the solution's box."""
    value = next((row[name] for name in (column, *ANSWER_COLUMNS) if row.get(name) is not None), None)
    value = ground_truth(row.get("reward_model")) if value is None else value
    if value is None and isinstance(row.get(SOLUTION_COLUMN), str):
        value = last_boxed(row[SOLUTION_COLUMN])
    text = solution_text(value)
    return (last_boxed(text) if "\\boxed" in (text or "") else text) or None


# --- Is it the right copy? ------------------------------------------------------------------------------------------

_LAYOUT = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;]|[\s$]")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+")


def checksum(problems: Sequence[Row]) -> str:
    r"""Return 16 hex digits that depend on the problems and their solutions, but not on their order.

    What varies between copies does not count: white space, `$`, `\left` and `\right`, the spaces `\!`, `\,`, `\;`,
    `\dfrac` and `\tfrac` for `\frac`; in a solution also a last degree sign, commas between thousands, zeros before
    an integer (025) and after its point (27.0).
    """
    digests = sorted(
        hashlib.sha256(f"{_fold(row['problem'])}\n{_fold_answer(row['solution'])}".encode()).hexdigest()
        for row in problems
    )
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _fold(text: str) -> str:
    return _LAYOUT.sub("", re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text))


def _fold_answer(text: str) -> str:
    text = re.sub(r"\^(?:\\circ|\{\\circ\})$", "", _fold(text))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return re.sub(r"^(-?)0+(?=\d+$)", r"\1", re.sub(r"^(-?\d+)\.0+$", r"\1", text))


def _check(name: str, benchmark: Benchmark, rows: int, found: str) -> str | None:
    if (rows, found) in ((benchmark.rows, known) for known in benchmark.checksums):
        return None
    return (
        f"Benchmark {name!r} is not the set that others report on: {benchmark.rows} rows with checksum "
        f"{' or '.join(benchmark.checksums)} were expected, {rows} with {found} found; its numbers are not comparable."
    )
