"""Policies against the bound, in virtual time: the tables of `rollout.py simulated`."""

import argparse
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace

from rollout_costs import FAST, QWEN_1_5B, SLOW, VARIED, EngineCosts, InterpreterCosts, Workload
from rollout_simulation import EngineOptions, Outcome, critical_path_seconds, interpreter_seconds, simulate
from rollout_workload import Script, without_calls, workload

TOOLS = {"fast": FAST, "slow": SLOW}
CALLS = (1, 2, 4)
OURS = EngineOptions()
ROUNDS = EngineOptions(mode="rounds")

Results = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="workloads drawn; figures are medians over them")
    parser.add_argument("--rollouts", type=int, default=256, help="per rank")


def measure(options: argparse.Namespace) -> Results:
    shapes = [Workload(rollouts=options.rollouts, seed=seed) for seed in range(options.seeds)]
    results: Results = {"seeds": options.seeds, "rollouts": options.rollouts}
    for part in (policies, levers, constants, verl_tool, sensitivity):
        results |= part(shapes)
    return results


def medians(runs: Iterable[Results]) -> Results:
    runs = list(runs)
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def alone_seconds(scripts: list[Script], costs: EngineCosts, options: EngineOptions = OURS) -> float:
    """Generation alone: the same model tokens without a call."""
    return simulate(without_calls(scripts), options, costs, slots=1).seconds


def describe(outcome: Outcome, bound: float) -> Results:
    return {
        "seconds": outcome.seconds,
        "over_bound": outcome.seconds / bound,
        "idle_share": outcome.idle_share,
        "prefilled_tokens": outcome.prefilled_tokens,
    }


def policies(shapes: list[Workload]) -> Results:
    """Rounds, TRL's serial loop and ours; and what keeps ours from the bound."""

    def run(shape: Workload, calls: int, tool: InterpreterCosts) -> Results:
        costs, scripts = EngineCosts(), workload(shape, calls, tool)
        alone, capacity = alone_seconds(scripts, costs), interpreter_seconds(scripts, tool.slots)
        bound, path = max(alone, capacity), critical_path_seconds(scripts, costs)
        outcomes = {
            "ours": simulate(scripts, OURS, costs, tool.slots),
            "rounds": simulate(scripts, ROUNDS, costs, tool.slots),
            # TRL 1.16 runs synchronous tools one after the other between whole-batch generations. vLLM's prefix cache
            # is on there (but for sleep mode), so continuations are as cheap as ours.
            "serial": simulate(scripts, ROUNDS, costs, slots=1),
        }
        instant = simulate([replace(script, latencies=[0.0] * calls) for script in scripts], OURS, costs, slots=1)
        ours = outcomes["ours"]
        found = {
            f"{name}/{key}": v for name, outcome in outcomes.items() for key, v in describe(outcome, bound).items()
        }
        return found | {
            "alone_seconds": alone,
            "capacity_seconds": capacity,
            "critical_path_seconds": path,
            "instant/over_bound": instant.seconds / bound,
            "ours/over_instant": ours.seconds / max(instant.seconds, capacity, path),
            "ours/last_executing": ours.last_executing,
            "ours/last_queued": ours.last_queued,
            "ours/over_bound_and_path": ours.seconds / max(bound, path),
            "ours/over_instant_and_last_calls": ours.seconds
            / (instant.seconds + ours.last_executing + ours.last_queued),
            "rounds/over_ours": outcomes["rounds"].seconds / ours.seconds,
            "serial/over_ours": outcomes["serial"].seconds / ours.seconds,
        }

    table: dict[tuple[str, int], Results] = {}
    for tool_name, tool in TOOLS.items():
        for calls in CALLS:
            runs = [run(shape, calls, tool) for shape in shapes]
            worst = {"ours/over_bound_worst": max(run["ours/over_bound"] for run in runs)}
            table[tool_name, calls] = medians(runs) | worst
    sys.stdout.write(
        f"\n7B on an H100, {shapes[0].rollouts} rollouts: seconds, over the bound, engine idle; x = slower than ours;"
        " alone is C = 0\n"
        f"tool  C   alone capacity |{'ours':>12}{'(worst seed)':>19} |{'rounds':>9}{'x':>19} |{'serial':>9}{'x':>19}\n"
    )
    for (tool_name, calls), found in table.items():
        cells = []
        for name, last in (
            ("ours", "ours/over_bound_worst"),
            ("rounds", "rounds/over_ours"),
            ("serial", "serial/over_ours"),
        ):
            values = (
                found[f"{name}/seconds"],
                found[f"{name}/over_bound"],
                100 * found[f"{name}/idle_share"],
                found[last],
            )
            cells.append("{:8.1f} {:7.3f} {:4.0f}% {:7.3f}".format(*values))
        bounds = f"{found['alone_seconds']:7.1f} {found['capacity_seconds']:8.1f}"
        sys.stdout.write(f"{tool_name:5} {calls} {bounds} | {' | '.join(cells)}\n")
    sys.stdout.write(
        "\nWhat keeps ours from the bound. Instant: ours with programs that take no time; what it has over the bound\n"
        "is prefill of observations and partial blocks. Path: the longest rollout alone in engine and interpreter.\n"
        "Last: the rollout that finishes last, the seconds of its programs and of their wait for a slot.\n"
        "Ours is given over (a) max(bound, path), (b) max(instant, capacity, path), (c) instant + last.\n"
        "tool  C  instant/bound   path | last  waits |              (a)       (b)       (c)\n"
    )
    for (tool_name, calls), found in table.items():
        sys.stdout.write(
            f"{tool_name:5} {calls} {found['instant/over_bound']:14.3f} {found['critical_path_seconds']:6.1f} | "
            f"{found['ours/last_executing']:4.2f} {found['ours/last_queued']:6.2f} | "
            f"{found['ours/over_bound_and_path']:16.3f} {found['ours/over_instant']:9.3f} "
            f"{found['ours/over_instant_and_last_calls']:9.3f}\n"
        )
    return {
        f"policies/{tool}/C={calls}/{name}": v for (tool, calls), found in table.items() for name, v in found.items()
    }


