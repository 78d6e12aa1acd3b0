"""Filters, refills and a second update, each alone and all together: what they do to the tiny task and to harder ones.

    python benchmarks/stability.py [--variants 'tiny/*' hard/plus] [--seeds 1 2] [--steps 20] [--folder FOLDER]

Trains recipes/tiny.yaml for every variant (stability_variants.py) and seed, prints a table, writes
benchmarks/results/stability.json and the figure assets/stability.png. Runs stay in `--folder`: a finished one is not
trained again, and all finished ones are reported. `--list` shows the variants.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from machine import machine_facts
from stability_figure import draw_stability
from stability_measures import THRESHOLDS, measure
from stability_variants import VARIANTS, write_problems
from training_runs import is_finished, train_all

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "stability.json"
FIGURE = ROOT / "assets" / "stability.png"

Measured = Mapping[int, Mapping[str, float]]
"""Measures of a variant's runs, by seed."""

COLUMNS = {
    "final_accuracy": ("final", ".3f"),
    **{f"steps_to_{threshold}": (f"steps to {threshold}", ".0f") for threshold in THRESHOLDS},
    **{f"tokens_to_{threshold}": (f"tokens to {threshold}", ",.0f") for threshold in THRESHOLDS},
    "wasted": ("wasted", ".2f"),
    "dead_groups": ("dead groups", ".2f"),
    "full_steps": ("full steps", ".2f"),
    "extra_generation": ("extra", ".2f"),
    "largest_drop": ("largest drop", ".3f"),
}
"""Measures of the table: title and format."""


def finished_runs(folder: Path) -> dict[str, dict[int, Path]]:
    """Folders of finished runs, by variant and seed, in the order of `VARIANTS`."""
    runs: dict[str, dict[int, Path]] = {name: {} for name in VARIANTS}
    for path in sorted(folder.glob("*/*_seed*")):
        parts = re.fullmatch(r"(.+)_seed(\d+)", path.name)
        variant = f"{path.parent.name}/{parts[1]}" if parts else ""
        if variant in runs and path.is_dir() and is_finished(path):
            runs[variant][int(parts[2])] = path
    return {name: dict(sorted(seeds.items())) for name, seeds in runs.items() if seeds}


def cell(runs: Measured, name: str, form: str) -> str:
    """Mean over seeds; what some seeds never reached has their number instead of a mean that would leave them out."""
    values = [run[name] for run in runs.values() if name in run]
    if len(values) < len(runs):
        return f"in {len(values)} of {len(runs)}"
    return format(statistics.mean(values), form)


def table(measured: Mapping[str, Measured]) -> str:
    """Markdown: a row per variant with the means over its seeds, and under it a row per seed."""
    lines = [
        "| variant | seeds | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for variant, runs in measured.items():
        rows = {f"**{variant}**": runs}
        if len(runs) > 1:
            rows |= {f"seed {seed}": {seed: run} for seed, run in runs.items()}
        for title, part in rows.items():
            cells = [
                cell(part, name, form) if any(name in run for run in part.values()) else "-"
                for name, (_, form) in COLUMNS.items()
            ]
            lines.append(f"| {title} | {' '.join(map(str, part))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def flat(measured: Mapping[str, Measured]) -> dict[str, float]:
    return {
        f"{variant}/seed{seed}/{name}": value
        for variant, runs in measured.items()
        for seed, values in runs.items()
        for name, value in values.items()
    }


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names of the variants that match one of the patterns. Raises `ValueError` where a pattern has none."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in VARIANTS):
            raise ValueError(f"--variants {pattern!r} matches none of {', '.join(VARIANTS)}.")
    return [name for name in VARIANTS if any(fnmatch(name, pattern) for pattern in patterns)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["*"], help="names, or patterns such as 'tiny/*'")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of each variant")
    parser.add_argument("--steps", type=int, help="default: those of each variant")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "stability")
    parser.add_argument("--list", action="store_true", help="show the variants and stop")
    options = parser.parse_args()
    if options.list:
        for name, variant in VARIANTS.items():
            sys.stdout.write(f"{name:18} {variant.steps:4} steps, seeds {variant.seeds}: {variant.switches}\n")
        return
    try:
        names = chosen(options.variants)
    except ValueError as error:
        parser.error(str(error))
    data = write_problems(options.folder / "problems")
    runs = {
        options.folder / f"{name}_seed{seed}": VARIANTS[name].options(data, options.steps) | {"seed": seed}
        for name in names
        for seed in options.seeds or VARIANTS[name].seeds
    }
    train_all(runs, options.jobs)

    finished = finished_runs(options.folder)
    measured = {name: {seed: measure(path) for seed, path in seeds.items()} for name, seeds in finished.items()}
    RESULTS.write_text(json.dumps(machine_facts() | flat(measured), indent=1) + "\n", encoding="utf-8")
    draw_stability(finished, FIGURE)
    sys.stdout.write(f"{table(measured)}\n\nwritten: {RESULTS.relative_to(ROOT)}, {FIGURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
