"""What Weights & Biases gets besides the metrics that transformers sends: tables of rollouts, and the report page."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torl_trl.records import read_rollouts, rollouts_path

TABLE_ROWS = 8
COLUMNS = ("step", "problem_id", "prompt", "completion", "solution", "reward", "correct", "stop_reason", "advantage")


class RolloutTables(TrainerCallback):
    """For runs with wandb, on the main process: at each log of a step whose texts are kept (`save_rollouts_every`, and
    evaluations) a table of up to `TABLE_ROWS` rollouts, each of another group while there are enough.
    """

    def __init__(self, run_folder: Path):
        self._run_folder = run_folder

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        split = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        path = rollouts_path(self._run_folder, state.global_step, split)
        rows = choose_rows(path) if path.exists() else []
        if rows:
            import wandb

            table = wandb.Table(columns=list(COLUMNS), data=[[row[name] for name in COLUMNS] for row in rows])
            wandb.log({f"rollouts/{split}": table, "train/global_step": state.global_step})


def log_report(page: Path) -> None:
    """Give the report page to the present wandb run, as an artifact."""
    import wandb

    artifact = wandb.Artifact(f"report-{wandb.run.id}", type="report")
    artifact.add_file(str(page))
    wandb.run.log_artifact(artifact)


def choose_rows(path: Path) -> list[Mapping[str, Any]]:
    """Up to `TABLE_ROWS` rows with text of a file of rollouts: the first of each group, then the second, and so on."""
    rows = read_rollouts(path).select([*COLUMNS, "full", "group_id", "generation_index"]).to_pylist()
    rows = sorted((row for row in rows if row["full"]), key=lambda row: (row["generation_index"], row["group_id"]))
    return rows[:TABLE_ROWS]


def hide_secrets(arguments: list[str], options: TrainingArguments) -> None:
    """Take the secrets of `options` out of a command line, in place: wandb stores the one of its process."""
    given = {option.name: getattr(options, option.name) for option in fields(options) if option.init}
    secrets = sorted(set(_texts(given)) - set(_texts(options.to_dict())), key=len, reverse=True)
    for position, word in enumerate(arguments):
        for secret in secrets:
            word = word.replace(secret, "***")
        arguments[position] = word


def _texts(value: Any) -> Iterator[str]:
    if type(value) is str and value:  # options that are enums are texts too, and no secrets
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
