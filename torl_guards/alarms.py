"""Alarms for a model that collapses: warnings with the likely cause, and `alarm/...` among the metrics.

A rule looks at the median of the last `WINDOW` logs of training, so that one odd step raises nothing, and compares it
with a fixed limit or with the median of the first logs of the run. The limits are wide on purpose: what learns well
stays silent, as far as runs at hand show (tests/test_guards.py). An alarm stops nothing.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torl_trl.metrics_file import metrics_line

logger = logging.getLogger(__name__)

WINDOW = 5
"""Logs, of which the median is taken."""


@dataclass(frozen=True, slots=True)
class Medians:
    """Of a metric over `WINDOW` logs each: the first, the last, and the largest of all."""

    first: float
    now: float
    peak: float


@dataclass(frozen=True, slots=True)
class Rule:
    """`is_on` decides over the sum of `metrics`; `text` says what it means, with the fields of `Medians`.

    A rule that looks at a change needs `logs` of them, so that the first and the last do not overlap.
    """

    name: str
    metrics: tuple[str, ...]
    is_on: Callable[[Medians], bool]
    text: str
    logs: int = 2 * WINDOW


RULES = (
    Rule(
        "entropy",
        ("entropy",),
        lambda of: of.now < 0.1 * of.first,
        "entropy is {now:.2g}, below a tenth of its first value {first:.2g}: the model writes nearly the same every "
        "time, so that groups hardly differ. Most often learning_rate is too high or the problems are too easy: lower "
        "it, raise temperature or epsilon_high, or take harder problems",
    ),
    Rule(
        "length_fell",
        ("completions/mean_length",),
        lambda of: of.now < 0.25 * of.first,
        "completions/mean_length is {now:.0f} tokens, below a quarter of its first value {first:.0f}: the model has "
        "learnt to guess or to stop early. Most often long texts were cut off and so never right: read the rollouts, "
        "and raise max_completion_length if stop/length was high",
    ),
    Rule(
        "length_rose",
        ("completions/mean_length",),
        lambda of: of.now > 4 * of.first,
        "completions/mean_length is {now:.0f} tokens, above four times its first value {first:.0f}: if accuracy does "
        "not rise along, the model fills its budget. Most often with loops or an answer given again and again: read "
        "the rollouts, look at repetition, and lower learning_rate",
    ),
    Rule(
        "code_ratio",
        ("tools/code_ratio",),
        lambda of: of.now < 0.05 and of.peak >= 0.3,
        "tools/code_ratio is {now:.2g} and was {peak:.2g}: the model has stopped writing code. Most often code did "
        "not pay: look for calls that fail (tools/status/*, tools/interpreter_failure), for executability_penalty, "
        "and for problems that need no code",
    ),
    Rule(
        "repetition",
        ("repetition",),
        lambda of: of.now > 0.3 and of.now > 2 * of.first,
        "repetition is {now:.2g} and was {first:.2g} at first: that share of the rollouts ends in a loop of the same "
        "words. Most often learning_rate is too high: lower it or max_grad_norm, and go back to a checkpoint from "
        "before the rise",
    ),
    Rule(
        "truncated",
        ("stop/length", "stop/observation_overflow"),
        lambda of: of.now > 0.5,
        "{now:.0%} of the rollouts are cut off at max_completion_length, so that they cannot be right. Most often "
        "the budget is too small for these problems, or the model loops: raise max_completion_length, or look at "
        "repetition",
        logs=WINDOW,
    ),
)


def collapse_alarms(history: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """The sentence of each alarm that is on after these logs of training, oldest first, and None for one that is off.

    Rules whose metrics have too few values are left out. A log without a value, or with NaN, counts for no rule.
    """
    alarms: dict[str, str | None] = {}
    for rule in RULES:
        values = [sum(row) for log in history if _are_numbers(row := [log.get(name) for name in rule.metrics])]
        if len(values) >= rule.logs:
            medians = [median(values[start : start + WINDOW]) for start in range(len(values) - WINDOW + 1)]
            of = Medians(medians[0], medians[-1], max(medians))
            numbers = {"first": of.first, "now": of.now, "peak": of.peak}
            alarms[rule.name] = rule.text.format(**numbers) if rule.is_on(of) else None
    return alarms


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


class CollapseAlarms(TrainerCallback):
    """Warns when an alarm goes on, again only after `WINDOW` logs without it; puts `alarm/<name>` (0, 1) in the logs.

    After a resume it knows the logs from before.
    """

    def __init__(self) -> None:
        self._history: list[dict[str, Any]] = []
        self._last_on: dict[str, int] = {}  # numbers of logs

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._history = [log for log in state.log_history if _is_of_training(log)]
        self._last_on.clear()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or not _is_of_training(logs):
            return
        self._history.append(dict(logs))
        number = len(self._history)
        for name, sentence in collapse_alarms(self._history).items():
            logs[f"alarm/{name}"] = float(sentence is not None)
            if sentence is None:
                continue
            if number - self._last_on.get(name, -WINDOW) > WINDOW:
                logger.warning("Alarm %s at step %d: %s.", name, state.global_step, sentence)
            self._last_on[name] = number


def add_alarms(trainer: Trainer) -> None:
    """Put the alarms first among a trainer's callbacks, so that its files and trackers get `alarm/...` too."""
    trainer.callback_handler.callbacks.insert(0, CollapseAlarms())


def _is_of_training(logs: Mapping[str, Any]) -> bool:
    return metrics_line(0, dict(logs))["split"] == "train"
