r"""Grading: is the answer in a finished completion the known solution?

    grade(completion, solution)                      one text, in a script
    with Grader(num_workers=2) as grader:            many, in training
        verdict = grader.submit(rollout.model_texts, solution).result()

The answer is the last balanced `\boxed{}` outside fences (`extraction`). It is compared as text (`normal`,
`equivalence`), then by math-verify in a killable process (`pool`, `worker`). Neither torch nor sympy is imported.
"""

import functools

from torl_grading.equivalence import Reason
from torl_grading.pool import Grader, GraderError, Verdict

__all__ = ["Grader", "GraderError", "Reason", "Verdict", "grade"]
_shared_grader = functools.cache(Grader)


def grade(completion: str, solution: str) -> Verdict:
    """Grade one finished text. Raises `GraderError` when grading itself fails.

    Fenced blocks are dropped, so observations are too; but text that a program printed past its own closing fence
    cannot be told from the model's. With a `Rollout` at hand, submit its `model_texts`.
    """
    return _shared_grader().submit([completion], solution).result()
