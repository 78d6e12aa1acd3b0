"""The model card of a run: what it says, what it leaves out, and code that runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from test_comparison import RESULTS

from torl_report.card import write_card
from torl_report.facts import run_facts
from torl_trl.run_folder import write_config

BASE = Path(__file__).parents[1] / "recipes" / "tiny" / "base"
OPTIONS = {
    "model_name_or_path": "Qwen/Qwen2.5-Math-1.5B",
    "dataset_name": "someone/problems",
    "output_dir": "runs/mine",
    "hub_model_id": "someone/mine",
    "hub_token": "hf_planted",
    "max_steps": 10,
    "num_generations": 16,
    "learning_rate": 1e-6,
    "max_tool_calls": 1,
    "max_completion_length": 3072,
    "interpreter": "sandbox_fusion",
    "interpreter_options": {"url": "http://user:planted@host:8080", "api_key": "sk-planted"},
    "lora_r": 16,
}
LINES = [
    {"step": 0, "split": "eval", "epoch": 0.0, "accuracy": 0.125, "reward": -0.75, "aime24/avg@16": 0.05},
    {"step": 1, "split": "train", "epoch": 0.1, "accuracy": 0.2, "reward": -0.6},
    {"step": 10, "split": "eval", "epoch": 1.0, "accuracy": 0.875, "reward": 0.75, "aime24/avg@16": 0.15},
    {"step": 10, "split": "summary", "epoch": 1.0, "train_runtime": 5.0},
]


def card_of(folder: Path, *, lines=LINES, evaluation=None, **options) -> ModelCard:
    folder.mkdir(exist_ok=True)
    write_config(folder, OPTIONS | options)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ModelCard.load(write_card(folder, evaluation=evaluation))


def test_the_hub_reads_where_a_model_comes_from(tmp_path):
    data = card_of(tmp_path).data
    assert (data.library_name, data.base_model, data.datasets) == (
        "transformers",
        "Qwen/Qwen2.5-Math-1.5B",
        ["someone/problems"],
    )
    assert {"torl", "grpo", "trl"} <= set(data.tags) and data.license is None


def test_a_local_base_or_file_is_no_id_and_shows_no_path(tmp_path):
    problems = tmp_path / "secret-place" / "train.parquet"
    problems.parent.mkdir()
    problems.touch()
    card = card_of(tmp_path / "run", model_name_or_path=str(BASE), dataset_name=str(problems), use_peft=True)
    assert card.data.base_model is None and card.data.datasets is None and card.data.library_name == "peft"
    assert "`train.parquet`" in card.text and str(tmp_path) not in card.text and str(BASE) not in card.text


def test_it_shows_what_was_set_and_what_was_measured(tmp_path):
    (tmp_path / "curves.png").touch()
    text = card_of(tmp_path).text
    for row in ("| `learning_rate` | 1e-06 |", "| `max_tool_calls` | 1 |", "| accuracy | 0.125 | 0.875 |"):
        assert row in text
    assert "| On held-out problems | step 0 | step 10 |" in text and "| aime24/avg@16 | 0.050 | 0.150 |" in text
    assert "![Learning curves](curves.png)" in text and "arxiv.org/abs/2503.23383" in text
    assert "lora_r" not in text  # no LoRA was used


def test_without_an_evaluation_training_is_measured_and_without_metrics_nothing(tmp_path):
    assert (
        "| On the problems of training, while sampling | step 1 | step 1 |" in card_of(tmp_path, lines=LINES[1:2]).text
    )
    text = card_of(tmp_path, lines=[]).text
    assert "Measured" not in text and "curves.png" not in text and "## Evaluation" not in text


def test_an_evaluation_stands_beside_the_paper(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(RESULTS))
    assert "| ToRL-7B | yes |" in card_of(tmp_path).text
    other = tmp_path / "other.json"
    path.rename(other)
    assert "| ToRL-7B | yes |" in card_of(tmp_path, evaluation=other).text


def test_the_data_card_tells_about_the_problems(tmp_path):
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "README.md").write_text(
        "---\ntags: [math]\n---\n\n# train\n\n12 problems of algebra,\nall new.\n\nMore.\n"
    )
    text = card_of(tmp_path / "run", dataset_name=str(tmp_path / "train.jsonl")).text
    assert "> 12 problems of algebra,\n> all new." in text and "More." not in text


def test_the_report_page_finds_the_versions(tmp_path):
    card_of(tmp_path)
    assert any(version.startswith("trl: 1.") for version in run_facts(tmp_path)["versions"])


def test_secrets_stay_out(tmp_path):
    assert "planted" not in card_of(tmp_path).text + (tmp_path / "config.yaml").read_text()


def test_a_card_without_a_configuration_is_a_card(tmp_path):
    assert ModelCard.load(write_card(tmp_path)).data.library_name == "transformers"


@pytest.mark.parametrize("template", [None, "Solve it.\n'''\"{question}\"'''\nAnswer:\n"])
def test_its_example_runs(template, tmp_path):
    text = card_of(tmp_path, hub_model_id=str(BASE), max_completion_length=40, prompt_template=template).text
    (code,) = re.findall(r"^```python\n(from transformers.*?)^```$", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_options_with_signs_of_tables_and_yaml_stay_text(tmp_path):
    card = card_of(tmp_path, interpreter="a|b\nc", dataset_name="x: y\n---\n")
    assert "| `interpreter` | a\\|b c |" in card.text and yaml.safe_load(card.data.to_yaml())["library_name"]
