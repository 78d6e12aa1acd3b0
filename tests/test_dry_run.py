"""A dry run is the recipe's run but for what it says: its options, its stand-ins, every recipe as users start it."""

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import peft
import pytest
import yaml
from accelerate.utils import is_deepspeed_available
from launching import ROOT, SCRIPT, metrics
from stand_in_hub import HubStandIn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config
from trl import ModelConfig

from torl_doctor import stand_ins
from torl_doctor.dry_run import dry_options, prepare
from torl_doctor.stand_ins import shrunk, stand_in
from torl_trl.command_line import parse_arguments
from torl_trl.config import ToRLConfig
from torl_trl.data import DataError
from torl_trl.errors import UserError
from torl_trl.records import read_rollouts, rollouts_path
from torl_trl.script_arguments import ToRLScriptArguments

RECIPES = ROOT / "recipes"
TINY = RECIPES / "tiny"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))
LAPTOP = {"processes": 1, "gpu": False, "vllm": False, "deepspeed": False}
CLUSTER = {"processes": 8, "gpu": True, "vllm": True, "deepspeed": True}
DEFAULTS = {
    **dict.fromkeys(("output_dir", "prompts_per_step", "gradient_accumulation_steps", "hub_model_id", "deepspeed")),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "max_train_problems", "max_eval_problems")),
    **dict.fromkeys(("use_vllm", "vllm_enable_sleep_mode", "fp16", "push_to_hub"), False),
    **dict.fromkeys(("drop_void_turns", "drop_dead_groups", "mask_truncated_completions"), False),
    **{"accuracy_band": None, "overlong_penalty_tokens": 0},
    **{"num_generations": 16, "per_device_train_batch_size": 16, "max_completion_length": 3072},
    "vllm_mode": "colocate",
}


def recipe(name: str) -> dict:
    return DEFAULTS | yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


# --- options --------------------------------------------------------------------------------------------------------


def test_on_a_machine_that_has_everything_only_sizes_and_the_folder_change():
    options, left_out = dry_options(recipe("qwen7b.yaml"), **CLUSTER)
    assert left_out == []
    assert options == {
        "output_dir": "runs/qwen7b/dry_run",
        "resume_from_checkpoint": "false",
        **{"max_steps": 2, "eval_steps": 2, "logging_steps": 1},
        "prompts_per_step": 8,  # 8 processes with 16 rollouts each
        **{"max_train_problems": 64, "max_eval_problems": 8, "max_completion_length": 64},
    }


def test_a_laptop_leaves_out_what_it_lacks_and_says_each():
    options, left_out = dry_options(recipe("qwen7b.yaml"), **LAPTOP)
    assert options["use_vllm"] == options["vllm_enable_sleep_mode"] == "false"
    assert (options["deepspeed"], options["dtype"], options["use_cpu"]) == ("", "float32", "true")
    assert [line.partition(",")[0] for line in left_out] == ["vLLM", "vLLM's sleep mode", "DeepSpeed"]


def test_filters_are_left_out_since_a_random_model_would_train_nothing():
    options, left_out = dry_options(recipe("qwen7b_plus.yaml"), **CLUSTER)
    filters = ("drop_void_turns", "drop_dead_groups", "mask_truncated_completions", "refill_limit")
    assert [options[name] for name in filters] == ["false"] * 3 + [0]
    assert left_out == ["the filters, which would leave out all that a random model writes"]


@pytest.mark.parametrize(
    "written", [["--accuracy_band", "0.2", "0.8", "--refill_limit", "2"], ["--drop_void_turns", "true"]]
)
def test_whatever_filter_is_on_a_dry_run_has_none_and_parses(written, tmp_path):
    words = ["--config", "tiny.yaml", "--output_dir", str(tmp_path), "--dry_run", "true", "--loss_type", "dapo"]
    words += ["--overlong_penalty_tokens", "100"]
    arguments, left_out = prepare([*words, *written], RECIPES)
    _, args, _ = parse_arguments(arguments, RECIPES)
    assert args.accuracy_band in (None, [0, 1]) and args.refill_limit == 0 and not args.drop_void_turns
    assert args.overlong_penalty_tokens == args.max_completion_length == 64
    assert any(line.startswith("the filters, ") for line in left_out)


def test_servers_are_left_alone_since_they_hold_the_real_model():
    options, left_out = dry_options(recipe("qwen7b_multinode.yaml"), **CLUSTER)
    assert options["vllm_mode"] == "colocate"
    assert left_out == ["vLLM servers, which hold the real model: vLLM runs in this process"]


