"""Saves on the Hub: what arrives, what training notices of it, and what a failure costs."""

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import hf_hub_download
from launching import SCRIPT, launch
from safetensors.torch import load_file
from stand_in_hub import TOKEN, USER, HubStandIn
from test_trainer import grader, make_trainer  # noqa: F401  (a fixture)

from torl_report.card import write_card
from torl_trl import ToRLConfig
from torl_trl.errors import UserError
from torl_trl.hub import open_repo

SAVES = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": True, "hub_always_push": True}


@pytest.fixture
def hub(monkeypatch):
    with HubStandIn() as hub:
        hub.use(monkeypatch)
        yield hub


@pytest.fixture
def train(hub, tmp_path, grader, caplog):  # noqa: F811
    """Train two steps in the folder `tiny`, as the launch script does."""
    caplog.set_level(logging.INFO, "torl_trl.hub")

    def run(**options):
        folder = tmp_path / "tiny"
        trainer = make_trainer(folder, grader, **SAVES | options)
        trainer._model_card = partial(write_card, folder)
        trainer.train()
        return trainer

    return run


def lines(folder) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] == "train"]


def test_a_run_arrives_with_its_model_card_metrics_and_configuration(train, hub, tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("config.yaml", "curves.png", "evaluation.json", "notes.txt"):
        (folder / name).write_text('{"benchmarks": {}}' if "json" in name else f"seed: 1 # {name}")
    trainer = train()
    assert hub.repos[f"{USER}/tiny"].messages == ["initial commit", "Step 1", "Step 2"]
    trainer.push_to_hub()
    repo = hub.repos[f"{USER}/tiny"]
    assert repo.private
    assert set(repo.files()) - {".gitattributes"} == {
        *("README.md", "config.yaml", "curves.png", "evaluation.json", "metrics.jsonl"),
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    content = repo.files()["model.safetensors"]
    assert content == (folder / "checkpoint-2" / "model.safetensors").read_bytes()
    assert content in hub.large.values()
    assert not list((folder / ".push").iterdir())
    path = hf_hub_download(f"{USER}/tiny", "model.safetensors", cache_dir=tmp_path / "cache", token=TOKEN)
    trained = trainer.model.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in load_file(path).items())


def test_only_the_end_is_pushed_where_that_is_asked_for(train, hub):
    trainer = train(hub_strategy="end", hub_model_id=f"{USER}/other", hub_private_repo=False)
    trainer.push_to_hub()
    assert hub.repos[f"{USER}/other"].messages == ["initial commit", "End of training"]
    assert not hub.repos[f"{USER}/other"].private


def test_each_save_has_its_branch(train, hub, tmp_path):
    train(hub_branch_per_save=True)
    repo = hub.repos[f"{USER}/tiny"]
    assert set(repo.branches) == {"main", "step-000001", "step-000002"}
    for step in (1, 2):
        saved = (tmp_path / "tiny" / f"checkpoint-{step}" / "model.safetensors").read_bytes()
        assert repo.files(f"step-00000{step}")["model.safetensors"] == saved


def test_the_last_checkpoint_is_pushed_whole_and_without_what_the_one_before_had(train, hub, tmp_path):
    trainer = train(hub_strategy="checkpoint", save_total_limit=1)
    trainer.push_to_hub()
    names = {path.name for path in (tmp_path / "tiny" / "checkpoint-2").iterdir()} - {"training_args.bin"}
    pushed = {name for name in hub.repos[f"{USER}/tiny"].files() if name.startswith("last-checkpoint/")}
    assert pushed == {f"last-checkpoint/{name}" for name in names}
    assert {"optimizer.pt", "trainer_state.json", "rng_state.pth"} <= names


def test_a_revision_that_is_not_there_is_made(train, hub):
    train(hub_revision="try-2")
    repo = hub.repos[f"{USER}/tiny"]
    assert "model.safetensors" in repo.files("try-2") and "model.safetensors" not in repo.files("main")


FAILURES = [(403, "/preupload/"), (401, "/lfs/"), (403, "/commit/"), (500, "/commit/")]


@pytest.mark.parametrize(("status", "path"), FAILURES)
def test_a_failing_push_costs_a_sentence_and_nothing_else(status, path, train, hub, tmp_path, caplog):
    hub.fail(status, path=path)
    trainer = train(save_steps=2, max_steps=3)
    folder = tmp_path / "tiny"
    assert trainer.state.global_step == 3 and trainer._hub.failed == 2
    said = [record.getMessage() for record in caplog.records if record.name == "torl_trl.hub" and record.levelno > 20]
    for step, sentence in zip((2, 3), said, strict=True):
        checkpoint = folder / f"checkpoint-{step}"
        assert (
            sentence.startswith(f"Step {step}: the push to {hub.url}/{USER}/tiny failed (") and str(status) in sentence
        )
        assert f"hf upload {USER}/tiny {checkpoint}" in sentence and "\n" not in sentence
        assert load_file(checkpoint / "model.safetensors")
    hub.mend()
    trainer.push_to_hub()
    assert "model.safetensors" in hub.repos[f"{USER}/tiny"].files()
    assert caplog.messages[-1] == f"End of training: pushed to {hub.url}/{USER}/tiny"


def test_the_command_that_is_said_pushes_by_hand(train, hub, tmp_path, caplog):
    hub.fail(403, path="/preupload/")
    train().push_to_hub()
    hub.mend()
    command = shlex.split(caplog.messages[-1].rpartition("by hand: ")[2])
    program = str(Path(sys.executable).with_name(command[0]))
    subprocess.run([program, *command[1:]], check=True, env=os.environ | hub.environment, capture_output=True)
    files = hub.repos[f"{USER}/tiny"].files()
    assert files["model.safetensors"] == (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert {"README.md", "tokenizer.json", "metrics.jsonl"} <= set(files)
    assert not [name for name in files if "/" in name or name.endswith((".bin", ".pt", ".pth"))]


def test_failed_pushes_are_a_metric(train, hub, tmp_path):
    hub.fail(403, path="/preupload/")
    trainer = train(save_steps=1, max_steps=4)
    assert trainer._hub.failed == 4
    counted = [line["hub/failed_pushes"] for line in lines(tmp_path / "tiny")]
    assert counted == sorted(counted) and counted[0] == 0


def test_a_server_that_recovers_gets_the_same_push_again(train, hub):
    hub.fail(500, times=1, path="/lfs/")
    trainer = train(save_steps=2)
    assert trainer._hub.failed == 0
    assert "model.safetensors" in hub.repos[f"{USER}/tiny"].files()


def test_training_does_not_wait_for_a_server_that_hangs(train, hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("torl_trl.trainer.ToRLTrainer._finish_current_push", lambda self: None)
    monkeypatch.setattr("torl_trl.trainer.ToRLTrainer.init_hf_repo", _then_silent(hub))
    started = time.perf_counter()
    trainer = train(max_steps=4, hub_always_push=False)
    seconds = time.perf_counter() - started
    assert [line["step"] for line in lines(tmp_path / "tiny")] == [1, 2, 3, 4] and seconds < 60
    deadline = time.monotonic() + 30  # the push may get its turn later than the training
    while not any(request.startswith("silent") for request in hub.requests):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Step 2: not pushed, the push before goes on" in caplog.text
    assert trainer._hub.failed == 0 and trainer._hub._thread.is_alive()
    hub.speak()
    trainer._hub.wait()
    assert hub.repos[f"{USER}/tiny"].messages[1:] == ["Step 1"]
    trainer.push_to_hub()
    assert hub.repos[f"{USER}/tiny"].messages[1:] == ["Step 1", "End of training"]


def _then_silent(hub):
    from torl_trl.trainer import ToRLTrainer

    original = ToRLTrainer.init_hf_repo

    def init_hf_repo(self, token=None):
        original(self, token)
        hub.fall_silent()

    return init_hf_repo


def test_a_push_ends_when_its_server_stays_silent(train, hub, monkeypatch):
    monkeypatch.setattr("torl_trl.hub.SILENCE_SECONDS", 1)
    monkeypatch.setattr("torl_trl.trainer.ToRLTrainer.init_hf_repo", _then_silent(hub))
    assert train(max_steps=1)._hub.failed == 1


def test_a_checkpoint_that_is_removed_while_it_waits_is_pushed_all_the_same(train, hub, monkeypatch):
    monkeypatch.setattr("torl_trl.trainer.ToRLTrainer._finish_current_push", lambda self: None)
    monkeypatch.setattr("torl_trl.trainer.ToRLTrainer.init_hf_repo", _then_silent(hub))
    trainer = train(max_steps=3, save_total_limit=1)
    hub.speak()
    trainer._hub.wait()
    assert trainer._hub.failed == 0
    assert hub.repos[f"{USER}/tiny"].messages[1:] == ["Step 1", "Step 2", "Step 3"]


# --- before training -------------------------------------------------------------------------------------------------


def config(folder, **options) -> ToRLConfig:
    options = {"use_cpu": True, "bf16": False, "num_generations": 8, "push_to_hub": True} | options
    return ToRLConfig(output_dir=str(folder / "tiny"), **options)


def test_without_a_token_there_is_one_sentence_before_training(hub, tmp_path, monkeypatch):
    hub.use(monkeypatch, token=None)
    with pytest.raises(UserError, match=r"^There is no token for the Hub: run `hf auth login`, set HF_TOKEN, or set"):
        open_repo(config(tmp_path))
    assert not hub.requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hub_token": "hf_wrong"}, r"The Hub does not open 'tiny' \(.*: check the token, its rights"),
        ({"hub_model_id": "somebody/else"}, r"The Hub does not open 'somebody/else' \(.*403.*: check the token"),
        ({"hub_model_id": "no such name"}, r"hub_model_id 'no such name' is no name of a repository"),
    ],
)
def test_a_repository_that_cannot_be_pushed_to_is_one_sentence(options, message, hub, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        open_repo(config(tmp_path, **options))
    assert "\n" not in str(error.value) and "hf_wrong" not in str(error.value)


def test_transformers_does_not_push_behind_our_back(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    with pytest.raises(UserError, match="WANDB_LOG_MODEL is set"):
        open_repo(config(tmp_path, report_to="wandb"))


def test_a_token_that_may_only_read_is_refused(tmp_path, monkeypatch):
    with HubStandIn(role="read") as hub:
        hub.use(monkeypatch)
        with pytest.raises(UserError, match="may only read"):
            open_repo(config(tmp_path))


def test_a_hub_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    with HubStandIn() as hub:
        hub.use(monkeypatch)
    with pytest.raises(UserError, match=r"^The Hub at http://127.* is not reached \(.*: check the network and HF_END"):
        open_repo(config(tmp_path))


def test_a_repository_that_is_there_is_used_again(hub, tmp_path, caplog):
    assert open_repo(config(tmp_path)) == open_repo(config(tmp_path)) == f"{USER}/tiny"
    assert not caplog.records


def test_a_repository_that_is_public_already_is_said(hub, tmp_path, caplog):
    open_repo(config(tmp_path, hub_private_repo=False))
    assert not caplog.records
    open_repo(config(tmp_path))
    assert caplog.messages == [
        f"{hub.url}/{USER}/tiny is there and public, and a push leaves it so: set another hub_model_id?"
    ]


# --- the launch script -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_token_the_launch_script_ends_before_it_loads_anything(hub, tmp_path):
    command = [sys.executable, SCRIPT, "--config", "tiny.yaml", "--output_dir", str(tmp_path), "--push_to_hub", "true"]
    environment = os.environ | hub.environment | {"HF_TOKEN": "", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "Error: There is no token for the Hub: run"
    )
    assert not hub.requests and not (tmp_path / "config.yaml").exists()


@pytest.mark.slow
def test_two_processes_push_once(hub, tmp_path):
    words = ("--push_to_hub", "true", "--hub_model_id", "mine", "--save_steps", "1", "--hub_branch_per_save", "true")
    words += ("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--num_generations", "8")
    printed = launch(tmp_path, *words, processes=2, env=hub.environment | {"ACCELERATE_USE_CPU": "true"})
    repo = hub.repos[f"{USER}/mine"]
    assert repo.messages == ["initial commit", "Step 1", "Step 2", "End of training"]
    assert set(repo.branches) == {"main", "step-000001", "step-000002"}
    assert repo.files()["model.safetensors"] == (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    assert f'name = "{USER}/mine"'.replace('"', "'").encode() in repo.files()["README.md"]
    assert f"End of training: pushed to {hub.url}/{USER}/mine" in printed
