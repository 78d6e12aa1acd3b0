"""The steps of data preparation themselves: what each drops, and why."""

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
from transformers import AutoTokenizer

import torl_grading
from torl_data.curation import NearDuplicates
from torl_data.limr import AccuracyTable, accuracy_table, in_band, lim_scores, pass_rates, select
from torl_data.sources import normalise_problem
from torl_data.steps import (
    Step,
    examine_choice,
    examine_contamination,
    examine_open,
    examine_parts,
    examine_sketch,
    read_rows_of,
)
from torl_grading import Grader
from torl_trl.data import Row, check_solutions, problem_id, read_file
from torl_trl.errors import UserError
from torl_trl.prompts import load_template, render_prompt

STEPS = (
    "normalise",
    "contamination",
    "open",
    "multiple_choice",
    "parts",
    "length",
    "duplicates",
    "near_duplicates",
    "unverifiable",
)
"""In this order: benchmark problems first, so that all are listed; then what is cheap before what takes long."""
LONGEST = 20_000
"""In characters: no prompt of 400 tokens is so long, and what is could hold up the patterns of the steps."""
SELECTIONS = ("pass_rate", "limr")


def _nothing(rows: Sequence[Row]) -> list[None]:
    return [None] * len(rows)


def reading(args: argparse.Namespace) -> Step:
    """Return the step that takes the rows of the sources."""

    def decide(row: Row, _: Any) -> str | None:
        if not row["problem"] or not row["answer"]:
            return "no problem or answer"
        return f"over {LONGEST:,} characters" if len(row["problem"]) > LONGEST else None

    options = {"problem_column": args.problem_column, "answer_column": args.answer_column}
    return Step("read", "no problem or answer", _nothing, decide, options, here=True)


def _normalise(row: Row, _: Any) -> None:
    row["problem"] = normalise_problem(row["problem"])
    row["problem_id"] = problem_id(row["problem"])


def _drop_if(reason: str) -> Callable[[Row, Any], str | None]:
    return lambda row, found: reason if found else None


def filters(args: argparse.Namespace, benchmarks: list[Any], grader: Grader) -> list[Step]:
    """Return the steps that are not skipped. `benchmarks` holds names and checksums, on which decontamination depends.

    Raises `UserError` for a template or tokenizer that cannot be had.
    """
    steps = {
        "normalise": lambda: Step("normalise", "texts normalised", _nothing, _normalise, here=True),
        "open": lambda: Step("open", "proofs and open questions", examine_open, _drop_if("proof or prose")),
        "multiple_choice": lambda: Step(
            "multiple_choice", "multiple choice", examine_choice, _drop_if("the answer can be guessed")
        ),
        "parts": lambda: Step(
            "parts", "several sub-answers", examine_parts, _drop_if("several answers are asked for")
        ),
        "length": lambda: _length(args),
        "duplicates": _duplicates,
        "near_duplicates": lambda: _near_duplicates(args.near_duplicate_threshold),
        "contamination": lambda: _contamination(args.contamination_threshold, benchmarks),
        "unverifiable": lambda: _unverifiable(grader),
    }
    return [steps[name]() for name in STEPS if name not in args.skip]


def _length(args: argparse.Namespace) -> Step:
    template = load_template(args.prompt_template)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    except (OSError, ValueError) as error:
        raise UserError(
            f"Tokenizer {args.tokenizer!r} is no folder, and the Hub did not give it: give --tokenizer, or "
            "--skip length (loading the data for training drops long prompts too)."
        ) from error

    def lengths(rows: list[Row]) -> list[int]:
        prompts = [render_prompt(template, row["problem"]) for row in rows]
        return [len(token_ids) for token_ids in tokenizer(prompts)["input_ids"]]

    def decide(row: Row, length: int) -> str | None:
        return f"over {args.max_prompt_length} tokens" if length > args.max_prompt_length else None

    options = {"tokenizer": args.tokenizer, "template": template, "most": args.max_prompt_length}
    return Step("length", "prompts too long", lengths, decide, options, here=True)


def _duplicates() -> Step:
    answers: dict[int, int] = {}

    def decide(row: Row, sketch: Any) -> str | None:
        if sketch.form not in answers:
            answers[sketch.form] = sketch.answer
            return None
        same = answers[sketch.form] == sketch.answer
        return "seen before" if same else "seen before, with its answer written otherwise"

    return Step("duplicates", "exact duplicates", examine_sketch, decide)


def _near_duplicates(threshold: float) -> Step:
    known = NearDuplicates(threshold)

    def decide(row: Row, sketch: Any) -> str | None:
        found = known.find_or_add(row["problem_id"], sketch)
        if found is None:
            return None
        step.notes.append({"problem_id": row["problem_id"], "earlier_id": found[0], "similarity": found[1]})
        return "seen before in other words"

    step = Step("near_duplicates", "near duplicates", examine_sketch, decide, {"threshold": threshold})
    return step