def levers(shapes: list[Workload]) -> Results:
    """Returning rollouts first, and the prefix cache, where fewer sequences run than there are rollouts."""
    choices = {
        "in turn": OURS,
        "returning first": replace(OURS, returning_first=True),
        "in turn, no cache": replace(OURS, prefix_cache=False),
        "returning first, no cache": replace(OURS, returning_first=True, prefix_cache=False),
    }

    def run(shape: Workload, calls: int, tool: InterpreterCosts, limit: int) -> Results:
        costs, scripts = EngineCosts(), workload(shape, calls, tool)
        alone = alone_seconds(scripts, costs, replace(OURS, max_sequences=limit))
        bound = max(alone, interpreter_seconds(scripts, tool.slots))
        return {
            name: simulate(scripts, replace(choice, max_sequences=limit), costs, tool.slots).seconds / bound
            for name, choice in choices.items()
        }

    results: Results = {}
    sys.stdout.write(
        "\nOurs over the bound with a limit on running sequences (TRL sets it to the rollouts per rank)\n"
    )
    sys.stdout.write(f"{'tool':5} C  limit" + "".join(f"{name:>27}" for name in choices) + "\n")
    for tool_name, tool in TOOLS.items():
        for calls in CALLS:
            for limit in (64, 128, 256):
                found = medians(run(shape, calls, tool, limit) for shape in shapes)
                results |= {f"levers/{tool_name}/C={calls}/limit={limit}/{name}": v for name, v in found.items()}
                cells = "".join(f"{value:27.3f}" for value in found.values())
                sys.stdout.write(f"{tool_name:5} {calls} {limit:6}{cells}\n")
    return results


def ratios(scripts: list[Script], costs: EngineCosts, slots: int) -> Results:
    """What most tables show of a setting."""
    ours, rounds = simulate(scripts, OURS, costs, slots), simulate(scripts, ROUNDS, costs, slots)
    alone, capacity = alone_seconds(scripts, costs), interpreter_seconds(scripts, slots)
    return {
        "ours_seconds": ours.seconds,
        "rounds_seconds": rounds.seconds,
        "over_bound": ours.seconds / max(alone, capacity),
        "rounds_over_ours": rounds.seconds / ours.seconds,
        "capacity_over_alone": capacity / alone,
    }


