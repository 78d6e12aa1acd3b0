"""How the tiny base model has learned to write: solutions of mixed quality, each really run.

The base reads documents made here and nothing else. Six in ten guess the answer without code; the others write a
program, and that program is right, wrong or failing. After a failure some documents mend the program in a second
call and some guess. Wrong programs include the right ones of the *other* kinds of the family, so the base knows every
program it needs and is not sure which question asks for it: that is left to reinforcement learning.
"""

import contextlib
import io
import traceback
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from problems import Problem

from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl import prompts


@dataclass(frozen=True)
class Habits:
    """Shares of the mixture; all are probabilities."""

    code: float = 0.40
    """A document calls the interpreter."""
    right: float = 0.44
    """The first program is right, in a family with few failures."""
    failing: float = 0.06
    """The first program fails, in a family with few failures."""
    right_treacherous: float = 0.32
    failing_treacherous: float = 0.34
    """The same two in a family whose first program often fails."""
    misread: float = 0.14
    """A wrong program is one for another kind of question."""
    mend: float = 0.75
    """A failed program is followed by a second one, not by a guess."""
    mend_right: float = 0.60
    """The second program is right."""
    miscopy: float = 0.04
    """The answer is not the number that was printed."""
    lucky_guess: float = 0.05
    """A guess is right."""


HABITS = Habits()


@dataclass(frozen=True)
class Programs:
    """What the base writes for a family: `right` by kind, `wrong` and `failing` for every kind."""

    right: dict[str, tuple[str, ...]]
    wrong: tuple[str, ...]
    failing: tuple[str, ...]
    treacherous: bool = False
    """The first program often fails."""


