"""What the tiny recipe learns: tool-call limits C = 0, 1, 2 over several seeds, with the same budget of steps.

    python benchmarks/tiny.py [--seeds 1 2 3] [--calls 0 1 2] [--jobs 2]

Trains `recipes/tiny.yaml` for every seed and limit, prints a table, and writes benchmarks/results/tiny.json and the
figure assets/tiny.png. Runs stay in runs/benchmark/: a finished one is not trained again, all finished ones are
reported. One thread per run.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from comparison import draw_comparison
from machine import machine_facts
from training_runs import is_finished, train_all

from torl_trl.records import read_rollouts
from torl_trl.run_folder import read_metrics

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "benchmark"
RESULTS = ROOT / "benchmarks" / "results" / "tiny.json"
FIGURE = ROOT / "assets" / "tiny.png"
MEASURED = (
    "accuracy",
    "tools/code_ratio",
    "tools/pass_ratio",
    "tools/executed_code_ratio",
    "tools/accuracy_with_code",
)


def finished_runs() -> dict[tuple[int, int], Path]:
    """Folders of finished runs, by tool-call limit and seed."""
    names = {folder: re.fullmatch(r"tiny_c(\d+)_seed(\d+)", folder.name) for folder in sorted(RUNS.iterdir())}
    return {
        (int(name[1]), int(name[2])): folder
        for folder, name in names.items()
        if name and folder.is_dir() and is_finished(folder)
    }


def measure(folder: Path) -> dict[str, float]:
    """First and last evaluation of a run, and the seconds of its training."""
    lines = read_metrics(folder)
    evaluations = [line for line in lines if line["split"] == "eval"]
    first, last = evaluations[0], evaluations[-1]
    values = {f"{name}/first": first[name] for name in MEASURED if first.get(name) is not None}
    values |= {f"{name}/last": last[name] for name in MEASURED if last.get(name) is not None}
    (summary,) = [line for line in lines if line["split"] == "summary"]
    steps = [line["step_time"] for line in lines if line["split"] == "train"]
    return values | {"seconds": summary["train_runtime"], "step_seconds": statistics.median(steps)}


def shares_by_family(folders: list[Path]) -> dict[str, float]:
    """Share of completions with executed code, and accuracy among them, per family, first and last evaluation."""
    families = {}
    for line in (ROOT / "recipes" / "tiny" / "eval.jsonl").read_text().splitlines():
        problem = json.loads(line)
        families[problem["problem"]] = problem["family"]
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for folder in folders:
        files = sorted((folder / "rollouts").glob("eval_step_*.parquet"))
        for when, file in (("first", files[0]), ("last", files[-1])):
            for row in read_rollouts(file).to_pylist():
                family = next(name for problem, name in families.items() if problem in row["prompt"])
                executed = any(call["seconds"] is not None for call in row["calls"])
                total = sums[f"{family}/{when}"]
                total[0] += 1
                total[1] += executed
                total[2] += executed and row["correct"]
    shares = {}
    for name, (completions, executed, right) in sorted(sums.items()):
        shares[f"family/{name}/executed"] = executed / completions
        shares[f"family/{name}/right_with_code"] = right / executed if executed else float("nan")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--calls", type=int, nargs="+", default=[2, 1, 0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    pairs = [(calls, seed) for calls in options.calls for seed in options.seeds]
    runs = {RUNS / f"tiny_c{calls}_seed{seed}": {"max_tool_calls": calls, "seed": seed} for calls, seed in pairs}
    train_all(runs, options.jobs)
    folders = finished_runs()

    results: dict[str, float | str] = {}
    for (calls, seed), folder in sorted(folders.items()):
        results |= {f"c{calls}/seed{seed}/{name}": value for name, value in measure(folder).items()}
    most_calls = max(calls for calls, _ in folders)
    results |= shares_by_family([folder for (calls, _), folder in folders.items() if calls == most_calls])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(machine_facts() | results, indent=1) + "\n")
    FIGURE.parent.mkdir(exist_ok=True)
    runs: dict[str, list[Path]] = defaultdict(list)
    for (calls, _), folder in sorted(folders.items()):
        runs[f"C = {calls}"].append(folder)
    draw_comparison(runs, FIGURE)

    sys.stdout.write(f"{'run':16}" + "".join(f"{name.removeprefix('tools/'):>22}" for name in MEASURED) + "\n")
    for calls, seed in sorted(folders):
        cells = []
        for name in MEASURED:
            first, last = (results.get(f"c{calls}/seed{seed}/{name}/{when}") for when in ("first", "last"))
            cells.append(f"{first:.2f} -> {last:.2f}" if None not in (first, last) else "-")
        sys.stdout.write(f"C = {calls}, seed {seed:<3}" + "".join(f"{cell:>22}" for cell in cells) + "\n")
    sys.stdout.write(f"\nwritten: {RESULTS.relative_to(ROOT)}, {FIGURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
