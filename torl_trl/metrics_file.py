"""The callback that writes metrics.jsonl while a run goes on."""

import json
import logging
import math
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torl_trl.run_folder import METRICS_NAME, remove_rollouts_after, write_atomically

logger = logging.getLogger(__name__)

_EVAL_PREFIX = "eval_"


class MetricsFile(TrainerCallback):
    """Appends every log of the trainer to the run's metrics.jsonl, on the main process, flushed at once.

    Names lose transformers' `eval_` prefix, which becomes `"split": "eval"`; the last log of a training run
    (`train_runtime` and so on) is `"split": "summary"`. NaN and infinity become null.

    When training starts, what the coming steps will write again is removed: everything after the checkpoint that is
    resumed, or the whole of an older run (lines that this object wrote at step 0 before training stay). Rollout files
    of those steps go with them.
    """

    def __init__(self, run_folder: Path):
        self.path = Path(run_folder) / METRICS_NAME
        self.own_lines = 0
        self.tail_checked = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        remove_rollouts_after(self.path.parent, state.global_step)
        if not self.path.exists():
            return
        lines = _complete_lines(self.path)
        if state.global_step > 0:
            kept = [line for line in lines if _survives(line, state.global_step, bool(args.eval_on_start))]
        else:
            first_own = len(lines) - self.own_lines
            kept = [line for line in lines[first_own:] if _step_of(line) == 0]
        if len(kept) < len(lines):
            logger.info("Removed %d lines of an earlier run from %s.", len(lines) - len(kept), self.path)
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))
        self.tail_checked = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.own_lines = 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.tail_checked and self.path.exists():  # a killed run may have left half a line
            write_atomically(self.path, "".join(f"{line}\n" for line in _complete_lines(self.path)))
        self.tail_checked = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics_line(state.global_step, logs), allow_nan=False) + "\n")
        self.own_lines += 1


def metrics_line(step: int, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of one log."""
    if "train_runtime" in logs:
        split, prefix = "summary", ""
    elif any(name.startswith(_EVAL_PREFIX) for name in logs):
        split, prefix = "eval", _EVAL_PREFIX
    else:
        split, prefix = "train", ""
    line = {"step": step, "split": split, "epoch": _plain(logs.get("epoch"))}
    for name, value in logs.items():
        if name not in ("epoch", "step"):
            line[name.removeprefix(prefix)] = _plain(value)
    return line


def _plain(value: Any) -> Any:
    """Return a JSON value: a number that is finite, or None for one that is not; others as they are."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value) if isinstance(value, Real) else value.item()  # numpy scalars and one-element tensors
    return number if math.isfinite(number) else None


def _complete_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _step_of(line: str) -> int:
    return json.loads(line)["step"]


def _survives(line: str, resumed_step: int, evaluates_again: bool) -> bool:
    """Whether a line of the earlier run still holds after training resumed from the checkpoint of a step."""
    logged = json.loads(line)
    if logged["step"] == resumed_step:  # transformers logs and evaluates a step before it saves it
        return logged["split"] == "train" or (logged["split"] == "eval" and not evaluates_again)
    return logged["step"] < resumed_step
