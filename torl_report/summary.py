"""What a run learned in a few numbers: its first evaluation beside its last, for terminal and model card."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torl_trl.run_folder import METRICS_NAME, read_metrics

SUMMARY_METRICS = {
    "accuracy": "accuracy",
    "tools/code_ratio": "completions with code",
    "tools/pass_ratio": "executed code that ran",
    "tools/executed_code_ratio": "code that was executed",
    "tools/accuracy_with_code": "accuracy where code was executed",
    "tools/call_frequency": "calls per completion",
}
"""Metrics of the summary, and what they are called there."""


@dataclass(frozen=True, slots=True)
class Summary:
    """First and last line of metrics, of evaluation ("eval") where a run has it, else of training ("train").

    `last_step` is that of all lines.
    """

    split: str
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    last_step: int

    @property
    def labels(self) -> dict[str, str]:
        """The metrics to show and what they are called: `SUMMARY_METRICS`, and each benchmark's average."""
        return SUMMARY_METRICS | {name: name for name in self.last if "/avg@" in name}


def summarize_run(run_folder: Path) -> Summary | None:
    """Return the summary of a run's metrics, or None if nothing was logged."""
    lines = read_metrics(run_folder) if (run_folder / METRICS_NAME).exists() else []
    split = "eval" if any(line["split"] == "eval" for line in lines) else "train"
    measured = [line for line in lines if line["split"] == split]
    if not measured:
        return None
    return Summary(split, measured[0], measured[-1], max(line["step"] for line in lines))
