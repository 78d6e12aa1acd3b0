"""The ablation bench counts what a run's folder says: tokens, waste, full batches, when a threshold was reached."""

import json

import pytest
import stability
import yaml
from report_runs import rollout
from stability_measures import measure, read_sampled
from stability_variants import DEAD_SHARE, RECIPE, SWITCHES, VARIANTS, write_problems

from torl_trl.command_line import parse_arguments
from torl_trl.records import rollouts_path, write_rollouts
from torl_trl.run_folder import read_metrics

LIVE, DEAD = (1.0, -1.0), (0.0, 0.0)


def batch(step, *groups, reasons=()):
    """Rows of a step: a pair of advantages per group; `reasons` by (group, index) are why a rollout was dropped."""
    reasons = dict(reasons)
    return [
        rollout(step, group, index, advantage=advantage, dropped=reasons.get((group, index)))
        for group, advantages in enumerate(groups)
        for index, advantage in enumerate(advantages)
    ]


@pytest.fixture
def folder(tmp_path):
    """A run of four steps that asks for two groups of two; batches serve two steps each."""
    config = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "num_generations": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    evaluations = {0: 0.2, 1: 0.8, 2: 0.7, 4: 0.9}
    lines = [{"step": step, "split": "eval", "accuracy": accuracy} for step, accuracy in evaluations.items()]
    lines += [{"step": step, "split": "train", "grad_norm": 0.1 * step} for step in range(1, 5)]
    lines += [{"step": 4, "split": "summary", "train_runtime": 12.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    surplus = {(3, index): "surplus" for index in range(2)} | {(0, 1): "void_turn"}
    write_rollouts(rollouts_path(tmp_path, 1, "train"), batch(1, LIVE, DEAD, LIVE, LIVE, reasons=surplus))
    write_rollouts(rollouts_path(tmp_path, 3, "train"), batch(3, LIVE, DEAD))
    write_rollouts(rollouts_path(tmp_path, 4, "eval"), [rollout(4, split="eval")])
    return tmp_path


def test_a_rollout_is_wasted_when_it_was_dropped_or_has_no_advantage(folder):
    first, second = read_sampled(folder)
    assert (first.rollouts, first.trained, first.groups, first.live_groups) == (8, 3, 4, 2)
    assert (second.rollouts, second.trained, second.groups, second.live_groups) == (4, 2, 2, 1)
    assert measure(folder)["wasted"] == pytest.approx(7 / 12)


def test_a_batch_is_full_when_as_many_groups_train_as_were_asked_for(folder):
    measured = measure(folder)
    assert measured["full_steps"] == 0.5
    assert measured["extra_generation"] == 0.5
    assert measured["dead_groups"] == pytest.approx(3 / 6)


def test_tokens_are_the_model_s_own_of_every_sampled_rollout_until_the_evaluation(folder):
    own = sum(sum(row["env_mask"]) for row in batch(1, LIVE)) // 2
    measured = measure(folder)
    assert (measured["steps_to_0.8"], measured["tokens_to_0.8"]) == (1, 8 * own)
    assert (measured["steps_to_0.85"], measured["tokens_to_0.85"]) == (4, 12 * own)
    assert measured["tokens"] == 12 * own


def test_the_largest_drop_is_between_two_evaluations_in_a_row(folder):
    measured = measure(folder)
    assert measured["largest_drop"] == pytest.approx(0.1)
    assert (measured["final_accuracy"], measured["best_accuracy"]) == (0.9, 0.9)
    assert measured["largest_gradient"] == pytest.approx(0.4)


def test_a_run_without_its_tokens_is_refused(folder):
    write_rollouts(rollouts_path(folder, 3, "train"), [rollout(3, full=False, env_mask=None)])
    with pytest.raises(ValueError, match="save_rollouts_every: 1"):
        measure(folder)


def test_the_table_has_means_over_seeds_and_says_which_seeds_never_came_there(folder):
    reached = measure(folder)
    never = {name: value for name, value in reached.items() if "0.85" not in name} | {"final_accuracy": 0.7}
    rows = stability.table({"tiny/paper": {1: reached, 2: never}}).splitlines()[2:]
    assert rows[0].startswith("| **tiny/paper** | 1 2 | 0.800 | 1 | in 1 of 2 |")
    assert rows[2].startswith("| seed 2 | 2 | 0.700 | 1 | - |")


def test_variants_are_chosen_by_pattern_and_a_pattern_without_any_is_said():
    assert stability.chosen(["dead/*"]) == ["dead/refill", "dead/paper"]
    with pytest.raises(ValueError, match="matches none of tiny/paper"):
        stability.chosen(["tiny"])


def test_a_variant_that_trains_twice_on_a_batch_makes_twice_the_steps_of_the_same_batches(tmp_path):
    problems = write_problems(tmp_path)
    paper, plus = (VARIANTS[f"tiny/{name}"].options(problems, steps=10) for name in ("paper", "plus"))
    assert (paper["max_steps"], plus["max_steps"]) == (10, 20)
    assert plus["eval_steps"] == 2 * paper["eval_steps"]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_recipe_takes_the_options_of_every_variant(name, tmp_path):
    options = VARIANTS[name].options(write_problems(tmp_path))
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    _, args, _ = parse_arguments(["--config", "tiny.yaml", *words], RECIPE.parent)
    assert all(getattr(args, option) == value for option, value in options.items() if hasattr(args, option) and value)


def test_plus_is_what_the_plus_recipe_switches_on():
    recipe = yaml.safe_load((RECIPE.parent / "qwen1.5b_plus.yaml").read_text(encoding="utf-8"))
    plus = SWITCHES["plus"]
    assert {option: recipe[option] for option in plus} == plus


def test_a_share_of_the_dead_task_has_no_right_answer_and_the_rest_is_as_it_was(tmp_path):
    (path,) = write_problems(tmp_path).values()
    before, after = (
        [json.loads(line) for line in text.splitlines()]
        for text in ((RECIPE / "train.jsonl").read_text(), path.read_text())
    )
    changed = [row["answer"] != old["answer"] for old, row in zip(before, after, strict=True)]
    assert sum(changed) == DEAD_SHARE * len(before)
    assert all(row["problem"] == old["problem"] for old, row in zip(before, after, strict=True))


def test_finished_runs_are_found_by_variant_and_seed(folder, tmp_path):
    assert read_metrics(folder)[-1]["split"] == "summary"
    target = tmp_path / "runs" / "tiny" / "no_std_seed2"
    target.mkdir(parents=True)
    (target / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text())
    (tmp_path / "runs" / "tiny" / "paper_seed1").mkdir()
    assert stability.finished_runs(tmp_path / "runs") == {"tiny/no_std": {2: target}}
