"""The report page: what is in it. What it does in a browser is in test_report_browser.py."""

import base64
import gzip
import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from report_runs import HOSTILE, rollout, write_run

import torl_report
from torl_report import page as page_module
from torl_report.page import build_page
from torl_report.paper import PAPER_CURVES
from torl_report.sampling import choose_groups, read_groups
from torl_report.series import MAX_POINTS, METRIC_SECTIONS, draw_sections
from torl_trl.errors import UserError
from torl_trl.filters import Drop
from torl_trl.records import write_rollouts

LINES = [
    {"step": 0, "split": "eval", "accuracy": 0.1},
    *({"step": step, "split": "train", "accuracy": step / 10, "tools/status/ok": 5.0} for step in range(1, 4)),
    {"step": 3, "split": "eval", "accuracy": 0.4},
    {"step": 3, "split": "summary", "train_runtime": 1.0},
]


def data_of(path):
    """What the page holds for its script."""
    packed = re.search(r'id="data">([^<]*)<', path.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def panels_of(sections):
    return {panel["title"]: panel for section in sections for panel in section["panels"]}


def groups_of(steps, per_step=4, members=2, **facts):
    return [
        rollout(step, group, index, prose=f"{step} {group} {index} " * 20, **facts)
        for step in steps
        for group in range(per_step)
        for index in range(members)
    ]


# --- The page -------------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_that_names_no_address(tmp_path):
    run = write_run(tmp_path / "run", [rollout()], LINES)
    path = build_page([run])
    assert path == run / "report.html"
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert not re.search(r"\{\{\w+\}\}", text)
    assert path.stat().st_size < 3_000_000


def test_a_page_is_made_while_a_line_is_half_written(tmp_path):
    run = write_run(tmp_path, [], LINES)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "spl')
    accuracy = panels_of(data_of(build_page([run]))["sections"])["Accuracy"]
    assert [curve["x"] for curve in accuracy["curves"] if curve["kind"] != "paper"] == [[1, 2, 3], [0, 3]]


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    data = data_of(build_page([write_run(tmp_path)], tmp_path / "page.html"))
    assert (data["sections"], data["recorded"], data["rollouts"]) == ([], 0, [])


@pytest.mark.parametrize("name", ["nothing", "absent"])
def test_a_folder_that_is_no_run_is_refused_in_one_sentence(tmp_path, name):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"has neither metrics.jsonl nor .* name the output_dir"):
        build_page([tmp_path / name])


def test_text_of_models_stays_out_of_the_markup_and_arrives_whole(tmp_path):
    row = rollout(prose=HOSTILE, prompt=HOSTILE, solution=HOSTILE, extracted=HOSTILE, problem_id=HOSTILE)
    path = build_page([write_run(tmp_path / "<img src=x>", [row])])
    assert "hacked" not in path.read_text()
    assert "<img" not in path.read_text()
    (group,) = data_of(path)["rollouts"]
    assert group["prompt"] == HOSTILE
    assert group["rollouts"][0]["pieces"][0] == [0, f"{HOSTILE}\n"]


def test_several_runs_are_compared_a_colour_each(tmp_path):
    runs = [write_run(tmp_path / name, [rollout()], LINES) for name in ("a", "b")]
    for run, rate in zip(runs, ("1e-4", "1e-5"), strict=True):
        (run / "config.yaml").write_text(f"learning_rate: {rate}\nseed: 1\n")
    data = data_of(build_page(runs))
    curves = panels_of(data["sections"])["Accuracy"]["curves"]
    assert [(curve["name"], curve["kind"], curve["color"]) for curve in curves if curve["kind"] != "paper"] == [
        ("a", "train", 0),
        ("a", "eval", 0),
        ("b", "train", 1),
        ("b", "eval", 1),
    ]
    assert {curve["color"] for curve in curves if curve["kind"] == "paper"} == {None}
    assert data["differences"] == [["learning_rate", "1e-4", "1e-5"]]
    assert [group["run"] for group in data["rollouts"]] == [0, 1]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    runs = [write_run(tmp_path / parent / "run", [], LINES) for parent in ("a", "b")]
    assert [run["name"] for run in data_of(build_page(runs))["runs"]] == [str(run) for run in runs]


