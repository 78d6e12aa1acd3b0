"""Alarms for a collapse, and the stop before a broken update."""

import contextlib
import json
import logging
import math
import random
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from test_trainer import make_trainer
from transformers import TrainerCallback, TrainerControl, TrainerState

from torl_grading import Grader
from torl_guards.alarms import WINDOW, CollapseAlarms, add_alarms, collapse_alarms
from torl_guards.beats import Beats, watched
from torl_trl import ToRLConfig
from torl_trl.command_line import run_main
from torl_trl.divergence import DivergenceError, check_gradient
from torl_trl.engines.vllm_server import VLLMServerEngine
from torl_trl.errors import UserError
from torl_trl.metrics import ends_in_a_loop
from torl_trl.progress import RolloutStats


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=1) as grader:
        yield grader


# --- alarms --------------------------------------------------------------------------------------------------------

HEALTHY = {
    "entropy": 0.6,
    "completions/mean_length": 400.0,
    "tools/code_ratio": 0.8,
    "repetition": 0.02,
    "stop/length": 0.1,
    "stop/observation_overflow": 0.01,
}


def history(*parts: tuple[int, dict]) -> list[dict]:
    """Logs: so many with these metrics, the others healthy, all with a little noise."""
    noise = random.Random(0)
    logs = [HEALTHY | changed for count, changed in parts for _ in range(count)]
    return [{name: value * noise.uniform(0.9, 1.1) for name, value in log.items()} for log in logs]


def on_at_the_end(*parts: tuple[int, dict]) -> set[str]:
    return {name for name, sentence in collapse_alarms(history(*parts)).items() if sentence is not None}


@pytest.mark.parametrize(
    ("alarm", "collapsed"),
    [
        ("entropy", {"entropy": 0.03}),
        ("length_fell", {"completions/mean_length": 60.0}),
        ("length_rose", {"completions/mean_length": 2400.0}),
        ("code_ratio", {"tools/code_ratio": 0.01}),
        ("repetition", {"repetition": 0.5}),
        ("truncated", {"stop/length": 0.45, "stop/observation_overflow": 0.15}),
    ],
)
def test_each_collapse_raises_its_own_alarm_and_one_odd_step_raises_none(alarm, collapsed):
    assert on_at_the_end((20, {})) == set()
    assert on_at_the_end((20, {}), (2, collapsed)) == set()
    assert on_at_the_end((20, {}), (5, collapsed)) == {alarm}
    assert on_at_the_end((20, {}), (5, collapsed), (5, {})) == set()
    sentence = collapse_alarms(history((20, {}), (5, collapsed)))[alarm]
    assert "Most often" in sentence and "\n" not in sentence and "{" not in sentence


def test_a_model_that_never_wrote_code_and_one_that_learns_to_are_no_alarm():
    assert on_at_the_end((30, {"tools/code_ratio": 0.0})) == set()
    assert on_at_the_end((10, {"tools/code_ratio": 0.1}), (30, {"tools/code_ratio": 0.95, "entropy": 0.2})) == set()


def test_alarms_wait_for_enough_logs_and_pass_over_what_is_no_number():
    assert collapse_alarms(history((WINDOW - 1, {}))) == {}
    assert set(collapse_alarms(history((WINDOW, {})))) == {"truncated"}
    without = [{"entropy": math.nan, "stop/length": None, "stop/observation_overflow": 0.0}] * 20
    assert collapse_alarms(without) == {}


def test_an_alarm_is_said_once_and_again_only_after_it_was_over(caplog):
    alarms, seen = CollapseAlarms(), []
    collapsed = {"entropy": 0.03}
    with caplog.at_level(logging.WARNING, "torl_guards"):
        for step, log in enumerate(history((20, {}), (20, collapsed), (20, {}), (20, collapsed)), start=1):
            state = TrainerState(global_step=step, is_world_process_zero=True)
            alarms.on_log(None, state, TrainerControl(), logs=log)
            alarms.on_log(None, state, TrainerControl(), logs={"eval_entropy": 9.0})
            seen.append(log.get("alarm/entropy"))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"Alarm entropy at step {step}" for step in (23, 63)
    ]
    assert seen[8] is None and seen[9] == 0.0 and seen[22] == 1.0 and sum(filter(None, seen)) == 20 + 18


