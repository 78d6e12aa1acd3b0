"""A trainer of two ranks with filters: rank 0's groups are live and rank 1's dead, or all. Run by torchrun."""

import os
import sys
from pathlib import Path

from test_refill_training import ALL_WRONG, LIVE, filtering

from torl_grading import Grader

if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    with Grader(num_workers=1) as grader:
        # Rows of a step in order: problems 0 to 3 in step 1, of which rank 1 has the last two, 4 to 7 in step 2.
        live = {} if name == "empty" else dict.fromkeys((0, 1, 4, 5), LIVE)
        options = {"drop_dead_groups": True, "refill_limit": 2.0 if name == "empty" else 20.0, "max_steps": 2}
        trainer = filtering(folder, grader, live, **options)
        trainer.texts |= {problem: ALL_WRONG for problem in trainer.texts if int(problem[2:]) not in live}
        trainer.train()
        weights = sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters())
        sys.stdout.write(f"weights of rank {rank}: {weights!r}\n")