def test_an_evaluation_shows_its_results_and_its_benchmarks_as_splits(tmp_path):
    write_rollouts(tmp_path / "rollouts" / "aime24.parquet", [rollout(0, split="eval")])
    result = {"rows": 30, "samples": 4, "avg": 0.25, "se_problems": 0.05, "maj": 0.3}
    evaluation = {"benchmarks": {"aime24": result}, "mean": 0.25, "settings": {"temperature": 0}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    data = data_of(build_page([tmp_path]))
    table = data["runs"][0]["evaluation"]
    assert table["rows"] == [["aime24", 30, 4, 0.25, 0.05, 0.3], ["mean", "", "", 0.25, "", ""]]
    assert "temperature" in data["runs"][0]["settings"]
    assert [group["split"] for group in data["rollouts"]] == ["aime24"]


def test_a_run_says_how_it_is_repeated_and_with_what_it_was_made(tmp_path):
    data_folder = tmp_path / "data"
    data_folder.mkdir()
    (data_folder / "train.jsonl").touch()
    (data_folder / "README.md").write_text("# Our problems")
    run = write_run(tmp_path / "a run", [], LINES)
    (run / "config.yaml").write_text(f"dataset_name: {data_folder / 'train.jsonl'}\n")
    (run / "README.md").write_text("# Card\n\n### Framework versions\n\n- TRL: 1.16.0\n- Pytorch: 2.13.0\n\n## More\n")
    data = data_of(build_page([run]))
    facts = data["runs"][0]
    assert facts["command"] == f"accelerate launch recipes/grpo_torl.py --config '{run / 'config.yaml'}'"
    assert facts["config"].startswith("dataset_name:")
    assert facts["versions"] == ["TRL: 1.16.0", "Pytorch: 2.13.0"]
    assert facts["card"] == "# Our problems"
    assert {"python", "torch", "trl", "system", "GPUs"} <= data["machine"].keys()


def test_a_large_run_makes_a_page_of_bounded_size(tmp_path, monkeypatch):
    plain = build_page([write_run(tmp_path / "none", [], LINES)]).stat().st_size
    run = write_run(tmp_path / "run", groups_of(range(1, 41)), LINES)
    monkeypatch.setattr(page_module, "PAGE_BYTES", plain + 12_000)
    path = build_page([run])
    data = data_of(path)
    shown = sum(len(group["rollouts"]) for group in data["rollouts"])
    assert (data["recorded"], data["withText"]) == (320, 320)
    assert 20 < shown < 320
    assert path.stat().st_size < plain + 16_000


def test_the_files_of_the_page_belong_to_the_package():
    folder = Path(torl_report.__file__).parent
    patterns = tomllib.loads((folder.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path.name for pattern in patterns["torl_report"] for path in folder.glob(pattern)}
    assert packaged == {"page.html", "page.css", "page.js"}


# --- Curves ---------------------------------------------------------------------------------------------------------


def test_curves_say_what_was_not_logged_and_what_was_always_zero():
    lines = [
        {"step": step, "split": "train", "tools/status/ok": 3.0, "tools/status/timeout": 0.0, "reward": 0.0}
        for step in range(3)
    ]
    sections, missing = draw_sections({"run": lines}, METRIC_SECTIONS)
    assert [section["zero"] for section in sections] == [[], ["Interpreter statuses (timeout)"]]
    assert [curve["name"] for curve in panels_of(sections)["Interpreter statuses"]["curves"]] == ["ok"]
    assert panels_of(sections)["Reward"]["curves"][0]["y"] == [0, 0, 0]
    assert {"Entropy", "Importance-sampling ratio (sampling/importance_sampling_ratio/*)"} <= set(missing)


def test_filters_and_alarms_have_curves_of_their_own():
    metrics = {f"filter/{reason}": 0.0 for reason in Drop} | {"filter/dead_group": 0.6, "filter/full": 0.9}
    metrics |= {"filter/extra_generation": 1.5, "alarm/entropy": 1.0, "alarm/repetition": 0.0, "repetition": 0.2}
    sections, _ = draw_sections({"run": [{"step": 1, "split": "train"} | metrics]}, METRIC_SECTIONS)
    drawn = {title: [curve["name"] for curve in panel["curves"]] for title, panel in panels_of(sections).items()}
    assert drawn == {
        "Sentinels": ["training"],
        "Left out of the loss": ["dead group"],
        "Full groups": ["training"],
        "Refills": ["training"],
        "Alarms": ["entropy"],
    }
    (section,) = [section for section in sections if section["heading"] == "Filters and alarms"]
    assert "Alarms (repetition)" in section["zero"]


def test_the_papers_curves_stand_beside_ours_and_only_there():
    metrics = {curve.metric: 0.5 for curve in PAPER_CURVES}
    sections, _ = draw_sections({"run": [{"step": 1, "split": "train"} | metrics]}, METRIC_SECTIONS)
    drawn = [curve for panel in panels_of(sections).values() for curve in panel["curves"] if curve["kind"] == "paper"]
    assert len(drawn) == len(PAPER_CURVES)
    assert all(curve.points[0][0] == 0 and min(value for _, value in curve.points) > -1.1 for curve in PAPER_CURVES)
    sections, _ = draw_sections({"run": [{"step": 1, "split": "train", "entropy": 0.5}]}, METRIC_SECTIONS)
    assert [curve["kind"] for curve in panels_of(sections)["Entropy"]["curves"]] == ["train"]


def test_a_long_curve_is_thinned_and_has_its_mean():
    lines = [{"step": step, "split": "train", "reward": step % 2} for step in range(2 * MAX_POINTS + 1)]
    sections, _ = draw_sections({"run": lines}, METRIC_SECTIONS)
    curve = panels_of(sections)["Reward"]["curves"][0]
    assert len(curve["x"]) == len(curve["y"]) == len(curve["mean"]) <= MAX_POINTS
    assert curve["mean"][300] == pytest.approx(0.5, abs=0.01)


def test_values_that_are_no_numbers_are_left_out():
    lines = [{"step": step, "split": "train", "reward": value} for step, value in enumerate([1.0, float("nan"), None])]
    sections, _ = draw_sections({"run": lines}, METRIC_SECTIONS)
    assert panels_of(sections)["Reward"]["curves"][0]["y"] == [1.0]


# --- Rollouts -------------------------------------------------------------------------------------------------------


def test_a_completion_is_cut_into_text_code_and_what_was_inserted(tmp_path):
    (group,) = data_of(build_page([write_run(tmp_path, [rollout(prose="Hm.", code="print(17)")])]))["rollouts"]
    assert group["rollouts"][0]["pieces"] == [
        [0, "Hm.\n"],
        [1, "```python\nprint(17)\n```"],
        [0, "\n```output"],
        [2, "\n17\n```\n"],
        [0, "So \\boxed{17}."],
    ]
    assert group["rollouts"][0]["calls"] == [["ok", 0.25, 0.5]]


def test_rollouts_without_text_are_counted_and_not_shown(tmp_path):
    heavy = dict.fromkeys(("prompt", "completion", "prompt_ids", "completion_ids", "env_mask", "segments", "calls"))
    run = write_run(tmp_path, [rollout(), rollout(group=1, full=False, **heavy), rollout(2), rollout(2, 1)])
    old = tmp_path / "rollouts" / "step_000002.parquet"
    pq.write_table(pq.read_table(old).drop_columns(["segments"]), old)
    stored = read_groups(run)
    assert (stored.recorded, stored.with_text, stored.without_segments) == (4, 1, 2)
    assert len(stored.groups) == 1


def test_a_budget_keeps_whole_groups_spread_evenly_over_the_steps(tmp_path):
    groups = read_groups(write_run(tmp_path, groups_of(range(1, 33), per_step=2, members=4))).groups
    total = sum(len(group.packed) for group in groups)
    budget = total // 8
    chosen = choose_groups(groups, budget)
    assert all(group.rollouts == 4 for group in chosen)
    assert budget * 0.8 < sum(len(group.packed) for group in chosen) <= budget
    steps = [group.step for group in chosen]
    assert steps == sorted(set(steps))
    assert max(later - step for step, later in pairwise(steps)) <= 2 * 32 / len(steps)
    assert choose_groups(groups, total) == groups
    assert choose_groups(groups, 0) == []


def test_a_budget_keeps_some_of_each_label(tmp_path):
    rows = groups_of(range(1, 33), per_step=2)
    for place in (17, 40, 91):
        rows[place] = rows[place] | {"correct": False}  # although the program printed the solution
    stored = read_groups(write_run(tmp_path, rows))
    chosen = choose_groups(stored.groups, sum(len(group.packed) for group in stored.groups) // 8)
    assert sum("wrong_although_code_right" in group.labels for group in chosen) == 3


def test_labels_are_counted_over_all_rollouts_with_text(tmp_path, monkeypatch):
    rows = [rollout(step, 0, index, correct=index > 0) for step in (1, 2) for index in range(4)]
    run = write_run(tmp_path, [*rows, rollout(2, split="eval", code=None)])
    monkeypatch.setattr(page_module, "PAGE_BYTES", 0)
    data = data_of(build_page([run]))
    assert data["rollouts"] == []
    counts = {label["key"]: (label["counts"], label["of"]) for label in data["labels"]}
    assert counts["wrong_although_code_right"] == ([2], [9])
    assert counts["right_without_code"] == ([1], [9])
    curves = panels_of(data["labelSections"])["Wrong although code right"]["curves"]
    assert [(curve["kind"], curve["x"], curve["y"]) for curve in curves] == [
        ("train", [1, 2], [0.25, 0.25]),
        ("eval", [2], [0.0]),
    ]
