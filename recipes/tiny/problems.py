"""Problems of the tiny recipe: ten families of arithmetic and number theory, drawn from a seed.

A family asks two or three kinds of question about the same numbers ("sum of all divisors", "sum of the proper
divisors", "number of divisors"). Which program is right depends on the kind, so a model has to read the question and
not only to recognise the family. Numbers are large enough that an answer is hard to guess and easy to compute.

    python recipes/tiny/problems.py        writes train.jsonl and eval.jsonl beside this file; no problem is in both
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent
SEED = 20250330
TRAIN_SIZE, EVAL_SIZE = 2000, 200

Values = dict[str, int]


class Kind:
    """One kind of question: the rule that answers it, and ways to ask it with a place for each value."""

    def __init__(self, answer: Callable[..., int], *questions: str):
        self.answer = answer
        self.questions = questions


class Family:
    """Kinds of question about values drawn in the same way."""

    def __init__(self, name: str, draw: Callable[[Random], Values], **kinds: Kind):
        self.name = name
        self.draw = draw
        self.kinds = kinds


@dataclass(frozen=True)
class Problem:
    """A question with its answer; `family`, `kind` and `values` say where it came from."""

    family: str
    kind: str
    values: Values
    question: str
    answer: int

    def as_row(self) -> dict[str, str]:
        return {"problem": self.question, "answer": str(self.answer), "family": self.family}


# How values are drawn.


def draw_boxes(rng: Random) -> Values:
    return {"a": rng.randint(23, 98), "b": rng.randint(23, 98), "c": rng.randint(11, 22)}


def draw_power(rng: Random) -> Values:
    return {"a": rng.randint(12, 99), "b": rng.randint(12, 60), "m": rng.randint(101, 997)}


def draw_common(rng: Random) -> Values:
    shared = rng.randint(11, 48)
    a, b = rng.sample(range(3, 20), 2)
    return {"a": shared * a, "b": shared * b}


def draw_even(rng: Random) -> Values:
    return {"n": 2 * rng.randint(60, 490)}


def draw_factors(rng: Random) -> Values:
    return {"a": rng.randint(112, 989), "b": rng.randint(112, 989)}


def draw_multiples(rng: Random) -> Values:
    a, b = rng.sample((3, 4, 5, 6, 7, 8, 9), 2)
    return {"a": a, "b": b, "n": a * rng.randint(30, 99)}


def draw_interval(rng: Random) -> Values:
    a = rng.randint(5, 29)
    return {"a": a, "b": a + rng.randint(6, 20)}


def draw_recurrence(rng: Random) -> Values:
    return {
        "x": rng.randint(11, 99),
        "n": rng.randint(5, 30),
        "p": rng.randint(2, 9),
        "q": rng.randint(11, 99),
        "m": rng.randint(101, 499),
    }


def draw_prime_interval(rng: Random) -> Values:
    a = rng.randint(102, 800)
    return {"a": a, "b": a + rng.randint(40, 120)}


def draw_congruence(rng: Random) -> Values:
    while True:
        a, b = rng.randint(11, 39), rng.randint(11, 39)
        if a != b and math.gcd(a, b) == 1:
            return {"a": a, "r": rng.randint(1, a - 1), "b": b, "s": rng.randint(1, b - 1)}


# How answers are found: plain rules, not the programs that the model writes.


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def digit_sum(n: int) -> int:
    return sum(map(int, str(n)))


def primes_between(a: int, b: int) -> list[int]:
    return [n for n in range(max(a, 2), b + 1) if all(n % d for d in range(2, math.isqrt(n) + 1))]


def iterate(step: Callable[[int], int], x: int, n: int) -> int:
    for _ in range(n):
        x = step(x)
    return x


def chinese_remainder(a: int, r: int, b: int, s: int) -> int:
    return (r + a * ((s - r) * pow(a, -1, b) % b)) % (a * b)


FAMILIES = (
    Family(
        "boxes",
        draw_boxes,
        sold=Kind(
            lambda a, b, c: a * b - c,
            "A shop has {a} boxes of {b} pens each and sells {c} pens. How many pens are left?",
            "From {a} boxes with {b} pens in each, {c} pens are taken out. How many pens remain?",
        ),
        boxes_sold=Kind(
            lambda a, b, c: (a - c) * b,
            "A shop has {a} boxes of {b} pens each and sells {c} boxes. How many pens are left?",
            "From {a} boxes with {b} pens in each, {c} boxes are taken away. How many pens remain?",
        ),
        shared=Kind(
            lambda a, b, c: a * b // c,
            "A shop has {a} boxes of {b} pens each. How many pens can it give to each of {c} children?",
            "The pens of {a} boxes with {b} pens in each are shared by {c} pupils. How many does each get?",
        ),
    ),
    Family(
        "power",
        draw_power,
        remainder=Kind(
            lambda a, b, m: pow(a, b, m),
            "What is the remainder when {a}^{b} is divided by {m}?",
            "Find {a} to the power {b} modulo {m}.",
        ),
        sum=Kind(
            lambda a, b, m: (pow(a, b, m) + pow(b, a, m)) % m,
            "What is the remainder when {a}^{b} + {b}^{a} is divided by {m}?",
            "Find {a} to the power {b} plus {b} to the power {a} modulo {m}.",
        ),
    ),
    Family(
        "common",
        draw_common,
        gcd=Kind(
            lambda a, b: math.gcd(a, b),
            "Find the greatest common divisor of {a} and {b}.",
            "A floor of {a} by {b} cm is covered with equal square tiles. How wide can a tile be at most?",
        ),
        lcm=Kind(
            lambda a, b: math.lcm(a, b),
            "Find the least common multiple of {a} and {b}.",
            "Two lamps flash every {a} and {b} seconds. After how many seconds do they flash together again?",
        ),
    ),
    Family(
        "divisors",
        draw_even,
        sum=Kind(
            lambda n: sum(divisors(n)),
            "Find the sum of all positive divisors of {n}.",
            "What do all divisors of {n} add up to?",
        ),
        proper=Kind(
            lambda n: sum(divisors(n)) - n,
            "Find the sum of the positive divisors of {n} that are less than {n}.",
            "What do the proper divisors of {n} add up to?",
        ),
        even=Kind(
            lambda n: sum(d for d in divisors(n) if d % 2 == 0),
            "Find the sum of the even positive divisors of {n}.",
            "What do the even divisors of {n} add up to?",
        ),
    ),
    Family(
        "digits",
        draw_factors,
        product=Kind(
            lambda a, b: digit_sum(a * b),
            "Find the sum of the digits of {a} * {b}.",
            "Multiply {a} by {b} and add the digits of the result.",
        ),
        power=Kind(
            lambda a, b: digit_sum(a**b),
            "Find the sum of the digits of {a}^{b}.",
            "Raise {a} to the power {b} and add the digits of the result.",
        ),
    ),
    Family(
        "multiples",
        draw_multiples,
        either=Kind(
            lambda a, b, n: sum(k % a == 0 or k % b == 0 for k in range(1, n + 1)),
            "How many integers from 1 to {n} are divisible by {a} or {b}?",
            "Count the numbers up to {n} that are multiples of {a} or of {b}, or of both.",
        ),
        first_only=Kind(
            lambda a, b, n: sum(k % a == 0 and k % b != 0 for k in range(1, n + 1)),
            "How many integers from 1 to {n} are divisible by {a} but not by {b}?",
            "Count the multiples of {a} up to {n} that are no multiples of {b}.",
        ),
    ),
    Family(
        "squares",
        draw_interval,
        squares=Kind(
            lambda a, b: sum(k * k for k in range(a, b + 1)),
            "Add the squares of all integers from {a} to {b}.",
            "What is {a}^2 + ... + {b}^2, the sum over each integer between them?",
        ),
        cubes=Kind(
            lambda a, b: sum(k**3 for k in range(a, b + 1)),
            "Add the cubes of all integers from {a} to {b}.",
            "What is {a}^3 + ... + {b}^3, the sum over each integer between them?",
        ),
        odd=Kind(
            lambda a, b: sum(k * k for k in range(a, b + 1) if k % 2 == 1),
            "Add the squares of the odd integers from {a} to {b}.",
            "What is the sum of k^2 over the odd integers k between {a} and {b}, ends included?",
        ),
    ),
    Family(
        "recurrence",
        draw_recurrence,
        multiply_first=Kind(
            lambda x, n, p, q, m: iterate(lambda y: (y * p + q) % m, x, n),
            "Start with {x}. Do this {n} times: multiply by {p}, add {q}, reduce modulo {m}. What results?",
        ),
        add_first=Kind(
            lambda x, n, p, q, m: iterate(lambda y: (y + q) * p % m, x, n),
            "Start with {x}. Do this {n} times: add {q}, multiply by {p}, reduce modulo {m}. What results?",
        ),
    ),
    Family(
        "primes",
        draw_prime_interval,
        sum=Kind(
            lambda a, b: sum(primes_between(a, b)),
            "Find the sum of the primes from {a} to {b}.",
            "What do all primes between {a} and {b} add up to?",
        ),
        largest=Kind(
            lambda a, b: max(primes_between(a, b)),
            "Find the largest prime from {a} to {b}.",
            "Which prime between {a} and {b} is the largest?",
        ),
    ),
    Family(
        "congruence",
        draw_congruence,
        two=Kind(
            chinese_remainder,
            "Find the smallest positive number that modulo {a} is {r} and modulo {b} is {s}.",
            "Divided by {a}, a number leaves {r}; divided by {b}, it leaves {s}. Which is the first such number?",
        ),
        linear=Kind(
            lambda a, r, b, s: s * pow(a, -1, b) % b,
            "Find the smallest positive number x such that {a} * x modulo {b} is {s}.",
            "Multiplied by {a} and divided by {b}, a number leaves {s}. Which is the first such number?",
        ),
    ),
)


def draw_problem(rng: Random) -> Problem:
    """Draw a problem: a family, a kind and a wording with equal chances, then values."""
    family = rng.choice(FAMILIES)
    name = rng.choice(list(family.kinds))
    kind = family.kinds[name]
    values = family.draw(rng)
    question = rng.choice(kind.questions).format(**values)
    return Problem(family.name, name, values, question, kind.answer(**values))


def draw_distinct(rng: Random, seen: set[str]) -> Iterator[Problem]:
    """Yield problems whose question is not in `seen` without end; each is added to it."""
    while True:
        problem = draw_problem(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def write_splits(folder: Path, seed: int = SEED, train: int = TRAIN_SIZE, held_out: int = EVAL_SIZE) -> None:
    """Write `train.jsonl` and `eval.jsonl` (fields problem, answer, family)."""
    problems = draw_distinct(Random(seed), set())
    for name, size in (("eval.jsonl", held_out), ("train.jsonl", train)):
        rows = [json.dumps(next(problems).as_row()) for _ in range(size)]
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    write_splits(arguments.folder, arguments.seed)