@pytest.mark.parametrize(
    ("given", "processes", "step"),
    [
        ({"prompts_per_step": 128}, 1, {"prompts_per_step": 4}),
        ({"prompts_per_step": 128}, 16, {"prompts_per_step": 16}),
        ({"prompts_per_step": 2}, 1, {"prompts_per_step": 2}),
        ({"num_generations": 8, "gradient_accumulation_steps": 8}, 1, {"gradient_accumulation_steps": 2}),
        ({"num_generations": 8, "per_device_train_batch_size": 4}, 1, {"gradient_accumulation_steps": 1}),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 8}, 1, {}),
        ({"num_generations": 0}, 1, {}),
    ],
)
def test_a_step_shrinks_to_a_few_prompts_with_the_same_groups_and_micro_batches(given, processes, step):
    options, _ = dry_options(DEFAULTS | given, **LAPTOP | {"processes": processes})
    names = {"prompts_per_step", "gradient_accumulation_steps"}
    assert {name: value for name, value in options.items() if name in names} == step


def test_a_step_that_the_real_run_could_not_share_is_refused():
    with pytest.raises(UserError, match="cannot be shared by 7 x per_device_train_batch_size 16"):
        dry_options(recipe("qwen7b.yaml"), **CLUSTER | {"processes": 7})


def test_a_push_goes_to_a_repository_of_its_own():
    pushes = DEFAULTS | {"push_to_hub": True, "output_dir": "runs/mine"}
    assert dry_options(pushes, **CLUSTER)[0]["hub_model_id"] == "mine-dry-run"
    assert dry_options(pushes | {"hub_model_id": "me/torl"}, **CLUSTER)[0]["hub_model_id"] == "me/torl-dry-run"


@pytest.mark.parametrize("words", [["--dry_run", "true"], ["--dry_run=true"], ["--dry_run"]])
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_of_a_dry_run_parses_wherever_it_is_made(name, words, tmp_path):
    arguments, _ = prepare(["--config", name, "--output_dir", str(tmp_path), *words], RECIPES)
    script_args, args, _ = parse_arguments(arguments, RECIPES)
    assert script_args.dry_run and args.max_steps == 2
    assert args.output_dir == str(tmp_path / "dry_run")


def test_without_the_option_the_command_line_stays_as_it_is():
    words = ["--config", "tiny.yaml", "--max_steps", "3"]
    assert prepare(words, RECIPES) == (words, [])


