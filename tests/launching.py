"""The launch script in a process of its own, as users start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def metrics(folder: Path, split: str = "train") -> list[dict]:
    """The lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]
