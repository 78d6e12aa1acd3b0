"""The embedded interpreter: a fresh Python process on this machine for every call.

What is covered. A program has no variables of our environment (no tokens, no keys), an own empty working directory
that is deleted afterwards, no input, and limits on wall time, CPU time, memory of each process, size of each file,
open files and printed text. When the call ends, for whatever reason, everything that it started is killed. Nothing is
left over from one call to the next. Programs can import what is installed for our Python (numpy, sympy, ...), and
string hashing is fixed, so that the same program prints its sets in the same order.

What is NOT covered. A program runs as our user: it can read and change the files that we can, reach the network, and
signal our processes. The memory limit counts per process, and macOS does not enforce it. The process limit counts all
processes of the user, as the kernel does, and does not bind root. A hostile program that leaves its session, drops its
environment and closes our descriptors outlives its call. Good enough for programs that mean no harm; a backend with
isolation is the answer to those that do.
"""

import logging
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from torl_trl.interpreters.base import ExecutionResult, InterpreterClosed, InterpreterUnavailable
from torl_trl.interpreters.process import Program

logger = logging.getLogger(__name__)


class EmbeddedInterpreter:
    """Runs each program in a fresh process, `slots` at a time, in the order of `submit`.

    `slots` is the total of this object; its default is the cores this process may use, divided by the local ranks.
    `timeout_seconds` is wall time from the start of the program, waiting for a slot and the start of Python not
    included. `max_output_chars` counts stdout and stderr apart. `max_processes` is the kernel's RLIMIT_NPROC: all
    processes and threads of the user, ours too.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        timeout_seconds: float = 10.0,
        memory_mb: int = 1024,
        max_output_chars: int = 65_536,
        max_processes: int = 4096,
        max_file_mb: int = 64,
    ) -> None:
        slots = _usable_cores() if slots is None else slots
        given = {
            "slots": slots,
            "timeout_seconds": timeout_seconds,
            "memory_mb": memory_mb,
            "max_output_chars": max_output_chars,
            "max_processes": max_processes,
            "max_file_mb": max_file_mb,
        }
        for name, value in given.items():
            if value <= 0:
                raise ValueError(f"{name} of the embedded interpreter is {value!r}: give a number above 0.")
        self.slots = slots
        self.timeout_seconds = timeout_seconds
        self.max_output_chars = max_output_chars
        self._rlimits = {
            "RLIMIT_CPU": math.ceil(timeout_seconds) + 1,  # binds programs with several threads, and escaped ones
            "RLIMIT_FSIZE": max_file_mb * 2**20,
            "RLIMIT_NPROC": max_processes,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
        }
        if sys.platform == "linux":  # macOS refuses it
            self._rlimits["RLIMIT_AS"] = memory_mb * 2**20
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix="interpreter")
        self._lock = threading.Lock()
        self._running: set[Program] = set()
        self._closed = False

    def submit(self, code: str) -> Future[ExecutionResult]:
        """Queue `code`. Raises `InterpreterClosed` after `close`; the future may raise `InterpreterError`."""
        with self._lock:
            if self._closed:
                raise InterpreterClosed("The embedded interpreter is closed: make a new one.")
            return self._executor.submit(self._call, code, time.perf_counter())

    def close(self) -> None:
        """Kill what runs, fail it and what waits with `InterpreterClosed`. May be called twice."""
        with self._lock:
            self._closed = True
            for program in self._running:
                program.kill()
        self._executor.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, code: str, submitted: float) -> ExecutionResult:
        queue_seconds = time.perf_counter() - submitted
        if self._closed:
            raise InterpreterClosed("The embedded interpreter was closed before this program started.")
        try:
            folder = tempfile.mkdtemp(prefix="torl-")
        except OSError as error:
            raise InterpreterUnavailable(f"There is no place for a program's temporary folder: {error}.") from error
        try:
            return replace(self._run(code, folder), queue_seconds=queue_seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if os.path.exists(folder):
                logger.warning("A program left %s behind in a state that we cannot delete.", folder)

    def _run(self, code: str, folder: str) -> ExecutionResult:
        try:
            program = Program(code, folder, self._rlimits, self.max_output_chars)
        except OSError as error:
            raise InterpreterUnavailable(f"Cannot start {sys.executable!r} for a program: {error}.") from error
        with self._lock:
            self._running.add(program)
            if self._closed:
                program.kill()
        try:
            result = program.run(self.timeout_seconds)
        finally:
            with self._lock:
                self._running.discard(program)
        if program.killed:
            raise InterpreterClosed("The embedded interpreter was closed while this program ran.")
        return result


def _usable_cores() -> int:
    """This process's share of the machine's cores: launchers say how many ranks there are."""
    return max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # fewer than os.cpu_count() under taskset, Slurm and most containers
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