def _contamination(threshold: float, benchmarks: list[Any]) -> Step:
    def decide(row: Row, hit: Any) -> str | None:
        if hit is None:
            return None
        facts = {"origin": row["origin"], "problem_id": row["problem_id"], "problem": row["problem"][:500]}
        place = {"benchmark": hit.benchmark, "benchmark_id": hit.benchmark_id, "overlap": round(hit.overlap, 3)}
        step.notes.append(facts | place | {"exact": hit.exact})
        return f"{hit.benchmark}, {'the same' if hit.exact else 'reworded'}"

    options = {"threshold": threshold, "benchmarks": benchmarks}
    step = Step("contamination", "problems of benchmarks", examine_contamination, decide, options)
    return step


def _unverifiable(grader: Grader) -> Step:
    def examine(rows: list[Row]) -> list[str | None]:
        reasons = check_solutions((row["answer"] for row in rows), grader)
        return [reasons[row["answer"]] for row in rows]

    files = sorted(Path(torl_grading.__file__).parent.glob("*.py"))
    options = {"grader": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()}
    return Step(
        "unverifiable", "answers the verifier cannot use", examine, lambda row, reason: reason, options, here=True
    )


# --- Selection ------------------------------------------------------------------------------------------------------


def selection(how: str, args: argparse.Namespace, data: Path) -> tuple[Step, dict[str, float], set[str]]:
    """Return the step that selects, the scores of the problems in `data`, and the ids that are kept.

    Raises `UserError` when the rollouts do not tell enough.
    """
    table = read_accuracies(args.rollouts)
    try:
        scores = lim_scores(table, args.lim_epochs) if how == "limr" else pass_rates(table)
    except ValueError as error:
        raise UserError(str(error)) from error
    # A run trained on the text before it was normalised knows the problem by another id.
    own = {row["problem_id"]: row["raw_id"] for row in read_rows_of(data)}
    scores = {name: scores[known] for name, raw in own.items() for known in (name, raw) if known in scores}
    if not scores:
        raise UserError(f"--rollouts have {len(table.problem_ids)} problems and none is in the data: name their runs.")
    threshold = 0.6 if args.lim_threshold is None else args.lim_threshold
    if how == "pass_rate":
        kept = in_band(scores, args.min_pass_rate, args.max_pass_rate)
        column, below = "pass_rate", f"not between {args.min_pass_rate:g} and {args.max_pass_rate:g}"
    elif args.lim_count is not None:
        kept, column, below = select(scores, count=args.lim_count), "lim_score", f"not among the best {args.lim_count}"
    else:
        kept, column, below = select(scores, threshold=threshold), "lim_score", f"under {threshold:g}"

    def decide(row: Row, _: Any) -> str | None:
        score = row[column] = scores.get(row["problem_id"])
        if score is None:
            return "no score: not seen in the rollouts (for LIMR in every epoch)"
        return None if row["problem_id"] in kept else below

    rates = pass_rates(table)
    never = sum(rates.get(name, rates.get(own[name], 0.0)) == 0 for name in kept)
    note = f"{len(scores):,} problems have a score, {len(kept):,} are kept, of which {never:,} were never solved"
    digest = hashlib.sha256(json.dumps([sorted(scores.items()), sorted(kept), below]).encode()).hexdigest()
    title = f"selected by {'LIM score' if how == 'limr' else 'pass rate'}"
    return Step(how, title, _nothing, decide, {"digest": digest}, here=True, notes=[{"note": note}]), scores, kept


def read_accuracies(places: list[Path]) -> AccuracyTable:
    """Read what runs logged about each problem: folders of runs (their rollouts/), or tables with the columns
    problem_id, epoch (not needed for pass rates) and correct, accuracy or reward (of which 1 is right, as in LIMR)."""
    names: list[str] = []
    epochs: list[float] = []
    correct: list[float] = []
    for place in places:
        files = sorted(place.glob("rollouts/step_*.parquet")) or sorted(place.glob("step_*.parquet"))
        for file in files or ([place] if place.is_file() else []):
            for row in _read_columns(file):
                if "problem_id" not in row or (value := _correctness(row)) is None:
                    raise UserError(
                        f"Rollouts {file.name!r} have a row without problem_id or correct, accuracy or reward: "
                        "name the folder of a run, or a table with these columns."
                    )
                names.append(str(row["problem_id"]))
                epochs.append(float(row.get("epoch") or 0))
                correct.append(value)
        if not files and not place.is_file():
            raise UserError(f"--rollouts {str(place)!r} is no table and no folder of a run with rollouts/: check it.")
    return accuracy_table(names, epochs, correct)


def _read_columns(file: Path) -> list[Row]:
    """The rows of a table; of parquet only what is needed, since rollouts have heavy columns."""
    if file.suffix != ".parquet":
        return read_file(file)
    try:
        known = [name for name in pq.read_schema(file).names if name in _TABLE_COLUMNS]
        return pq.read_table(file, columns=known, partitioning=None).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"Rollouts {file.name!r} cannot be read as parquet: remove or repair the file.") from error


_TABLE_COLUMNS = ("problem_id", "epoch", "correct", "accuracy", "reward")


def _correctness(row: Row) -> float | None:
    """1.0, 0.0 or a share; NaN for a rollout without a verdict; None if no column tells."""
    for column in ("correct", "accuracy", "reward"):
        if column in row:
            value = row[column]
            if value is None or value == "":
                return float("nan")
            if isinstance(value, str) and value.lower() in ("true", "false"):
                return float(value.lower() == "true")
            return float(float(value) == 1) if column == "reward" else float(value)
    return None
