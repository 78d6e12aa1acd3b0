"""Tier `plain`: a fresh Python process for every program, with limits and no isolation, where there is no Linux.

A program runs as our user: it can read and change the files that we can, reach the network, and signal our processes.
macOS does not enforce the memory limit. A hostile program that leaves its session, drops its environment and closes
our descriptors outlives its call.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping

from torl_trl.interpreters.base import (
    ENVIRONMENT,
    ExecutionResult,
    InterpreterClosed,
    InterpreterUnavailable,
)
from torl_trl.interpreters.sandbox.supervise import run_alone
from torl_trl.interpreters.tiers import SANDBOX, package_folders


class PlainBackend:
    """Runs each program in a process of its own; `call` from any thread."""

    def __init__(self, max_output_chars: int, rlimits: Mapping[str, int]) -> None:
        self._max_output_chars = max_output_chars
        self._rlimits = rlimits
        self._program_source = (SANDBOX / "program.py").read_text(encoding="utf-8")
        self._packages = os.pathsep.join(package_folders())
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen] = {}
        self._closed = False

    def call(self, slot: int, code: str, timeout_seconds: float) -> ExecutionResult:
        """Run `code`. Raises `InterpreterUnavailable`, or `InterpreterClosed` after `close`."""

        def started(process: subprocess.Popen) -> None:
            with self._lock:
                self._running[slot] = process
                if self._closed:
                    _kill(process)

        try:
            fields = run_alone(
                code,
                self._program_source,
                timeout_seconds,
                self._max_output_chars,
                self._rlimits,
                ENVIRONMENT,
                flags=("-S",),  # reading every .pth file takes twice as long as the rest of the start
                packages=self._packages,
                started=started,
            )
        except OSError as error:
            raise InterpreterUnavailable(f"Cannot start a process for a program: {error}.") from error
        finally:
            with self._lock:
                self._running.pop(slot, None)
        if self._closed:
            raise InterpreterClosed("The embedded interpreter was closed while this program ran.")
        if fields["status"] is None:
            raise InterpreterUnavailable(f"Python did not reach the program: {fields['stderr'].strip()[-300:]!r}.")
        return ExecutionResult.of(fields)

    def close(self) -> None:
        """Kill what runs: its `call` raises."""
        with self._lock:
            self._closed = True
            for process in self._running.values():
                _kill(process)


def _kill(process: subprocess.Popen) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
