"""The runs of stability.py: tasks, switches, and which are combined over which seeds.

Settings were chosen on seeds from 11 on; seeds 1, 2 and 3 are reported.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny"
DEAD_SHARE = 0.5
"""Of the training problems of the task `dead` that no rollout can answer; of the others some are always answered."""

COMMON = {
    "lr_scheduler_type": "constant",  # the paper's: what a decay smooths away would be missed
    "lr_scheduler_kwargs": "",
    "save_strategy": "no",
    "save_rollouts_every": 1,  # with their tokens
}
TASKS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "hard": {
        "max_tool_calls": 3,
        "max_completion_length": 256,
        "gradient_accumulation_steps": 4,  # 8 problems a step
        "learning_rate": 1.4e-3,
    },
    "dead": {"dataset_name": "unanswerable.jsonl"},
}
"""What a task changes in recipes/tiny.yaml. The name of a file is one that `write_problems` writes.

hard: steps so large and so noisy that with the paper's settings turns fall to pieces: malformed calls, markers of the
model's own, garbled programs. Tried with the paper's settings on seeds 11 and 12, held-out accuracy:
    1e-3    one run, rose to 0.81 in 25 steps
    1.4e-3  one run, 0.46, 0.36, 0.28 after 5, 10, 15 steps
    2e-3    two runs: one fell from 0.59 after 10 steps to 0.51 after 30, the other from 0.39 to 0.27 after 10
Only the families whose first program often fails, at 1e-3 with 16 problems a step, were no harder: 0.85 in 15 steps.
"""

VOID = {"drop_void_turns": True}
REFILL = {"drop_dead_groups": True, "refill_limit": 3.0}
MASK = {"mask_truncated_completions": True}
NO_STD = {"scale_rewards": "none"}
CLIP_HIGHER = {"epsilon_high": 0.28, "num_iterations": 2}
PLUS_ONCE = VOID | REFILL | MASK | NO_STD | {"resample_failures": 1}
SWITCHES: dict[str, dict[str, Any]] = {
    "paper": {},
    "void": VOID,
    "refill": REFILL,
    "mask": MASK,
    "penalty": {"overlong_penalty_tokens": 64},
    "no_std": NO_STD,
    "clip_higher": CLIP_HIGHER,
    "double_rate": {"learning_rate": 8e-4},  # a control: what the second update of clip_higher does
    "plus": PLUS_ONCE | CLIP_HIGHER,
    "plus_once": PLUS_ONCE,  # one update per rollout
}
"""What is switched on, over the paper's settings; `plus` is what qwen1.5b_plus.yaml has."""


@dataclass(frozen=True)
class Variant:
    """A task with switches; `steps` are generation batches, of which each is trained on `num_iterations` times."""

    task: str
    switches: str
    steps: int
    seeds: tuple[int, ...]
    eval_every: int = 5

    def options(self, problems: Mapping[str, Path], steps: int | None = None) -> dict[str, Any]:
        """Options over recipes/tiny.yaml; `problems` are the files of `write_problems`."""
        options = COMMON | TASKS[self.task] | SWITCHES[self.switches]
        updates = options.get("num_iterations", 1)
        if "dataset_name" in options:
            options["dataset_name"] = problems[options["dataset_name"]]
        return options | {"max_steps": (steps or self.steps) * updates, "eval_steps": self.eval_every * updates}


THREE, TWO, ONE = (1, 2, 3), (1, 2), (1,)
VARIANTS = {
    f"{variant.task}/{variant.switches}": variant
    for variant in (
        Variant("tiny", "paper", 70, THREE),
        Variant("tiny", "plus", 30, THREE),
        Variant("tiny", "plus_once", 40, THREE),
        Variant("tiny", "double_rate", 40, THREE),
        Variant("dead", "refill", 25, THREE),
        Variant("hard", "paper", 30, THREE),
        Variant("hard", "plus", 30, THREE),
        Variant("hard", "void", 30, THREE),
        Variant("hard", "plus_once", 30, THREE),
        Variant("tiny", "clip_higher", 30, THREE),
        Variant("dead", "paper", 25, TWO),
        Variant("hard", "refill", 30, TWO),
        Variant("tiny", "refill", 40, TWO),
        Variant("tiny", "void", 40, TWO),
        Variant("tiny", "no_std", 40, TWO),
        Variant("tiny", "mask", 40, ONE),
        Variant("tiny", "penalty", 40, ONE),
    )
}
"""The most important first: in this order they are trained."""


def write_problems(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write the problem files of the tasks and return them by name; the same seed gives the same files.

    unanswerable.jsonl: the tiny recipe's problems, of which a share of `DEAD_SHARE` got an answer that no program
    prints, as a wrong key would be. Groups of these have equal rewards whatever the model has learned.
    """
    rng = Random(seed)
    rows = [json.loads(line) for line in (RECIPE / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rng.sample(rows, round(DEAD_SHARE * len(rows))):
        row["answer"] += ".5"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "unanswerable.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {path.name: path}
