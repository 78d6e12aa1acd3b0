"""A trainer of two ranks, one of which fails in its rollouts; each rank prints what it raised. Run by torchrun."""

import os
import sys
import time

from test_trainer import answer, make_trainer
from toys import FakeInterpreter

from torl_grading import Grader


class Dying(FakeInterpreter):
    """Dies on rank 1 as no interpreter should: with an exception that is no `InterpreterError`."""

    def submit(self, code: str):
        if os.environ["RANK"] == "1":
            raise OSError("no space left on device")
        return super().submit(code)


if __name__ == "__main__":
    started = time.perf_counter()
    with Grader(num_workers=1) as grader:
        trainer = make_trainer(sys.argv[1], grader, interpreter=Dying(answer))
        started = time.perf_counter()
        try:
            trainer.train()
        except (RuntimeError, OSError) as error:
            name, seconds = type(error).__name__, time.perf_counter() - started
            sys.stdout.write(f"rank {os.environ['RANK']} raised {name} in {seconds:.0f} s: {error}\n")