PROGRAMS = {
    "boxes": Programs(
        {
            "sold": ("print({a} * {b} - {c})",),
            "boxes_sold": ("print(({a} - {c}) * {b})",),
            "shared": ("print({a} * {b} // {c})",),
        },
        ("print({a} * ({b} - {c}))", "print({a} + {b} - {c})", "print({a} * {b} % {c})"),
        ("print(pens * {b} - {c})", "print(crates * {b} // {c})"),
    ),
    "power": Programs(
        {
            "remainder": ("print(pow({a}, {b}, {m}))", "print({a}**{b} % {m})"),
            "sum": ("print((pow({a}, {b}) + pow({b}, {a})) % {m})", "print(({a}**{b} + {b}**{a}) % {m})"),
        },
        ("print({a}^{b} % {m})", "print({a} * {b} % {m})", "print({b}**{a} % {m})"),
        ("print(power({a}, {b}) % {m})", "print(modulo({a}**{b}, {m}))"),
    ),
    "common": Programs(
        {
            "gcd": ("from math import gcd\nprint(gcd({a}, {b}))", "import math\nprint(math.gcd({a}, {b}))"),
            "lcm": ("from math import lcm\nprint(lcm({a}, {b}))", "import math\nprint(math.lcm({a}, {b}))"),
        },
        ("print({a} * {b})", "print({a} % {b})"),
        ("print(gcd({a}, {b}))", "print(lcm({a}, {b}))", "import math\nprint(math.hcf({a}, {b}))"),
        treacherous=True,
    ),
    "divisors": Programs(
        {
            "sum": ("n = {n}\nprint(sum(d for d in range(1, n + 1) if n % d == 0))",),
            "proper": ("n = {n}\nprint(sum(d for d in range(1, n) if n % d == 0))",),
            "even": ("n = {n}\nprint(sum(d for d in range(2, n + 1, 2) if n % d == 0))",),
        },
        (
            "n = {n}\nprint(sum(d for d in range(2, n) if n % d == 0))",
            "n = {n}\nprint(sum(1 for d in range(1, n + 1) if n % d == 0))",
            "n = {n}\nprint(sum(d for d in range(1, n + 1) if n % 2 == 0))",
        ),
        ("print(sum(divisors({n})))", "print(sum(d for d in range(1, {n}) if n % d == 0))"),
    ),
    "digits": Programs(
        {
            "product": ("print(sum(int(d) for d in str({a} * {b})))",),
            "power": ("print(sum(int(d) for d in str({a}**{b})))",),
        },
        (
            "print(sum(int(d) for d in str({a} + {b})))",
            "print(len(str({a} * {b})))",
            "print(len(str({a}**{b})))",
        ),
        (
            "print(sum(str({a} * {b})))",
            "print(sum(str({a}**{b})))",
            "print(sum(int(d) for d in {a} * {b}))",
            "print(sum(int(d) for d in {a}**{b}))",
        ),
        treacherous=True,
    ),
    "multiples": Programs(
        {
            "either": ("print(sum(1 for k in range(1, {n} + 1) if k % {a} == 0 or k % {b} == 0))",),
            "first_only": ("print(sum(1 for k in range(1, {n} + 1) if k % {a} == 0 and k % {b} != 0))",),
        },
        (
            "print(sum(1 for k in range(1, {n}) if k % {a} == 0 or k % {b} == 0))",
            "print(sum(1 for k in range(1, {n}) if k % {a} == 0 and k % {b} != 0))",
            "print(sum(1 for k in range(1, {n} + 1) if k % {a} == 0 and k % {b} == 0))",
            "print({n} // {a} + {n} // {b})",
        ),
        ("print(sum(1 for k in range(1, n + 1) if k % {a} == 0))", "print(multiples({n}, {a}, {b}))"),
    ),
    "squares": Programs(
        {
            "squares": ("print(sum(k**2 for k in range({a}, {b} + 1)))",),
            "cubes": ("print(sum(k**3 for k in range({a}, {b} + 1)))",),
            "odd": ("print(sum(k**2 for k in range({a}, {b} + 1) if k % 2 == 1))",),
        },
        (
            "print(sum(k**2 for k in range({a}, {b})))",
            "print(sum(k**3 for k in range({a}, {b})))",
            "print(sum(k**2 for k in range({a}, {b}) if k % 2))",
        ),
        ("print(sum(k**2 for k in {b} - {a}))", "print(sum(k**2 for k in range(a, b + 1)))"),
    ),
    "recurrence": Programs(
        {
            "multiply_first": ("x = {x}\nfor _ in range({n}):\n    x = (x * {p} + {q}) % {m}\nprint(x)",),
            "add_first": ("x = {x}\nfor _ in range({n}):\n    x = (x + {q}) * {p} % {m}\nprint(x)",),
        },
        (
            "x = {x}\nfor _ in range(1, {n}):\n    x = (x * {p} + {q}) % {m}\nprint(x)",
            "x = {x}\nfor _ in range(1, {n}):\n    x = (x + {q}) * {p} % {m}\nprint(x)",
            "x = {x}\nfor _ in range({n}):\n    x = x + {q} * {p} % {m}\nprint(x)",
        ),
        ("for _ in range({n}):\n    x = (x * {p} + {q}) % {m}\nprint(x)",),
    ),
    "primes": Programs(
        {
            "sum": ("print(sum(n for n in range({a}, {b} + 1) if all(n % d for d in range(2, n))))",),
            "largest": ("print(max(n for n in range({a}, {b} + 1) if all(n % d for d in range(2, n))))",),
        },
        (
            "print(sum(n for n in range({a}, {b} + 1) if any(n % d for d in range(2, n))))",
            "print(max(n for n in range({a}, {b} + 1) if n % 2))",
            "print(sum(1 for n in range({a}, {b} + 1) if all(n % d for d in range(2, n))))",
        ),
        (
            "print(sum(n for n in range({a}, {b} + 1) if isprime(n)))",
            "print(max(n for n in range({a}, {b} + 1) if isprime(n)))",
            "import math\nprint(sum(n for n in range({a}, {b} + 1) if math.isprime(n)))",
        ),
        treacherous=True,
    ),
    "congruence": Programs(
        {
            "two": ("print(next(x for x in range(1, 9999) if x % {a} == {r} and x % {b} == {s}))",),
            "linear": ("print(next(x for x in range(1, 9999) if {a} * x % {b} == {s}))",),
        },
        (
            "print(next(x for x in range(1, 9999) if x % {a} == {r} or x % {b} == {s}))",
            "print(next(x for x in range(1, 9999) if x % {b} == {s}))",
            "print({a} * {b} + {s})",
        ),
        ("while x % {b} != {s}:\n    x += {a}\nprint(x)", "print(solve({a}, {b}, {s}))"),
        treacherous=True,
    ),
}

