"""What trackers get: tables of rollouts, the report page, and no secret."""

import json
import time
from pathlib import Path

import pytest
import wandb
from launching import launch, metrics
from report_runs import rollout, write_run
from stand_in_hub import TOKEN, USER, HubStandIn
from transformers import TrainerControl, TrainerState

from torl_report.tracking import COLUMNS, TABLE_ROWS, RolloutTables, choose_rows, hide_secrets, log_report
from torl_trl import ToRLConfig
from torl_trl.records import rollouts_path

SECRETS = ("sk-planted", "pw-planted", TOKEN)
OPTIONS = {"api_key": "sk-planted", "url": "http://user:pw-planted@host:8080"}


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch):
    """A run of wandb that stays on this machine; all its files are in the folder."""
    folder = tmp_path / "tracked"
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(folder))
    folder.mkdir()
    with wandb.init(
        mode="offline", dir=str(folder), project="test", settings=wandb.Settings(console="off", silent=True)
    ):
        yield folder


def log(run: Path, step: int, logs: dict) -> None:
    state = TrainerState(global_step=step, is_world_process_zero=True)
    RolloutTables(run).on_log(None, state, TrainerControl(), logs=logs)


def tables(folder: Path, split: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in folder.glob(f"**/media/table/rollouts/{split}_*.table.json")]


def test_a_logged_step_has_a_table_of_rollouts_with_their_full_text(tmp_path, wandb_folder):
    rows = [rollout(group=group, index=index, prose="long " * 500) for group in range(3) for index in range(4)]
    run = write_run(tmp_path / "run", [*rows, rollout(split="eval", step=1, code=None)])
    log(run, 1, {"loss": 0.1})
    log(run, 1, {"eval_reward": 0.1})
    log(run, 2, {"loss": 0.1})
    (table,) = tables(wandb_folder, "train")
    assert table["columns"] == list(COLUMNS) and len(table["data"]) == TABLE_ROWS
    assert table["data"][0][COLUMNS.index("completion")] == rows[0]["completion"]
    assert len(tables(wandb_folder, "eval")) == 1


def test_a_table_shows_many_groups_and_only_rows_with_text(tmp_path):
    rows = [rollout(group=group, index=index) for group in range(6) for index in range(16)]
    run = write_run(tmp_path, rows)
    assert [row["group_id"] for row in choose_rows(rollouts_path(run, 1, "train"))] == [0, 1, 2, 3, 4, 5, 0, 1]
    bare = write_run(tmp_path / "bare", [rollout(full=False, prompt=None, completion=None)])
    assert choose_rows(rollouts_path(bare, 1, "train")) == []


def test_the_report_page_is_an_artifact(tmp_path, wandb_folder):
    page = tmp_path / "report.html"
    page.write_text("<p>the report of this run</p>")
    log_report(page)
    staged = [path for path in wandb_folder.rglob("*") if path.is_file() and path.read_bytes() == page.read_bytes()]
    assert staged
    name = f"report-{wandb.run.id}".encode()
    wandb.finish()
    (logged,) = wandb_folder.glob("**/*.wandb")
    deadline = time.monotonic() + 20
    while name not in logged.read_bytes():  # wandb's service writes it on its own time
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- secrets -----------------------------------------------------------------------------------------------------


def test_secrets_leave_a_command_line_and_the_rest_stays():
    args = ToRLConfig(
        output_dir="runs/x", use_cpu=True, bf16=False, num_generations=8, hub_token=TOKEN, interpreter_options=OPTIONS
    )
    words = ["--hub_token", TOKEN, "--interpreter_options", json.dumps(OPTIONS), "--save_strategy", "steps"]
    hide_secrets(words, args)
    assert words == [
        *("--hub_token", "***", "--interpreter_options", '{"api_key": "***", "url": "***"}'),
        *("--save_strategy", "steps"),
    ]


@pytest.mark.slow
def test_secrets_reach_neither_trackers_nor_the_hub_nor_any_file_of_a_run(tmp_path):
    run, tracked = tmp_path / "run", tmp_path / "tracked"
    run.mkdir()
    tracked.mkdir()
    environment = dict.fromkeys(("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"), str(tracked))
    words = [
        "--report_to",
        "all",
        "--max_tool_calls",
        "0",
        "--interpreter_options",
        json.dumps(OPTIONS),
    ]
    words += [
        "--push_to_hub",
        "true",
        "--hub_token",
        TOKEN,
        "--hub_strategy",
        "checkpoint",
        "--hub_always_push",
        "true",
    ]
    words += ["--save_steps", "1"]
    with HubStandIn() as hub:
        switches = hub.environment | environment | {"WANDB_MODE": "offline", "HF_TOKEN": ""}
        printed = launch(run, *words, env=switches | {"TENSORBOARD_LOGGING_DIR": str(tracked)})
        files = hub.repos[f"{USER}/run"].files()
        assert f"End of training: pushed to {hub.url}/{USER}/run" in printed
    assert {"README.md", "config.yaml", "metrics.jsonl", "curves.png", "model.safetensors"} <= set(files)
    assert b"arxiv.org/abs/2503.23383" in files["README.md"]
    assert metrics(run)[-1]["hub/failed_pushes"] == 0
    assert list(tracked.glob("**/*.wandb")) and list(tracked.glob("**/rollouts/train_*.table.json"))
    assert list(tracked.glob("**/events.out.tfevents.*"))
    kept = {str(path): path.read_bytes() for folder in (run, tracked) for path in folder.rglob("*") if path.is_file()}
    assert any(path.endswith("training_args.bin") for path in kept)
    for secret in SECRETS:
        assert secret not in printed
        assert [name for name, content in (kept | files).items() if secret.encode() in content] == []


@pytest.mark.slow
def test_a_run_without_trackers_leaves_nothing_of_theirs(tmp_path):
    launch(tmp_path, "--report_to", "none", env={"WANDB_DIR": str(tmp_path)})
    assert not list(tmp_path.glob("**/wandb")) and not list(tmp_path.glob("**/events.out.tfevents.*"))
    assert "<html" in (tmp_path / "report.html").read_text()[:200]
