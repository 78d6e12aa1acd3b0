"""Filters and refills in a trainer: what TRL is given, what is recorded, empty steps, resume, two ranks."""

import json
import logging
import math
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from launching import on_two_ranks
from scripted_engine import ScriptedEngine
from test_trainer import RIGHT, SILENT, WRONG, answer, make_trainer
from toys import FakeInterpreter, byte_level_tokenizer, ok

from torl_grading import Grader
from torl_interpreters.base import InterpreterUnavailable
from torl_trl import AccuracyReward, ExecutabilityPenalty, ToRLTrainer
from torl_trl.errors import UserError
from torl_trl.metrics_file import MetricsFile
from torl_trl.records import read_rollouts
from torl_trl.rewards import OverlongPenalty
from torl_trl.run_folder import read_metrics

VOID = "Hm, I do not know."
LIVE, ALL_RIGHT, ALL_WRONG = [RIGHT, WRONG, SILENT, SILENT], [RIGHT] * 4, [WRONG] * 4


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=1) as grader:
        yield grader


class ProblemTrainer(ToRLTrainer):
    """A trainer whose model writes, for each problem, the four texts that `texts` has for it, in turn."""

    texts: dict[str, list[str]]

    def rollout(self, prompts):
        self.phase.generation.engine = lambda sampling: nullcontext(ProblemEngine(self))
        return super().rollout(prompts)


class ProblemEngine(ScriptedEngine):
    def __init__(self, trainer):
        tokenizer = byte_level_tokenizer()
        super().__init__([], tokenizer, eos_token_id=0, vocab_size=len(tokenizer), mode="rounds")
        self._scripts, self._positions = {}, {}
        self._trainer, self._tokenizer, self._written = trainer, tokenizer, Counter()

    def add(self, request):
        if asked := re.fullmatch(r"Q(\d)\?\n", self._tokenizer.decode(request.token_ids)):  # a rollout begins
            texts = self._trainer.texts[f"id{asked[1]}"]
            text = texts[self._written[asked[1]] % len(texts)]
            self._written[asked[1]] += 1
            self._scripts[request.rollout_id] = [*self._tokenizer.encode(text, add_special_tokens=False), 0]
            self._positions[request.rollout_id] = 0
        super().add(request)


def filtering(folder, grader, texts, **options):
    """Eight problems, two of them a step; `texts` says which of them are live, the others are all right."""
    texts = {f"id{number}": texts.get(number, ALL_RIGHT) for number in range(8)}
    options = {"loss_type": "dapo", "save_rollouts_every": 1, "shuffle_dataset": False} | options
    return make_trainer(folder, grader, trainer_class=ProblemTrainer, texts=texts, **options)


