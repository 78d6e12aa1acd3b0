"""The run's config.yaml and metrics.jsonl."""

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
import yaml
from transformers import TrainerControl, TrainerState, TrainingArguments

from torl_trl.metrics_file import MetricsFile, metrics_line
from torl_trl.run_folder import read_metrics, write_config


class Backend(Enum):
    FAST = "fast"


@dataclass
class Options:
    learning_rate: float = 1e-6
    output_dir: Path = Path("runs/tiny")
    backend: Backend = Backend.FAST
    betas: tuple[float, float] = (0.9, 0.999)
    hub_token: str | None = "hf_very_secret"
    eos_token: str = "<|end|>"
    max_tokens: int = 7
    interpreter_options: dict = field(
        default_factory=lambda: {"api_key": "e2b_very_secret", "url": "http://me:very_secret@host:80/run", "slots": 4}
    )
    derived: int = field(default=3, init=False)


def test_the_config_is_plain_yaml_that_loads_again(tmp_path):
    path = write_config(tmp_path, Options(), {"recipe": "tiny"})
    assert yaml.safe_load(path.read_text()) == {
        "learning_rate": 1e-6,
        "output_dir": "runs/tiny",
        "backend": "fast",
        "betas": [0.9, 0.999],
        "eos_token": "<|end|>",
        "max_tokens": 7,
        "interpreter_options": {"url": "http://host:80/run", "slots": 4},
        "recipe": "tiny",
    }


def test_secrets_are_left_out_and_named(tmp_path):
    text = write_config(tmp_path, Options()).read_text()
    assert "very_secret" not in text
    assert text.splitlines()[0].endswith("Left out as secret: hub_token, interpreter_options.api_key.")


def test_training_arguments_become_plain_yaml(tmp_path):
    torch = pytest.importorskip("torch")
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, hub_token="hf_very_secret", report_to="none")
    path = write_config(tmp_path, arguments, {"model_init_kwargs": {"dtype": torch.float32}})
    loaded = yaml.safe_load(path.read_text())
    assert loaded["model_init_kwargs"] == {"dtype": "float32"}
    assert loaded["lr_scheduler_type"] == "linear"
    assert "very_secret" not in path.read_text()


def test_parts_that_disagree_and_values_that_are_not_plain_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"'seed' is 1 and 2 in two parts"):
        write_config(tmp_path, {"seed": 1}, {"seed": 2})
    with pytest.raises(TypeError, match=r"'a\.b'"):
        write_config(tmp_path, {"a": {"b": object()}})


def test_an_option_can_be_left_out(tmp_path):
    path = write_config(tmp_path, {"a": 1, "generation_batch_size": 8}, leave_out=("generation_batch_size",))
    assert yaml.safe_load(path.read_text()) == {"a": 1}


class Run:
    """A trainer as the callback sees it."""

    def __init__(self, folder, step=0, main=True, eval_on_start=False):
        self.callback = MetricsFile(folder)
        self.args = TrainingArguments(output_dir=str(folder), use_cpu=True, eval_on_start=eval_on_start)
        self.state = TrainerState(global_step=step, is_world_process_zero=main)

    def begin(self):
        self.callback.on_train_begin(self.args, self.state, TrainerControl())
        return self

    def log(self, step, **logs):
        self.state.global_step = step
        self.callback.on_log(self.args, self.state, TrainerControl(), logs=logs)
        return self


def places(folder):
    return [(line["step"], line["split"]) for line in read_metrics(folder)]


def test_logs_become_lines_with_their_split(tmp_path):
    run = Run(tmp_path).begin().log(1, reward=0.5, epoch=0.25, **{"tools/code_ratio": 0.75})
    assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")  # flushed at once
    run.log(1, eval_reward=0.25, epoch=0.25, **{"eval_tools/code_ratio": 1.0})
    run.log(1, train_runtime=3.0, train_loss=0.0, epoch=0.25)
    assert read_metrics(tmp_path) == [
        {"step": 1, "split": "train", "epoch": 0.25, "reward": 0.5, "tools/code_ratio": 0.75},
        {"step": 1, "split": "eval", "epoch": 0.25, "reward": 0.25, "tools/code_ratio": 1.0},
        {"step": 1, "split": "summary", "epoch": 0.25, "train_runtime": 3.0, "train_loss": 0.0},
    ]


def test_numbers_that_json_does_not_know_become_null():
    torch = pytest.importorskip("torch")
    logs = {"a": float("nan"), "b": float("inf"), "c": None, "d": torch.tensor(0.5), "e": torch.tensor(float("nan"))}
    line = metrics_line(1, logs)
    assert [line[name] for name in "abcde"] == [None, None, None, 0.5, None]


def test_only_the_main_process_writes(tmp_path):
    Run(tmp_path, main=False).begin().log(1, reward=0.5)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    run = Run(tmp_path).begin().log(0, eval_reward=0.0)
    for step in range(1, 6):
        run.log(step, reward=0.0).log(step, eval_reward=0.0)
    Run(tmp_path, step=3).begin().log(4, reward=1.0)
    both = [(step, split) for step in range(1, 4) for split in ("train", "eval")]
    assert places(tmp_path) == [(0, "eval"), *both, (4, "train")]
    assert read_metrics(tmp_path)[-1]["reward"] == 1.0


def test_an_evaluation_that_the_resumed_run_repeats_is_removed(tmp_path):
    Run(tmp_path).begin().log(3, reward=0.0).log(3, eval_reward=0.0).log(3, train_runtime=1.0)
    Run(tmp_path, step=3, eval_on_start=True).begin().log(3, eval_reward=0.5)
    assert places(tmp_path) == [(3, "train"), (3, "eval")]


def test_a_new_run_in_an_old_folder_starts_the_file_anew_but_keeps_its_own_first_evaluation(tmp_path):
    Run(tmp_path).begin().log(0, eval_reward=0.0).log(1, reward=0.0)
    Run(tmp_path).log(0, eval_reward=0.5).begin().log(1, reward=0.5)
    assert [line["reward"] for line in read_metrics(tmp_path)] == [0.5, 0.5]


def test_half_a_line_left_by_a_killed_run_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start in (lambda run: run.begin(), lambda run: run):
        path.write_text('{"step": 1, "split": "train", "reward": 0.0}\n{"step": 2, "sp')
        assert places(tmp_path) == [(1, "train")]
        start(Run(tmp_path, step=1)).log(2, reward=0.5)
        assert places(tmp_path) == [(1, "train"), (2, "train")]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps([1]) + "\n")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_metrics(tmp_path)
