"""A figure of several runs over each other: a panel per metric, a colour per setting, a band over its seeds."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torl_report.curves import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILION,
    Curve,
    Points,
    finish,
    metric_points,
    save,
    style,
)
from torl_trl.run_folder import read_metrics

PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, "#56B4E9")
DASHES = ("-", "--", "-.", ":")

COMPARED = (
    Curve("eval", "accuracy", "Accuracy, held out", ""),
    Curve("train", "tools/code_ratio", "Completions with code", ""),
    Curve("train", "tools/executed_code_ratio", "Code that was executed", ""),
)
"""What `draw_comparison` shows: a panel per curve, its label the title."""


def draw_comparison(named_runs: Mapping[str, Sequence[Path]], path: Path, metrics: Sequence[Curve] = COMPARED) -> Path:
    """Overlay runs at `path`, a panel per metric: each name's median line and min to max band over its runs (seeds).

    At each step the median is over the runs that logged the metric there. Raises what `read_metrics` raises.
    """
    figure = Figure(figsize=(4.6 * len(metrics), 3.9), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    lines = {name: [read_metrics(Path(folder)) for folder in folders] for name, folders in named_runs.items()}
    for axes, curve in zip(panels, metrics, strict=True):
        in_range = True
        for index, (name, runs) in enumerate(lines.items()):
            points = [metric_points(run, curve.split, curve.metric) for run in runs]
            in_range = in_range and all(0 <= value <= 1 for run in points for _, value in run)
            draw_band(axes, name, points, index, curve.split == "eval")
        style(axes, curve.label, "", is_share=in_range)
        finish(axes)
    return save(figure, Path(path))


def draw_band(axes: Axes, name: str, runs: Sequence[Points], index: int, markers: bool) -> None:
    at_step: dict[float, list[float]] = {}
    for points in runs:
        for step, value in points:
            at_step.setdefault(step, []).append(value)
    if not at_step:
        return
    steps = sorted(at_step)
    color, dashes = PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)]
    low, high = [min(at_step[step]) for step in steps], [max(at_step[step]) for step in steps]
    axes.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
    axes.plot(
        steps,
        [statistics.median(at_step[step]) for step in steps],
        color=color,
        linestyle=dashes,
        linewidth=2,
        marker="o" if markers else None,
        markersize=4.5,
        label=name,
    )
