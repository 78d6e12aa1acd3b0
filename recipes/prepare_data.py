"""Make a training set: drop what cannot be trained on, duplicates and benchmark problems; select what is worth it.

    python recipes/prepare_data.py --sources numinamath-1.5 math deepscaler --output_dir data/torl
    python recipes/prepare_data.py --sources data/torl/train.parquet --output_dir data/selected \\
        --select limr --rollouts runs/probe

A source is `[name=]place[:subset][@split]` with a file, a folder or a Hub id as place, or a short name (--help). The
output folder gets train.parquet, its card README.md, report.json, and work/ with one parquet file a step: run again,
finished steps are not repeated.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torl_data.card import draw_scores, write_card
from torl_data.curation import Benchmarks
from torl_data.filters import SELECTIONS, STEPS, filters, reading, selection
from torl_data.sources import (
    SOURCES,
    benchmark_place,
    open_source,
    parse_benchmarks,
    parse_source,
    to_row,
)
from torl_data.steps import Step, StepReport, Workers, run_step
from torl_eval.benchmarks import ANSWER_COLUMNS, PAPER_BENCHMARKS, PROBLEM_COLUMNS, problem_of
from torl_grading import Grader
from torl_trl.command_line import CommandParser, run_main
from torl_trl.data import DataError, Row
from torl_trl.errors import UserError

OUTPUT_COLUMNS = ("problem", "answer", "source", "origin", "problem_id")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Raises `UserError`."""
    parser = CommandParser(description=__doc__)
    add = parser.add_argument
    add("--sources", nargs="+", required=True, metavar="SOURCE", help=f"short names: {', '.join(SOURCES)}")
    add("--output_dir", type=Path, required=True)
    add("--benchmarks", nargs="+", default=[], metavar="NAME=PLACE")
    add("--skip", nargs="+", default=[], choices=STEPS, metavar="STEP", help=f"any of {', '.join(STEPS)}")
    add("--problem_column", help=f"default: {' or '.join(PROBLEM_COLUMNS)}, or the user message of a prompt column")
    add("--answer_column", help=f"default: one of {', '.join(ANSWER_COLUMNS)}, or the box in the solution column")
    add("--tokenizer", default="Qwen/Qwen2.5-Math-1.5B", help="whose tokens --max_prompt_length counts")
    add("--prompt_template", help="a file or a text with {question}; default: ToRL's")
    add("--max_prompt_length", type=int, default=400, help="in tokens, template included (released code: 400)")
    add("--near_duplicate_threshold", type=float, default=0.6, help="Jaccard similarity of runs of three tokens")
    add("--contamination_threshold", type=float, default=0.85, help="share of a benchmark problem's runs of tokens")
    add("--num_proc", type=int, default=os.cpu_count() or 1, help="processes")
    add("--select", nargs="+", default=[], choices=SELECTIONS, metavar="HOW", help=" or ".join(SELECTIONS))
    add("--rollouts", nargs="+", type=Path, default=[], help="folders of runs, or tables (problem_id, epoch, correct)")
    add("--lim_threshold", type=float, help="keep scores of at least this (default: 0.6, as LIMR)")
    add("--lim_count", type=int, help="keep that many of the best scores instead")
    add("--lim_epochs", type=int, help="use the first epochs only (default: all whole ones)")
    add("--min_pass_rate", type=float, default=0.0, help="keep pass rates above this")
    add("--max_pass_rate", type=float, default=1.0, help="and below this")
    parser.epilog = "The benchmarks are " + ", ".join(map(benchmark_place, PAPER_BENCHMARKS))
    parser.epilog += "; --benchmarks adds others, and says where one of these is when it has its name."
    args = parser.parse_args(arguments)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    for name in ("near_duplicate_threshold", "contamination_threshold"):
        if not 0 < getattr(args, name) <= 1:
            raise UserError(f"--{name} is {getattr(args, name)}: give a share over 0, at most 1.")
    for name in ("num_proc", "max_prompt_length", "lim_count", "lim_epochs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}: give at least 1.")
    if bool(args.select) != bool(args.rollouts):
        raise UserError("--select and --rollouts belong together: say how to select, and from which runs' rollouts.")
    if args.lim_threshold is not None and args.lim_count is not None:
        raise UserError("--lim_threshold and --lim_count are both given: give one.")
    names = [parse_source(text).name for text in args.sources]
    if len(set(names)) < len(names):
        raise UserError(f"Two sources are called {Counter(names).most_common(1)[0][0]!r}: name one as NAME=PLACE.")


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    sources = [parse_source(text) for text in args.sources]
    named = parse_benchmarks(args.benchmarks) if "contamination" not in args.skip else []
    benchmarks, benchmarks_checksum = Benchmarks(args.contamination_threshold), []
    for benchmark in named:
        checksum, rows = open_source(benchmark, {"id", "unique_id"})
        benchmarks_checksum.append((benchmark.name, checksum))
        found = 0
        for number, row in enumerate(rows):
            if problem := problem_of(row, None):
                benchmarks.add(benchmark.name, str(row.get("id") or row.get("unique_id") or number), problem)
                found += 1
        if not found:
            raise DataError(
                f"Benchmark {benchmark.title()!r} has no problems that can be read, so that nothing would be free of "
                f"it: give it a column {' or '.join(PROBLEM_COLUMNS)}."
            )

    with Workers(args.num_proc, benchmarks) as workers, Grader(num_workers=args.num_proc) as grader:
        opened = [(source, *open_source(source, {args.problem_column, args.answer_column})) for source in sources]

        def read() -> Iterator[Row]:
            for source, _, rows in opened:
                for number, row in enumerate(rows):
                    if number == 0 and not {args.problem_column, *PROBLEM_COLUMNS, "prompt"} & row.keys():
                        raise DataError(
                            f"Source {source.title()!r} has no problem column, of its columns these can be used: "
                            f"{', '.join(row) or 'none'}; set --problem_column."
                        )
                    yield to_row(row, source, args.problem_column, args.answer_column)

        reports: list[StepReport] = []

        def run(step: Step, rows: Path | Iterator[Row], key: str) -> Path:
            path, report = run_step(step, rows, key, args.output_dir / "work", workers)
            reports.append(report)
            _print(report)
            return path

        steps = filters(args, benchmarks_checksum, grader)
        path = run(reading(args), read(), json.dumps([[source.name, checksum] for source, checksum, _ in opened]))
        for step in steps:
            path = run(step, path, reports[-1].key)
        figures = []
        for how in args.select:
            step, scores, kept = selection(how, args, path)
            path = run(step, path, reports[-1].key)
            name, title = ("lim_score", "LIM score") if how == "limr" else ("pass_rate", "Pass rate")
            draw_scores(args.output_dir / f"{name}.png", title, scores, kept)
            figures.append(name)

    if not reports[-1].kept:
        reasons = "; ".join(f"{report.title}: {report.rows - report.kept}" for report in reports if report.dropped)
        raise UserError(f"No problem is left ({reasons}): check the columns and the options, or --skip a step.")
    kept_of = _write(path, args.output_dir / "train.parquet", (*OUTPUT_COLUMNS, *figures))
    shown = ("skip", "max_prompt_length", "near_duplicate_threshold", "contamination_threshold", "select")
    options = {name: getattr(args, name) for name in shown} | (
        {} if "length" in args.skip else {"tokenizer": Path(args.tokenizer).name}
    )
    if args.select:
        options |= {name: value for name, value in vars(args).items() if name.startswith(("lim_", "min_", "max_pass"))}
    card = write_card(
        args.output_dir,
        sources=sources,
        benchmarks=named,
        options=options,
        reports=reports,
        kept_of=kept_of,
        figures=figures,
    )
    print(f"\n{sum(kept_of.values()):,} problems in {args.output_dir / 'train.parquet'}; the card is {card}")


def _print(report: StepReport) -> None:
    time = "done before" if report.reused else f"{report.seconds:.1f} s"
    print(f"{report.title:<42} {report.rows:>9,} in {report.rows - report.kept:>9,} dropped   {time}", flush=True)
    for note in report.notes if report.name in SELECTIONS else ():
        print(f"  {note['note']}", flush=True)


def _write(source: Path, target: Path, columns: tuple[str, ...]) -> dict[str, int]:
    """Write the columns of the training set and return the number of rows of each source."""
    counts: Counter[str] = Counter()
    file = pq.ParquetFile(source)
    schema = pa.schema([file.schema_arrow.field(name) for name in columns])
    aside = target.with_name(f".{target.name}.tmp")
    with pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for batch in file.iter_batches(columns=list(columns)):
            counts.update(batch.column("origin").to_pylist())
            writer.write_batch(batch.select(list(columns)))
    os.replace(aside, target)
    return dict(counts)


if __name__ == "__main__":
    run_main(main)
