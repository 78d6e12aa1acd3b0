"""The fork server as the trainer sees it: a process with one socket per slot."""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from typing import Any

from torl_interpreters import tiers
from torl_interpreters.base import ENVIRONMENT, InterpreterClosed, InterpreterUnavailable

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0  # importing sympy and scipy from a cold disk, on a busy machine
_SLACK_SECONDS = 60.0  # how much longer than its program a slot may take before it counts as dead


class ServerDied(Exception):
    """The fork server, or one of its slots, is gone: the call may be run again by another one."""


class ServerProcess:
    """A started fork server with `slots` sockets. `limits` are a program's: max_output_chars, max_file_mb, rlimits.

    Raises `InterpreterUnavailable` with the reason when it does not come up.
    """

    def __init__(self, tier: tiers.Tier, slots: int, **limits: Any) -> None:
        self._process = self._folder = None
        if not tier.has_namespaces:
            self._folder = tempfile.mkdtemp(prefix="torl-")
            os.chmod(self._folder, 0o711)  # slots of other users have their own folders in it
        trainer = os.pidfd_open(os.getpid())  # the server ends with us, even if a fork of ours keeps the sockets open
        ours, theirs = zip(*(socket.socketpair() for _ in range(slots + 1)), strict=True)
        self._control, *self._slots = ours
        control, *slot_sockets = [end.fileno() for end in theirs]
        settings = {
            "tier": tier,
            "control": control,
            "trainer": trainer,
            "slots": slot_sockets,
            "packages": tiers.box_packages() if tier.has_namespaces else tiers.package_folders(),
            "folder": self._folder,
            "readable": [*tiers.SYSTEM_PATHS, *tiers.python_folders(), *tiers.package_folders(), str(tiers.SANDBOX)],
            "first_uid": tiers.FIRST_UID + 1000 * int(os.environ.get("LOCAL_RANK", "0")),  # limits count by user
            **limits,
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the server lives
        try:
            self._process = subprocess.Popen(
                tiers.server_command(tier, json.dumps(settings)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=ENVIRONMENT | {"HOME": "/tmp", "TMPDIR": "/tmp"},
                pass_fds=(trainer, control, *slot_sockets),
                start_new_session=True,  # Ctrl-C is for us: we end it
            )
        except OSError as error:
            self.close()
            raise InterpreterUnavailable(f"cannot start the fork server: {error}") from error
        finally:
            os.close(trainer)
            for end in theirs:
                end.close()
        self._control.settimeout(_START_SECONDS)
        try:
            self.missing: list[str] = _receive(self._control)["missing"]  # packages
        except OSError as error:
            self.close()
            raise InterpreterUnavailable(f"the fork server did not start: {self.last_words()}") from error

    def call(self, slot: int, code: str, timeout_seconds: float) -> dict[str, Any]:
        """Run `code` in `slot`, which must be free: the fields of its result. Raises `ServerDied`."""
        request = {"code": code.encode("utf-8", "replace").decode(), "timeout": timeout_seconds}
        connection = self._slots[slot]
        connection.settimeout(timeout_seconds + _SLACK_SECONDS)
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            return _receive(connection)
        except OSError as error:  # also a time-out
            raise ServerDied(str(error)) from error

    def last_words(self) -> str:
        """What the server wrote last on standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "it wrote no reason"

    def close(self) -> None:
        """End the server with all that it runs. Calls that are under way raise `ServerDied`. May be called twice."""
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


class ForkServerBackend:
    """A fork server that is started again when it dies; the calls under way are then run once more."""

    def __init__(self, tier: tiers.Tier, slots: int, **limits: Any) -> None:
        self._start = lambda: ServerProcess(tier, slots, **limits)
        self._lock = threading.Lock()
        self._closed = False
        self._server = self._start()
        self.missing = self._server.missing

    def call(self, slot: int, code: str, timeout_seconds: float) -> dict[str, Any]:
        for _ in range(2):
            server = self._server
            try:
                return server.call(slot, code, timeout_seconds)
            except ServerDied as error:
                with self._lock:
                    if self._closed:
                        text = "The embedded interpreter was closed while this program ran."
                        raise InterpreterClosed(text) from error
                    if self._server is server:
                        server.close()
                        words = server.last_words()
                        logger.warning("The fork server ended (%s; %s) and is started again.", error, words)
                        self._server = self._start()
        raise InterpreterUnavailable("The fork server ended twice while it ran this program.")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._server.close()


def _receive(connection: socket.socket) -> dict[str, Any]:
    """What the server says next, a line of JSON. Raises `OSError` when it is gone, or silent for too long."""
    with connection.makefile("rb") as stream:
        line = stream.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection to the fork server ended")
    return json.loads(line)
