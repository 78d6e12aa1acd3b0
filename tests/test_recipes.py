"""Every recipe parses and is the run that it says; every accelerate config makes what its name says."""

import json
import os
import re
import shutil
from pathlib import Path

import accelerate.commands.launch
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin, is_deepspeed_available, patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from processes import as_rank_0_of

from torl_trl.batch import DERIVED
from torl_trl.command_line import parse_arguments
from torl_trl.config import ToRLConfig
from torl_trl.errors import UserError
from torl_trl.prompts import TORL_TEMPLATE, load_template, render_prompt
from torl_trl.run_folder import write_config

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))
QWEN = [name for name in NAMES if name.startswith("qwen")]
CONFIGS = ROOT / "accelerate_configs"
TRAIN_URL = "https://raw.githubusercontent.com/GAIR-NLP/ToRL/main/data/torl_data/train.parquet"

ACCUMULATION = dict.fromkeys(QWEN, (128, 64, 16, 8)) | {"qwen1.5b_lora.yaml": (64, 32, 8, 4)}
"""Accumulation steps on 1, 2, 8 and 16 processes."""


@pytest.fixture
def stand_ins(tmp_path: Path) -> list[str]:
    """A model folder and a data file in place of those of a recipe."""
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(RECIPES / "tiny" / "base", model)
    data.write_text(json.dumps({"problem": "What is 1 + 1?", "answer": "2"}) + "\n")
    return ["--model_name_or_path", str(model), "--dataset_name", str(data), "--eval_dataset_name", str(data)]


def parse(name: str, words: list[str]):
    """A recipe on a machine without a GPU. Sleep is vLLM's own on GPUs, and DeepSpeed may not be installed here."""
    words = ["--config", name, "--use_cpu", "true", "--bf16", "false", "--vllm_enable_sleep_mode", "false", *words]
    if not is_deepspeed_available():
        words += ["--deepspeed", ""]
    return parse_arguments(words, RECIPES)


def values(name: str) -> dict:
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_parses_and_its_values_arrive(name, stand_ins):
    script_args, args, model_args = parse(name, stand_ins)
    given_elsewhere = {"use_cpu", "bf16", "vllm_enable_sleep_mode", "deepspeed", "report_to", "resume_from_checkpoint"}
    given_elsewhere |= {"model_name_or_path", "dataset_name", "eval_dataset_name"}
    for key, value in values(name).items():
        if key not in given_elsewhere and key != "prompt_template":
            (holder,) = [part for part in (script_args, args, model_args) if hasattr(part, key)]
            arrived = getattr(holder, key)
            assert getattr(arrived, "value", arrived) == value, key
    template = load_template(script_args.prompt_template)
    assert "1 + 1" in render_prompt(template, "What is 1 + 1?")


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("number", range(4))
def test_a_step_is_the_same_on_1_2_8_and_16_processes(name, number, stand_ins):
    with as_rank_0_of((1, 2, 8, 16)[number]):
        args = parse(name, stand_ins)[1]
    assert args.gradient_accumulation_steps == args.steps_per_generation == ACCUMULATION[name][number]
    stated = values(name)
    assert args.generation_batch_size == stated["prompts_per_step"] * stated["num_generations"]


def test_the_config_that_a_run_writes_is_the_same_step_on_other_processes(stand_ins, tmp_path):
    with as_rank_0_of(8):
        path = write_config(tmp_path, *parse("qwen1.5b.yaml", stand_ins), leave_out=DERIVED)
    with as_rank_0_of(2):
        args = parse(str(path), [])[1]
    assert (args.gradient_accumulation_steps, args.generation_batch_size) == (64, 2048)


@pytest.mark.parametrize("name", QWEN)
def test_a_header_says_what_is_needed_and_what_comes_out(name):
    header = (RECIPES / name).read_text(encoding="utf-8").partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    command = " ".join(header.replace("#", "").replace("\\", "").split())
    assert re.search(rf"accelerate launch .*recipes/grpo_torl\.py --config {re.escape(name)}", command)
    for line in ("Hardware", "Memory", "Time", "Paper", "Status"):
        assert re.search(rf"^# {line}:\s+\S", header, re.MULTILINE), line
    assert "Memory:   estimated" in header and "Time:     estimated" in header
    assert "was not made at its size" in header


@pytest.mark.parametrize("name", QWEN)
def test_every_value_of_a_recipe_has_its_source(name):
    without = {"logging_steps", "save_rollouts_every", "output_dir", "save_strategy", "eval_strategy"}
    for line in (RECIPES / name).read_text(encoding="utf-8").splitlines():
        key = re.match(r"(\w+):", line)
        if key and key[1] not in without and not key[1].startswith(("lora_", "vllm_server")):
            source = line.partition("  #")[2]
            assert re.search(r"paper|script|verl|ours|released code|authors|token mean|the model's own", source), line


def test_the_two_runs_of_the_paper_differ_only_where_they_must():
    small, large = values("qwen1.5b.yaml"), values("qwen7b.yaml")
    differing = {key for key in small.keys() | large.keys() if small.get(key) != large.get(key)}
    assert differing == {"model_name_or_path", "dtype", "deepspeed", "max_steps", "output_dir"}
    assert (small["max_steps"], large["max_steps"]) == (1000, 500)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen1.5b_c2.yaml", {"max_tool_calls", "max_steps"}),
        ("qwen1.5b_penalty.yaml", {"executability_penalty", "penalty_scope", "max_steps"}),
        (
            "qwen1.5b_no_tool.yaml",
            {"max_tool_calls", "prompt_template", "interpreter", "interpreter_options", "max_observation_chars"},
        ),
    ],
)
def test_an_ablation_changes_only_what_it_is_about(name, changed):
    base, ablation = values("qwen1.5b.yaml"), values(name)
    differing = {key for key in base.keys() | ablation.keys() if base.get(key) != ablation.get(key)}
    assert differing == changed | {"output_dir"}


