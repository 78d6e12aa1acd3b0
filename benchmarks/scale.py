"""Steps on 8 to 1,024 GPUs with shared interpreters, SIMULATED: step time and the interpreter cores that it takes.

    python benchmarks/scale.py [--gpus 8 64 1024]

Each rank runs the real rollout loop against a virtual engine and interpreter (rollout_simulation.py, constants in
rollout_costs.py); the update is arithmetic (`Update`). A step is the slowest rank's generation, then the update.
Interpreter slots are a total that the ranks share out evenly, as our interpreters do, and a slot is a core. Prints the
table of SCALE.md, which has the assumptions, and writes benchmarks/results/scale.json.
"""

import argparse
import bisect
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from machine import machine_facts
from rollout_costs import FAST, QWEN_1_5B, QWEN_7B, SLOW, EngineCosts, InterpreterCosts, ModelShape, Workload
from rollout_simulation import EngineOptions, simulate
from rollout_workload import Script, workload

RESULTS = Path(__file__).parent / "results" / "scale.json"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODELS = {"1.5B": QWEN_1_5B, "7B": QWEN_7B}
TOOLS = {"fast": FAST, "slow": SLOW}
BATCHES = ("constant", "scaled")
"""The paper's 2,048 rollouts a step over all GPUs, or the paper's 256 on each of them."""
PAPER_ROLLOUTS, PAPER_GPUS = 2048, 8
SIMULATED_RANKS = 16
"""Of a scaled batch, whose ranks are all alike: enough, since six of seven ranks have a rollout at the token limit."""
NEAR = 1.05
"""Cores are enough when the step takes at most so many times as long as with a core for each program."""

Results = dict[str, float]


@dataclass(frozen=True)
class Update:
    """Seconds of what follows generation, on H100 SXM with eight to a node."""

    operations: float = 989e12 * 0.3
    """Per second and GPU. 989 TFLOP/s dense bf16 is NVIDIA's data sheet; 0.3 of it is assumed: transformers' layers in
    eager mode, below the up to 0.47 that Megatron-LM reports on H100."""
    operations_per_token: float = 8.0
    """Per parameter: 2 forward, 4 backward, 2 forward again for gradient checkpointing."""
    micro_batch: int = 16
    """Rows, padded to the longest of them: `per_device_train_batch_size` of our recipes."""
    bus: float = 350e9
    """Bytes per second of collectives: 400 GB/s of InfiniBand a node (NVIDIA DGX H100) less an assumed eighth."""
    fixed: float = 5.0
    """Push of weights to the engine, optimizer, records: assumed, and the same at every size."""

    def seconds(self, scripts: list[Script], model: ModelShape, gpus: int) -> float:
        """A rank's update. Float32 gradients are summed over the ranks: twice their bytes pass through each."""
        lengths = [
            len(script.prompt_ids) + script.tokens + 16 + script.observation_chars[0] // 4 for script in scripts
        ]
        Random(0).shuffle(lengths)
        batches = [lengths[start : start + self.micro_batch] for start in range(0, len(lengths), self.micro_batch)]
        tokens = sum(len(batch) * max(batch) for batch in batches)
        compute = tokens * self.operations_per_token * model.parameters / self.operations
        sums = len(batches) if model is QWEN_7B else 1  # ZeRO-2 after each micro-batch, DDP once
        summed = sums * 2 * (gpus - 1) / gpus * 4 * model.parameters / self.bus
        return compute + summed + self.fixed


# The paper's machine, to hold the arithmetic against its 118 s a step without calls: an A800 has the A100 SXM's 312
# TFLOP/s dense bf16 and 2.04 TB/s (NVIDIA's data sheets).
A800_COSTS = EngineCosts(model=QWEN_1_5B).scaled("bandwidth", 2.04 / 3.35).scaled("compute", 312 / 989)
A800_UPDATE = Update(operations=312e12 * 0.3)