GUESSES = (
    "I work it out in my head. The answer is ",
    "Step by step this gives ",
    "By mental arithmetic the result is ",
)
PLANS = ("I write a program.\n", "Let me compute this with Python.\n", "")
MENDS = ("The program failed. I mend it.\n", "I try another program.\n")
ANSWERS = ("The answer is ", "So the result is ")


@lru_cache(maxsize=1 << 16)
def execute(source: str) -> ExecutionResult:
    """Run one of our own programs in this process; an exception ends as its traceback."""
    stdout, stderr, status = io.StringIO(), "", ExecutionStatus.OK
    with contextlib.redirect_stdout(stdout):
        try:
            exec(source, {"__name__": "__main__"})
        except Exception:  # whatever the program raises is its result
            stderr, status = traceback.format_exc(), ExecutionStatus.ERROR
    return ExecutionResult(status, stdout.getvalue(), stderr, seconds=0.0)


def right_program(problem: Problem, rng: Random) -> str:
    return rng.choice(PROGRAMS[problem.family].right[problem.kind]).format(**problem.values)


def wrong_program(problem: Problem, rng: Random, habits: Habits) -> str:
    """A program that is not meant for this kind: one for another kind of the family, or a wrong one."""
    programs = PROGRAMS[problem.family]
    others = [source for kind, sources in programs.right.items() if kind != problem.kind for source in sources]
    return rng.choice(others if rng.random() < habits.misread else programs.wrong).format(**problem.values)


def first_program(problem: Problem, rng: Random, habits: Habits) -> str:
    programs = PROGRAMS[problem.family]
    right = habits.right_treacherous if programs.treacherous else habits.right
    failing = habits.failing_treacherous if programs.treacherous else habits.failing
    chance = rng.random()
    if chance < right:
        return right_program(problem, rng)
    if chance < right + failing:
        return rng.choice(programs.failing).format(**problem.values)
    return wrong_program(problem, rng, habits)


def guess(problem: Problem, rng: Random, habits: Habits) -> str:
    """The answer by luck, or else a number of as many digits."""
    if rng.random() < habits.lucky_guess:
        return str(problem.answer)
    digits = len(str(problem.answer))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}."


@dataclass(frozen=True)
class Passage:
    """A stretch of a document; `inserted` is what the interpreter adds in training."""

    text: str
    inserted: bool = False


def call(lead: str, source: str) -> tuple[list[Passage], ExecutionResult]:
    """A tool call as it reads in a rollout: text, program, marker, and the inserted observation."""
    asked = f"{lead}{prompts.PYTHON_FENCE}\n{source}\n{prompts.FENCE}\n{prompts.OUTPUT_MARKER}"
    result = execute(source)
    observation = prompts.format_observation(result, max_chars=256)
    return [Passage(asked), Passage(prompts.inserted_text("output_marker", asked, observation), True)], result


def write_solution(problem: Problem, rng: Random, habits: Habits = HABITS) -> list[Passage]:
    """One completion of the base's kind, without the end-of-sequence token."""
    if rng.random() >= habits.code:
        return [Passage(rng.choice(GUESSES) + boxed(guess(problem, rng, habits)))]
    passages, result = call(rng.choice(PLANS), first_program(problem, rng, habits))
    if result.status == ExecutionStatus.ERROR and rng.random() < habits.mend:
        mended = rng.random() < habits.mend_right
        source = right_program(problem, rng) if mended else wrong_program(problem, rng, habits)
        second, result = call(rng.choice(MENDS), source)
        passages += second
    copied = result.status == ExecutionStatus.OK and rng.random() >= habits.miscopy
    answer = result.stdout.strip() if copied else guess(problem, rng, habits)
    return [*passages, Passage(rng.choice(ANSWERS) + boxed(answer))]
