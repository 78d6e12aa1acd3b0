"""Whole runs of the launch script, as users start them."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from launching import ROOT, SCRIPT, SHORT, accelerate_launch, launch, launch_environment, metrics, needs_deepspeed
from transformers import AutoModelForCausalLM

from torl_trl.records import read_rollouts


@pytest.mark.slow
def test_a_run_leaves_its_whole_folder(tmp_path):
    printed = launch(tmp_path)
    assert {"config.yaml", "metrics.jsonl", "rollouts", "curves.png", "checkpoint-2"} <= {
        path.name for path in tmp_path.iterdir()
    }
    for name in ("curves.png", "metrics.jsonl", "rollouts", "checkpoint-2"):
        assert str(tmp_path / name) in printed
    assert "step 1/2" in printed and "step 2/2" in printed
    assert len(metrics(tmp_path)) == 2


@pytest.mark.slow
def test_the_written_config_repeats_the_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    launch(first)
    command = [sys.executable, SCRIPT, "--config", str(first / "config.yaml"), "--output_dir", str(second)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ids = [read_rollouts(folder / "rollouts" / "step_000002.parquet")["completion_ids"] for folder in (first, second)]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_two_processes_train_together_and_rank_0_writes_alone(tmp_path):
    words = ("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--num_generations", "8")
    words += ("--eval_strategy", "steps", "--eval_steps", "2", "--max_eval_problems", "5")
    words += ("--per_device_eval_batch_size", "2", "--num_generations_eval", "1")
    launch(tmp_path, *words, processes=2, env={"ACCELERATE_USE_CPU": "true"})
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    table = read_rollouts(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(table) == 32
    assert sorted({row["rank"] for row in table}) == [0, 1]
    assert [row["group_id"] for row in table] == [i // 8 for i in range(32)]
    accuracy = sum(row["correct"] for row in table) / 32
    assert metrics(tmp_path)[0]["accuracy"] == pytest.approx(accuracy)
    calls = [sum(len(row["calls"]) for row in table if row["rank"] == rank) for rank in (0, 1)]
    (evaluation,) = metrics(tmp_path, "eval")  # 5 problems on 2 ranks in batches of 2: no repeat counts
    table = read_rollouts(tmp_path / "rollouts" / "eval_step_000002.parquet").to_pylist()
    assert len({row["problem_id"] for row in table}) == len(table) == 5
    assert evaluation["accuracy"] == pytest.approx(sum(row["correct"] for row in table) / 5)
    assert sum(calls) == sum(value for name, value in metrics(tmp_path)[0].items() if name.startswith("tools/status/"))


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_trackers_get_the_metrics(tracker, tmp_path):
    launch(tmp_path, "--report_to", tracker, env={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)})
    pattern = {"wandb": "wandb/offline-run-*/*.wandb", "tensorboard": "**/events.out.tfevents.*"}[tracker]
    logged = list(tmp_path.glob(pattern)) or list(ROOT.glob(f"runs/{pattern}"))
    assert b"tools/code_ratio" in logged[0].read_bytes()


@pytest.mark.slow
def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path):
    launch(tmp_path, "--save_strategy", "steps", "--save_steps", "1")
    launch(tmp_path, "--max_steps", "3", "--resume_from_checkpoint", str(tmp_path / "checkpoint-2"))
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.slow
def test_lora_trains_with_a_half_precision_base(tmp_path):
    launch(tmp_path, "--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj", "--dtype", "bfloat16")
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_rank_that_fails_in_its_rollouts_fails_all_at_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment |= {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'recipes'}"}
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "two_ranks.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [re.sub(r"\d+ s:", "N s:", line) for line in lines] == [
        "rank 0 raised EngineError in N s: Rank 1 failed in its rollouts: no space left on device",
        "rank 1 raised OSError in N s: no space left on device",
    ], done.stderr[-2000:]
    assert all(int(re.search(r"(\d+) s:", line)[1]) < 60 for line in lines)


# --- two processes, as `accelerate launch` starts them with each of our configs ------------------------------------

STEP = ("--num_generations", "8", "--per_device_train_batch_size", "8")
STEP += ("--prompts_per_step", "16", "--gradient_accumulation_steps", "8")  # the latter as derived for two processes
SEVEN_B = json.dumps(yaml.safe_load((ROOT / "recipes" / "qwen7b.yaml").read_text(encoding="utf-8"))["deepspeed"])


def start(config: str, folder: Path, *words: str, machine: int | None = None, port: int = 0) -> subprocess.Popen:
    """Two steps of the tiny recipe in `folder` on two processes, or those of one of two machines."""
    command = accelerate_launch(config, port)
    if machine is not None:
        command += ["--machine_rank", str(machine), "--main_process_ip", "127.0.0.1"]
    command += [SCRIPT, "--config", "tiny.yaml", "--output_dir", str(folder), *SHORT, *STEP, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=launch_environment(), stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen) -> str:
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    return printed


def completions(folder: Path, step: int) -> list[dict]:
    return read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2", dtype="float32").state_dict()


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> Path:
    """The run under DDP, with which the others are compared."""
    folder = tmp_path_factory.mktemp("ddp")
    finish(start("ddp.yaml", folder))
    return folder


@pytest.mark.slow
def test_two_processes_get_the_problems_and_about_the_rewards_of_one(ddp, tmp_path):
    words = [*STEP[:-1], "16"]  # accumulation steps of one process
    launch(tmp_path, *words)
    one, two = completions(tmp_path, 1), completions(ddp, 1)
    assert [row["problem_id"] for row in one] == [row["problem_id"] for row in two]
    rewards = [metrics(folder)[0]["reward"] for folder in (tmp_path, ddp)]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.25)  # of 128 rollouts each, two standard errors


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("config", "words"),
    [("zero2.yaml", ()), ("zero3.yaml", ()), ("ddp.yaml", ("--deepspeed", SEVEN_B))],
    ids=["zero2", "zero3", "the 7B recipe's own"],
)
def test_sharded_processes_train_the_weights_of_ddp(config, words, ddp, tmp_path):
    finish(start(config, tmp_path, *words))
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]  # rank 0 alone writes
    first = completions(tmp_path, 1)
    calls = [sum(len(row["calls"]) for row in first if row["rank"] == rank) for rank in (0, 1)]
    assert len(first) == 128 and calls[0] != calls[1] and all(calls)
    assert [row["completion_ids"] for row in first] == [row["completion_ids"] for row in completions(ddp, 1)]
    for ours, theirs in zip(metrics(tmp_path), metrics(ddp), strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    trained, expected = weights(tmp_path), weights(ddp)
    assert all(torch.allclose(trained[name], expected[name], rtol=0, atol=1e-6) for name in expected)


@pytest.mark.slow
@needs_deepspeed
def test_the_7b_recipe_s_sharding_keeps_float32_weights_behind_bfloat16_ones(tmp_path):
    finish(start("ddp.yaml", tmp_path, "--deepspeed", SEVEN_B, "--bf16", "true", "--dtype", "bfloat16"))
    assert all(math.isfinite(line[name]) for line in metrics(tmp_path) for name in ("loss", "grad_norm", "reward"))
    (path,) = tmp_path.glob("checkpoint-2/global_step2/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    for master in state["single_partition_of_fp32_groups"]:  # with weight decay, and without
        assert master.dtype == torch.float32
        assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ds3_gather_for_generation", "false"), "The transformers engine needs the whole model on each process"),
        (("--deepspeed", SEVEN_B), "The recipe sets deepspeed and the accelerate config DEEPSPEED: launch without"),
    ],
)
def test_sharding_that_cannot_work_is_refused_with_a_sentence(words, message, tmp_path):
    process = start("zero3.yaml", tmp_path, *words)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode != 0
    assert any(line.startswith(f"Error: {message}") for line in errors.splitlines()), errors[-3000:]


@pytest.mark.slow
@needs_deepspeed
def test_micro_batches_are_added_up_in_float32_where_accelerate_sets_deepspeed(tmp_path):
    words = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 ACCELERATE_USE_DEEPSPEED=true"
    program = (
        "from torl_trl import ToRLConfig; "
        "config = ToRLConfig(output_dir='x', use_cpu=True, bf16=False, num_generations=8); "
        "print(config.deepspeed_plugin.deepspeed_config['data_types'])"
    )
    environment = os.environ | dict(word.split("=") for word in words.split())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "{'grad_accum_dtype': 'fp32'}" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_two_machines_train_together(ddp, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [start("multi_node.yaml", tmp_path, machine=number, port=port) for number in (0, 1)]
    with ThreadPoolExecutor() as pool:  # both at once, lest one waits on a full pipe
        printed = list(pool.map(finish, machines))
    assert ["step 2/2" in text for text in printed] == [True, False]
    assert [row["completion_ids"] for row in completions(tmp_path, 2)] == [
        row["completion_ids"] for row in completions(ddp, 2)
    ]
