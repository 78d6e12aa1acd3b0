"""Problems of smollm2.yaml: arithmetic with two-digit numbers, as formulas and as one-line stories, drawn from a seed.

    python recipes/smollm2/problems.py

writes train.jsonl and eval.jsonl beside this file; no problem is in both.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent
SEED = 20250330
TRAIN_SIZE, EVAL_SIZE = 2000, 64


@dataclass(frozen=True)
class Family:
    """One kind of question about the numbers a, b and c, and the rule that answers it."""

    question: str
    answer: Callable[[int, int, int], int]


FAMILIES = {
    "product": Family("What is {a} * {b}?", lambda a, b, c: a * b),
    "times": Family("What is {a} times {b}?", lambda a, b, c: a * b),
    "product_plus": Family("What is {a} * {b} + {c}?", lambda a, b, c: a * b + c),
    "product_minus": Family("What is {a} * {b} - {c}?", lambda a, b, c: a * b - c),
    "sum_times": Family("What is ({a} + {b}) * {c}?", lambda a, b, c: (a + b) * c),
    "boxes": Family("A box holds {a} eggs. How many eggs are in {b} boxes?", lambda a, b, c: a * b),
    "tickets": Family("A ticket costs {a} dollars. How much do {b} tickets cost?", lambda a, b, c: a * b),
    "orchard": Family("{a} rows of {b} trees lose {c} trees. How many are left?", lambda a, b, c: a * b - c),
}


def draw_rows(rng: Random) -> Iterator[dict[str, str]]:
    """Yield rows without end, the families in turn, no question twice."""
    seen: set[str] = set()
    while True:
        for name, family in FAMILIES.items():
            a, b, c = (rng.randint(12, 98) for _ in range(3))
            question = family.question.format(a=a, b=b, c=c)
            if question not in seen:
                seen.add(question)
                yield {"problem": question, "answer": str(family.answer(a, b, c)), "family": name}


def write_problems(folder: Path) -> None:
    """Write eval.jsonl and train.jsonl; the order of the training problems is drawn, too."""
    rng = Random(SEED)
    rows = draw_rows(rng)
    for name, size in (("eval", EVAL_SIZE), ("train", TRAIN_SIZE)):
        split = [next(rows) for _ in range(size)]
        text = "".join(f"{json.dumps(row)}\n" for row in split)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default: beside this file)")
    write_problems(parser.parse_args().folder)


if __name__ == "__main__":
    main()
