"""Saved rollouts once more, without a model: graded by another grader, or their programs run by another interpreter.

    result = regrade(run_folder, grade_text="full", grader=grader)
    result = reexecute(run_folder, interpreter=interpreter, max_observation_chars=256)
    print(replay_table(result, write_replay(result, run_folder)))

Only full rows have texts and calls (`save_rollouts_every`); how many others there were, and what else was passed over,
stands in `skipped`.
"""

import dataclasses
import json
import logging
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from torl_grading import Grader
from torl_interpreters.base import ExecutionResult, Interpreter, InterpreterError
from torl_trl.errors import UserError
from torl_trl.prompts import format_observation, shorten
from torl_trl.records import read_rollouts, segment_texts
from torl_trl.rewards import AccuracyReward, GradeText
from torl_trl.rollout import Rollout, Segment, StopReason
from torl_trl.run_folder import ROLLOUTS_NAME, write_atomically

WINDOW = 512
"""Programs given to an interpreter before the first of them is waited for; it runs as many at once as it has slots."""

_PLACE = ("step", "group_id", "generation_index", "problem_id")
_NOT_FULL = "rollouts without texts"
_TABLE_ROWS = 20
_CELL_CHARS = 36

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """Where a rollout is recorded: the file's name, and the row's columns in it."""

    file: str
    step: int
    group_id: int
    generation_index: int
    problem_id: str


@dataclass(frozen=True, slots=True)
class VerdictDifference(RolloutPlace):
    """A rollout that the grader now judges otherwise."""

    solution: str
    correct_before: bool
    correct_after: bool
    extracted_before: str | None
    extracted_after: str | None
    reason_before: str | None
    reason_after: str

    def before_and_now(self) -> tuple[str, str]:
        """Both verdicts, in words."""
        return f"{self.reason_before}: {self.extracted_before}", f"{self.reason_after}: {self.extracted_after}"


@dataclass(frozen=True, slots=True)
class CallDifference(RolloutPlace):
    """A call whose program now ends otherwise; `call` counts the rollout's calls from 0.

    `unstable`: a second run on the same interpreter gave something else again, so that the program says nothing about
    the interpreter (time, random numbers, memory addresses). None if that second run failed.
    """

    call: int
    code: str
    status_before: str
    status_after: str
    observation_before: str
    observation_after: str
    unstable: bool | None

    def before_and_now(self) -> tuple[str, str]:
        """Both outcomes, in words."""
        unstable = "unstable, " if self.unstable else ""
        before = f"{self.status_before}: {self.observation_before}"
        return before, f"{unstable}{self.status_after}: {self.observation_after}"


@dataclass(frozen=True, slots=True)
class Regraded:
    """What `regrade` found; `checked` and `skipped` (by the reason) count rollouts."""

    NAME: ClassVar[str] = "regrade.json"

    grade_text: GradeText
    checked: int
    skipped: dict[str, int]
    differences: list[VerdictDifference]

    def summary(self) -> str:
        right = sum(difference.correct_after for difference in self.differences)
        return (
            f"{self.checked} rollouts graded again (grade_text {self.grade_text}): {right} became correct, "
            f"{len(self.differences) - right} became wrong"
        )


@dataclass(frozen=True, slots=True)
class Reexecuted:
    """What `reexecute` found; `checked` counts executed calls, `programs` the different ones among them.

    `interpreter_failures` counts calls whose program could not be run now; they are neither checked nor differences.
    """

    NAME: ClassVar[str] = "reexecute.json"

    checked: int
    programs: int
    interpreter_failures: int
    skipped: dict[str, int]
    differences: list[CallDifference]

    def summary(self) -> str:
        unstable = sum(difference.unstable is True for difference in self.differences)
        failures = f"; the interpreter failed on {self.interpreter_failures} more" if self.interpreter_failures else ""
        return (
            f"{self.checked} calls ({self.programs} different programs) executed again: {len(self.differences)} "
            f"ended otherwise, {unstable} of them unstable{failures}"
        )


Replayed = Regraded | Reexecuted


def regrade(run_folder: Path, *, grade_text: GradeText, grader: Grader) -> Regraded:
    """Grade every full rollout of a run again and list those whose `correct` changed.

    Raises `GraderError` when grading itself fails, `UserError` without rollouts, and what `read_rollouts` raises.
    """
    reward = AccuracyReward(grader, grade_text)
    checked, skipped = 0, Counter[str]()
    differences: list[VerdictDifference] = []
    columns = ["solution", "completion", "segments", "correct", "extracted", "reason", "stop_reason"]
    for file, rows in _files(run_folder, columns, "grading"):
        graded = []
        for row in rows:
            if (why := _why_not_graded(row)) is None:
                graded.append((row, _rollout(row)))
            else:
                skipped[why] += 1
        reward([], [], rollouts=[rollout for _, rollout in graded], solution=[row["solution"] for row, _ in graded])
        checked += len(graded)
        differences += [
            VerdictDifference(
                *_place(file, row),
                solution=row["solution"],
                correct_before=row["correct"],
                correct_after=rollout.verdict.correct,
                extracted_before=row["extracted"],
                extracted_after=rollout.verdict.extracted,
                reason_before=row["reason"],
                reason_after=rollout.verdict.reason,
            )
            for row, rollout in graded
            if rollout.verdict.correct != row["correct"]
        ]
    return Regraded(grade_text, checked, dict(skipped), differences)


