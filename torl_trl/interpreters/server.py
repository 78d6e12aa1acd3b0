"""The fork server as the trainer sees it: a process with one socket per slot."""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping

from torl_trl.interpreters.base import ENVIRONMENT, ExecutionResult, InterpreterUnavailable
from torl_trl.interpreters.tiers import (
    FIRST_UID,
    SANDBOX,
    SYSTEM_PATHS,
    Tier,
    box_packages,
    package_folders,
    python_folders,
    server_command,
)

_START_SECONDS = 120.0  # importing sympy and scipy from a cold disk, on a busy machine
_SLACK_SECONDS = 60.0  # how much longer than its program a slot may take before it counts as dead


class ServerDied(Exception):
    """The fork server, or one of its slots, is gone: the call may be run again by another one."""


class ServerProcess:
    """A started fork server with `slots` sockets.

    Raises `InterpreterUnavailable` with the reason when it does not come up.
    """

    def __init__(
        self,
        tier: Tier,
        slots: int,
        *,
        max_output_chars: int,
        max_file_mb: int,
        rlimits: Mapping[str, int],
    ) -> None:
        self.tier = tier
        self._folder = None
        if not tier.has_namespaces:
            self._folder = tempfile.mkdtemp(prefix="torl-")
            os.chmod(self._folder, 0o711)  # slots of other users have their own folders in it
        trainer = os.pidfd_open(os.getpid())  # the server ends with us, even if a fork of ours keeps the sockets open
        pairs = [socket.socketpair() for _ in range(slots + 1)]
        theirs = [pair[1].fileno() for pair in pairs]
        self._control, *self._slots = [pair[0] for pair in pairs]
        settings = {
            "tier": tier,
            "control": theirs[0],
            "trainer": trainer,
            "slots": theirs[1:],
            "packages": box_packages() if tier.has_namespaces else package_folders(),
            "folder": self._folder,
            "readable": [*SYSTEM_PATHS, *python_folders(), *package_folders(), str(SANDBOX)],
            "writable": ["/dev/null"],
            "first_uid": FIRST_UID + 1000 * int(os.environ.get("LOCAL_RANK", "0")),  # limits count by user
            "max_chars": max_output_chars,
            "max_file_mb": max_file_mb,
            "rlimits": dict(rlimits),
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._lock = threading.Lock()
        self._ended = False
        try:
            self._process = subprocess.Popen(
                server_command(tier, [json.dumps(settings)]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=ENVIRONMENT | {"HOME": "/tmp", "TMPDIR": "/tmp"},
                pass_fds=(trainer, *theirs),
                start_new_session=True,  # Ctrl-C is for us: we end it
            )
        except OSError as error:
            self._process = None
            self.end()
            raise InterpreterUnavailable(f"cannot start the fork server: {error}") from error
        finally:
            os.close(trainer)
            for _, their_end in pairs:
                their_end.close()
        self.missing: list[str] = self._greet()

    def _greet(self) -> list[str]:
        """Wait until the server is warm; the packages it could not import."""
        self._control.settimeout(_START_SECONDS)
        try:
            with self._control.makefile("rb") as stream:
                line = stream.readline()
        except TimeoutError:
            line = b""
        if not line:
            self.end()
            raise InterpreterUnavailable(f"the fork server did not start: {self.last_words()}")
        return json.loads(line)["missing"]

    def call(self, slot: int, code: str, timeout_seconds: float) -> ExecutionResult:
        """Run `code` in `slot`, which must be free. Raises `ServerDied`."""
        connection = self._slots[slot]
        connection.settimeout(timeout_seconds + _SLACK_SECONDS)
        data = code.encode("utf-8", "replace")
        try:
            connection.sendall(struct.pack("<Id", len(data), timeout_seconds) + data)
            (size,) = struct.unpack("<I", self._receive(connection, 4))
            fields = json.loads(self._receive(connection, size))
        except OSError as error:  # also a time-out
            raise ServerDied(str(error)) from error
        return ExecutionResult.of(fields)

    @staticmethod
    def _receive(connection: socket.socket, size: int) -> bytes:
        parts = []
        while size:
            part = connection.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionError("the connection to the fork server ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def last_words(self) -> str:
        """What the server wrote last on standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "it wrote no reason"

    def end(self) -> None:
        """End the server with all that it runs. Calls that are under way raise `ServerDied`. May be called twice."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        for connection in (self._control, *self._slots):
            with contextlib.suppress(OSError):  # the other end is gone
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Free the descriptors too; nobody may be in `call`."""
        self.end()
        for connection in (self._control, *self._slots):
            connection.close()
        self._errors.close()
