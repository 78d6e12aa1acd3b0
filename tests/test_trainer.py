"""ToRLTrainer on TRL: what reaches the loss, the rewards, the metrics and the files."""

import json
from contextlib import nullcontext

import pyarrow.parquet as pq
import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from launching import needs_deepspeed, on_two_ranks
from scripted_engine import ScriptedEngine
from toys import FakeInterpreter, byte_level_tokenizer, ok, tiny_model
from trl import GRPOTrainer

from torl_grading import Grader
from torl_interpreters.base import ExecutionResult, ExecutionStatus, InterpreterUnavailable
from torl_trl import AccuracyReward, ExecutabilityPenalty, Rollout, ToRLConfig, ToRLTrainer
from torl_trl.errors import UserError
from torl_trl.metrics_file import MetricsFile
from torl_trl.padding import without_padding
from torl_trl.records import read_rollouts

CALL = "```python\nprint({})\n```\n```output"
RIGHT = CALL.format("6 * 7") + "So \\boxed{42}."
WRONG = CALL.format("6 + 7") + "So \\boxed{13}."
SILENT = "I guess \\boxed{41}."
BROKEN = CALL.format("boom") + "So \\boxed{0}."
TEXTS = [RIGHT, WRONG, SILENT, BROKEN]
LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
NEEDED = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=1) as grader:
        yield grader


def answer(code: str):
    if "boom" in code:
        return ExecutionResult(ExecutionStatus.ERROR, "", "Traceback\nNameError: name 'boom' is not defined\n", 0.01)
    return ok(str(eval(code.strip()[len("print(") : -1])))


class ScriptedTrainer(ToRLTrainer):
    """A trainer whose model writes `texts`, one after the other, whatever its weights say."""

    texts: list[str] = TEXTS

    def rollout(self, prompts):
        tokenizer = byte_level_tokenizer()
        texts = [self.texts[i % len(self.texts)] for i in range(len(prompts))]
        scripts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        engine = ScriptedEngine(scripts, tokenizer, eos_token_id=0, vocab_size=len(tokenizer), mode="rounds")
        self.phase.generation.engine = lambda sampling: nullcontext(engine)
        return super().rollout(prompts)


def make_trainer(
    folder,
    grader,
    *,
    interpreter=None,
    rewards=None,
    texts=TEXTS,
    trainer_class=ScriptedTrainer,
    benchmarks=None,
    **options,
):
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 120,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | options
    rows = [{"prompt": f"Q{i}?\n", "problem": f"Q{i}?", "solution": "42", "problem_id": f"id{i}"} for i in range(8)]
    eval_rows = rows[:4]
    if benchmarks:
        eval_rows = [row | {"benchmark": name} for row, name in zip(eval_rows, benchmarks, strict=True)]
    model = tiny_model()
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    trainer = trainer_class(
        model=copy,
        reward_funcs=rewards or [AccuracyReward(grader)],
        interpreter=interpreter or FakeInterpreter(answer),
        args=ToRLConfig(**options),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(eval_rows) if "eval_strategy" in options else None,
        processing_class=byte_level_tokenizer(),
        callbacks=[MetricsFile(folder)],
    )
    trainer.texts = texts
    return trainer


