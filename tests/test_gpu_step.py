"""The trainer's benchmarks, scaled down to a CPU: all their parts run, and both trainers train the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_step
import pytest
import torch
import trainer as trainer_benchmark
from trainer_scripted import Work

from torl_grading import Grader
from torl_trl import get_interpreter
from torl_trl.metrics_file import METRICS_NAME
from torl_trl.records import read_rollouts

SCRIPT = Path(gpu_step.__file__)
WORK = Work(prompts=2, generations=4, per_device=4, prompt_tokens=32, mean_tokens=70, completion_tokens=160)
CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def weights(trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("decoded", [False, True])
def test_plain_grpo_and_torl_train_the_same_tokens_to_the_same_weights(decoded, tmp_path):
    with get_interpreter("embedded") as interpreter, Grader(num_workers=1) as grader:
        runs_code = interpreter if decoded else None
        trainers = trainer_benchmark.make_trainers(
            lambda: trainer_benchmark.random_model("1M"), WORK, tmp_path, grader, runs_code, max_steps=3, **CPU
        )
        before = weights(trainers["ours"])
        for trainer in trainers.values():
            trainer.train()
    moved, difference = weights(trainers["ours"]) - before, weights(trainers["ours"]) - weights(trainers["plain"])
    assert 0 < difference.norm() < 0.05 * moved.norm() or not difference.any()
    rows = read_rollouts(tmp_path / "ours" / "rollouts" / "step_000001.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [-1.0, 1.0] * 4
    assert all(row["calls"][0]["status"] == "ok" for row in rows)
    assert max(len(row["completion_ids"]) for row in rows) > 0.6 * WORK.completion_tokens
    if decoded:
        assert rows[1]["completion"].endswith("So \\boxed{42}.") and "```output\n7\n```\n" in rows[1]["completion"]


@pytest.mark.slow
def test_the_trainers_take_turns_and_the_ratios_are_those_of_neighbours(tmp_path):
    with Grader(num_workers=1) as grader:
        trainers = trainer_benchmark.make_trainers(
            lambda: trainer_benchmark.random_model("1M"), WORK, tmp_path, grader, None, max_steps=3, **CPU
        )
        found = trainer_benchmark.compare(trainers, 1, WORK.rollouts)
    ratio = found["ours/seconds"] / found["plain/seconds"]
    assert found["ours/seconds_over_plain"] == pytest.approx(ratio)
    extra = (found["bare/cpu_seconds"] - found["plain/cpu_seconds"]) / WORK.rollouts
    assert found["bare/extra_cpu_seconds_per_rollout"] == pytest.approx(extra)
    text = (tmp_path / "ours" / METRICS_NAME).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 4  # the last turn's steps and the summary
    assert not any(line.get("filter/skipped_step") for line in lines)  # it trains without the speed-ups, too


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_every_part_runs_on_tiny_sizes_and_its_split_adds_up_to_the_step(engine, tmp_path):
    pytest.importorskip("peft")
    if engine == "vllm":
        pytest.importorskip("vllm", reason="needs vllm: make test VLLM=1 installs it")
    path = tmp_path / "results.json"
    done = run("--cpu", "--results", str(path), "--engine", engine)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text(encoding="utf-8"))
    assert {results[f"{part}/state"] for part in gpu_step.PARTS} == {"done"}, done.stderr
    assert results["machine/gpu"] == "none, tiny sizes on the CPU"
    for part in ("full", "lora"):
        assert results[f"{part}/engine"] == engine
        scripted, decoded = (
            {name.rpartition("/")[2]: value for name, value in results.items() if name.startswith(f"{part}/{which}/")}
            for which in ("scripted", "decoded")
        )
        for found in (scripted, decoded):
            names = ("generation", "tools", "grading", "update", "other")
            split = {name: found[f"{name}_seconds"] for name in names}
            assert sum(split.values()) == pytest.approx(found["seconds"], rel=0.01)
            assert all(0 <= seconds < found["seconds"] for seconds in split.values())
            assert found["peak_memory_gb"] > 0 and found["programs_seconds"] > 0
        assert decoded["generation_seconds"] > 10 * scripted["generation_seconds"]
        assert decoded["sampled_tokens"] == scripted["sampled_tokens"] > 8 * 64
    assert results["versus/ours/seconds_over_plain"] > 0


def test_what_is_known_stays_when_the_time_is_up_and_a_part_that_runs_again_starts_anew(tmp_path):
    path = tmp_path / "results.json"
    known = {"machine/gpu": "a", "full/decoded/seconds": 1.23456789, "lora/decoded/seconds": 2.0}
    gpu_step.write_to(path, known)
    gpu_step.forget(path, ["lora"])
    gpu_step.run_parts(["lora"], ["--results", str(path)], 0.0, lambda found: gpu_step.write_to(path, found))
    results = json.loads(path.read_text(encoding="utf-8"))
    state = {"lora/state": "not measured: the time was up"}
    assert results == {"machine/gpu": "a", "full/decoded/seconds": 1.2346} | state


@pytest.mark.slow
def test_a_part_that_fails_does_not_end_the_others(tmp_path):
    states = {}
    gpu_step.run_parts(["full", "lora"], ["--no-such-option"], 1.0, states.update)
    assert states["full/state"] == states["lora/state"] == "failed: exit code 2"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("arguments", "words"), [([], "there is no GPU here"), (["--cpu"], "--cpu needs --results")])
def test_a_cpu_never_writes_the_gpu_s_results(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", *arguments])
    with pytest.raises(SystemExit):
        gpu_step.main()
    assert words in capsys.readouterr().err


def test_the_architecture_is_that_of_qwen2_5_math_1_5b():
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(gpu_step.Sizes(cpu=False, engine="vllm").config)
    assert model.num_parameters() == 1_543_714_304
    assert model.num_parameters() - model.model.embed_tokens.weight.numel() == pytest.approx(1.31e9, rel=0.001)
