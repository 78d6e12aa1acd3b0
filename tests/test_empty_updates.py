"""Updates and micro-batches without anything to train: weights, words and metrics, however TRL cuts its batches."""

import logging

import pytest
import torch
from launching import needs_deepspeed, on_two_ranks
from test_refill_training import LIVE, VOID, filtering, loss_mask
from test_trainer import RIGHT
from transformers import TrainerCallback

from torl_grading import Grader
from torl_trl.run_folder import read_metrics

ALL_VOID = [VOID] * 4
ONE_TRAINS = [VOID, VOID, VOID, RIGHT]


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=1) as grader:
        yield grader


class Updates(TrainerCallback):
    """For each update: whether it moved a weight, and how many tokens trained in it."""

    def __init__(self, trainer):
        self.trainer, self.moved, self.tokens = trainer, [], []
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        self.before = [parameter.detach().clone() for parameter in self.trainer.model.parameters()]
        self.start = self.trainer._step

    def on_step_end(self, args, state, control, **kwargs):
        pairs = zip(self.before, self.trainer.model.parameters(), strict=True)
        self.moved.append(any(not torch.equal(before, after) for before, after in pairs))
        batches, places = self.trainer._buffered_inputs, range(self.start, self.trainer._step)
        self.tokens.append(sum(int(loss_mask(batches[place % len(batches)]).sum()) for place in places))


def train_lines(folder):
    return [line for line in read_metrics(folder) if line["split"] == "train" and "loss" in line]


CUTS = {
    "an update takes two of eight micro-batches": {"steps_per_generation": 8, "gradient_accumulation_steps": 2},
    "and each is used twice": {"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "an update takes one micro-batch": {"steps_per_generation": 8, "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize("options", CUTS.values(), ids=CUTS)
def test_an_update_without_anything_to_train_leaves_the_weights_alone(options, tmp_path, grader, caplog):
    texts = dict.fromkeys(range(8), ONE_TRAINS)
    options = options | {"max_steps": 16, "weight_decay": 0.1, "per_device_train_batch_size": 1}
    trainer = filtering(tmp_path, grader, texts, drop_void_turns=True, **options)
    updates = Updates(trainer)
    with caplog.at_level(logging.WARNING, "torl_trl"):
        trainer.train()
    assert updates.moved == [tokens > 0 for tokens in updates.tokens]
    assert 0 < sum(updates.moved) < 16
    lines = train_lines(tmp_path)
    assert [line.get("filter/skipped_step") for line in lines] == [not moved for moved in updates.moved]
    said = [f"Step {line['step']} trains nothing" in caplog.text for line in lines]
    assert said == [not moved for moved in updates.moved]
    assert all("step_time" in line for line in lines)


@pytest.mark.parametrize("first", [LIVE, ALL_VOID])
def test_an_update_of_two_generation_batches_trains_with_the_one_that_has_something(first, tmp_path, grader):
    second = ALL_VOID if first is LIVE else LIVE
    texts = dict.fromkeys((0, 1), first) | dict.fromkeys((2, 3), second)
    options = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = filtering(tmp_path, grader, texts, drop_void_turns=True, **options)
    updates = Updates(trainer)
    trainer.train()
    (line,) = train_lines(tmp_path)
    assert updates.moved == [True] and line["grad_norm"] > 0 and line["filter/skipped_step"] == 0


def test_micro_batches_without_anything_to_train_are_in_no_mean(tmp_path, grader):
    texts = {0: ALL_VOID, 1: ONE_TRAINS}
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": 1}
    entropies = []
    for name, switch in {"all": {}, "one": {"drop_void_turns": True}}.items():
        filtering(tmp_path / name, grader, texts, **options, **switch).train()
        entropies.append(train_lines(tmp_path / name)[0]["entropy"])
    assert entropies[1] == pytest.approx(entropies[0], rel=0.01)  # of a random model, near ln(vocabulary)


def test_rollouts_that_are_left_out_keep_their_length_in_the_metrics(tmp_path, grader):
    lines = []
    for name, switch in {"all": {}, "live": {"drop_dead_groups": True}, "none": {"drop_void_turns": True}}.items():
        texts = {0: ALL_VOID, 1: ALL_VOID} if name == "none" else {1: LIVE}
        filtering(tmp_path / name, grader, texts, max_steps=1, **switch).train()
        lines.append(train_lines(tmp_path / name)[0])
    measured = [{name: line[name] for name in line if name.startswith(("completions/", "num_"))} for line in lines]
    assert measured[0] == measured[1]
    assert measured[2]["completions/min_length"] > 0  # a step that trains nothing has lengths too


def test_the_metric_of_skipped_updates_is_their_share_of_those_that_are_logged_together(tmp_path, grader):
    options = {"drop_dead_groups": True, "max_steps": 4, "logging_steps": 4}
    filtering(tmp_path, grader, {0: LIVE, 1: LIVE}, **options).train()
    assert [line["filter/skipped_step"] for line in train_lines(tmp_path)] == [0.75]


def test_the_schedule_goes_on_through_a_skipped_step(tmp_path, grader):
    options = {"lr_scheduler_type": "linear", "max_steps": 4}
    filtering(tmp_path, grader, {0: LIVE, 1: LIVE}, drop_dead_groups=True, **options).train()
    lines = train_lines(tmp_path)
    assert [line.get("filter/skipped_step") for line in lines] == [0, 1, 1, 1]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.slow
@needs_deepspeed
def test_sharded_processes_skip_what_ddp_skips_and_train_the_rest_like_it(tmp_path):
    """DeepSpeed steps inside of its backward pass, so a micro-batch that is left out must not take a step along."""
    lines = {}
    for config in ("ddp.yaml", "zero2.yaml", "zero3.yaml"):
        (tmp_path / config).mkdir()
        on_two_ranks("two_ranks_filtering.py", tmp_path / config, "parts", config=config)
        names = ("loss", "grad_norm", "learning_rate", "filter/skipped_step")
        lines[config] = [tuple(line[name] for name in names) for line in train_lines(tmp_path / config)]
    assert 0 < sum(skipped for *_, skipped in lines["ddp.yaml"]) < 8
    for config in ("zero2.yaml", "zero3.yaml"):
        for ours, theirs in zip(lines[config], lines["ddp.yaml"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