@functools.lru_cache(maxsize=8)
def rank_scripts(batch: str, gpus: int, tool: InterpreterCosts, draw: int) -> list[list[Script]]:
    """What each simulated rank writes."""
    paper_share = PAPER_ROLLOUTS // PAPER_GPUS
    ranks, share = (gpus, PAPER_ROLLOUTS // gpus) if batch == "constant" else (min(gpus, SIMULATED_RANKS), paper_share)
    return [workload(Workload(share, seed=1024 * draw + rank), 1, tool) for rank in range(ranks)]


@functools.cache
def generation_seconds(
    batch: str, gpus: int, tool: InterpreterCosts, draw: int, costs: EngineCosts, slots: int
) -> float:
    """The slowest rank's, with `slots` a rank."""
    ranks = rank_scripts(batch, gpus, tool, draw)
    return max(simulate(scripts, EngineOptions(), costs, slots).seconds for scripts in ranks)


def describe(batch: str, gpus: int, tool: InterpreterCosts, draw: int, costs: EngineCosts, update: Update) -> Results:
    """A step with as many cores as it needs, by `NEAR`."""
    alike = gpus if batch == "constant" else min(gpus, SIMULATED_RANKS)  # what there is to simulate
    ranks = rank_scripts(batch, alike, tool, draw)
    updating = max(update.seconds(scripts, costs.model, gpus) for scripts in ranks)
    share = len(ranks[0])

    def step(slots: int) -> float:
        return generation_seconds(batch, alike, tool, draw, costs, slots) + updating

    enough = NEAR * step(share)
    slots = bisect.bisect_left(range(1, share), True, key=lambda slots: step(slots) <= enough) + 1
    seconds = step(slots)
    programs = sum(script.latencies[0] for scripts in ranks for script in scripts) * gpus / len(ranks)
    return {
        "seconds": seconds,
        "generation_seconds": seconds - updating,
        "update_seconds": updating,
        "rollouts_per_second": share * gpus / seconds,
        "cores": slots * gpus,
        "cores_busy": programs / (seconds - updating),
    }


def table(results: Results, gpus: Sequence[int]) -> str:
    """The rows of SCALE.md; of a scaled batch, whose figures grow in step, the first and the last."""
    columns = ("model", "batch", "GPUs", "rollouts", "generation s", "update s", "step s", "rollouts/s")
    columns += tuple(f"cores, {tool}" for tool in TOOLS)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model, batch, count in itertools.product(MODELS, BATCHES, gpus):
        if batch == "scaled" and count not in (gpus[0], gpus[-1]):
            continue
        fast, slow = (f"{model}/{batch}/{count}/{tool}" for tool in TOOLS)
        numbers = [results[f"{fast}/{name}"] for name in ("generation_seconds", "update_seconds", "seconds")]
        cells = [model, batch, f"{count:,}", f"{PAPER_ROLLOUTS * (count // PAPER_GPUS if batch == 'scaled' else 1):,}"]
        cells += [f"{number:.0f}" for number in (*numbers, results[f"{fast}/rollouts_per_second"])]
        cells += [f"{results[f'{key}/cores']:,.0f} ({results[f'{key}/cores_busy']:,.0f})" for key in (fast, slow)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(gpus: Sequence[int], draws: int) -> Results:
    """Medians over draws of the workload."""
    results: Results = {}
    for (name, model), batch, count, (tool_name, tool) in itertools.product(
        MODELS.items(), BATCHES, gpus, TOOLS.items()
    ):
        costs = EngineCosts(model=model)
        runs = [describe(batch, count, tool, draw, costs, Update()) for draw in range(draws)]
        key = f"{name}/{batch}/{count}/{tool_name}"
        results |= {f"{key}/{what}": statistics.median(run[what] for run in runs) for what in runs[0]}
    paper = describe("constant", PAPER_GPUS, FAST, 0, A800_COSTS, A800_UPDATE)
    return results | {f"paper/{what}": paper[what] for what in ("seconds", "generation_seconds", "update_seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS, help="powers of two from 8 to 2,048")
    parser.add_argument("--draws", type=int, default=3, help="workloads drawn; figures are medians over them")
    options = parser.parse_args()
    results = measure(options.gpus, options.draws)
    sys.stdout.write(table(results, options.gpus))
    sys.stdout.write(f"1.5B on the paper's 8 A800: {results['paper/seconds']:.0f} s a step\n")
    rounded = {name: float(f"{value:.5g}") for name, value in results.items()}
    RESULTS.write_text(json.dumps(machine_facts() | {"simulated": "yes"} | rounded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
