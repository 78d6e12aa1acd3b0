"""Tier `plain`: a fresh Python process for every program, with limits and no isolation, where there is no Linux.

A program runs as our user: it can read and change the files that we can, reach the network, and signal our processes.
macOS does not enforce the memory limit. A hostile program that leaves its session, drops its environment and closes
our descriptors outlives its call.

`Program` is used by one thread from start to end; only `kill` may be called from another. Time and output are limited
here, the other limits in the child (sandbox/program.py).
"""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torl_trl.interpreters.base import (
    ENVIRONMENT,
    ExecutionResult,
    ExecutionStatus,
    InterpreterClosed,
    InterpreterUnavailable,
)
from torl_trl.interpreters.sandbox.supervise import Stream, delete, status_of

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).parent / "sandbox" / "program.py"
# As `-I`, but with a few variables of ours instead of an ignored environment, so that the hash seed can be fixed.
_PYTHON_FLAGS = ("-S", "-s", "-P", "-u", "-X", "utf8")
_PACKAGES = os.pathsep.join(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
_STARTUP_SECONDS = 60.0  # for Python itself, before the program; generous, because then it is our machine that is slow
_DRAIN_SECONDS = 0.5  # killed processes have closed their pipes by then, or they are not in the group


class PlainBackend:
    """Runs each program in a process of its own; `call` from any thread."""

    def __init__(self, max_output_chars: int, rlimits: Mapping[str, int]) -> None:
        self._max_output_chars = max_output_chars
        self._rlimits = rlimits
        self._lock = threading.Lock()
        self._running: set[Program] = set()
        self._closed = False

    def call(self, slot: int, code: str, timeout_seconds: float) -> ExecutionResult:
        """Run `code`. Raises `InterpreterUnavailable`, or `InterpreterClosed` after `close`."""
        try:
            folder = tempfile.mkdtemp(prefix="torl-")
        except OSError as error:
            raise InterpreterUnavailable(f"There is no place for a program's temporary folder: {error}.") from error
        try:
            return self._run(code, folder, timeout_seconds)
        finally:
            delete(folder)
            if os.path.exists(folder):
                logger.warning("A program left %s behind in a state that we cannot delete.", folder)

    def close(self) -> None:
        """Kill what runs."""
        with self._lock:
            self._closed = True
            for program in self._running:
                program.kill()

    def _run(self, code: str, folder: str, timeout_seconds: float) -> ExecutionResult:
        try:
            program = Program(code, folder, self._rlimits, self._max_output_chars)
        except OSError as error:
            raise InterpreterUnavailable(f"Cannot start {sys.executable!r} for a program: {error}.") from error
        with self._lock:
            self._running.add(program)
            if self._closed:
                program.kill()
        try:
            result = program.run(timeout_seconds)
        finally:
            with self._lock:
                self._running.discard(program)
        if program.killed:
            raise InterpreterClosed("The embedded interpreter was closed while this program ran.")
        return result


class Program:
    """A started program; `run` waits for its end, once. Raises `OSError` when the system has no process for it."""

    def __init__(self, code: str, folder: str, rlimits: Mapping[str, int], max_output_chars: int) -> None:
        self.killed = False
        self._folder = folder
        self._ready = False
        # The child and all that it starts hold the write end of this pipe: its end means that none of them is left.
        self._alive, alive = os.pipe()
        self._ended, ended = os.pipe()
        try:
            self._process = self._start(code, rlimits, alive)
        except OSError:
            for fd in (self._alive, self._ended, ended):
                os.close(fd)
            raise
        finally:
            os.close(alive)
        self.stdout, self.stderr = Stream(max_output_chars), Stream(max_output_chars)
        self._streams = {self._process.stdout.fileno(): self.stdout, self._process.stderr.fileno(): self.stderr}
        self._selector = selectors.DefaultSelector()
        for fd in (*self._streams, self._alive, self._ended):
            self._selector.register(fd, selectors.EVENT_READ)
        self._watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        self._watcher.start()

    def _start(self, code: str, rlimits: Mapping[str, int], alive: int) -> subprocess.Popen:
        environment = ENVIRONMENT | {"HOME": self._folder, "TMPDIR": self._folder}
        limits = [f"{name}={value}" for name, value in rlimits.items()]
        with tempfile.TemporaryFile() as source:
            source.write(code.encode("utf-8", "replace"))
            source.seek(0)
            return subprocess.Popen(
                [sys.executable, *_PYTHON_FLAGS, str(_PROGRAM), str(alive), _PACKAGES, *limits],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
                pass_fds=(alive,),
            )

    def _watch(self, ended: int) -> None:
        """Tell the selector when the program ends; its children may hold its pipes for longer."""
        if hasattr(os, "waitid"):  # the process stays a zombie, so that its group's number cannot be given away
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        os.close(ended)

    def kill(self) -> None:
        """End the whole process group now. From any thread, also when the program has ended."""
        self.killed = True
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so with EPERM
            os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, timeout_seconds: float) -> ExecutionResult:
        """Read until the program ends, runs too long or prints too much; then kill its group and free everything.

        Raises `InterpreterUnavailable` when Python ended, or hung, before it reached the program.
        """
        started = None
        deadline = time.perf_counter() + _STARTUP_SECONDS
        timed_out = False
        try:
            while self._ended in self._selector.get_map() and not self._overflow:
                self._read(deadline)
                if started is None and self._ready:
                    started = time.perf_counter()
                    deadline = started + timeout_seconds
                timed_out = time.perf_counter() >= deadline
                if timed_out:
                    break
            seconds = time.perf_counter() - (started or 0.0)
        finally:
            self._end()
        if started is None and not self.killed:
            raise InterpreterUnavailable(f"Python did not reach the program: {self.stderr.text.strip()[-300:]!r}.")
        return ExecutionResult(
            status=ExecutionStatus(status_of(self._process.returncode, self.stderr.text, timed_out, self._overflow)),
            stdout=self.stdout.text,
            stderr=self.stderr.text,
            seconds=seconds,
            truncated=self._overflow,
        )

    @property
    def _overflow(self) -> bool:
        return self.stdout.overflow or self.stderr.overflow

    def _read(self, deadline: float) -> None:
        """Wait until the deadline for one event, and take all that are there."""
        for key, _ in self._selector.select(max(0.0, deadline - time.perf_counter())):
            data = os.read(key.fd, 65_536)
            if key.fd in self._streams:
                self._streams[key.fd].feed(data)
            elif data:  # the child's one byte; more of it would be the program's
                self._ready = True
            if not data:
                self._selector.unregister(key.fd)

    def _end(self) -> None:
        self._kill_group()
        self._drain()
        if self._selector.get_map():
            self._kill_escaped()
            self._drain()
        self._selector.close()
        self._watcher.join()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
        os.close(self._alive)
        os.close(self._ended)

    def _drain(self) -> None:
        deadline = time.perf_counter() + _DRAIN_SECONDS
        while self._selector.get_map() and time.perf_counter() < deadline:
            self._read(deadline)

    def _kill_escaped(self) -> None:
        """Kill what left the process group (`setsid`), found by its environment; where there is a /proc."""
        mark = f"TMPDIR={self._folder}\0".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)
            except OSError:  # it has just ended, or belongs to another user
                continue
