"""A run that is killed goes on from its last whole checkpoint, and ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import ROOT, SCRIPT, metrics

from torl_trl.checkpoints import last_whole_checkpoint
from torl_trl.command_line import parse_arguments
from torl_trl.errors import UserError
from torl_trl.records import read_rollouts

KILLS = 20
STEPS = 6
TINY = ["--config", "tiny.yaml", "--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "2"]
TINY += ["--eval_strategy", "no", "--eval_on_start", "false", "--save_rollouts_every", "1"]
TINY += ["--gradient_accumulation_steps", "2", "--resume_from_checkpoint", "true"]


def checkpoint(folder: Path, step: int) -> Path:
    """As much of a checkpoint as tells that it is whole."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "rng_state.pth").touch()
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def test_the_last_whole_checkpoint_counts_by_number(tmp_path):
    assert last_whole_checkpoint(tmp_path / "nowhere") is None
    for step in (2, 10, 9):
        checkpoint(tmp_path, step)
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path / "trainer_state.json").unlink(),
        lambda path: (path / "trainer_state.json").write_text('{"global_st'),
        lambda path: (path / "rng_state.pth").unlink(),  # save_only_model
        lambda path: (path / "trainer_state.json").write_text('{"global_step": 2}'),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(spoil, tmp_path):
    checkpoint(tmp_path, 2)
    spoil(checkpoint(tmp_path, 4))
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_named_checkpoint_must_be_whole_and_true_may_find_none(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--config", "tiny.yaml", "--output_dir", str(tmp_path), "--resume_from_checkpoint"]

    def resumed(value: str) -> str | None:
        return parse_arguments([*words, value], ROOT / "recipes")[1].resume_from_checkpoint

    assert resumed("true") is None
    path = checkpoint(tmp_path, 2)
    assert resumed("true") == resumed(str(path)) == str(path)
    (path / "trainer_state.json").unlink()
    with pytest.raises(UserError, match="is not whole"):
        resumed(str(path))


def start(folder: Path) -> subprocess.Popen:
    command = [sys.executable, SCRIPT, *TINY, "--output_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]


def without_times(line: dict) -> dict:
    return {name: value for name, value in line.items() if not any(part in name for part in ("time", "second"))}


def outcome(folder: Path) -> tuple:
    """What must not depend on a kill: weights, metrics and rollouts, but for what is measured in seconds."""
    weights = (folder / f"checkpoint-{STEPS}" / "model.safetensors").read_bytes()
    rows = []
    for path in sorted((folder / "rollouts").iterdir()):
        for row in read_rollouts(path).drop_columns(["epoch"]).to_pylist():
            row["calls"] = [{k: v for k, v in call.items() if "seconds" not in k} for call in row["calls"] or ()]
            rows.append(row)
    lines = [without_times(line) for line in metrics(folder)]
    return weights, [{k: v for k, v in line.items() if not k.startswith("rollout/")} for line in lines], rows


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_weights_metrics_and_rollouts_of_an_unbroken_one(tmp_path):
    began = time.monotonic()
    finish(start(tmp_path / "unbroken"))
    seconds = time.monotonic() - began
    expected = outcome(tmp_path / "unbroken")
    assert [line["step"] for line in expected[1]] == list(range(1, STEPS + 1))
    draw = random.Random(7)
    moments = [draw.uniform(0.35, 1.3) * seconds for _ in range(KILLS)]  # two at a time are slower than one

    def kill_and_resume(number: int) -> bool:
        folder = tmp_path / f"killed_{number}"
        process = start(folder)
        try:
            process.wait(moments[number])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        killed = process.wait() == -signal.SIGKILL
        process.stdout.close()
        finish(start(folder))
        found = outcome(folder)
        assert found[0] == expected[0], f"weights after kill {number} at {moments[number]:.1f} s"
        assert found[1] == expected[1], f"metrics after kill {number} at {moments[number]:.1f} s"
        assert found[2] == expected[2], f"rollouts after kill {number} at {moments[number]:.1f} s"
        return killed

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(kill_and_resume, range(KILLS))) > KILLS / 2
