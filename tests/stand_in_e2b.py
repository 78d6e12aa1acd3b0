"""A stand-in for E2B on loopback: its creation API and the code-interpreter server of each sandbox, over real HTTP.

    with E2BStandIn() as stand_in:
        os.environ.update(stand_in.environment)  # points E2B's own SDK here; a test uses monkeypatch.setenv
        stand_in.misbehave("execute", "garbage", "500")  # the next two requests to run code
        ...
    assert stand_in.alive == set()

A sandbox is a Python process that runs the code it is sent, as the kernel does: variables stay from call to call. What
goes wrong is what goes wrong at E2B: see `FAULTS`, and the limits among the options.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

FAULTS = {
    "execute": ("slow", "500", "429", "502", "drop", "drop_after", "garbage", "half", "cut"),
    "create": ("slow", "500", "429", "503", "drop", "drop_after", "garbage"),
    "kill": ("500", "429", "drop"),
}
"""By request. `drop`: the connection closes without an answer; `drop_after`: the same when the work is done. `half`: a
line of the answer ends early; `cut`: the connection does. And `hang`, which no random fault is: no answer, ever."""

KERNEL = """
import contextlib, io, json, os, sys, traceback
requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", 0)
namespace = {"__name__": "__main__"}
for line in requests:
    out, err, error = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(json.loads(line), namespace)
        except BaseException as raised:
            text = "".join(traceback.format_exception(raised))
            error = {"name": type(raised).__name__, "value": str(raised), "traceback": text}
    answers.write(json.dumps([out.getvalue(), err.getvalue(), error]).encode() + b"\\n")
