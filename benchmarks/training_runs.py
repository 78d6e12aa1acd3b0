"""Training runs of a benchmark: each with one thread, several at a time; a finished one is not trained again."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torl_trl.run_folder import METRICS_NAME, read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"


def train_all(runs: Mapping[Path, Mapping[str, Any]], jobs: int, recipe: str = "tiny.yaml") -> None:
    """Train what is not finished of `runs`: run folder -> options that differ from the recipe, `jobs` at a time.

    Raises `CalledProcessError` when a run fails; FOLDER.log beside its folder says why.
    """
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: train(*run, recipe), runs.items()))


def train(folder: Path, options: Mapping[str, Any], recipe: str = "tiny.yaml") -> None:
    """Train one run, unless it is finished; one that was cut off starts anew."""
    if is_finished(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, RECIPES / "grpo_torl.py", "--config", RECIPES / recipe, "--output_dir", folder]
    for name, value in options.items():
        words += [f"--{name}", *(value if isinstance(value, list | tuple) else [value])]
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        # vLLM would bind each run to all cores; torch's default port serves one run only.
        own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "MASTER_PORT": str(free_port())}
        subprocess.run(list(map(str, words)), check=True, stdout=log, stderr=log, env=os.environ | own)
    sys.stdout.write(f"finished {folder.name}\n")
    sys.stdout.flush()


def is_finished(folder: Path) -> bool:
    """Whether a run came to its end: it wrote its summary line."""
    return (folder / METRICS_NAME).exists() and any(line["split"] == "summary" for line in read_metrics(folder))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