@pytest.mark.parametrize("base", ["qwen1.5b", "qwen7b"])
def test_a_plus_run_is_the_paper_s_run_with_the_switches_on(base):
    paper, plus = values(f"{base}.yaml"), values(f"{base}_plus.yaml")
    switches = {"drop_void_turns", "drop_dead_groups", "refill_limit", "mask_truncated_completions", "scale_rewards"}
    switches |= {"resample_failures", "stop_at_grad_norm", "hang_timeout", "max_tool_calls", "output_dir"}
    switches |= {"num_iterations", "epsilon_high"}
    correction = {f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max")}
    assert {key for key in paper.keys() | plus.keys() if paper.get(key) != plus.get(key)} == switches | correction
    assert not switches & {"drop_void_turns", "drop_dead_groups"} & paper.keys()


def test_the_multi_node_run_is_the_7b_run_with_servers():
    base, nodes = values("qwen7b.yaml"), values("qwen7b_multinode.yaml")
    differing = {key for key in base.keys() | nodes.keys() if base.get(key) != nodes.get(key)}
    assert {key for key in differing if not key.startswith("vllm_")} == {"output_dir"}


def test_the_servers_of_the_multi_node_run_are_eight(stand_ins):
    args = parse("qwen7b_multinode.yaml", stand_ins)[1]
    assert args.server_urls() == [f"http://gen:800{number}" for number in range(8)]


def test_the_paper_s_values_stand_in_its_runs():
    for name in ("qwen1.5b.yaml", "qwen7b.yaml"):
        stated = values(name)
        assert (stated["prompts_per_step"], stated["num_generations"], stated["max_tool_calls"]) == (128, 16, 1)
        assert (stated["max_prompt_length"], stated["max_completion_length"]) == (400, 3072)
        assert (stated["learning_rate"], stated["beta"], stated["epsilon"]) == (1e-6, 0.0, 0.2)
        assert (stated["temperature"], stated["eval_temperature"]) == (1.0, 0.0)
        assert (stated["interpreter"], stated["max_observation_chars"]) == ("sandbox_fusion", 256)
        assert stated["dataset_name"] == TRAIN_URL


def test_the_plain_prompt_asks_for_no_program():
    template = load_template(str(RECIPES / "qwen" / "plain_reasoning.txt"))
    assert "program" not in template and r"\boxed{}" in template
    frame = TORL_TEMPLATE.partition("User: ")[0], TORL_TEMPLATE.rpartition("{question}")[2]
    assert template.startswith(frame[0]) and template.endswith(frame[1])


def test_the_page_of_recipes_lists_every_one():
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[`([\w.]+\.yaml)`\]\(\1\)", page, re.MULTILINE) == sorted(NAMES, key=page.index)
    assert all(config.name in page for config in CONFIGS.glob("*.yaml"))


# --- accelerate configs ---------------------------------------------------------------------------------------------


def launcher_environment(name: str, *words: str) -> dict[str, str]:
    """What `accelerate launch --config_file` of a config puts into the environment of its processes."""
    parser = accelerate.commands.launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(CONFIGS / name), *words, "script.py"])
    args, defaults, _ = accelerate.commands.launch._validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_a_config_and_knows_all_its_keys(path):
    config = load_config_from_file(str(path))
    options = {action.dest for action in accelerate.commands.launch.launch_command_parser()._actions}
    for section in (getattr(config, "deepspeed_config", {}), getattr(config, "fsdp_config", {})):
        assert set(section) <= options
    assert config.num_processes % config.num_machines == 0


@pytest.mark.parametrize(("name", "stage"), [("zero2.yaml", "2"), ("zero3.yaml", "3")])
def test_a_deepspeed_config_sets_its_stage(name, stage):
    environment = launcher_environment(name)
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == stage
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_fsdp2_makes_a_plugin_of_version_2():
    environment = launcher_environment("fsdp2.yaml")
    with patch_environment(**{name: value for name, value in environment.items() if "FSDP" in name}):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing


@pytest.mark.parametrize("sharding", ["DEEPSPEED", "FSDP"])
@pytest.mark.skipif(not is_deepspeed_available(), reason="needs deepspeed")
def test_a_recipe_with_deepspeed_refuses_an_accelerate_config_with_its_own(sharding, stand_ins, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{sharding}", "true")
    with pytest.raises(UserError, match=f"The recipe sets deepspeed and the accelerate config {sharding}: launch"):
        parse("qwen7b.yaml", stand_ins)
    assert not parse("qwen1.5b.yaml", stand_ins)[1].deepspeed


def test_deepspeed_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("torl_trl.config.is_deepspeed_available", lambda: False)
    with pytest.raises(
        UserError, match=r"^deepspeed is set and the package is missing: install requirements\.txt, or remove it\.$"
    ):
        ToRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, deepspeed=values("qwen7b.yaml")["deepspeed"])


@pytest.mark.skipif(not is_deepspeed_available(), reason="needs deepspeed")
def test_the_7b_run_is_zero_2_with_its_sizes_filled_in(stand_ins):
    with as_rank_0_of(8):
        args = parse("qwen7b.yaml", stand_ins)[1]
        config = args.hf_deepspeed_config.config
    assert args.deepspeed_plugin.zero_stage == 2
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (2048, 16)
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "false"
