"""How fast answers are graded: pairs that need algebra, the same with hanging ones among them, pairs of plain text.

    python benchmarks/grading.py [--pairs 1000] [--workers 2] [--repeats 3]

The pairs come from a fixed seed: fractions, roots, polynomials, tuples and sets, half of them wrong, none of them
twice. A hanging answer is one that the static guard does not see, so that it takes a worker's soft limit. Prints a
table and writes benchmarks/results/grading.json.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from machine import machine_facts

from torl_grading import Grader

RESULTS = Path(__file__).parent / "results" / "grading.json"
HANGS = (
    r"\sum_{{k=1}}^{{9999}} k^k+{n}",
    r"\int_0^1 \sin(\cos(\tan(x^x)))+{n} dx",
    r"\prod_{{k=1}}^{{9999}} (k^k+{n})",
)
HANGS += (r"\int_0^1 x^{{x^{{x+{n}}}}} dx", r"\sin(\sum_{{k=1}}^{{9999}} k^{{k+{n}}})")


def hard_pair(rng: random.Random) -> tuple[str, str]:
    """A solution and an answer that text alone does not decide; the answer is right in half of the cases."""
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.choice((2, 3, 5, 6, 7, 11))
    d = a if rng.random() < 0.5 else a + 1
    return rng.choice(
        (
            (f"{a}+{b}\\sqrt{{{c}}}", f"\\sqrt{{{c}}} \\cdot {b} + {d}"),
            (f"\\frac{{{a}\\sqrt{{{c}}}}}{{{b}}}", f"\\frac{{{d * c}}}{{{b}\\sqrt{{{c}}}}}"),
            (f"x^2+{a + b}x+{a * b}", f"(x+{d})(x+{b})"),
            (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\pi \\cdot \\frac{{{2 * d}}}{{{2 * b}}}"),
            (f"({a}, {b}\\sqrt{{{4 * c}}})", f"({d}, {2 * b}\\sqrt{{{c}}})"),
            (f"\\{{{a}, {b}\\sqrt{{{4 * c}}}\\}}", f"{2 * b}\\sqrt{{{c}}}, {d}"),
        )
    )


def easy_pair(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 9999), rng.randint(2, 99)
    d = a if rng.random() < 0.5 else a + 1
    return rng.choice(
        ((str(a), str(d)), (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{d}}}{{{b}}}"), (f"({a}, {b})", f"({d},{b})"))
    )


def per_second(grader: Grader, pairs: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Pairs a second, and each verdict's own seconds."""
    started = time.perf_counter()
    futures = [grader.submit([f"So it is \\boxed{{{answer}}}."], solution) for solution, answer in pairs]
    seconds = sorted(future.result().seconds for future in futures)
    return len(pairs) / (time.perf_counter() - started), seconds


def measure(options: argparse.Namespace) -> dict[str, float]:
    rounds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rounds.setdefault(name, []).append(value)

    started = time.perf_counter()
    with Grader(options.workers) as grader:
        per_second(grader, [hard_pair(random.Random(0)) for _ in range(2 * options.workers)])
        note("start/seconds", time.perf_counter() - started)
        for repeat in range(options.repeats):
            rng = random.Random(repeat + 1)
            rate, seconds = per_second(grader, [hard_pair(rng) for _ in range(options.pairs)])
            note("hard/per_second", rate)
            note("hard/p99_ms", 1000 * seconds[int(0.99 * len(seconds))])
            mixed = [hard_pair(rng) for _ in range(options.pairs)]
            for index in range(0, options.pairs, 100):
                mixed[index] = (r"2\sqrt{3}", HANGS[index // 100 % len(HANGS)].format(n=rng.randint(1, 10**6)))
            timeouts = grader.timeouts
            note("hard, 1 % hanging/per_second", per_second(grader, mixed)[0])
            note("hard, 1 % hanging/timeouts", grader.timeouts - timeouts)
            note("text/per_second", per_second(grader, [easy_pair(rng) for _ in range(10 * options.pairs)])[0])
    results = {name: statistics.median(values) for name, values in rounds.items()}
    results["ratio/slower with 1 % hanging"] = results["hard/per_second"] / results["hard, 1 % hanging/per_second"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    results = measure(parser.parse_args())
    sys.stdout.write("".join(f"{name:35} {value:10.2f}\n" for name, value in results.items()))
    RESULTS.parent.mkdir(exist_ok=True)
    rounded = {name: round(value, 4) for name, value in results.items()}
    RESULTS.write_text(json.dumps(machine_facts() | rounded, indent=1) + "\n")
    sys.stdout.write(f"\nwritten: {RESULTS.relative_to(RESULTS.parents[2])}\n")


if __name__ == "__main__":
    main()