def scored_batch(trainer) -> tuple[list[dict], dict]:
    """One generation batch with its rows, as the loss would get it."""
    trainer.model.train()
    inputs = [dict(trainer.train_dataset[i // 4]) for i in range(8)]
    return inputs, trainer._generate_and_score_completions(inputs)


def test_training_runs_and_writes_the_run_s_folder(tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, save_strategy="steps", save_steps=2, save_rollouts_every=2)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[0]["accuracy"] == 0.25 and steps[0]["reward"] == -0.5
    assert steps[0]["tools/code_ratio"] == 0.75 and steps[0]["tools/pass_ratio"] == pytest.approx(2 / 3)
    assert {"time/generating", "time/executing", "time/waiting", "time/grading", "time/training"} <= set(steps[0])
    table = read_rollouts(tmp_path / "rollouts" / "step_000002.parquet").to_pylist()
    assert [row["generation_index"] for row in table] == [0, 1, 2, 3] * 2
    assert len({row["group_id"] for row in table}) == 2
    assert [row["reward"] for row in table] == [1.0, -1.0, -1.0, -1.0] * 2
    assert table[0]["completion"] == RIGHT.replace("```output", "```output\n42\n```\n")
    assert table[0]["advantage"] > 0 > table[1]["advantage"]
    assert table[3]["calls"][0]["status"] == "error"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-2").eos_token_id == 0


def test_a_real_model_is_sampled_by_the_transformers_engine(tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, trainer_class=ToRLTrainer, max_completion_length=12, max_steps=1)
    trainer.train()
    table = pq.read_table(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    assert all(1 <= len(row["completion_ids"]) <= 12 for row in table)
    assert len({tuple(row["completion_ids"]) for row in table}) > 1


def test_a_half_precision_copy_generates_with_the_present_weights(tmp_path, grader):
    trainer = make_trainer(
        tmp_path, grader, trainer_class=ToRLTrainer, generation_dtype="bfloat16", max_completion_length=8, max_steps=2
    )
    trainer.train()
    copied = trainer.phase.generation.copy.at(2)
    for copy, source in zip(copied.parameters(), trainer.model.parameters(), strict=True):
        assert copy.dtype == torch.bfloat16 and torch.equal(copy, source.to(torch.bfloat16))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_inserted_tokens_get_exactly_no_gradient_and_their_logprobs_do_not_matter(loss_type, tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, loss_type=loss_type, **NEEDED.get(loss_type, {}))
    _, batch = scored_batch(trainer)
    trainer.current_gradient_accumulation_steps = 1
    batch = {key: value for key, value in batch.items() if value is not None}
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (~mask & batch["completion_mask"].bool()).sum() > 8  # there are inserted tokens

    real = trainer._get_per_token_logps_and_entropies

    def loss_with(shift_masked: float) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = []

        def spied(*args, **kwargs):
            logps, *rest = real(*args, **kwargs)
            leaf = (logps.detach() + shift_masked * ~mask).requires_grad_()
            leaves.append(leaf)
            return leaf, *rest

        trainer._get_per_token_logps_and_entropies = spied
        batch["old_per_token_logps"] = real(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
        )[0].detach()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        return loss.detach(), leaves[0].grad

    loss, gradient = loss_with(0.0)
    assert torch.all(gradient[~mask] == 0.0)
    rewarded = mask & (batch["advantages"][:, None] != 0)
    assert torch.all(gradient[rewarded] != 0.0)
    shifted_loss, shifted_gradient = loss_with(3.0)
    assert torch.equal(loss, shifted_loss)
    assert torch.equal(gradient, shifted_gradient)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_of_a_micro_batch_is_the_same_without_its_padding(loss_type, tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, loss_type=loss_type, num_iterations=2, **NEEDED.get(loss_type, {}))
    _, batch = scored_batch(trainer)
    trainer.current_gradient_accumulation_steps = 1
    rows = [1, 2, 6]  # none of them is the longest
    batch = {
        name: value[rows] if torch.is_tensor(value) and value.ndim > 0 else value for name, value in batch.items()
    }
    cut = without_padding(batch)
    assert cut["completion_ids"].shape[1] < batch["completion_ids"].shape[1]
    assert cut["completion_ids"].shape == cut["old_per_token_logps"].shape == cut["tool_mask"].shape

    def loss_and_gradient(inputs):
        trainer.model.zero_grad()
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    whole, short = loss_and_gradient(batch), loss_and_gradient(cut)
    assert torch.allclose(whole[0], short[0], atol=1e-6)
    assert torch.allclose(whole[1], short[1], atol=1e-6)


def test_on_a_cpu_only_completions_pass_through_the_vocabulary(tmp_path, grader, monkeypatch):
    trainer = make_trainer(tmp_path, grader)
    _, batch = scored_batch(trainer)
    trainer.current_gradient_accumulation_steps = 1
    scored = []
    real = trl.trainer.utils._ChunkedLogProbFunction

    class Spy:
        @staticmethod
        def apply(hidden, *rest):
            scored.append(len(hidden))
            return real.apply(hidden, *rest)

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Spy)
    trainer._compute_loss(trainer.model, batch)
    assert scored == [int(batch["completion_mask"].sum())]


def test_a_failed_interpreter_gives_no_reward_and_no_token_with_two_reward_functions(tmp_path, grader):
    def failing(code):
        return InterpreterUnavailable("down") if "6 + 7" in code else answer(code)

    rewards = [AccuracyReward(grader), ExecutabilityPenalty()]
    trainer = make_trainer(tmp_path, grader, interpreter=FakeInterpreter(failing), rewards=rewards)
    trainer.args.max_interpreter_failures = 0.25  # as many as fail here
    inputs, batch = scored_batch(trainer)
    rollouts: list[Rollout] = [row["rollouts"] for row in inputs]
    assert [rollout.interpreter_failed for rollout in rollouts] == [False, True, False, False] * 2
    assert 1 in rollouts[1].env_mask  # the record keeps the truth
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert mask[1].sum() == 0 and batch["advantages"][1] == 0
    assert batch["num_items_in_batch"] == mask.sum()
    # The group's baseline is that of the others: rewards 1, -1 and -1.5.
    values = torch.tensor([1.0, -1.0, -1.5])
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert torch.allclose(batch["advantages"][[0, 2, 3]], expected, atol=1e-4)


def test_evaluation_is_measured_over_all_its_batches_and_recorded(tmp_path, grader):
    options = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = make_trainer(tmp_path, grader, **options)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["split"] == "eval"]
    assert line["step"] == 2 and line["accuracy"] == 0.25
    table = read_rollouts(tmp_path / "rollouts" / "eval_step_000002.parquet")
    assert table.num_rows == 8
    assert len(set(table["group_id"].to_pylist())) == 4


def test_an_evaluation_logs_the_average_of_each_benchmark(tmp_path, grader):
    options = {"eval_strategy": "steps", "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = make_trainer(
        tmp_path, grader, benchmarks=["a", "b", "a", "b"], texts=[RIGHT, RIGHT, WRONG, RIGHT], **options
    )
    trainer.evaluate()
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["a/avg@2"], line["b/avg@2"], line["accuracy"]) == (1.0, 0.5, 0.75)


@pytest.mark.parametrize(("limit", "stops"), [(0.2, True), (0.25, False)])
def test_a_run_stops_when_the_interpreter_fails_too_often(limit, stops, tmp_path, grader):
    def failing(code):
        return InterpreterUnavailable("down") if "6 + 7" in code else answer(code)

    trainer = make_trainer(
        tmp_path,
        grader,
        interpreter=FakeInterpreter(failing),
        interpreter_retries=0,
        max_interpreter_failures=limit,
    )
    if not stops:
        trainer.train()
        return
    with pytest.raises(UserError, match=r"failed in 2 of 8 rollouts of train step 1, more than .*: 0.2 allows"):
        trainer.train()
    statuses = read_rollouts(tmp_path / "rollouts" / "step_000001.parquet")["stop_reason"].to_pylist()
    assert statuses.count("interpreter_failed") == 2  # written, to see what happened


def first_token_reward(rollouts, **columns):
    """A reward that random completions differ in, so that the weights move."""
    return [float(rollout.completion_ids[0] % 5) for rollout in rollouts]


def train_to(folder, grader, max_steps, checkpoint=None, **options):
    """A real model's run to `max_steps`, from a checkpoint if one is given; its trainer."""
    trainer = make_trainer(
        folder,
        grader,
        interpreter=FakeInterpreter(lambda code: ok("1")),
        rewards=[AccuracyReward(grader), first_token_reward],
        trainer_class=ToRLTrainer,
        max_completion_length=10,
        max_steps=max_steps,
        save_strategy="steps",
        **options,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize("resumed_at", [2, 4, 6])  # inside the first epoch of 4 steps, at its end, in the second
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(resumed_at, tmp_path, grader):
    def run(folder, max_steps, checkpoint=None):
        trainer = train_to(folder, grader, max_steps, checkpoint, save_steps=resumed_at)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    def problems(folder):
        return [read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")["problem_id"] for step in (7, 8)]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    weights = run(whole, 8)
    run(broken, resumed_at)
    resumed = run(broken, 8, str(broken / f"checkpoint-{resumed_at}"))
    assert problems(whole) == problems(broken)
    assert torch.equal(weights, resumed)


@pytest.mark.parametrize(
    "config",
    [None, *(pytest.param(name, marks=[pytest.mark.slow, needs_deepspeed]) for name in ("zero2.yaml", "zero3.yaml"))],
)
def test_two_ranks_resumed_in_their_second_epoch_are_the_unbroken_run(config, tmp_path):
    printed = on_two_ranks("two_ranks_resuming.py", tmp_path, config=config).splitlines()
    runs = [line.split(": ")[1] for line in printed if line.startswith("rank")]  # on two ranks, unbroken and resumed
    assert len(runs) == 4 and len(set(runs)) == 1


def test_a_resume_inside_a_generation_cycle_is_said(tmp_path, grader, caplog):
    options = {"num_iterations": 2, "save_steps": 2}
    train_to(tmp_path, grader, 3, **options)  # a run saves at its end, too
    for step, said in ((2, 0), (3, 1)):
        train_to(tmp_path, grader, 4, str(tmp_path / f"checkpoint-{step}"), **options)
        assert caplog.text.count("lies inside a generation cycle of 2 micro-steps") == said


@pytest.mark.parametrize("steps", [2, 4])  # inside an epoch of 4 steps, and at its end
def test_a_finished_run_that_is_started_again_trains_no_step_more(steps, tmp_path, grader):
    options = {"trainer_class": ToRLTrainer, "max_completion_length": 12, "max_steps": steps}
    options |= {"interpreter": FakeInterpreter(lambda code: ok("1"))}
    options |= {"save_strategy": "steps", "save_steps": 1}
    finished = make_trainer(tmp_path, grader, **options)
    finished.train()
    again = make_trainer(tmp_path, grader, **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert again.state.global_step == steps
    pairs = zip(finished.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, steps + 1))
    assert not (tmp_path / f"checkpoint-{steps + 1}").exists()


def test_eval_reward_weighs_every_completion_the_same(tmp_path, grader):
    options = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 1, "per_device_eval_batch_size": 3}
    trainer = make_trainer(tmp_path, grader, texts=[RIGHT, WRONG, WRONG], **options)
    trainer.evaluate()
    trainer.evaluate()  # another one at the same step does not add up with the first
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # batches of 3 and 1: right, wrong, wrong and right
        assert line["accuracy"] == 0.5 and line["reward"] == 0.0
    assert read_rollouts(tmp_path / "rollouts" / "eval_step_000000.parquet").num_rows == 4


@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"steps_per_generation": 2}])
def test_full_text_is_kept_when_batches_serve_several_steps(options, tmp_path, grader):
    trainer = make_trainer(tmp_path, grader, max_steps=6, save_rollouts_every=4, **options)
    trainer.train()
    full = {
        step: read_rollouts(tmp_path / "rollouts" / f"step_{step:06d}.parquet")["full"][0].as_py()
        for step in (1, 3, 5)
    }
    assert full == {1: True, 3: False, 5: True}


