"""How fast interpreters run programs: calls per second, latency, CPU and memory, for 1 to 256 callers.

    python benchmarks/interpreters.py [--seconds 1.0] [--repeats 3] [--callers 1 2 8 32 256]

Compares a fresh process per call, each tier of the embedded interpreter that works here, a pool of processes that
`exec` the program in a warm Python (fast and unsafe: a ceiling), and Sandbox Fusion or E2B where
TORL_SANDBOX_FUSION_URL, or E2B_API_KEY or E2B_DEBUG, is set. The backends take turns in one run, so that ratios hold
on a machine that is not quiet. Prints a table and writes benchmarks/results/interpreters.json. `fork` is the other
ceiling: how often the same warm process can fork, and its child end, on all cores.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from machine import machine_facts

from torl_interpreters.tiers import SANDBOX, package_folders
from torl_trl.errors import UserError
from torl_trl.interpreters import EmbeddedInterpreter, Interpreter, InterpreterUnavailable, get_interpreter

RESULTS = Path(__file__).parent / "results" / "interpreters.json"
CORES = len(os.sched_getaffinity(0))
SNIPPETS = {
    "print": ("print(2**100)", "1267650600228229401496703205376\n"),
    "sympy": (
        "from sympy import symbols, factor\nx = symbols('x')\nprint(factor(x**6 - 1))",
        "(x - 1)*(x + 1)*(x**2 - x + 1)*(x**2 + x + 1)\n",
    ),
    "numpy": (
        "import numpy as np\nprint(round(np.linalg.det(np.array([[2.0, 1.0], [7.0, 4.0]])), 6))",
        "1.0\n",
    ),
}
BARE_FORK = """
import os, sys, time
sys.path[:0] = [{sandbox!r}, *{packages!r}]
import fork_server
fork_server.warm_up()
workers = []
for _ in range({cores}):
    reader, writer = os.pipe()
    if os.fork() == 0:
        count, end = 0, time.perf_counter() + {seconds}
        while time.perf_counter() < end:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            count += 1
        os.write(writer, str(count).encode())
        os._exit(0)
    workers.append(reader)
print(sum(int(os.read(reader, 100)) for reader in workers) / {seconds})
"""


def execute(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(code, {"__name__": "__main__"})
    return stdout.getvalue()


class Pool:
    """The unsafe ceiling: processes that stay."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(CORES)

    def submit(self, code: str) -> Future:
        return self._pool.submit(execute, code)

    def close(self) -> None:
        self._pool.shutdown()


def backends() -> Iterator[tuple[str, Interpreter | Pool]]:
    for name, tier in (("fresh process", "plain"), ("root", "root"), ("user", "user"), ("none", "none")):
        with contextlib.suppress(InterpreterUnavailable):
            yield name, EmbeddedInterpreter(isolation=tier, timeout_seconds=60)
    yield "pool (unsafe)", Pool()
    for name, variables in (("sandbox_fusion", ["TORL_SANDBOX_FUSION_URL"]), ("e2b", ["E2B_API_KEY", "E2B_DEBUG"])):
        if any(os.environ.get(variable) for variable in variables):
            with contextlib.suppress(UserError):
                yield name, get_interpreter(name, timeout_seconds=60)


def drive(backend: Interpreter | Pool, code: str, printed: str, callers: int, seconds: float) -> list[float]:
    """Latencies of the calls that `callers` make one after the other, each its own, for some seconds."""
    latencies: list[float] = []
    lock, end = threading.Lock(), time.perf_counter() + seconds
    busy = threading.Semaphore(0)

    def call() -> None:
        started = time.perf_counter()
        future = backend.submit(code)
        future.add_done_callback(lambda future: done(future, started))

    def done(future: Future, started: float) -> None:
        result = future.result()
        assert getattr(result, "stdout", result) == printed, result
        now = time.perf_counter()
        with lock:
            latencies.append(now - started)
        if now < end:
            call()
        else:
            busy.release()

    for _ in range(callers):
        call()
    for _ in range(callers):
        busy.acquire()
    return latencies


def family() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat after the name, of this process and all below it."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    members = {os.getpid()}
    while True:
        grown = members | {pid for pid, fields in stats.items() if int(fields[1]) in members}
        if grown == members:
            return {pid: stats[pid] for pid in members if pid in stats}
        members = grown


def cpu_seconds() -> float:
    """Of this process, those below it, and those of theirs that have ended."""
    return sum(sum(map(int, fields[11:15])) for fields in family().values()) / os.sysconf("SC_CLK_TCK")


