"""The doctor: a line for what is right, and the right line for each thing that is planted wrong."""

import json
import logging
import shutil
from collections import namedtuple
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from stand_in_hub import TOKEN, HubStandIn
from stand_in_sandbox_fusion import SandboxFusionStandIn
from test_vllm_server import StandIn as VLLMStandIn
from transformers import AutoConfig, AutoTokenizer

from torl_doctor import machine, preflight, services
from torl_doctor.__main__ import CHECKS, RECIPES, main
from torl_doctor.findings import Finding, Run, examine
from torl_doctor.preflight import look_at
from torl_trl.command_line import parse_arguments

TINY = ["--config", "tiny.yaml", "--max_train_problems", "128", "--max_eval_problems", "4"]
QWEN = [name.name for name in sorted(RECIPES.glob("qwen*.yaml"))]
DEAD = "http://127.0.0.1:9"


def run_of(folder: Path, *words: str) -> Run:
    return look_at(*parse_arguments([*TINY, "--output_dir", str(folder), *words], RECIPES))


def findings(run: Run, *names: str) -> list[Finding]:
    return list(examine(run, {name: CHECKS[name] for name in names}))


def only(run: Run, *names: str) -> Finding:
    """The last check's one line."""
    (finding,) = [finding for finding in findings(run, *names) if finding.check == names[-1]]
    return finding


