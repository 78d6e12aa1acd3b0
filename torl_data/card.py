"""The data card: README.md beside the prepared data, the figure of its scores, and the same facts as report.json."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torl_data.sources import Source
from torl_data.steps import StepReport
from torl_report.curves import BLUE, ORANGE
from torl_trl.run_folder import write_atomically

MOST_HITS = 200
"""The card lists no more; report.json has all."""


def write_card(
    folder: Path,
    *,
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    options: Mapping[str, Any],
    reports: Sequence[StepReport],
    kept_of: Mapping[str, int],
    figures: Sequence[str],
) -> Path:
    """Write README.md and report.json into `folder`. `kept_of` counts the rows that each source has in the end."""
    facts = {
        "sources": [
            {"name": source.name, "place": source.title(), "kept": kept_of.get(source.name, 0)} for source in sources
        ],
        "benchmarks": {source.name: source.title() for source in benchmarks},
        "options": dict(options),
        "steps": [asdict(report) for report in reports],
    }
    write_atomically(folder / "report.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    total = sum(kept_of.values())
    read = next((report for report in reports if report.name == "read"), None)
    lines = [
        "---",
        "task_categories: [text-generation]",
        "tags: [math, reinforcement-learning]",
        "configs:",
        "- config_name: default",
        "  data_files: [{split: train, path: train.parquet}]",
        "---",
        "",
        f"# {folder.resolve().name}",
        "",
        f"{total:,} mathematical problems with answers that a verifier can grade, from {read.rows if read else 0:,} "
        "rows, made with recipes/prepare_data.py of torl-trl. To train on them: `dataset_name: train.parquet`.",
        "",
        "Columns: `problem`, `answer`, `source` (as the data tells it), `origin` (the source below), `problem_id` "
        "(of the problem's words and signs)"
        + "".join(f", `{name}`" for name in ("lim_score", "pass_rate") if name in figures)
        + ".",
        "",
        "The texts keep the licences of their sources, which this card does not replace. AIME and AMC problems carry "
        "no open licence: do not publish them.",
        "",
        "## Sources",
        "",
        *_table(
            ("source", "where", "kept"), [(s.name, f"`{s.title()}`", f"{kept_of.get(s.name, 0):,}") for s in sources]
        ),
        "",
        "## Steps",
        "",
        *_table(
            ("step", "rows in", "dropped", "kept", "seconds", "why"),
            [
                (
                    report.title,
                    f"{report.rows:,}",
                    f"{report.rows - report.kept:,}",
                    f"{report.kept:,}",
                    f"{report.seconds:.1f}",
                    "; ".join(f"{reason}: {count:,}" for reason, count in report.dropped.items()),
                )
                for report in reports
            ],
        ),
        "",
        "Options: " + ", ".join(f"`{name}: {value}`" for name, value in options.items()) + ".",
        "",
    ]
    lines += _contamination(reports, benchmarks)
    for name in figures:
        lines += [f"## {name}", "", f"![{name}]({name}.png)", ""]
    lines += _examples(reports)
    path = folder / "README.md"
    write_atomically(path, "\n".join(lines))
    return path


def _contamination(reports: Sequence[StepReport], benchmarks: Sequence[Source]) -> list[str]:
    report = next((report for report in reports if report.name == "contamination"), None)
    if report is None:
        return ["## Contamination", "", "Not looked for.", ""]
    looked = ", ".join(f"{source.name} (`{source.title()}`)" for source in benchmarks)
    counts = Counter(hit["benchmark"] for hit in report.notes)
    found = ", ".join(f"{count} of {name}" for name, count in counts.items()) or "none"
    hits = [
        (
            *(hit[name] for name in ("origin", "problem_id", "benchmark", "benchmark_id")),
            f"{hit['overlap']:.2f}",
            " ".join(hit["problem"].split())[:100].replace("|", "\\|"),
        )
        for hit in report.notes[:MOST_HITS]
    ]
    lines = ["## Contamination", "", f"Looked for: {looked}. Found and dropped: {found}.", ""]
    if hits:
        lines += [*_table(("source", "problem_id", "benchmark", "its id", "overlap", "problem"), hits), ""]
    if len(report.notes) > MOST_HITS:
        lines += [f"{len(report.notes) - MOST_HITS} more are in report.json.", ""]
    return lines


def _examples(reports: Sequence[StepReport]) -> list[str]:
    rows = [
        (report.title, example["reason"], " ".join(example["problem"].split())[:120].replace("|", "\\|"))
        for report in reports
        for example in report.examples[:2]
    ]
    return ["## Examples of what was dropped", "", *_table(("step", "why", "problem"), rows), ""] if rows else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def draw_scores(path: Path, title: str, scores: Mapping[str, float], kept: Collection[str]) -> None:
    """Draw a histogram of scores, those of `kept` problems in their own colour, as PNG."""
    figure = Figure(figsize=(7.2, 4.0), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    values = sorted(scores.values())
    low = values[len(values) // 100]  # a few scores far below would leave no room for the others
    parts = [
        [max(score, low) for name, score in scores.items() if (name in kept) == chosen] for chosen in (True, False)
    ]
    labels = [f"kept ({len(parts[0]):,})", f"dropped ({len(parts[1]):,})"]
    axes.hist(parts, bins=40, stacked=True, color=[BLUE, ORANGE], label=labels)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(title if low <= values[0] else f"{title} (lower ones drawn at {low:.2f})")
    axes.set_ylabel("problems")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)
