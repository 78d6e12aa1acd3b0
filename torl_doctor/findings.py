"""What a check says, and how errors of what it looks at become lines instead of ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import datasets
import httpx
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from trl import ModelConfig

from torl_doctor.memory import MemoryEstimate
from torl_interpreters.base import InterpreterError
from torl_trl.config import ToRLConfig
from torl_trl.engines.base import EngineError
from torl_trl.errors import UserError
from torl_trl.script_arguments import ToRLScriptArguments

Level = Literal["ok", "warning", "error"]
OFFLINE = (httpx.TransportError, ConnectionError, LocalEntryNotFoundError)
"""Causes of a failure that say that the network, and not the run, is missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: which check, what it found, and what to do about it."""

    level: Level
    value: str
    remedy: str = ""
    check: str = ""

    def __str__(self) -> str:
        return f"{self.level:8}{self.check:14}{self.value}{f': {self.remedy}' if self.remedy else ''}"


@dataclass(slots=True)
class Run:
    """A run as it is looked at: its options, and what earlier checks loaded, None where that failed.

    `processes` are those of the launcher; without one, what `accelerate launch` would start: one a GPU.
    """

    script_args: ToRLScriptArguments
    args: ToRLConfig
    model_args: ModelConfig
    processes: int = 1
    device_bytes: int = 0  # of the memory that a process has
    config: PretrainedConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    estimate: MemoryEstimate | None = None
    data: dict[str, datasets.Dataset] = field(default_factory=dict)  # train, and eval if the run evaluates


Check = Callable[[Run], Iterator[Finding]]


def examine(run: Run, checks: dict[str, Check]) -> Iterator[Finding]:
    """Make the checks, in order. What one raises of the errors that its subject may have is its last line."""
    for name, check in checks.items():
        try:
            for finding in check(run):
                yield replace(finding, check=name)
        except (UserError, EngineError, InterpreterError, httpx.HTTPError, OSError) as error:
            yield replace(_failure(error), check=name)


def _failure(error: Exception) -> Finding:
    what, _, remedy = " ".join(str(error).split()).removesuffix(".").rpartition(": ")
    if _is_offline(error):
        return Finding("warning", f"not checked, the network is missing ({what or remedy})", "check it where it is")
    return Finding("error", what or remedy, remedy if what else "")


def _is_offline(error: BaseException | None) -> bool:
    """Whether an error of data or a model goes back to a network that is not there; services must be there."""
    if not isinstance(error, UserError | OSError | httpx.HTTPError):
        return False
    chain: list[Any] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    return any(isinstance(cause, OFFLINE) for cause in chain)
