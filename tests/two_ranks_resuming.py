"""A run of two ranks, unbroken and resumed in its second epoch; each rank prints both runs' problems and weights.

Run by a launcher with a folder. An epoch has 4 steps of 2 problems.
"""

import os
import sys
from pathlib import Path

from test_trainer import train_to

from torl_grading import Grader
from torl_trl.records import read_rollouts

BROKEN_AT, STEPS = 5, 8


def run(folder: Path, grader: Grader, max_steps: int, checkpoint: str | None = None) -> str:
    options = {"per_device_train_batch_size": 4, "save_steps": BROKEN_AT}
    trainer = train_to(folder, grader, max_steps, checkpoint, **options)
    files = [folder / "rollouts" / f"step_{step:06d}.parquet" for step in range(1, max_steps + 1)]
    problems = [sorted(set(read_rollouts(file)["problem_id"].to_pylist())) for file in files]
    weights = sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters())
    return f"{problems} {weights!r}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with Grader(num_workers=1) as grader:
        unbroken = run(folder / "unbroken", grader, STEPS)
        run(folder / "broken", grader, BROKEN_AT)
        resumed = run(folder / "broken", grader, STEPS, str(folder / "broken" / f"checkpoint-{BROKEN_AT}"))
    rank = os.environ["RANK"]
    sys.stdout.write(f"rank {rank}, unbroken: {unbroken}\nrank {rank}, resumed: {resumed}\n")