# --- stand-ins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False),
        LlamaConfig(vocab_size=500, tie_word_embeddings=True),
        Qwen3Config(vocab_size=500, max_position_embeddings=4096),
        GPT2Config(vocab_size=500),
    ],
    ids=lambda config: config.model_type,
)
def test_a_shrunk_model_is_small_saved_and_of_the_same_kind(config, tmp_path):
    model = AutoModelForCausalLM.from_config(shrunk(config))
    model.save_pretrained(tmp_path)
    small = AutoConfig.from_pretrained(tmp_path)
    assert (small.num_hidden_layers, small.hidden_size) == (2, 64)
    for name in ("model_type", "vocab_size", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(small, name) == getattr(config, name)
    assert sum(p.numel() for name, p in model.named_parameters() if ".layers." in name or ".h." in name) < 150_000


def arguments(folder: Path, model: str, **options):
    script = {"dataset_name": str(TINY / "train.jsonl"), "eval_dataset_name": str(TINY / "eval.jsonl")}
    script |= {name: options.pop(name) for name in list(options) if name.endswith(("_name", "_column"))}
    options |= {"use_cpu": True, "bf16": False, "num_generations": 8, "eval_strategy": "steps", "eval_steps": 2}
    args = ToRLConfig(output_dir=str(folder), **options)
    return ToRLScriptArguments(**script), args, ModelConfig(model_name_or_path=model)


def no_benchmark(name: str):
    raise DataError(f"{name} cannot be fetched.")


@pytest.fixture
def offline(monkeypatch):
    """No name of the Hub is looked up."""

    def unreachable(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(stand_ins.AutoConfig, "from_pretrained", unreachable)


def test_what_is_there_is_used_as_it_is(tmp_path):
    parts = arguments(tmp_path, str(TINY / "base"))
    assert stand_in(*parts, TINY, no_benchmark) == []
    assert parts[0].dataset_name == str(TINY / "train.jsonl") and parts[1].interpreter == "embedded"
    assert parts[2].model_name_or_path == str(tmp_path / "base")
    real, small = (AutoConfig.from_pretrained(folder) for folder in (TINY / "base", tmp_path / "base"))
    assert (small.vocab_size, small.max_position_embeddings) == (real.vocab_size, real.max_position_embeddings)


def test_what_is_not_reached_is_replaced_and_said(tmp_path, offline, monkeypatch):
    monkeypatch.delenv("TORL_SANDBOX_FUSION_URL", raising=False)
    options = {"dataset_name": "http://127.0.0.1:9/train.parquet", "eval_dataset_name": "aime24,math500"}
    options |= {"interpreter": "sandbox_fusion", "interpreter_options": {"timeout_seconds": 7, "retries": 1}}
    parts = arguments(tmp_path, "owner/model", problem_column="question", **options)
    left_out = stand_in(*parts, TINY, no_benchmark)
    assert [line.partition(",")[0] for line in left_out] == [
        "the model's own architecture and tokenizer",
        "the recipe's dataset_name",
        "the recipe's eval_dataset_name",
        "the interpreter sandbox_fusion",
    ]
    assert "aime24 cannot be fetched" in left_out[2] and "url is missing" in left_out[3]
    script_args, args, model_args = parts
    row = json.loads(Path(script_args.dataset_name).read_text().splitlines()[0])
    assert {"question", "answer"} <= row.keys()  # the recipe's columns
    assert script_args.eval_dataset_name == str(tmp_path / "eval.jsonl")
    assert (args.interpreter, args.interpreter_options) == ("embedded", {"timeout_seconds": 7})
    assert script_args.max_prompt_length == 4 * 400  # the stand-in's tokens are shorter
    model = Qwen2Config.from_pretrained(model_args.model_name_or_path)
    assert (model.model_type, model.tie_word_embeddings, model.max_position_embeddings) == ("qwen2", True, 4096)


def test_what_is_there_and_broken_is_no_reason_for_a_stand_in(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"configuration .* cannot be loaded"):
        stand_in(*arguments(tmp_path, str(tmp_path / "model")), TINY, no_benchmark)
    options = {"interpreter": "sandbox_fusion", "interpreter_options": {"timeout": 7}}
    with pytest.raises(UserError, match="has no option 'timeout'"):
        stand_in(*arguments(tmp_path, str(TINY / "base"), **options), TINY, no_benchmark)


# --- every recipe, as users start it --------------------------------------------------------------------------------


def dry_run(name: str, folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, SCRIPT, "--config", name, "--dry_run", "true", "--output_dir", str(folder), *words]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, which came with deepspeed
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": tools} | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_dry(name, tmp_path):
    printed = dry_run(name, tmp_path)
    given, folder = recipe(name), tmp_path / "dry_run"
    lines = [line for line in printed.splitlines() if line.startswith("dry run: ")]
    assert printed.splitlines()[-1] == lines[-1] and lines[-1].startswith("dry run: tried 2 steps, ")
    assert any("random parameters for" in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["dry_run"]

    train, evaluations = metrics(folder), metrics(folder, "eval")
    assert [line["step"] for line in train] == [1, 2] and [line["step"] for line in evaluations] == [0, 2]
    assert all(math.isfinite(line[key]) for line in train for key in ("loss", "grad_norm"))
    sampling = range(0, 2, given.get("num_iterations", 1))  # a second update has no rollouts of its own
    assert all(math.isfinite(train[step][key]) for step in sampling for key in ("reward", "accuracy"))
    assert all(math.isfinite(line["accuracy"]) for line in evaluations)
    table = read_rollouts(rollouts_path(folder, sampling[-1] + 1, "train")).to_pylist()
    assert len(table) == 4 * given["num_generations"]
    ran = any("ran a program" in line for line in lines)
    assert ran == ("the interpreter" in lines[-1].partition(";")[0]) == (given["max_tool_calls"] > 0)

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    checkpoint = folder / "checkpoint-2"
    if given.get("use_peft"):
        model = peft.PeftModel.from_pretrained(base, checkpoint)
        assert any("lora_" in parameter for parameter, _ in model.named_parameters())
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 64
    if given["use_vllm"]:
        engine = "vllm" if find_spec("vllm") else "transformers"
        assert {row["engine"] for row in table} == {engine}
    if given["deepspeed"] and is_deepspeed_available() and shutil.which("c++"):
        assert (checkpoint / "global_step2").is_dir()


@pytest.mark.slow
def test_a_dry_run_pushes_to_the_hub_where_the_recipe_does(tmp_path):
    with HubStandIn() as hub:
        words = ("--push_to_hub", "true", "--hub_model_id", "tester/model")
        printed = dry_run("tiny.yaml", tmp_path, *words, env=hub.environment)
        assert printed.splitlines()[-1].endswith("saving, a push to the Hub; left out: nothing")
        assert list(hub.repos) == ["tester/model-dry-run"]
        assert {"model.safetensors", "config.yaml"} <= hub.repos["tester/model-dry-run"].files().keys()


@pytest.mark.slow
def test_a_dry_run_leaves_the_run_that_is_there_alone(tmp_path):
    (tmp_path / "checkpoint-100").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for _ in range(2):  # the second begins again, too
        dry_run("tiny.yaml", tmp_path, "--resume_from_checkpoint", "true")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-100", "metrics.jsonl", "dry_run"}
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert [line["step"] for line in metrics(tmp_path / "dry_run")] == [1, 2]
