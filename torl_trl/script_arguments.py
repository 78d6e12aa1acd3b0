"""Data arguments of the launch script: where problems come from and how they become prompts."""

from dataclasses import dataclass, field
from pathlib import Path

from trl import ScriptArguments

from torl_trl.errors import UserError


@dataclass
class ToRLScriptArguments(ScriptArguments):
    """Data arguments of the launch script. `dataset_name` is a Hub id or a local file or folder."""

    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Held-out problems: data, or benchmarks as recipes/evaluate.py takes them, separated by commas. "
            "Without it, `dataset_test_split` of the training data."
        },
    )
    problem_column: str = field(default="problem", metadata={"help": "Column with the question."})
    answer_column: str = field(default="answer", metadata={"help": "Column with the known answer."})
    prompt_template: str | None = field(
        default=None, metadata={"help": "A text with one {question}, or a file with it. Default: ToRL's own."}
    )
    max_prompt_length: int = field(
        default=400, metadata={"help": "Longer prompts, in tokens, are dropped. Released code: 400."}
    )
    max_train_problems: int | None = field(default=None, metadata={"help": "Use only the first ones."})
    max_eval_problems: int | None = field(default=None, metadata={"help": "Use only the first ones."})
    dry_run: bool = field(
        default=False, metadata={"help": "Two steps with a tiny model of the same kind, in `output_dir`/dry_run."}
    )

    def __post_init__(self) -> None:
        if not self.dataset_name:
            raise UserError("dataset_name is missing: give a Hub data set id, or a JSONL, JSON, CSV or parquet file.")
        for name in ("dataset_streaming", "ignore_bias_buffers"):
            if getattr(self, name):
                raise UserError(f"{name} is true, which has no effect here: remove it.")
        for name in ("max_train_problems", "max_eval_problems", "max_prompt_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value!r}: give a number of at least 1.")

    def eval_data(self) -> str:
        """Where held-out problems come from. Raises `UserError` where it would be the training data again."""
        if self.eval_dataset_name:
            return self.eval_dataset_name
        if Path(self.dataset_name).is_file() or "://" in self.dataset_name:
            raise UserError(
                f"There is no eval_dataset_name, and dataset_name {self.dataset_name!r} is one file, whose problems "
                'are trained: name a file with held-out problems, or set eval_strategy to "no".'
            )
        return self.dataset_name