def memory_mb() -> float:
    """Proportional set size of the processes below this one."""
    total = 0
    for pid in set(family()) - {os.getpid()}:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0])
    return total / 1024


def bare_forks(seconds: float) -> float:
    code = BARE_FORK.format(sandbox=str(SANDBOX), packages=package_folders(), cores=CORES, seconds=seconds)
    return float(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout)


def measure(options: argparse.Namespace) -> dict[str, float]:
    results: dict[str, float] = {}
    opened: dict[str, Interpreter | Pool] = {}
    for name, backend in backends():
        before = memory_mb()
        opened[name] = backend
        drive(backend, *SNIPPETS["sympy"], callers=CORES, seconds=0.5)
        results[f"{name}/memory_mb"] = memory_mb() - before
    rounds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rounds.setdefault(name, []).append(value)

    for snippet, (code, printed) in SNIPPETS.items():
        for callers in options.callers:
            for _ in range(options.repeats):
                for name, backend in opened.items():
                    cpu, started = cpu_seconds(), time.perf_counter()
                    latencies = sorted(drive(backend, code, printed, callers, options.seconds))
                    took, key = time.perf_counter() - started, f"{name}/{snippet}/{callers}"
                    note(f"{key}/per_second", len(latencies) / took)
                    note(f"{key}/p50_ms", 1000 * latencies[len(latencies) // 2])
                    note(f"{key}/p95_ms", 1000 * latencies[int(len(latencies) * 0.95)])
                    note(f"{key}/cpu_ms", 1000 * (cpu_seconds() - cpu) / len(latencies))
                if callers == 2:
                    note(f"fork/{snippet}/2/per_second", bare_forks(options.seconds))
            sys.stdout.write(f"measured {snippet}, {callers} callers\n")
            sys.stdout.flush()
    for backend in opened.values():
        backend.close()
    return results | {name: statistics.median(values) for name, values in rounds.items()}


def ratios(results: dict[str, float]) -> dict[str, float]:
    """What the project promises, as ratios with 2 callers."""

    def rate(name: str, snippet: str) -> float:
        return results.get(f"{name}/{snippet}/2/per_second", float("nan"))

    found = {}
    for tier in ("root", "user", "none"):
        if f"{tier}/sympy/2/per_second" in results:
            found[f"ratio/{tier}/sympy over fresh process"] = rate(tier, "sympy") / rate("fresh process", "sympy")
            found[f"ratio/{tier}/print over bare fork"] = rate(tier, "print") / rate("fork", "print")
            for snippet in SNIPPETS:
                found[f"ratio/{tier}/{snippet} tax of isolation"] = rate("none", snippet) / rate(tier, snippet)
            key = f"{tier}/print/32"
            if f"{key}/p95_ms" in results:
                found[f"ratio/{tier}/p95 over p50 at 32"] = results[f"{key}/p95_ms"] / results[f"{key}/p50_ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 8, 32, 256])
    options = parser.parse_args()
    results = measure(options)
    promised = ratios(results)
    for snippet in SNIPPETS:
        sys.stdout.write(f"\n{snippet}: calls per second (p50 / p95 ms, CPU ms per call)\n{'':16}")
        sys.stdout.write("".join(f"{callers:>30}" for callers in options.callers) + "\n")
        for name in dict.fromkeys(key.split("/")[0] for key in results if key.endswith("per_second")):
            cells = []
            for callers in options.callers:
                key = f"{name}/{snippet}/{callers}"
                values = [results.get(f"{key}/{what}") for what in ("per_second", "p50_ms", "p95_ms", "cpu_ms")]
                if values[1] is None:
                    cells.append(f"{values[0]:.0f}" if values[0] else "")
                else:
                    cells.append("{:.0f} ({:.1f} / {:.1f}, {:.1f})".format(*values))
            sys.stdout.write(f"{name:16}" + "".join(f"{cell:>30}" for cell in cells) + "\n")
    sys.stdout.write("\n" + "".join(f"{name:45} {value:7.2f}\n" for name, value in promised.items()))
    RESULTS.parent.mkdir(exist_ok=True)
    rounded = {name: round(value, 4) for name, value in (results | promised).items()}
    RESULTS.write_text(json.dumps(machine_facts() | rounded, indent=1) + "\n")
    sys.stdout.write(f"\nwritten: {RESULTS.relative_to(RESULTS.parents[2])}\n")


if __name__ == "__main__":
    main()
