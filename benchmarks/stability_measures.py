"""What a finished run says about its health: learning, and what became of the rollouts that it sampled.

All is counted from the run's folder: accuracies from metrics.jsonl, rollouts from rollouts/step_*.parquet, which hold
every rollout that was sampled for a step, dropped ones too (`save_rollouts_every: 1` keeps their tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import pyarrow.compute as pc
import yaml

from torl_trl.filters import SAME
from torl_trl.records import read_rollouts
from torl_trl.run_folder import CONFIG_NAME, ROLLOUTS_NAME, read_metrics

THRESHOLDS = (0.8, 0.85)
"""Held-out accuracies whose cost is measured."""


@dataclass(frozen=True)
class Sampled:
    """The rollouts of one generation batch."""

    step: int
    """The first optimizer step that trains on them."""
    rollouts: int
    tokens: int
    """Tokens that the model wrote; observations are not among them."""
    trained: int
    """Rollouts that change the weights: not dropped, and with an advantage other than 0."""
    groups: int
    live_groups: int
    """Groups in which at least one rollout is trained."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises `ValueError` where the file was written without tokens."""
        table = read_rollouts(path)
        if table["env_mask"].null_count:
            raise ValueError(f"{str(path)!r} has no tokens: train with save_rollouts_every: 1.")
        trains = pc.fill_null(pc.greater(pc.abs(table["advantage"]), SAME), False)
        trains = pc.and_(trains, pc.is_null(table["dropped"]))
        return cls(
            step=table["step"][0].as_py(),
            rollouts=len(table),
            tokens=pc.sum(pc.list_flatten(table["env_mask"])).as_py(),
            trained=pc.sum(trains).as_py(),
            groups=len(pc.unique(table["group_id"])),
            live_groups=len(pc.unique(table.filter(trains)["group_id"])),
        )


def read_sampled(folder: Path) -> list[Sampled]:
    """The generation batches of a run's training, in order; evaluations are left out."""
    return [Sampled.read(path) for path in sorted((folder / ROLLOUTS_NAME).glob("step_*.parquet"))]


def read_evaluations(folder: Path) -> list[tuple[int, float]]:
    """(step, held-out accuracy), in order."""
    return [(line["step"], line["accuracy"]) for line in read_metrics(folder) if line["split"] == "eval"]


def tokens_until(step: int, batches: Sequence[Sampled]) -> int:
    """Tokens sampled for training when the optimizer has made `step` steps."""
    return sum(batch.tokens for batch in batches if batch.step <= step)


def measure(folder: Path) -> dict[str, float]:
    """The measures of one run; what it never reached is left out.

    Shares: `wasted` of sampled rollouts trained nothing; `dead_groups` of sampled groups trained nothing;
    `full_steps` of generation batches had as many live groups as a step asks for. `extra_generation` is sampled
    rollouts beyond those that the steps ask for, per rollout asked for. `largest_drop` is the largest fall of held-out
    accuracy from an evaluation to the next one.
    """
    config = yaml.safe_load((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    asked = config["per_device_train_batch_size"] * config["steps_per_generation"]  # rollouts, on the one rank
    batches, evaluations = read_sampled(folder), read_evaluations(folder)
    accuracies = [accuracy for _, accuracy in evaluations]
    rollouts, groups = sum(batch.rollouts for batch in batches), sum(batch.groups for batch in batches)
    full = [batch.live_groups >= asked // config["num_generations"] for batch in batches]
    lines = read_metrics(folder)
    values = {
        "final_accuracy": accuracies[-1],
        "best_accuracy": max(accuracies),
        "largest_drop": max(0.0, *(before - after for before, after in pairwise(accuracies))),
        "wasted": 1 - sum(batch.trained for batch in batches) / rollouts,
        "dead_groups": 1 - sum(batch.live_groups for batch in batches) / groups,
        "full_steps": sum(full) / len(full),
        "extra_generation": rollouts / (asked * len(batches)) - 1,
        "tokens": sum(batch.tokens for batch in batches),
        "largest_gradient": max(line["grad_norm"] for line in lines if line["split"] == "train"),
        "seconds": next(line["train_runtime"] for line in lines if line["split"] == "summary"),
    }
    for threshold in THRESHOLDS:
        reached = next((step for step, accuracy in evaluations if accuracy >= threshold), None)
        if reached is not None:
            values |= {
                f"steps_to_{threshold}": reached,
                f"tokens_to_{threshold}": tokens_until(reached, batches),
            }
    return values