"""


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def is_running(pid: int) -> bool:
    """Whether it runs; one that only waits to be taken off the list does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Sandbox:
    """One sandbox: a kernel, and how long it lives."""

    def __init__(self, lifetime_seconds: float) -> None:
        self.id = f"i{uuid.uuid4().hex[:19]}"
        self.expires = time.monotonic() + lifetime_seconds
        self.calls = 0
        self.running = 0  # requests to run code, now
        self.lock = threading.Lock()  # a kernel runs one call at a time
        self.contexts = {str(uuid.uuid4())}
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stand-in-", ignore_cleanup_errors=True)
        os.chmod(self._folder.name, 0o755)
        self._kernel = subprocess.Popen(
            [sys.executable, "-u", "-c", KERNEL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"TMPDIR": self._folder.name},
        )

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run code in the kernel; the events of the answer."""
        with self.lock:
            self.calls += 1
            try:
                self._kernel.stdin.write(json.dumps(code).encode() + b"\n")
                self._kernel.stdin.flush()
                stdout, stderr, error = json.loads(self._kernel.stdout.readline())
            except (OSError, ValueError):  # the code, or `kill`, has killed the kernel
                stdout, stderr = "", ""
                error = {"name": "ContextRestarting", "value": "Context was restarted", "traceback": ""}
                self.kill()
                self._start()
            now = time.strftime("%Y-%m-%dT%H:%M:%S.000000+00:00", time.gmtime())
            events: list[dict[str, Any]] = [{"type": "number_of_executions", "execution_count": self.calls}]
            for name, text in (("stdout", stdout), ("stderr", stderr)):
                if text:
                    events.append({"type": name, "text": text, "timestamp": now})
            if error:
                events.append({"type": "error", **error})
            return [*events, {"type": "end_of_execution"}]

    def kill(self) -> None:
        """End the kernel and all below it, as the end of a virtual machine does."""
        below = descendants(self._kernel.pid)
        for pid in (self._kernel.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._kernel.wait()
        deadline = time.monotonic() + 5
        while any(map(is_running, below)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for pipe in (self._kernel.stdin, self._kernel.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._folder.cleanup()


class E2BStandIn:
    """The service; a context manager. Options are limits: None is no limit.

    `calls_per_sandbox`: a sandbox answers "not found" after that many calls. `fault_share`: how many of the requests
    meet a random fault, each kind in turn, in an order fixed by `seed`.
    """

    def __init__(
        self,
        *,
        max_sandboxes: int | None = None,
        calls_per_sandbox: int | None = None,
        fault_share: float = 0.0,
        slow_seconds: float = 0.3,
        seed: int = 0,
    ) -> None:
        self.max_sandboxes = max_sandboxes
        self.calls_per_sandbox = calls_per_sandbox
        self.fault_share = fault_share
        self.slow_seconds = slow_seconds
        self.is_closing = threading.Event()
        self.creations: list[float] = []  # when each request to create came, by the monotonic clock
        self.bodies: list[dict[str, Any]] = []  # what it asked for
        self.created: list[str] = []
        self.most_alive = 0
        self.most_running = 0  # calls at a time in one sandbox
        self.faults: list[tuple[str, str]] = []  # all that happened
        self.sandboxes: dict[str, Sandbox] = {}
        self.lock = threading.RLock()
        self._planned: dict[str, deque[str]] = {name: deque() for name in FAULTS}
        self._by_key: dict[str, str] = {}
        self._random = random.Random(seed)
        self._turn = dict.fromkeys(FAULTS, 0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the SDK come here, with creations and all. E2B_DEBUG must not be set beside them."""
        return {"E2B_API_KEY": "e2b_stand_in", "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    @property
    def alive(self) -> set[str]:
        """The ids of the sandboxes that nobody has killed and whose lifetime has not ended."""
        with self.lock:
            for sandbox in [item for item in self.sandboxes.values() if item.expires < time.monotonic()]:
                self.remove(sandbox.id)
            return set(self.sandboxes)

    def misbehave(self, request: str, *faults: str) -> None:
        """Let the next requests (`execute`, `create` or `kill`) go wrong in these ways, one each."""
        with self.lock:
            self._planned[request] += faults

    def fault(self, request: str) -> str | None:
        """How this request goes wrong."""
        with self.lock:
            fault = None
            if self._planned[request]:
                fault = self._planned[request].popleft()
            elif self._random.random() < self.fault_share:
                kinds = FAULTS[request]
                fault = kinds[self._turn[request] % len(kinds)]
                self._turn[request] += 1
            if fault:
                self.faults.append((request, fault))
            return fault

    def create(self, body: dict[str, Any], key: str | None) -> Sandbox | None:
        """A new sandbox, or that of an earlier request with the same key; None above the limit."""
        with self.lock:
            self.bodies.append(body)
            if key in self._by_key and self._by_key[key] in self.alive:
                return self.sandboxes[self._by_key[key]]
            if self.max_sandboxes is not None and len(self.alive) >= self.max_sandboxes:
                return None
            sandbox = Sandbox(body.get("timeout", 15))
            self.sandboxes[sandbox.id] = sandbox
            self.created.append(sandbox.id)
            self.most_alive = max(self.most_alive, len(self.sandboxes))
            if key:
                self._by_key[key] = sandbox.id
            return sandbox

    def remove(self, sandbox_id: str) -> bool:
        with self.lock:
            sandbox = self.sandboxes.pop(sandbox_id, None)
        if sandbox:
            sandbox.kill()
        return sandbox is not None

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.stand_in = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Be gone: requests are refused from now on, and the sandboxes end. May be called twice."""
        self.is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for sandbox_id in list(self.sandboxes):
            self.remove(sandbox_id)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    stand_in: E2BStandIn

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # small writes would wait 40 ms for each other
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        match self.path.strip("/").split("/"):
            case ["v2", "sandboxes"]:
                self.create(body)
            case ["sandboxes", sandbox_id, "timeout"]:
                self.set_timeout(sandbox_id, body["timeout"])
            case ["execute"]:
                self.execute(body)
            case ["contexts"]:
                self.add_context(body)
            case _:
                self.reply(404, {"code": 404, "message": f"no {self.path}"})

    def do_GET(self) -> None:
        if self.path == "/health":
            sandbox = self.sandbox()
            self.reply(200 if sandbox else 502, "OK" if sandbox else "The sandbox was not found")
        elif self.path == "/contexts":
            sandbox = self.sandbox()
            contexts = sandbox.contexts if sandbox else ()
            self.reply(200, [{"id": name, "language": "python", "cwd": "/home/user"} for name in contexts])
        else:
            self.reply(404, {"code": 404, "message": f"no {self.path}"})

    def do_DELETE(self) -> None:
        if not self.fail("kill"):
            killed = self.server.stand_in.remove(self.path.rpartition("/")[2])
            self.reply(204 if killed else 404, None if killed else {"code": 404, "message": "not found"})

    def create(self, body: dict[str, Any]) -> None:
        stand_in = self.server.stand_in
        stand_in.creations.append(time.monotonic())
        if self.headers.get("X-API-KEY") == "wrong":
            self.reply(401, {"code": 401, "message": "Invalid API key"})
            return
        fault = stand_in.fault("create")
        if fault and fault != "drop_after" and self.fail("create", fault):
            return
        sandbox = stand_in.create(body, self.headers.get("Idempotency-Key"))
        if fault == "drop_after":
            self.close()
        elif sandbox is None:
            self.reply(429, {"code": 429, "message": "you have reached the maximum number of concurrent sandboxes"})
        else:
            ids = {"sandboxID": sandbox.id, "templateID": body["templateID"], "clientID": "stand-in"}
            self.reply(201, ids | {"envdVersion": "0.4.0", "envdAccessToken": "token", "domain": None})

    def set_timeout(self, sandbox_id: str, seconds: float) -> None:
        sandbox = self.server.stand_in.sandboxes.get(sandbox_id)
        if sandbox:
            sandbox.expires = time.monotonic() + seconds
        self.reply(204 if sandbox else 404, None if sandbox else {"code": 404, "message": "not found"})

    def add_context(self, body: dict[str, Any]) -> None:
        name = str(uuid.uuid4())
        sandbox = self.sandbox()
        if sandbox:
            sandbox.contexts.add(name)
        self.reply(200, {"id": name, "language": "python", "cwd": body.get("cwd") or "/home/user"})

    def execute(self, body: dict[str, Any]) -> None:
        stand_in = self.server.stand_in
        fault = stand_in.fault("execute")
        if fault and fault not in ("drop_after", "half", "cut") and self.fail("execute", fault):
            return
        sandbox = self.sandbox()
        limit = stand_in.calls_per_sandbox
        if sandbox is None or (limit is not None and sandbox.calls >= limit):
            self.reply(502, "The sandbox was not found")
            return
        with stand_in.lock:
            sandbox.running += 1
            stand_in.most_running = max(stand_in.most_running, sandbox.running)
        events: list[dict[str, Any]] = []
        worker = threading.Thread(target=lambda: events.extend(sandbox.run(body["code"])), daemon=True)
        worker.start()
        try:
            worker.join(0.2)
            if fault == "drop_after":
                worker.join()
                self.close()
                return
            self.start_stream()
            while worker.is_alive():
                worker.join(0.2)
                self.chunk('{"type": "keepalive"}\n')
        finally:
            worker.join(0 if stand_in.is_closing.is_set() else None)
            sandbox.running -= 1
        for event in events:
            line = json.dumps(event) + "\n"
            if fault in ("half", "cut") and event["type"] in ("stdout", "error", "end_of_execution"):
                self.chunk(line[: len(line) // 2])
                break
            self.chunk(line)
        if fault == "cut":
            self.close()
        else:
            self.wfile.write(b"0\r\n\r\n")

    def fail(self, request: str, fault: str | None = None) -> bool:
        """Go wrong instead of answering; False when there is nothing wrong, or it was only slow."""
        fault = fault or self.server.stand_in.fault(request)
        if fault is None:
            return False
        if fault == "slow":
            time.sleep(self.server.stand_in.slow_seconds)
            return False
        if fault == "hang":
            self.start_stream()
            while not self.server.stand_in.is_closing.wait(0.2):
                self.chunk('{"type": "keepalive"}\n')
        elif fault == "garbage":
            self.reply(201 if request == "create" else 200, "<html>It works!</html>")
        elif fault.isdigit():
            self.reply(int(fault), {"code": int(fault), "message": "the stand-in misbehaves"})
        else:
            self.close()
        return True

    def sandbox(self) -> Sandbox | None:
        stand_in = self.server.stand_in
        sandbox_id = self.headers.get("E2b-Sandbox-Id", "")
        return stand_in.sandboxes.get(sandbox_id) if sandbox_id in stand_in.alive else None

    def reply(self, status: int, body: object) -> None:
        data = b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def close(self) -> None:
        """Close the connection, whatever the client waits for."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """No log."""