@pytest.fixture
def lines(capsys, tmp_path):
    """Runs the command; gives its exit code and its lines as `--json` has them."""

    def run(*words: str) -> tuple[int, list[dict]]:
        code = main([*TINY, "--output_dir", str(tmp_path), "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    yield run
    logging.getLogger("torl_trl").setLevel(logging.NOTSET)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(services, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(services, "MOST_CALLS", 4)


def errors(found: list[dict]) -> set[str]:
    return {line["check"] for line in found if line["level"] == "error"}


def test_the_tiny_recipe_is_well_and_every_check_has_its_line(lines, quick):
    code, found = lines()
    assert code == 0 and not errors(found)
    assert {line["check"] for line in found} == set(CHECKS)
    assert all(set(line) == {"level", "value", "remedy", "check"} for line in found)
    assert all(line["remedy"] for line in found if line["level"] != "ok")


def test_without_json_each_finding_is_one_line(capsys, tmp_path, quick):
    assert main([*TINY, "--output_dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert len(text) == len(CHECKS) + 1  # the interpreter has two
    assert all(line.split()[0] in ("ok", "warning") for line in text)
    logging.getLogger("torl_trl").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no_such_key", "1"), "Unknown option"),
        (("--save_steps", "3", "--steps_per_generation", "16"), "cuts a generation cycle of 16"),
        (("--config", "absent.yaml"), "absent.yaml"),
    ],
)
def test_options_that_are_refused_are_one_line_and_exit_code_2(lines, words, said):
    code, found = lines(*words) if words[0] != "--config" else (main(["--json", *words]), None)
    assert code == 2
    if found is not None:
        (line,) = found
        assert line["check"] == "options" and said in line["value"]


def test_the_7b_recipe_on_a_machine_without_a_gpu_says_how_to_look_it_over_there(capsys):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert main(["--config", "qwen1.5b.yaml"]) == 2
    assert "--use_cpu true --vllm_enable_sleep_mode false" in capsys.readouterr().out


@pytest.mark.parametrize("name", QWEN)
def test_a_qwen_recipe_is_looked_over_offline_with_stand_ins(name, tmp_path, monkeypatch, quick, capsys):
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(RECIPES / "tiny" / "base", model)
    rows = [{"problem": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(128)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--eval_dataset_name", str(data)]
    words += ["--use_cpu", "true", "--vllm_enable_sleep_mode", "false", "--output_dir", str(tmp_path), "--json"]
    words += ["--lora_target_modules", "q_proj", "v_proj"] if "lora" in name else []
    with SandboxFusionStandIn() as sandbox, VLLMStandIn() as server:
        monkeypatch.setenv("TORL_SANDBOX_FUSION_URL", sandbox.url)
        words += ["--vllm_server_base_url", server.url] if "multinode" in name else []
        code = main(["--config", name, *words])
    found = json.loads(capsys.readouterr().out)
    logging.getLogger("torl_trl").setLevel(logging.NOTSET)
    wrong = errors(found) - {"versions", "prompts"}  # vllm may be missing here; the stand-in's context is 1,024
    assert not wrong and {line["check"] for line in found} == set(CHECKS)
    assert code == bool(errors(found))


# --- one thing wrong ------------------------------------------------------------------------------------------------


def test_missing_data_is_an_error_and_the_checks_after_it_are_made(tmp_path):
    run = run_of(tmp_path, "--dataset_name", "/absent.jsonl")
    found = findings(run, "model", "data", "held-out data", "prompts")
    assert [finding.level for finding in found] == ["ok", "error", "ok", "ok"]
    assert "/absent.jsonl" in found[1].value and "check the path" in found[1].remedy


def test_too_few_problems_for_a_step_are_an_error(tmp_path):
    last = findings(run_of(tmp_path, "--max_train_problems", "8"), "model", "data")[-1]
    assert last.level == "error" and "a step takes 16 problems and there are 8" in last.value


def test_what_the_data_drops_is_said_by_reason(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"problem": "1 + 1?", "answer": "2"}] * 3 + [{"problem": "2 + 2?", "answer": ""}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = findings(run_of(tmp_path, "--dataset_name", str(path)), "model", "data")
    assert "1 of 4 problems" in found[1].value and "dropped 2: duplicate" in found[1].value


def test_data_on_a_hub_that_is_not_reached_is_not_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", DEAD)
    found = only(run_of(tmp_path, "--dataset_name", f"{DEAD}/train.jsonl"), "model", "data")
    assert found.level == "warning" and "network" in found.value


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(RECIPES / "tiny" / "base", tmp_path / "model"))


def test_a_tokenizer_without_eos_is_an_error_and_what_needs_one_says_so(tmp_path, model):
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    found = findings(run_of(tmp_path, "--model_name_or_path", str(model)), "model", "tokens", "data", "prompts")
    assert [finding.level for finding in found] == ["error", "warning", "warning", "warning"]
    assert "end-of-sequence" in found[0].value


def test_a_marker_that_is_a_special_token_is_an_error(tmp_path):
    run = run_of(tmp_path)
    base = RECIPES / "tiny" / "base"
    run.config, run.tokenizer = AutoConfig.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    run.tokenizer.add_special_tokens({"additional_special_tokens": ["```output"]})
    assert [finding.level for finding in findings(run, "tokens")] == ["error"]


def test_a_generation_config_that_ends_elsewhere_is_a_warning(tmp_path, model):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    found = only(run_of(tmp_path, "--model_name_or_path", str(model)), "model", "tokens")
    assert found.level == "warning" and "ends at [5]" in found.value


def test_rollouts_longer_than_the_context_are_an_error(tmp_path):
    found = only(run_of(tmp_path, "--max_completion_length", "1020"), "model", "data", "prompts")
    assert found.level == "error" and "context" in found.value


def test_a_wrong_version_is_an_error_with_the_command_that_mends_it(tmp_path, monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.15.0" if name == "trl" else real(name))
    found = findings(run_of(tmp_path), "versions")
    assert [finding.level for finding in found] == ["error"]
    assert "trl is 1.15.0" in found[0].value and found[0].remedy == "pip install 'trl==1.16.0'"


def a_gpu(monkeypatch, *, memory: float, bfloat16: bool, count: int = 1) -> None:
    gpu = namedtuple("Gpu", "name total_memory")("T4", int(memory))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)


def on_gpu(run: Run) -> Run:
    run.args.use_cpu = False
    return run


def test_bfloat16_on_a_gpu_without_it_is_an_error(tmp_path, monkeypatch):
    run = on_gpu(run_of(tmp_path, "--dtype", "bfloat16"))
    a_gpu(monkeypatch, memory=16e9, bfloat16=False)
    assert only(run, "devices").level == "error"
    a_gpu(monkeypatch, memory=16e9, bfloat16=True)
    assert only(run, "devices").level == "ok"


def test_bfloat16_on_a_cpu_without_it_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_has_bfloat16", lambda: False)
    assert only(run_of(tmp_path, "--bf16", "true"), "devices").level == "warning"


def test_more_processes_than_gpus_is_an_error(tmp_path, monkeypatch):
    run = on_gpu(run_of(tmp_path))
    a_gpu(monkeypatch, memory=16e9, bfloat16=True, count=2)
    run.processes = 4
    found = only(run, "devices")
    assert found.level == "error" and "4 processes" in found.value


def test_a_run_that_does_not_fit_says_what_to_lower(tmp_path, monkeypatch):
    run = on_gpu(run_of(tmp_path))
    a_gpu(monkeypatch, memory=1e8, bfloat16=True)
    found = only(run, "devices", "model", "memory")
    assert found.level == "error" and "per_device_train_batch_size" in found.remedy


def test_no_room_on_the_disk_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    found = only(run_of(tmp_path), "devices", "model", "memory", "disk")
    assert found.level == "error" and "save_total_limit" in found.remedy


def test_a_dead_interpreter_is_an_error(tmp_path):
    options = json.dumps({"url": DEAD})
    found = only(run_of(tmp_path, "--interpreter", "sandbox_fusion", "--interpreter_options", options), "interpreter")
    assert found.level == "error" and DEAD in found.value and "start it" in found.remedy


def test_an_interpreter_that_does_not_conform_is_an_error(tmp_path, quick, monkeypatch):
    monkeypatch.setitem(services.PROGRAMS, "prints", ("print(1)", services.ExecutionStatus.OK, "2\n"))
    found = only(run_of(tmp_path), "interpreter")
    assert found.level == "error" and "the program that prints is ok with '1\\n'" in found.value


def test_programs_that_hold_up_a_step_are_a_warning(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(services, "LONG_SECONDS", 0.01)
    last = findings(run_of(tmp_path), "interpreter")[-1]
    assert last.level == "warning" and "raise slots" in last.remedy


def test_a_dead_vllm_server_is_an_error_and_one_that_answers_is_well(tmp_path):
    words = ["--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url"]
    assert only(run_of(tmp_path, *words, DEAD), "vllm").level == "error"
    with VLLMStandIn() as server:
        found = only(run_of(tmp_path, *words, server.url), "vllm")
    assert found.level == "warning" and "serves toy" in found.value  # another name than the run's model


@pytest.mark.parametrize(("role", "level"), [("write", "ok"), ("read", "error"), ("fineGrained", "warning")])
def test_the_hub_s_token_must_be_able_to_write_and_is_never_shown(tmp_path, monkeypatch, role, level):
    with HubStandIn(role) as hub:
        hub.use(monkeypatch)
        found = only(run_of(tmp_path, "--push_to_hub", "true"), "hub")
    assert found.level == level and TOKEN not in str(found)


def test_no_token_and_no_hub_are_lines_too(tmp_path, monkeypatch):
    with HubStandIn() as hub:
        hub.use(monkeypatch, token=None)
        run = run_of(tmp_path, "--push_to_hub", "true")
        assert only(run, "hub").level == "error"
        hub.use(monkeypatch)
    assert only(run, "hub").level == "warning"


def test_where_a_resume_goes_on_is_said(tmp_path):
    whole, half = tmp_path / "checkpoint-100", tmp_path / "checkpoint-200"
    for folder in (whole, half):
        folder.mkdir()
    (whole / "trainer_state.json").write_text(json.dumps({"global_step": 100}))
    (whole / "rng_state.pth").touch()
    found = findings(run_of(tmp_path, "--resume_from_checkpoint", "true"), "resume")
    assert [finding.level for finding in found] == ["warning", "ok"]
    assert "checkpoint-200" in found[0].value and f"goes on from {whole}" in found[1].value
    assert "writes over it" in findings(run_of(tmp_path), "resume")[1].value


def test_the_batch_of_many_processes_is_worked_out(tmp_path):
    run = run_of(tmp_path)
    run.args.prompts_per_step, run.processes = 16, 8
    assert "8 (processes) x 16 (per device) x 1 (gradient accumulation)" in only(run, "batch").value
    run.processes = 3
    assert only(run, "batch").level == "error"


# --- preflight ------------------------------------------------------------------------------------------------------


def test_a_training_logs_what_is_not_well_and_nothing_else(tmp_path, monkeypatch, caplog):
    run = run_of(tmp_path)
    parts = run.script_args, run.args, run.model_args
    with caplog.at_level(logging.INFO):
        preflight.preflight(*parts)
    assert caplog.messages == []
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    with caplog.at_level(logging.INFO):
        preflight.preflight(*parts)
    (message,) = caplog.messages
    assert message.startswith("disk: the run writes up to")


def test_a_finding_is_one_line():
    assert str(replace(Finding("warning", "a", "b"), check="disk")) == "warning disk          a: b"