def constants(shapes: list[Workload]) -> Results:
    """Each constant of the engine 50 % smaller and larger."""
    results: Results = {}
    sys.stdout.write("\nEach constant at half and one and a half: ours over the bound (rounds over ours)\n")
    names = [f"{tool} C={calls}" for tool in TOOLS for calls in CALLS]
    sys.stdout.write(f"{'':27}" + "".join(f"{name:>16}" for name in names) + "\n")
    varied = [("as committed", 1.0), *((name, factor) for name in VARIED for factor in (0.5, 1.5))]
    for name, factor in varied:
        costs = EngineCosts() if name == "as committed" else EngineCosts().scaled(name, factor)
        sys.stdout.write(f"{name:22} {factor:4.1f}")
        for tool_name, tool in TOOLS.items():
            for calls in CALLS:
                found = medians(ratios(workload(shape, calls, tool), costs, tool.slots) for shape in shapes)
                key = f"constants/{name}/{factor}/{tool_name}/C={calls}"
                results |= {f"{key}/{what}": value for what, value in found.items()}
                sys.stdout.write(f"{found['over_bound']:9.3f} ({found['rounds_over_ours']:4.2f})")
        sys.stdout.write("\n")
    return results


def verl_tool(shapes: list[Workload]) -> Results:
    """verl-tool's asyncRL.md: Qwen-Math-1.5B, 2,048 rollouts on 4 H100. It gives no lengths and no latencies."""
    published = {1: (75, 127, 1.69), 3: (94, 194, 2.06)}
    results: Results = {}
    sys.stdout.write(
        "\nverl-tool's setting: 1.5B, 512 rollouts per rank; published: asynchronous, synchronous, ratio\n"
    )
    sys.stdout.write("tool  turns   ours rounds  ratio  over bound   published\n")
    for tool_name, tool in TOOLS.items():
        for calls, figures in published.items():
            costs = EngineCosts(model=QWEN_1_5B)
            found = medians(
                ratios(workload(replace(shape, rollouts=512), calls, tool), costs, tool.slots) for shape in shapes
            )
            results |= {f"verl-tool/{tool_name}/turns={calls}/{name}": value for name, value in found.items()}
            results[f"verl-tool/{tool_name}/turns={calls}/published_ratio"] = figures[2]
            sys.stdout.write(
                "{:5} {:5} {:6.1f} {:6.1f} {:6.2f} {:11.3f}   {} s, {} s, {}\n".format(
                    tool_name,
                    calls,
                    *(found[name] for name in ("ours_seconds", "rounds_seconds", "rounds_over_ours", "over_bound")),
                    *figures,
                )
            )
    return results


def sensitivity(shapes: list[Workload]) -> Results:
    """Tool latency, slots and the tail of the lengths, so that a user sees when the interpreter is the limit."""
    latencies, slots, tails = (0.1, 0.3, 1.0, 3.0), (4, 16, 64, 256), (0.4, 0.65, 0.9)
    results: Results = {}
    sys.stdout.write(
        "\nC = 2, 7B: seconds of ours, over the bound, * where the interpreter's slots are the bound\n"
        "tail = sigma of the log-normal lengths (the mean before the cut stays); 0.65 elsewhere; medians of latency\n"
        f"{'tail  latency':14}" + "".join(f"{f'{count} slots':>18}" for count in slots) + "\n"
    )
    for sigma in tails:
        for median in latencies:
            sys.stdout.write(f"{sigma:4.2f} {median:7.1f} s")
            for count in slots:
                tool = InterpreterCosts(median, SLOW.sigma, count)
                found = medians(
                    ratios(workload(replace(shape, sigma=sigma), 2, tool), EngineCosts(), count) for shape in shapes
                )
                key = f"sensitivity/tail={sigma}/latency={median}/slots={count}"
                results |= {f"{key}/{name}": value for name, value in found.items()}
                limit = "*" if found["capacity_over_alone"] > 1 else " "
                sys.stdout.write(f"{found['ours_seconds']:10.1f} {found['over_bound']:6.3f}{limit}")
            sys.stdout.write("\n")
    return results
