"""What a run says on the terminal: one line a step, and a short summary at the end."""

import logging
from pathlib import Path
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from torl_report.page import PAGE_NAME
from torl_report.summary import summarize_run
from torl_trl.run_folder import CURVES_NAME, METRICS_NAME, ROLLOUTS_NAME

logger = logging.getLogger("torl_trl.console")

STEP_METRICS = {
    "reward": "reward",
    "accuracy": "accuracy",
    "tools/code_ratio": "code",
    "tools/pass_ratio": "passed",
    "tools/call_frequency": "calls",
    "completions/mean_length": "tokens",
    "step_time": "seconds",
}
"""Metrics of a step line, and what they are called there."""


class StepLines(TrainerCallback):
    """Replaces transformers' progress bar and its dump of all metrics by one line a log, on the main process."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        shown = [
            f"{label} {logs[prefix + name]:.2f}"
            for name, label in STEP_METRICS.items()
            if isinstance(logs.get(prefix + name), float)
        ]
        logger.info("%s %d/%d  %s", "eval" if prefix else "step", state.global_step, state.max_steps, "  ".join(shown))


def remove_bars(trainer: Any) -> None:
    """Take transformers' own terminal output off a trainer."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)


def log_summary(run_folder: Path) -> None:
    """Say what was learnt, first evaluation beside last, and where everything lies."""
    if (summary := summarize_run(run_folder)) is None:
        logger.info("Nothing was logged: logging_steps is larger than the number of steps.")
        return
    first, last = summary.first, summary.last
    logger.info("")
    logger.info(
        "%-34s %10s %10s",
        "held-out problems" if summary.split == "eval" else "training",
        *(f"step {line['step']}" for line in (first, last)),
    )
    for name, label in summary.labels.items():
        values = [f"{line[name]:.2f}" if line.get(name) is not None else "-" for line in (first, last)]
        logger.info("%-34s %10s %10s", label, *values)
    logger.info("")
    checkpoint = run_folder / f"checkpoint-{summary.last_step}"
    for label, path in (
        ("report", run_folder / PAGE_NAME),
        ("figure", run_folder / CURVES_NAME),
        ("metrics", run_folder / METRICS_NAME),
        ("rollouts", run_folder / ROLLOUTS_NAME),
        ("checkpoint", checkpoint),
    ):
        if path.exists():
            logger.info("%-12s %s", label, path)