def test_a_resumed_run_knows_its_first_values():
    alarms = CollapseAlarms()
    state = TrainerState(global_step=20, is_world_process_zero=True, log_history=history((20, {})))
    alarms.on_train_begin(None, state, TrainerControl())
    for log in history((WINDOW, {"entropy": 0.03})):
        alarms.on_log(None, state, TrainerControl(), logs=log)
    assert log["alarm/entropy"] == 1.0


def test_alarms_reach_metrics_jsonl(tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, max_steps=WINDOW)
    add_alarms(trainer)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("alarm/truncated") for line in lines] == [None] * (WINDOW - 1) + [0.0, None]
    assert lines[0]["repetition"] == 0.0


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("The answer is 42. " * 8, True),
        ("So far so good. Then " + "wait, " * 30 + "wa", True),  # cut off
        ("0." + "3" * 80, True),
        ("First. " + "A longer piece of a text, as models repeat them when they are lost in it. " * 4, True),
        ("First. " + "A longer piece of a text, as models repeat them when they are lost in it. " * 3, False),
        ("wait, " * 30 + "the answer is \\boxed{42}.", False),
        ("1/3 = 0.3333333333333333", False),
        ("".join(f"Step {number}: look again. " for number in range(60)), False),  # counts, as documented
        ("", False),
    ],
)
def test_a_text_that_ends_in_a_loop_is_known(text, loops):
    assert ends_in_a_loop(text) is loops


# --- beats ---------------------------------------------------------------------------------------------------------


def test_what_the_trainer_does_becomes_beats_that_name_the_place(tmp_path, grader):
    places = []
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1, "save_strategy": "steps"}
    trainer = make_trainer(tmp_path, grader, max_steps=1, save_steps=1, **options)
    beats = Beats(trainer._interpreter)
    beats.heartbeat = SimpleNamespace(beat=places.append, rest=lambda: places.append("rest"))
    trainer.add_callback(beats)
    trainer.phase.on_rollouts = beats.on_rollouts
    trainer.train()
    expected = [
        "the start of training",
        "the start of the rollouts of train step 1",
        "rollouts of train step 1: 2 of 8 done, 6 in the engine, 0 calls running",
        "the end of the rollouts of train step 1; grading and training come next",
        "the gradient of step 1",
        "the end of step 1; its log, evaluation or save comes next",
        "the log of step 1",
        "the start of the rollouts of eval step 1",
        "a batch of the evaluation of step 1",
        "the end of the evaluation of step 1",
        "the save of step 1",
        "rest",
    ]
    assert [place for place in dict.fromkeys(places) if place in expected] == expected  # some come again
    assert beats.describe().startswith("Rollouts of eval step 1: 4 of 4 done, 0 in the engine, 0 calls running, ")


@pytest.mark.parametrize("remote", [True, False])
def test_a_step_of_a_server_without_a_finished_turn_is_no_beat(remote):
    places, beats = [], Beats(None)
    beats.heartbeat = SimpleNamespace(beat=places.append)
    engine, stats = object.__new__(VLLMServerEngine) if remote else object(), RolloutStats(rollouts=8, generating=8)
    for done in (0, 0, 0, 1, 1):
        stats.done = done
        beats.on_rollouts("train step 1", stats, engine)
    assert len(places) == (2 if remote else 5)


def test_a_watched_run_that_moves_leaves_nothing_behind(tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, max_steps=1, hang_timeout=300.0)
    before = signal.getsignal(signal.SIGINT)
    with watched(trainer, trainer._interpreter):
        assert (tmp_path / "hang_rank0.txt").exists() and signal.getsignal(signal.SIGINT) != before
        trainer.train()
    assert not list(tmp_path.glob("hang*")) and signal.getsignal(signal.SIGINT) == before
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


# --- divergence ----------------------------------------------------------------------------------------------------


class KeepWeights(TrainerCallback):
    def __init__(self, model):
        self.model, self.weights = model, None

    def on_step_end(self, *args, **kwargs):
        self.weights = [weight.detach().clone() for weight in self.model.parameters()]