def first_batch(trainer) -> tuple[list[dict], dict]:
    trainer.model.train()
    inputs = [dict(trainer.train_dataset[number // 4]) for number in range(8)]
    return inputs, trainer._generate_and_score_completions(inputs)


def loss_mask(output: dict) -> torch.Tensor:
    return output["completion_mask"] * output["tool_mask"]


def rows_of(folder: Path, step: int) -> list[dict]:
    return read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def test_trl_gets_groups_that_train_with_their_own_prompts_and_advantages(tmp_path, grader):
    seen = []

    def spy(prompts, completions, completion_ids, **columns):
        seen.append((list(prompts), columns["problem_id"]))
        return [0.0] * len(prompts)

    rewards = [AccuracyReward(grader), spy]
    live = {1: LIVE, 5: LIVE, 6: LIVE}
    trainer = filtering(tmp_path, grader, live, rewards=rewards, drop_dead_groups=True, refill_limit=4.0)
    inputs, output = first_batch(trainer)
    assert inputs[4]["problem_id"] == "id1"  # a live group stays in its place
    assert inputs[0]["problem_id"] in ("id1", "id5", "id6") and len({row["problem_id"] for row in inputs[:4]}) == 1
    # By hand: rewards 1, -1, -1, -1 have the mean -0.5 and the standard deviation 1.
    expected = [1.5 / 1.0001, *[-0.5 / 1.0001] * 3] * 2
    assert output["advantages"].tolist() == pytest.approx(expected, rel=1e-5)
    tokens = sum(sum(sample.rollout.env_mask) for sample in trainer._samples)
    assert output["num_items_in_batch"].item() == tokens
    for prompts, problems in seen:
        assert prompts == [f"Q{problem[2:]}?\n" for problem in problems]
    assert list(trainer._logs["prompt"])[-8:] == [row["prompt"] for row in inputs]
    assert sum(len(prompts) for prompts, _ in seen) == 8 + len(trainer._left_out)  # nobody is scored twice


def test_every_rollout_that_was_sampled_is_recorded_once_and_measured(tmp_path, grader):
    trainer = filtering(tmp_path, grader, {1: LIVE, 5: LIVE}, drop_dead_groups=True, refill_limit=4.0, max_steps=3)
    trainer.train()
    for line in [line for line in read_metrics(tmp_path) if line["split"] == "train"]:
        rows = rows_of(tmp_path, line["step"])
        places = [(row["group_id"], row["generation_index"]) for row in rows]
        assert sorted(places) == [(group, place) for group in range(len(rows) // 4) for place in range(4)]
        assert line["filter/extra_generation"] == (len(rows) - 8) / 8
        assert line["accuracy"] == sum(row["correct"] for row in rows) / len(rows)
        assert line["filter/dead_group"] == [row["dropped"] for row in rows].count("dead_group") / len(rows)
        trained = [row for row in rows if row["dropped"] is None]
        assert line["filter/full"] == len(trained) / 8
        assert all(row["advantage"] != 0 for row in trained)
        assert all(row["problem_id"] in ("id1", "id5") for row in trained)
        assert all(row["reward"] is not None for row in rows)
        assert line["reward"] == line["rewards/accuracy_reward/mean"] == sum(row["reward"] for row in rows) / len(rows)


def test_a_dead_group_that_nobody_replaces_counts_in_no_denominator(tmp_path, grader):
    trainer = filtering(tmp_path, grader, {1: LIVE}, drop_dead_groups=True)
    _, output = first_batch(trainer)
    live = [sample for sample in trainer._samples if sample.row["problem_id"] == "id1"]
    assert output["num_items_in_batch"].item() == sum(sum(sample.rollout.env_mask) for sample in live)
    assert loss_mask(output)[:4].sum() == 0
    plain = filtering(tmp_path, grader, {1: LIVE})
    _, unfiltered = first_batch(plain)
    assert unfiltered["num_items_in_batch"] > output["num_items_in_batch"]
    assert unfiltered["advantages"].tolist() == output["advantages"].tolist()


def test_a_void_turn_takes_a_rollout_out_of_the_loss_and_leaves_its_reward_in_the_baseline(tmp_path, grader):
    texts = {0: [RIGHT, VOID, WRONG, SILENT], 1: LIVE}
    trainer = filtering(tmp_path, grader, texts, drop_void_turns=True)
    _, output = first_batch(trainer)
    assert output["advantages"].tolist() == pytest.approx([1.5 / 1.0001, *[-0.5 / 1.0001] * 3] * 2, rel=1e-5)
    assert loss_mask(output)[1].sum() == 0 and loss_mask(output)[0].sum() > 0
    trained = [sample for number, sample in enumerate(trainer._samples) if number != 1]
    assert output["num_items_in_batch"].item() == sum(sum(sample.rollout.env_mask) for sample in trained)


def test_truncated_rollouts_are_left_out_by_trl_s_own_option_and_recorded_so(tmp_path, grader):
    options = {"mask_truncated_completions": True, "max_completion_length": 13, "max_steps": 1}
    trainer = filtering(tmp_path, grader, {0: [SILENT, RIGHT, VOID, SILENT], 1: [SILENT] * 4}, **options)
    _, output = first_batch(trainer)
    truncated = [sample.rollout.truncated for sample in trainer._samples]
    assert 0 < sum(truncated) < 8
    assert [sample.dropped is not None for sample in trainer._samples] == truncated
    assert [bool(row.sum() == 0) for row in loss_mask(output)] == truncated
    assert output["num_items_in_batch"] == loss_mask(output).sum()


@pytest.mark.parametrize("options", [{}, {"refill_limit": 2.0}, {"gradient_accumulation_steps": 2}])
def test_a_step_in_which_nothing_trains_is_skipped_and_said(options, tmp_path, grader, caplog):
    per_device = 4 if "gradient_accumulation_steps" in options else 8
    options = {"max_steps": 3, "weight_decay": 0.1, "per_device_train_batch_size": per_device} | options
    trainer = filtering(tmp_path, grader, {0: LIVE, 1: LIVE}, drop_dead_groups=True, **options)
    weights = []

    class Snapshots(MetricsFile):
        def on_step_end(self, args, state, control, **kwargs):
            weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
            trainer.texts = {f"id{number}": ALL_WRONG if state.global_step == 1 else LIVE for number in range(8)}

    trainer.add_callback(Snapshots(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    with caplog.at_level(logging.WARNING, "torl_trl"):
        trainer.train()
    first, second, third = weights
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # momentum and decay included
    assert any(not torch.equal(a, b) for a, b in zip(second, third, strict=True))
    lines = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert [line.get("filter/skipped_step") for line in lines] == [0, 1, 0]
    assert lines[1]["filter/full"] == 0 and lines[1]["loss"] == 0
    assert "Step 2 trains nothing" in caplog.text and "Step 1 trains nothing" not in caplog.text


def test_the_overlong_penalty_counts_the_model_s_own_tokens_only(tmp_path, grader):
    rewards = [AccuracyReward(grader), OverlongPenalty(10, 16)]
    trainer = filtering(tmp_path, grader, {0: LIVE}, rewards=rewards)
    first_batch(trainer)
    for sample in trainer._samples:
        own = sum(sample.rollout.env_mask)
        assert sample.scores[1] == pytest.approx(-min(1.0, max(0, own - 6) / 10))
    assert any(len(s.rollout.env_mask) > sum(s.rollout.env_mask) > 6 for s in trainer._samples)


def test_a_rollout_whose_interpreter_failed_is_sampled_again(tmp_path, grader, caplog):
    class Flaky(FakeInterpreter):
        failures = 2

        def submit(self, code):
            if self.failures:
                self.failures -= 1
                raise InterpreterUnavailable("down for a moment")
            return super().submit(code)

    options = {"interpreter_retries": 0, "max_steps": 1, "interpreter": Flaky(answer)}
    trainer = filtering(tmp_path, grader, {0: LIVE, 1: LIVE}, resample_failures=1, **options)
    with caplog.at_level(logging.WARNING, "torl_trl"):
        trainer.train()
    (line,) = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert line["tools/interpreter_failure"] == 0 and line["rollout/resampled"] == 2 / 10
    assert [row["dropped"] for row in rows_of(tmp_path, 1)] == [None] * 8
    assert "failed in 2 rollouts, which are sampled again" in caplog.text
    # Where it goes on failing they are given up, as without the switch.
    interpreter = Flaky(answer)
    interpreter.failures = 1000
    options |= {"interpreter": interpreter, "max_interpreter_failures": 1.0}
    trainer = filtering(tmp_path / "b", grader, {0: [RIGHT], 1: [SILENT]}, resample_failures=2, **options)
    trainer.train()
    assert [row["dropped"] for row in rows_of(tmp_path / "b", 1)] == ["interpreter_failed"] * 4 + [None] * 4


def test_a_dead_interpreter_is_not_asked_for_refills(tmp_path, grader):
    interpreter = FakeInterpreter(lambda code: InterpreterUnavailable("down"))
    options = {"interpreter": interpreter, "interpreter_retries": 0, "drop_dead_groups": True, "refill_limit": 4.0}
    trainer = filtering(tmp_path, grader, dict.fromkeys(range(8), LIVE), **options)
    with pytest.raises(UserError, match="failed in 4 of 8 rollouts of train step 1, more than max_interpreter_fail"):
        trainer.train()
    assert len(rows_of(tmp_path, 1)) == 8 and len(interpreter.codes) == 4


def test_rewards_that_cannot_be_had_early_are_refused(tmp_path, grader):
    async def slow(prompts, completions, completion_ids, **columns):
        return [0.0] * len(prompts)

    class Slow:
        __name__ = "slow"

        async def __call__(self, prompts, completions, completion_ids, **columns):
            return [0.0] * len(prompts)

    for function in (slow, Slow()):
        with pytest.raises(UserError, match="'slow' is a model or asynchronous"):
            filtering(tmp_path, grader, {}, rewards=[AccuracyReward(grader), function], drop_dead_groups=True)


EVERY_SWITCH = {
    "drop_void_turns": True,
    "drop_dead_groups": True,
    "accuracy_band": [0.1, 0.9],
    "refill_limit": 2.0,
    "mask_truncated_completions": True,
    "resample_failures": 1,
    "scale_rewards": "none",
    "epsilon_high": 0.28,
    "num_iterations": 2,
}


def first_token_reward(rollouts, **columns):
    return [float(rollout.completion_ids[0] % 2) for rollout in rollouts]


@pytest.mark.parametrize("resumed_at", [4, 8])
def test_a_resumed_run_with_every_switch_ends_with_the_weights_of_an_unbroken_one(resumed_at, tmp_path, grader):
    def trained(folder, resume=None):
        trainer = make_trainer(
            folder,
            grader,
            trainer_class=ToRLTrainer,
            interpreter=FakeInterpreter(lambda code: ok("1")),
            rewards=[AccuracyReward(grader), first_token_reward],
            max_steps=10,
            max_completion_length=12,
            save_strategy="steps",
            save_steps=resumed_at,
            save_rollouts_every=1,
            **EVERY_SWITCH | {"accuracy_band": None, "drop_void_turns": False, "mask_truncated_completions": False},
        )
        trainer.train(resume_from_checkpoint=resume)
        lines = [line for line in read_metrics(folder) if line["split"] == "train"]
        return trainer, [{name: line.get(name) for name in ("reward", "filter/full", "loss")} for line in lines]

    unbroken, metrics = trained(tmp_path / "a")
    assert unbroken._refill.stream.position > 0
    checkpoint = tmp_path / "a" / f"checkpoint-{resumed_at}"
    assert json.loads((checkpoint / "refill.json").read_text())["position"] >= 0
    resumed, later = trained(tmp_path / "b", str(checkpoint))
    assert later == metrics[resumed_at:]
    assert resumed._refill.stream.position == unbroken._refill.stream.position
    pairs = zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["uneven", "empty"])
def test_two_ranks_fill_uneven_steps_and_skip_empty_ones_together(name, tmp_path):
    """Rank 0 has live groups and rank 1 dead ones, or all are dead."""
    printed = on_two_ranks("two_ranks_filtering.py", tmp_path, name)
    sums = {line.split(": ")[1] for line in printed.splitlines() if line.startswith("weights of rank")}
    assert len(sums) == 1  # both ranks end with the same weights
    lines = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    rows = [row for step in (1, 2) for row in rows_of(tmp_path, step)]
    assert {row["rank"] for row in rows} == {0, 1}
    for step in (1, 2):
        places = sorted((row["group_id"], row["generation_index"]) for row in rows_of(tmp_path, step))
        assert places == [(group, place) for group in range(len(places) // 4) for place in range(4)]
    if name == "empty":
        assert [line["filter/full"] for line in lines] == [0, 0]
        assert [line["filter/skipped_step"] for line in lines] == [1, 1]
        assert all(line["filter/extra_generation"] == 2 for line in lines)
        return
    assert [line["filter/full"] for line in lines] == [1, 1]
    extra = [row for row in rows if row["group_id"] >= 4]
    assert extra and {row["rank"] for row in extra} == {1}  # only rank 1 had anything to replace
    assert all(math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0 for line in lines)


def test_penalties_make_a_group_of_wrong_answers_live(tmp_path, grader):
    broken = "```python\nprint(boom)\n```\n```outputSo \\boxed{0}."
    rewards = [AccuracyReward(grader), ExecutabilityPenalty()]
    texts = {0: [WRONG, WRONG, broken, broken], 1: ALL_WRONG}
    trainer = filtering(tmp_path, grader, texts, rewards=rewards, drop_dead_groups=True)
    first_batch(trainer)
    assert [sample.dropped is None for sample in trainer._samples] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(
    "rewards", [[-2, 2, 2, 2], [2, 0, 0, None], [0, 0, 0, 1], [None, None, None, 3], [1, 1, 1, 1]]
)
def test_a_group_is_dead_exactly_where_trl_gives_it_no_advantage(aggregation, rewards, tmp_path, grader):
    """With several reward functions, whose sum may be equal where their normalized sum is not, and the other way."""

    def other(prompts, **columns):
        return rewards * (len(prompts) // 4)

    options = {"rewards": [AccuracyReward(grader), other], "reward_weights": [2.0, 1.0]}
    options |= {"multi_objective_aggregation": aggregation}
    texts = dict.fromkeys(range(8), LIVE)  # right, wrong, wrong, wrong
    _, plain = first_batch(filtering(tmp_path, grader, texts, **options))
    trainer = filtering(tmp_path, grader, texts, drop_dead_groups=True, **options)
    _, output = first_batch(trainer)
    lives = bool(plain["advantages"][:4].abs().max() > 1e-4)
    assert [sample.dropped is None for sample in trainer._samples] == [lives] * 8
    assert torch.equal(output["advantages"], plain["advantages"])
