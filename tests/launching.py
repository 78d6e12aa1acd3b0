"""The launch script, and trainers of two ranks, in processes of their own, as users start them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils import is_deepspeed_available

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "recipes" / "grpo_torl.py")
SHORT = ["--max_steps", "2", "--eval_strategy", "no", "--eval_on_start", "false", "--save_rollouts_every", "1"]


def launch(folder: Path, *words: str, processes: int = 1, env: dict[str, str] | None = None) -> str:
    """Run two steps of the tiny recipe in `folder`, with `words` as overrides; return what it printed."""
    command = [sys.executable]
    if processes > 1:  # accelerate's launcher starts one process where there is no GPU, torchrun starts all
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [SCRIPT, "--config", "tiny.yaml", "--output_dir", str(folder), *SHORT, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


needs_deepspeed = pytest.mark.skipif(
    not is_deepspeed_available() or not shutil.which("c++"),
    reason="needs deepspeed, and on a CPU a C++ compiler, with which it builds its collectives",
)


def accelerate_launch(config: str, port: int = 0) -> list[str]:
    """The start of a command: two processes in float32 with one of our configs."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
    return [*command, "--config_file", str(ROOT / "accelerate_configs" / config), "--main_process_port", str(port)]


def launch_environment() -> dict[str, str]:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, which came with deepspeed
    return os.environ | {"OMP_NUM_THREADS": "1", "PATH": tools}


def on_two_ranks(script: str, folder: Path, *words: str, config: str | None = None) -> str:
    """Run a script of this folder with torchrun, or with an accelerate config of ours; return what it printed."""
    environment = launch_environment()
    if config is None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment["ACCELERATE_USE_CPU"] = "true"  # which the configs say; with DeepSpeed this would switch it off
    else:
        command = accelerate_launch(config)
    command += [str(ROOT / "tests" / script), str(folder), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path, split: str = "train") -> list[dict]:
    """The lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]
