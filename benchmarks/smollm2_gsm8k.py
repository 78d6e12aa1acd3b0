"""What a real model of 135 million parameters learns on GSM8K on a CPU core, with a tool and without.

    python benchmarks/smollm2_gsm8k.py [--train train.jsonl --test test.jsonl --problem_column problem]

Trains `recipes/smollm2_gsm8k.yaml` twice side by side, one thread each: as it stands, and with no tool call and the
same worked examples reasoned in words. Prints a table, and writes benchmarks/results/smollm2_gsm8k.json and the figure
assets/smollm2_gsm8k.png. A finished run in `--runs` is not trained again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from comparison import draw_band
from machine import machine_facts
from matplotlib.figure import Figure
from training_runs import train_all

from torl_report.curves import Curve, finish, metric_points, save, style
from torl_trl.run_folder import read_metrics

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "benchmark" / "smollm2_gsm8k"
RECIPE = "smollm2_gsm8k.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_gsm8k.json"
FIGURE = ROOT / "assets" / "smollm2_gsm8k.png"

NO_TOOL = {
    "max_tool_calls": "0",
    "prompt_template": str(ROOT / "recipes" / "smollm2" / "gsm8k_few_shot_no_tool.txt"),
    "max_prompt_length": "181",  # its examples have 4 tokens more, so that the same problems fit
}
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {"tool": ("C = 1", {}), "no_tool": ("C = 0", NO_TOOL)}
"""Name of a run's folder to its label and what it changes in the recipe."""

SHARES = ("accuracy", "tools/code_ratio", "tools/pass_ratio", "sentinel/constant_program")
TIMES = ("step_time", "time/generating", "time/training")
PANELS = (
    (Curve("train", "reward", "Reward, training", ""), (-1.0, 1.0)),
    (Curve("train", "tools/code_ratio", "Completions with code, training", ""), (0.0, 1.0)),
    (Curve("train", "tools/pass_ratio", "Executed code that ran, training", ""), (0.0, 1.0)),
    (Curve("train", "sentinel/constant_program", "Programs that compute nothing", ""), (0.0, 1.0)),
    (Curve("eval", "accuracy", "Accuracy, held out", ""), (0.0, 1.0)),
)
"""What the figure shows, and the range of each; one whose values use a small part of it shows that part."""


def measure(folder: Path) -> dict[str, float]:
    """A run's numbers: held out at each evaluation, training rollouts at both ends, and times.

    `train/NAME/first` and `/last` are means over the first and the last third of the steps, of all that was sampled.
    """
    lines = read_metrics(folder)
    steps = [line for line in lines if line["split"] == "train"]
    evaluations = [line for line in lines if line["split"] == "eval"]
    (summary,) = [line for line in lines if line["split"] == "summary"]
    values: dict[str, float] = {"steps": steps[-1]["step"], "seconds": summary["train_runtime"]}
    for line in evaluations:
        shares = {name: line.get(name) for name in (*SHARES, "reward")}
        values |= {f"eval/step{line['step']}/{name}": value for name, value in shares.items() if value is not None}
    third = max(1, len(steps) // 3)
    for name in (*SHARES, "reward"):
        for when, part in (("first", steps[:third]), ("last", steps[-third:])):
            if known := [line[name] for line in part if line.get(name) is not None]:
                values[f"train/{name}/{when}"] = statistics.fmean(known)
    return values | {f"median/{name}": statistics.median(line[name] for line in steps) for name in TIMES}


def table(results: dict[str, dict[str, float]]) -> str:
    """First and last evaluation of each run, the reward in training, and its time."""
    titles = ("run", "accuracy", "code ratio", "pass ratio", "constant program", "reward (training)", "minutes")
    rows = [titles]
    for name, values in results.items():
        steps = sorted(int(key.split("/")[1][4:]) for key in values if key.startswith("eval/") and "accuracy" in key)
        ends = [[values.get(f"eval/step{step}/{share}") for step in (steps[0], steps[-1])] for share in SHARES]
        ends.append([values[f"train/reward/{when}"] for when in ("first", "last")])
        cells = ["-" if None in pair else f"{pair[0]:.2f} -> {pair[1]:.2f}" for pair in ends]
        rows.append((SETTINGS[name][0], *cells, f"{values['seconds'] / 60:.0f}"))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(titles))]
    return "\n".join("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def draw(runs: Path) -> None:
    """Draw the panels, both runs over each other, as `FIGURE`."""
    figure = Figure(figsize=(3.8 * len(PANELS), 3.9), dpi=130, layout="constrained")
    lines = {label: read_metrics(runs / name) for name, (label, _) in SETTINGS.items()}
    for axes, (curve, (low, high)) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        points = {label: metric_points(run, curve.split, curve.metric) for label, run in lines.items()}
        for index, (label, run) in enumerate(points.items()):
            draw_band(axes, label, [run], index, curve.split == "eval")
        style(axes, curve.label, "", is_share=False)
        highest = max((value for run in points.values() for _, value in run), default=high)
        axes.set_ylim(low - 0.02 * (high - low), min(high, low + 1.6 * max(highest - low, 0.05)) + 0.02 * (high - low))
        finish(axes)
    save(figure, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help="training problems, a file; default: the recipe's, from the Hub")
    parser.add_argument("--test", help="held-out problems, a file; default: the recipe's, from the Hub")
    parser.add_argument("--problem_column", help="in those files (their answers are in the column answer)")
    parser.add_argument(
        "--bf16", default="true", help="compute updates in bfloat16; false on a CPU without AVX-512 BF16"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the two runs")
    options = parser.parse_args()
    given = {
        "dataset_name": options.train,
        "eval_dataset_name": options.test,
        "problem_column": options.problem_column,
    }
    given["bf16"] = options.bf16
    given = {key: value for key, value in given.items() if value is not None}
    train_all({options.runs / name: changes | given for name, (_, changes) in SETTINGS.items()}, 2, RECIPE)

    results = {name: measure(options.runs / name) for name in SETTINGS}
    flat = {f"{name}/{key}": value for name, values in results.items() for key, value in values.items()}
    RESULTS.write_text(json.dumps(machine_facts() | flat, indent=1) + "\n")
    draw(options.runs)
    sys.stdout.write(f"{table(results)}\n\nwritten: {RESULTS.relative_to(ROOT)}, {FIGURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
