"""Tier `plain`: a fresh Python process for every program, with limits and no isolation: the last resort.

A program runs as our user: it can read and change the files that we can, reach the network, and signal our processes.
macOS does not enforce the memory limit. A hostile program that leaves its session, drops its environment and closes
our descriptors outlives its call.
"""

import os
from collections.abc import Mapping
from typing import Any

from torl_interpreters.base import ENVIRONMENT, InterpreterClosed, InterpreterUnavailable
from torl_interpreters.tiers import SANDBOX, package_folders
from torl_sandbox.supervise import run_alone


class PlainBackend:
    """Runs each program in a process of its own; `call` from any thread."""

    def __init__(self, max_output_chars: int, rlimits: Mapping[str, int]) -> None:
        self._closed = False
        self._rules = {
            "program_source": (SANDBOX / "program.py").read_text(encoding="utf-8"),
            "max_chars": max_output_chars,
            "rlimits": rlimits,
            "environment": ENVIRONMENT,
            "flags": ("-S",),  # reading every .pth file takes twice as long as the rest of the start
            "packages": os.pathsep.join(package_folders()),
            "excess": lambda: "killed" if self._closed else None,
        }

    def call(self, slot: int, code: str, timeout_seconds: float) -> dict[str, Any]:
        """The fields of a result. Raises `InterpreterUnavailable`, or `InterpreterClosed` after `close`."""
        try:
            fields = run_alone(code, timeout=timeout_seconds, **self._rules)
        except OSError as error:
            raise InterpreterUnavailable(f"Cannot start a process for a program: {error}.") from error
        if self._closed:
            raise InterpreterClosed("The embedded interpreter was closed while this program ran.")
        if fields["status"] is None:
            raise InterpreterUnavailable(f"Python did not reach the program: {fields['stderr'].strip()[-300:]!r}.")
        return fields

    def close(self) -> None:
        """What runs is killed when it is looked at next: its `call` raises."""
        self._closed = True
