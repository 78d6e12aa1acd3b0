"""The figure of stability.py: held-out accuracy against the tokens that it took, and how full the steps were."""

from collections.abc import Callable, Mapping
from pathlib import Path

from comparison import DASHES, PALETTE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from stability_measures import read_evaluations, read_sampled, tokens_until

from torl_report.curves import Points, finish, save, style

Runs = Mapping[str, Mapping[int, Path]]
"""Run folders by variant ("task/switches") and seed."""


def accuracy_by_tokens(folder: Path) -> Points:
    """(thousands of tokens sampled for training, held-out accuracy)."""
    batches = read_sampled(folder)
    return [(tokens_until(step, batches) / 1000, accuracy) for step, accuracy in read_evaluations(folder)]


def live_groups_by_step(folder: Path) -> Points:
    """(step, groups that train, surplus left out)."""
    return [(batch.step, batch.live_groups) for batch in read_sampled(folder)]


SHOWN = {"tiny": ("paper", "plus", "clip_higher"), "hard": ("paper", "plus", "void"), "dead": ("paper", "refill")}
"""The switches whose runs are drawn, by task; more lines could not be told apart."""
PANELS: tuple[tuple[str, str, str, str, Callable[[Path], Points]], ...] = (
    ("tiny", "Tiny task", "held-out accuracy", "thousand tokens sampled", accuracy_by_tokens),
    ("hard", "Hard task, C = 3", "held-out accuracy", "thousand tokens sampled", accuracy_by_tokens),
    ("dead", "60 % of groups dead", "groups that train", "step", live_groups_by_step),
)
"""Task, title, units of y and x, and what is drawn of a run."""


def draw_stability(runs: Runs, path: Path) -> Path:
    """Draw a panel per task at `path`: a colour per variant, a line per seed."""
    figure = Figure(figsize=(4.6 * len(PANELS), 3.9), dpi=130, layout="constrained")
    for axes, (task, title, unit, along, points_of) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        style(axes, title, unit, is_share=points_of is accuracy_by_tokens)
        axes.set_xlabel(along)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        for index, switches in enumerate(SHOWN[task]):
            lines = [points_of(run) for run in runs.get(f"{task}/{switches}", {}).values()]
            draw_variant(axes, switches, lines, index)
        if points_of is live_groups_by_step:
            axes.set_ylim(bottom=0)
        finish(axes)
    return save(figure, path)


def draw_variant(axes: Axes, name: str, lines: list[Points], index: int) -> None:
    for number, points in enumerate(lines):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=PALETTE[index],
            linestyle=DASHES[index % len(DASHES)],
            linewidth=1.5,
            alpha=0.8,
            label=None if number else name,
        )
