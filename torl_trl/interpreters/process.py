"""One program in one process group: start it, read what it prints, end it and all that it started.

`Program` is used by one thread from start to end; only `kill` may be called from another. Time and output are limited
here, the other limits in the child (sandbox/program.py).
"""

import codecs
import contextlib
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

from torl_trl.interpreters.base import ExecutionResult, ExecutionStatus, InterpreterUnavailable

_PROGRAM = Path(__file__).parent / "sandbox" / "program.py"
# As `-I`, but with a few variables of ours instead of an ignored environment, so that the hash seed can be fixed.
_PYTHON_FLAGS = ("-S", "-s", "-P", "-u", "-X", "utf8")
_PACKAGES = os.pathsep.join(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
_STARTUP_SECONDS = 60.0  # for Python itself, before the program; generous, because then it is our machine that is slow
_DRAIN_SECONDS = 0.5  # killed processes have closed their pipes by then, or they are not in the group


class Stream:
    """Text read from a pipe, at most `max_chars` of it; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, max_chars: int) -> None:
        self.text = ""
        self.overflow = False
        self._max_chars = max_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> None:
        """Take what was read; empty data is the end."""
        if self.overflow:
            return
        self.text += self._decoder.decode(data, final=not data)
        self.overflow = len(self.text) > self._max_chars
        self.text = self.text[: self._max_chars]


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
        environment = {"HOME": self._folder, "TMPDIR": self._folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
            status=self._status(timed_out),
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

    def _status(self, timed_out: bool) -> ExecutionStatus:
        code = self._process.returncode
        if self._overflow:
            return ExecutionStatus.OUTPUT_LIMIT
        if timed_out or code == -signal.SIGXCPU:
            return ExecutionStatus.TIMEOUT
        if code == 0:
            return ExecutionStatus.OK
        if code < 0:
            return ExecutionStatus.KILLED
        last_line = self.stderr.text.rstrip().rpartition("\n")[2]
        exception = last_line.partition(":")[0]  # numpy has a MemoryError of its own
        return ExecutionStatus.MEMORY if exception.endswith("MemoryError") else ExecutionStatus.ERROR
