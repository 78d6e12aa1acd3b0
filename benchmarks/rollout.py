"""How fast rollouts with tool calls can be, and what our loop costs.

    python benchmarks/rollout.py simulated [--seeds 5]     virtual time, two minutes on a laptop
    python benchmarks/rollout.py loop [--repeats 3]        CPU time of the loop itself per engine event
    python benchmarks/rollout.py real [--repeats 5]        rounds against continuous with vLLM on this CPU

`simulated` runs the real loop against an engine and an interpreter on a virtual clock (rollout_simulation.py;
constants and sources in rollout_costs.py), for ToRL's whole-batch rounds, TRL's serial tool loop and ours. The bound
is the larger of generation alone (the same model tokens without a call) and of what the interpreter's slots need for
all programs. Figures are medians over seeds of the workload. Each command prints tables and writes
benchmarks/results/rollout_COMMAND.json.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from machine import machine_facts

RESULTS = Path(__file__).parent / "results"
COMMANDS = {"simulated": "rollout_simulated", "loop": "rollout_loop", "real": "rollout_real"}
"""The module of each command: it has `add_arguments(parser)` and `measure(options)`, which prints and returns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {name: importlib.import_module(module) for name, module in COMMANDS.items()}
    for name, module in modules.items():
        description = module.__doc__
        module.add_arguments(commands.add_parser(name, description=description, help=description.splitlines()[0]))
    options = parser.parse_args()
    results = modules[options.command].measure(options)
    path = RESULTS / f"rollout_{options.command}.json"
    path.parent.mkdir(exist_ok=True)
    rounded = {name: float(f"{value:.5g}") for name, value in results.items()}
    path.write_text(json.dumps(machine_facts() | rounded, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"\nwritten: {path.relative_to(RESULTS.parents[1])}\n")


if __name__ == "__main__":
    main()