def test_lora_generates_with_its_adapters_and_without_dropout(tmp_path, grader):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, grader, trainer_class=ToRLTrainer, max_completion_length=10)
    lora = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False, task_type="CAUSAL_LM")
    trainer = ToRLTrainer(
        model=trainer.model,
        reward_funcs=[AccuracyReward(grader)],
        interpreter=trainer._interpreter,
        args=trainer.args,
        train_dataset=trainer.train_dataset,
        processing_class=byte_level_tokenizer(),
        peft_config=lora,
    )
    inputs, _ = scored_batch(trainer)
    assert trainer.model.training
    trainer.model.eval()
    for rollout in (row["rollouts"] for row in inputs):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logprobs = trainer.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=1e-4)


def test_too_few_problems_for_a_step_are_refused(tmp_path, grader):
    with pytest.raises(UserError, match="There are 8 problems and a step takes 16"):
        make_trainer(tmp_path, grader, per_device_train_batch_size=64)


def test_settings_that_cannot_work_are_refused(tmp_path, grader):
    with pytest.raises(UserError, match="max_tool_calls is 1 and there is no interpreter"):
        ToRLTrainer(
            model=tiny_model(),
            reward_funcs=[AccuracyReward(grader)],
            interpreter=None,
            args=ToRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=8),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
            processing_class=byte_level_tokenizer(),
        )
    with pytest.raises(UserError, match="No AccuracyReward"):
        make_trainer(tmp_path, grader, rewards=[ExecutabilityPenalty()])


def test_half_precision_weights_with_a_small_learning_rate_are_refused(tmp_path, grader):
    def build(learning_rate):
        return ToRLTrainer(
            model=tiny_model().__class__(tiny_model().config).to(torch.bfloat16),
            reward_funcs=[AccuracyReward(grader)],
            interpreter=FakeInterpreter(answer),
            args=ToRLConfig(
                output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=8, learning_rate=learning_rate
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
            processing_class=byte_level_tokenizer(),
        )

    with pytest.raises(UserError, match="half precision"):
        build(1e-6)
    build(1e-5)