def reexecute(run_folder: Path, *, interpreter: Interpreter, max_observation_chars: int) -> Reexecuted:
    """Run the code of every executed call of a run again and list those whose status or observation changed.

    Each different program runs once, and a second time if a call of it changed. `max_observation_chars` is the run's.
    Raises `UserError` without rollouts, and what `read_rollouts` raises.
    """
    skipped = Counter[str]()
    calls: list[_Call] = []
    for file, rows in _files(run_folder, ["calls"], "reading"):
        for row in rows:
            if row["calls"] is None:
                skipped[_NOT_FULL] += 1
                continue
            for number, call in enumerate(row["calls"]):
                if call["status"] in ("malformed", "interpreter_failed"):
                    skipped[f"calls that ended {call['status']}"] += 1
                else:
                    outcome = call["status"], call["observation"]
                    calls.append(_Call(_place(file, row), number, call["code"], outcome))
    after = _run({call.code for call in calls}, interpreter, max_observation_chars)
    checked = [call for call in calls if after[call.code] is not None]
    changed = [call for call in checked if after[call.code] != call.outcome]
    again = _run({call.code for call in changed}, interpreter, max_observation_chars)
    differences = [
        CallDifference(
            *call.place,
            call=call.number,
            code=call.code,
            status_before=call.outcome[0],
            status_after=after[call.code][0],
            observation_before=call.outcome[1],
            observation_after=after[call.code][1],
            unstable=None if again[call.code] is None else again[call.code] != after[call.code],
        )
        for call in changed
    ]
    return Reexecuted(len(checked), len(after), len(calls) - len(checked), dict(skipped), differences)


def write_replay(result: Replayed, run_folder: Path) -> Path:
    """Write a result as JSON beside the run (regrade.json or reexecute.json) and return that path."""
    path = Path(run_folder) / result.NAME
    write_atomically(path, json.dumps(dataclasses.asdict(result), ensure_ascii=False, indent=1) + "\n")
    return path


def replay_table(result: Replayed, path: Path) -> str:
    """Return what a terminal shows of a result: its counts, and the first differences; `path` has all of them."""
    lines = [f"{result.summary()}."]
    lines += [f"Skipped: {count} {why}." for why, count in result.skipped.items()]
    if not result.differences:
        return "\n".join(lines)
    table = [("file", "group", "rollout", "before", "now")]
    for difference in result.differences[:_TABLE_ROWS]:
        before, now = (shorten(" ".join(text.split()), _CELL_CHARS) for text in difference.before_and_now())
        table.append((difference.file, str(difference.group_id), str(difference.generation_index), before, now))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    if (more := len(result.differences) - _TABLE_ROWS) > 0:
        lines.append(f"... and {more} more in {path}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Call:
    """An executed call as it was recorded; `outcome` is its status and observation."""

    place: tuple[str, int, int, int, str]
    number: int
    code: str
    outcome: tuple[str, str]


def _files(run_folder: Path, columns: Sequence[str], doing: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each file of rollouts: its name, and its rows with their place and `columns`."""
    paths = sorted((Path(run_folder) / ROLLOUTS_NAME).glob("*.parquet"))
    if not paths:
        raise UserError(f"{str(run_folder)!r} has no {ROLLOUTS_NAME}/*.parquet: give the output_dir of a run.")
    for path in tqdm(paths, desc=doing, leave=False, disable=None):  # None: quiet without a terminal
        yield path.name, read_rollouts(path).select([*_PLACE, "full", *columns]).to_pylist()


def _place(file: str, row: Mapping[str, Any]) -> tuple[str, int, int, int, str]:
    return (file, *(row[name] for name in _PLACE))


def _why_not_graded(row: Mapping[str, Any]) -> str | None:
    if not row["full"]:
        return _NOT_FULL
    if row["segments"] is None:
        return "rollouts from before segments were recorded"
    return "rollouts without a verdict (the interpreter failed)" if row["correct"] is None else None


def _rollout(row: Mapping[str, Any]) -> Rollout:
    """As much of a rollout as grading looks at: its texts and why it ended."""
    segments = [Segment(0, 0, inserted, text) for inserted, text in segment_texts(row)]
    return Rollout(0, [], segments=segments, stop_reason=StopReason(row["stop_reason"]))


def _run(codes: Collection[str], interpreter: Interpreter, max_chars: int) -> dict[str, tuple[str, str] | None]:
    """The status and observation of each program, None where the interpreter failed."""
    outcomes: dict[str, tuple[str, str] | None] = dict.fromkeys(codes)
    running: deque[tuple[str, Future[ExecutionResult]]] = deque()
    errors: list[InterpreterError] = []

    def take() -> None:
        code, future = running.popleft()
        try:
            result = future.result()
        except InterpreterError as error:
            errors.append(error)
        else:
            outcomes[code] = (str(result.status), format_observation(result, max_chars))

    for code in tqdm(sorted(codes), desc="executing", leave=False, disable=None):
        if len(running) == WINDOW:
            take()
        running.append((code, interpreter.submit(code)))
    while running:
        take()
    if errors:
        logger.warning("The interpreter failed on %d of %d programs, first: %s", len(errors), len(codes), errors[0])
    return outcomes
