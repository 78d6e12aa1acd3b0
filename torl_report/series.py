"""The page's curves: which metrics stand in which panel, and a run's points for them.

    sections, missing = draw_sections({"tiny": read_metrics(folder)}, METRIC_SECTIONS)

One run: a colour for each metric of a panel. Several runs: a colour for each run, and each metric has its own panel.
The result is plain data for page.js; a panel of which no run logged anything is not in it, `missing` names it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torl_report.curves import Points, metric_points, running_mean
from torl_report.paper import PAPER_CURVES
from torl_trl.filters import Drop

Lines = Sequence[Mapping[str, Any]]
"""Lines of a run's metrics.jsonl."""

MAX_POINTS = 600
"""A curve of more points is thinned to every second, third, ... of them; its mean is taken before."""
SMOOTH_ABOVE = 40
"""A curve of more points is drawn pale, with its running mean over it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes of curves. `metrics` maps a metric to its label; `prefix` adds whatever the runs logged under it.

    A share has the fixed range 0 to 1. Where evaluation measures the same, `has_eval` draws it too.
    """

    title: str
    unit: str
    metrics: Mapping[str, str]
    prefix: str | None = None
    is_share: bool = False
    has_eval: bool = True


def _share(title: str, unit: str, **metrics: str) -> Panel:
    """A panel of shares, of metrics under tools/."""
    return Panel(title, unit, {f"tools/{name}": label for name, label in metrics.items()}, is_share=True)


