"""The figure of a run: its learning curves on one page.

Drawn with matplotlib's object interface, so that nothing of a notebook's or a caller's figures is touched. Colours
are from Okabe and Ito's palette, which readers with any colour vision can tell apart.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torl_trl.run_folder import CURVES_NAME, read_metrics

BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
_INK, _GRID = "#333333", "#E3E3E3"
_SMOOTH_ABOVE = 40  # a line of more points than this is drawn pale, with its running mean over it

Points = list[tuple[float, float]]
"""(step, value), in order of step."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one split, and how it is drawn. An evaluation has markers: its points are far apart."""

    split: str
    metric: str
    label: str
    color: str
    dashes: str = "-"


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes with their curves; `unit` names the y axis, a share has the fixed range 0 to 1."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    is_share: bool = False


PANELS = (
    Panel(
        "Reward",
        "mean reward",
        (Curve("train", "reward", "training", BLUE), Curve("eval", "reward", "held out", VERMILION)),
    ),
    Panel(
        "Accuracy",
        "share of completions",
        (Curve("train", "accuracy", "training", BLUE), Curve("eval", "accuracy", "held out", VERMILION)),
        is_share=True,
    ),
    Panel(
        "Use of code",
        "ratio",
        (
            Curve("train", "tools/code_ratio", "completions with code", BLUE),
            Curve("train", "tools/executed_code_ratio", "code that was executed", GREEN, "--"),
            Curve("train", "tools/code_before_answer_ratio", "code before the answer", ORANGE, "-."),
        ),
        is_share=True,
    ),
    Panel(
        "Code that runs without error",
        "share of executed code",
        (
            Curve("train", "tools/pass_ratio", "all", _INK),
            Curve("train", "tools/pass_ratio_correct", "answer correct", BLUE, "--"),
            Curve("train", "tools/pass_ratio_incorrect", "answer incorrect", VERMILION, "-."),
        ),
        is_share=True,
    ),
    Panel(
        "Completion length",
        "model tokens, mean",
        (
            Curve("train", "completions/mean_length", "training", BLUE),
            Curve("eval", "completions/mean_length", "held out", VERMILION),
        ),
    ),
    Panel(
        "Time of a step",
        "seconds",
        (
            Curve("train", "time/generating", "generating", BLUE),
            Curve("train", "time/training", "training", VERMILION, "--"),
            Curve("train", "time/waiting", "waiting for code", ORANGE, "-."),
            Curve("train", "time/grading", "grading", PURPLE, ":"),
            Curve("train", "time/executing", "executing (all calls)", GREEN, (0, (1, 1.5))),
        ),
    ),
)


def draw_curves(run_folder: Path) -> Path:
    """Draw the run's metrics.jsonl as curves.png beside it and return that path.

    Metrics that the run did not log are left out; a panel without any says so. Raises what `read_metrics` raises.
    """
    run_folder = Path(run_folder)
    lines = read_metrics(run_folder)
    figure = Figure(figsize=(13.5, 7.2), dpi=130, layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        style(axes, panel.title, panel.unit, panel.is_share)
        for curve in panel.curves:
            _draw_curve(axes, curve, metric_points(lines, curve.split, curve.metric))
        finish(axes, crowded=len(panel.curves) > 3)
    return save(figure, run_folder / CURVES_NAME)


def metric_points(lines: Sequence[Mapping[str, Any]], split: str, metric: str) -> Points:
    """Return the points of a metric, nulls left out; of two logs of one step the later counts."""
    values = {line["step"]: line[metric] for line in lines if line["split"] == split and line.get(metric) is not None}
    return sorted(values.items())


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of up to `width` values around each, fewer at the ends."""
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _draw_curve(axes: Axes, curve: Curve, points: Points) -> None:
    if not points:
        return
    steps, values = [list(column) for column in zip(*points, strict=True)]
    style = {"color": curve.color, "linestyle": curve.dashes, "linewidth": 1.8, "label": curve.label}
    if curve.split == "eval" or len(points) == 1:
        axes.plot(steps, values, marker="o", markersize=5, **style)
    elif len(points) <= _SMOOTH_ABOVE:
        axes.plot(steps, values, **style)
    else:
        axes.plot(steps, values, color=curve.color, alpha=0.25, linewidth=0.9)
        axes.plot(steps, running_mean(values, max(5, len(values) // 20)), **style)


def style(axes: Axes, title: str, unit: str, is_share: bool) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(unit, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=_INK, length=3)
    if is_share:
        axes.set_ylim(-0.02, 1.02)


def finish(axes: Axes, crowded: bool = False) -> None:
    """Add the legend, above the curves where these are so many that no corner is free."""
    if not axes.lines:
        axes.text(0.5, 0.5, "not logged in this run", transform=axes.transAxes, ha="center", va="center", color=_INK)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if crowded:
        axes.set_ylim(0, 1.45 * axes.get_ylim()[1])
    layout = {"loc": "upper left", "ncols": 2, "columnspacing": 1} if crowded else {"loc": "best"}
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=9, **layout)


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.get_layout_engine().set(wspace=0.04, hspace=0.06)
    FigureCanvasAgg(figure)
    figure.savefig(path, facecolor="white")
    return path
