"""Figures of learning curves."""

import json

import pytest
from comparison import draw_comparison
from matplotlib.image import imread

from torl_report.curves import PANELS, draw_curves, metric_points, running_mean


def write_run(folder, steps, start=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    names = {curve.metric for panel in PANELS for curve in panel.curves}
    lines = [{"step": step, "split": "train"} | dict.fromkeys(names, start + step / 100) for step in range(steps)]
    lines += [{"step": step, "split": "eval", "accuracy": start + step / 100} for step in range(0, steps, 5)]
    lines += [{"step": steps, "split": "summary", "train_runtime": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def ink(path):
    """The share of pixels that are not white."""
    return float((imread(path)[..., :3].min(axis=-1) < 0.99).mean())


@pytest.mark.parametrize("steps", [1, 12, 60])
def test_curves_are_drawn_beside_the_metrics(tmp_path, steps):
    path = draw_curves(write_run(tmp_path, steps))
    assert path == tmp_path / "curves.png"
    assert imread(path).shape[1] > 1200
    assert ink(path) > 0.01


def test_a_half_written_last_line_does_not_stop_the_figure(tmp_path):
    write_run(tmp_path, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "spl')
    assert draw_curves(tmp_path).exists()


def test_a_run_that_logged_nothing_of_a_panel_still_has_a_figure(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "reward": null}\n')
    assert draw_curves(tmp_path).exists()


def test_a_folder_without_metrics_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        draw_curves(tmp_path)


def test_runs_are_overlaid_also_when_some_lack_a_metric(tmp_path):
    runs = {
        name: [write_run(tmp_path / f"{name}{seed}", 10 + seed, start) for seed in range(3)]
        for name, start in (("C = 0", 0.1), ("C = 2", 0.4))
    }
    path = draw_comparison(runs, tmp_path / "figures" / "ablation.png")
    assert ink(path) > 0.01
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text("")
    assert draw_comparison({"none": [tmp_path / "bare"]}, tmp_path / "none.png").exists()


def test_points_leave_nulls_out_and_the_later_log_of_a_step_counts():
    lines = [
        {"step": 2, "split": "eval", "a": 0.5},
        {"step": 1, "split": "eval", "a": 0.25},
        {"step": 2, "split": "eval", "a": 0.75},
        {"step": 3, "split": "eval", "a": None},
        {"step": 3, "split": "train", "a": 1.0},
    ]
    assert metric_points(lines, "eval", "a") == [(1, 0.25), (2, 0.75)]


def test_the_running_mean_narrows_at_the_ends():
    assert running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