METRIC_SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward", "mean reward", {"reward": "reward"}),
        Panel("Accuracy", "share of completions", {"accuracy": "accuracy"}, is_share=True),
        _share(
            "Accuracy by use of code",
            "share of completions",
            accuracy_with_code="with executed code",
            accuracy_without_code="without executed code",
        ),
        Panel(
            "Groups that teach nothing",
            "share of groups whose rewards are all equal",
            {"frac_reward_zero_std": "equal rewards"},
            is_share=True,
            has_eval=False,
        ),
    ),
    "Use of code (the paper's Figure 5)": (
        _share("Code ratio", "share of completions with code", code_ratio="code ratio"),
        _share("Pass ratio", "share of executed code that ran without error", pass_ratio="pass ratio"),
        _share(
            "Pass ratio by outcome",
            "share of executed code that ran without error",
            pass_ratio_correct="answer right",
            pass_ratio_incorrect="answer wrong",
        ),
        _share(
            "Effective code",
            "share of code blocks",
            executed_code_ratio="executed",
            code_before_answer_ratio="before the answer",
        ),
    ),
    "Tool calls": (
        Panel(
            "Calls",
            "mean number per completion",
            {
                "tools/call_frequency": "executed",
                "tools/malformed_call": "malformed",
                "tools/hallucinated_output": "output made up by the model",
            },
        ),
        Panel("Interpreter statuses", "calls per log", {}, prefix="tools/status/", has_eval=False),
        Panel(
            "Time of a call",
            "seconds, mean",
            {"tools/seconds_mean": "running", "tools/queue_seconds_mean": "in the queue"},
            has_eval=False,
        ),
        Panel("Observations", "inserted tokens per completion", {"tools/observation_tokens": "observation tokens"}),
    ),
    "Text": (
        Panel(
            "Completion length",
            "model tokens",
            {
                "completions/mean_length": "mean",
                "completions/max_length": "longest",
                "completions/min_length": "shortest",
            },
        ),
        Panel("Stop reasons", "share of completions", {}, prefix="stop/", is_share=True),
        Panel("Sentinels", "share of completions", {"repetition": "ends in a loop"}, prefix="sentinel/"),
    ),
    "Filters and alarms": (
        Panel(
            "Left out of the loss",
            "share of all sampled rollouts",
            {f"filter/{reason}": reason.replace("_", " ") for reason in Drop},
            is_share=True,
            has_eval=False,
        ),
        Panel(
            "Full groups",
            "share of the step's groups that train",
            {"filter/full": "full"},
            is_share=True,
            has_eval=False,
        ),
        Panel(
            "Refills",
            "rollouts sampled beyond the step's own, for each of those",
            {"filter/extra_generation": "extra"},
            has_eval=False,
        ),
        Panel("Alarms", "1: on", {}, prefix="alarm/", is_share=True, has_eval=False),
    ),
    "Optimisation": (
        Panel("Entropy", "nats per token", {"entropy": "entropy"}, has_eval=False),
        Panel("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, has_eval=False),
        Panel(
            "Clip ratios",
            "share of tokens",
            {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/region_mean": "either"},
            has_eval=False,
        ),
        Panel("Importance-sampling ratio", "ratio", {}, prefix="sampling/importance_sampling_ratio/", has_eval=False),
        Panel(
            "Sampler and trainer apart",
            "difference of a token's logprob",
            {},
            prefix="sampling/sampling_logp_difference/",
            has_eval=False,
        ),
        Panel("Learning rate", "", {"learning_rate": "learning rate"}, has_eval=False),
    ),
    "Time": (
        Panel("Time of a step", "seconds", {"step_time": "whole step"}, prefix="time/", has_eval=False),
        Panel("Sampling speed", "tokens per second and rank", {"rollout/tokens_per_second": "tokens"}, has_eval=False),
        Panel(
            "Waiting",
            "share of the rollout phase",
            {"rollout/engine_idle_share": "engine idle", "rollout/tool_wait_share": "rollout waits for its calls"},
            is_share=True,
            has_eval=False,
        ),
        Panel(
            "Prefill computed again",
            "tokens per rollout",
            {"rollout/prefill_recomputed_tokens": "recomputed"},
            has_eval=False,
        ),
    ),
}


def draw_sections(
    runs: Mapping[str, Lines], sections: Mapping[str, Sequence[Panel]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what page.js draws, [{heading, panels, zero}], and the titles of panels that no run logged anything of.

    `zero` names metrics that were 0 throughout, beside others of their panel: they have no curve. A panel is {title,
    unit, share, curves}, a curve {name, label, kind, color, x, y}, for many points with `mean`; kind "train", "eval"
    or "paper"; `color` is a place in the page's palette, null for the paper's beside a single metric or several runs.
    """
    drawn, missing = [], []
    for heading, panels in sections.items():
        section: dict[str, Any] = {"heading": heading, "panels": [], "zero": []}
        for panel in panels:
            whole = _whole(panel, runs)
            curves = {metric: _curves(metric, place, whole, runs) for place, metric in enumerate(whole.metrics)}
            logged = {metric: found for metric, found in curves.items() if found}
            zero = [metric for metric, found in logged.items() if not any(any(curve["y"]) for curve in found)]
            zero = zero if len(whole.metrics) > 1 else []
            section["panels"] += _panels(whole, {m: found for m, found in logged.items() if m not in zero}, len(runs))
            if zero:
                section["zero"].append(f"{panel.title} ({', '.join(whole.metrics[metric] for metric in zero)})")
            if not logged:
                missing.append(f"{panel.title} ({panel.prefix}*)" if panel.prefix else panel.title)
        if section["panels"] or section["zero"]:
            drawn.append(section)
    return drawn, missing


def _whole(panel: Panel, runs: Mapping[str, Lines]) -> Panel:
    """The panel with the metrics under its prefix, in the order in which they were logged."""
    if panel.prefix is None:
        return panel
    logged = dict.fromkeys(name for lines in runs.values() for line in lines for name in line)
    found = {
        name: name.removeprefix(panel.prefix).replace("_", " ") for name in logged if name.startswith(panel.prefix)
    }
    return Panel(panel.title, panel.unit, {**panel.metrics, **found}, None, panel.is_share, panel.has_eval)


def _curves(metric: str, place: int, panel: Panel, runs: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """The runs' curves of a metric, the `place`-th of its panel."""
    label = panel.metrics[metric]
    curves = []
    for run_place, (run, lines) in enumerate(runs.items()):
        for split in ("train", "eval") if panel.has_eval else ("train",):
            points = [point for point in metric_points(lines, split, metric) if math.isfinite(point[1])]
            if not points:
                continue
            if len(runs) > 1:
                name, color = run, run_place
            elif len(panel.metrics) == 1:
                name, color = ("training", 0) if split == "train" else ("held out", 1)
            else:  # one entry of the legend for training and held out
                name, color = label, place
            curves.append({"name": name, "label": label, "kind": split, "color": color} | _xy(points))
    return curves


def _panels(panel: Panel, curves: Mapping[str, list[dict[str, Any]]], runs: int) -> list[dict[str, Any]]:
    """The panel with its curves and the paper's; of several runs one panel for each metric."""
    facts = {"title": panel.title, "unit": panel.unit, "share": panel.is_share}
    single = len(panel.metrics) == 1
    if runs > 1:
        return [
            facts
            | ({} if single else {"title": f"{panel.title}: {panel.metrics[metric]}"})
            | {"curves": ours + _paper_curves(metric, panel.metrics[metric], None)}
            for metric, ours in curves.items()
        ]
    all_curves = []
    for metric, ours in curves.items():
        all_curves += ours + _paper_curves(metric, panel.metrics[metric], None if single else ours[0]["color"])
    return [facts | {"curves": all_curves}] if all_curves else []


def _paper_curves(metric: str, label: str, color: int | None) -> list[dict[str, Any]]:
    return [
        {
            "name": paper.name if color is None else f"{paper.name}, {label}",
            "label": paper.figure,
            "kind": "paper",
            "color": color,
            "x": [step for step, _ in paper.points],
            "y": [value for _, value in paper.points],
        }
        for paper in PAPER_CURVES
        if paper.metric == metric
    ]


def _xy(points: Points) -> dict[str, list[float]]:
    every = math.ceil(len(points) / MAX_POINTS)
    values = [value for _, value in points]
    data = {"x": [step for step, _ in points[::every]], "y": [_short(value) for value in values[::every]]}
    if len(points) > SMOOTH_ABOVE:
        mean = running_mean(values, max(5, len(values) // 20))
        data["mean"] = [_short(value) for value in mean[::every]]
    return data


def _short(value: float) -> float:
    return float(f"{value:.5g}")
