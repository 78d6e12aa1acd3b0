"""Whole runs of the launch script, as users start them."""

import os
import re
import subprocess
import sys

import pytest
from launching import ROOT, SCRIPT, launch, metrics

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