def broken_trainer(folder, grader, how, **options):
    """A trainer of two micro-batches a step, whose gradient goes wrong in step 2; all saves are on."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 3} | options
    trainer = make_trainer(folder, grader, **{"save_strategy": "steps", "save_steps": 1} | options)
    trainer.add_callback(keep := KeepWeights(trainer.model))
    compute_loss = trainer._compute_loss

    def scaled(model, inputs):
        loss = compute_loss(model, inputs)
        return loss * how if trainer.state.global_step == 1 and trainer._step % 2 else loss

    trainer._compute_loss = scaled
    return trainer, keep


@pytest.mark.parametrize("how", [math.nan, math.inf, 1e6])
def test_a_broken_gradient_stops_before_the_update_with_its_batch_and_nothing_saved(how, tmp_path, grader):
    trainer, keep = broken_trainer(tmp_path, grader, how, stop_at_grad_norm=1e3)
    assert trainer.args.logging_nan_inf_filter  # hides such a loss from the logs, not from us
    with pytest.raises(DivergenceError) as error:
        trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), keep.weights))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    saved = torch.load(tmp_path / "diverged_step_2_rank_0.pt", weights_only=True)
    assert saved["step"] == 2 and (saved["grad_norm"] > 1e3 or not math.isfinite(saved["grad_norm"]))
    assert len(saved["micro_batches"]) == 2
    for batch in saved["micro_batches"]:
        assert batch["completion_ids"].shape[0] == 4 and {"advantages", "tool_mask"} <= set(batch)
    sentence = str(error.value)
    assert sentence.startswith("The gradient norm of step 2 is ") and str(tmp_path / "checkpoint-1") in sentence
    assert ("above stop_at_grad_norm: 1000" in sentence) == math.isfinite(how)
    assert str(tmp_path / "diverged_step_2_rank_0.pt") in sentence and "resume_from_checkpoint: true" in sentence
    assert "\n" not in sentence


def test_a_gradient_hook_that_writes_nan_stops_the_run_without_a_checkpoint(tmp_path, grader, capsys):
    trainer, _ = broken_trainer(tmp_path, grader, 1.0, save_strategy="no", max_grad_norm=0.0)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(SystemExit):
        run_main(trainer.train)
    assert all(map(torch.equal, trainer.model.parameters(), before))
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("Error: The gradient norm of step 1 is nan") and line.endswith("then start again.")
    assert "the last whole checkpoint is none" in line


def test_the_batch_that_is_kept_has_all_generation_batches_of_the_update(tmp_path, grader):
    trainer, _ = broken_trainer(tmp_path, grader, math.nan, steps_per_generation=1)
    with pytest.raises(DivergenceError):
        trainer.train()
    first, second = torch.load(tmp_path / "diverged_step_2_rank_0.pt", weights_only=True)["micro_batches"]
    assert not torch.equal(first["prompt_ids"], second["prompt_ids"])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_infinite_gradient_is_the_loss_scale_s_business_whoever_chose_fp16(precision, tmp_path, grader):
    trainer = make_trainer(tmp_path, grader)
    trainer.accelerator.state._mixed_precision = precision  # as `accelerate launch --mixed_precision` does
    trainer.accelerator.scaler = SimpleNamespace(get_scale=lambda: 2.0)
    assert not trainer.args.fp16
    with contextlib.nullcontext() if precision == "fp16" else pytest.raises(DivergenceError):
        check_gradient(trainer, math.inf, [])
    trainer.accelerator.scaler = SimpleNamespace(get_scale=lambda: 0.5)
    with pytest.raises(DivergenceError):  # it helps no longer
        check_gradient(trainer, math.inf, [])


def test_a_large_finite_gradient_goes_on_where_nothing_limits_it(tmp_path, grader):
    trainer, _ = broken_trainer(tmp_path, grader, 1e6)
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("option", ["stop_at_grad_norm", "hang_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_limits_are_above_zero(option, value):
    with pytest.raises(UserError, match=f"{option} is {value}"):
        ToRLConfig(output_dir="x", use_cpu=True, bf16=False, num_generations=8, **{option: value})
