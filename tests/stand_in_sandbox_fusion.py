"""A stand-in for a Sandbox Fusion server: its documented wire format over real HTTP, and trouble on demand.

    with SandboxFusionStandIn() as stand_in:
        stand_in.misbehave("500", "drop")  # the next two calls
        httpx.post(f"{stand_in.url}/run_code", json={"code": "print(1)", "language": "python"})

As the real one it runs the code with Python in a temporary folder, in its own environment, under `run_timeout` and
`memory_limit_MB`; it loses the end of a long stdout.
"""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

MOST_STDOUT = 219_264
"""Characters of stdout that the real server returns at most."""

TROUBLE = (
    "500",
    "503",
    "429",
    "drop",  # the connection ends before the program runs
    "drop_after",  # and after
    "garbage",
    "half",  # of an answer
    "cut",  # stdout
    "empty",  # stdout
    "sandbox_error",
    "slow",  # by `slow_seconds`
    "die",  # for `dead_seconds`
)
"""What the stand-in can do instead of answering well."""

Body = dict[str, Any]


def call_in(body: Body) -> tuple[str, dict[str, Any]]:
    """The mark and the arguments of the supervisor in a request of ours; "code" among them is the model's program."""
    return _call_in(body["code"])


@cache
def _call_in(code: str) -> tuple[str, dict[str, Any]]:
    found = re.search(r"^print_result\(('.*?'), \*\*(\{.*\})\)$", code, re.MULTILINE)
    return eval(found[1]), eval(found[2])  # in Python 3.11 ast.literal_eval may fail when two threads use it at once


def response(stdout: str = "", **run: Any) -> Body:
    """A documented answer; `run` are fields of its run_result."""
    run_result = {"status": "Finished", "execution_time": 0.01, "return_code": 0, "stdout": stdout, "stderr": ""} | run
    status = "Success" if run_result["return_code"] == 0 else "Failed"
    more = {"message": "", "compile_result": None, "executor_pod_name": None, "files": {}}
    return {"status": status, "run_result": run_result} | more


def sandbox_error(message: str) -> Body:
    return response() | {"status": "SandboxError", "message": message, "run_result": None}


def answer_at_once(body: Body) -> Body:
    """The answer to a program `print(EXPRESSION)`, without a process."""
    mark, call = call_in(body)
    value = eval(call["code"].strip().removeprefix("print(").removesuffix(")"))
    line = {"status": "ok", "stdout": f"{value}\n", "stderr": "", "seconds": 0.0, "truncated": False}
    return response(f"\n{mark}{base64.b64encode(zlib.compress(json.dumps(line).encode())).decode()}\n")


class SandboxFusionStandIn:
    """A server on a port of loopback, from its making to `close`.

    `answer` makes the answer to a request; by default it runs the code. `behave` names the trouble for a request, or
    nothing; by default the next one of `misbehave`.
    """

    def __init__(
        self,
        *,
        answer: Callable[[Body], Body] | None = None,
        behave: Callable[[Body], str | Body | None] | None = None,
    ) -> None:
        self.answer = answer or self.run
        self.behave = behave or (lambda body: self._next.popleft() if self._next else None)
        self.slow_seconds = 1.0
        self.dead_seconds = 0.1
        self.requests: list[Body] = []
        self.answered: Counter[str] = Counter()
        """How often each text of code got its answer whole."""
        self.troubles: Counter[str] = Counter()
        self.most_running = 0
        self._running = 0
        self._next: deque[str | Body] = deque()
        self._lock = threading.RLock()
        self._connections: set[socket.socket] = set()
        self._programs: set[int] = set()
        self._deaths: list[threading.Thread] = []
        self._server: _Server | None = None
        self._port = 0
        self.revive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def misbehave(self, *troubles: str | Body) -> None:
        """The trouble for the next calls, in this order; a dict is an answer given as it is."""
        self._next.extend(troubles)

    def kill(self) -> None:
        """End at once, with all connections and programs."""
        with self._lock:
            server, self._server = self._server, None
            if server is None:
                return
            for pid in list(self._programs):
                kill_tree(pid)
            for connection in list(self._connections):
                hang_up(connection)
        server.shutdown()
        server.server_close()
        with self._lock:  # those that came meanwhile
            for connection in list(self._connections):
                hang_up(connection)

    def revive(self) -> None:
        """Be there again, at the same URL."""
        server = _Server(("127.0.0.1", self._port), _Handler)
        server.stand_in = self
        self._port = server.server_address[1]
        with self._lock:
            self._server = server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        """End at once and come back after `dead_seconds`."""

        def die() -> None:
            self.kill()
            time.sleep(self.dead_seconds)
            self.revive()

        with self._lock:
            if self._server is None or any(death.is_alive() for death in self._deaths):
                return
            self._deaths.append(threading.Thread(target=die))
            self._deaths[-1].start()

    def close(self) -> None:
        for death in self._deaths:
            death.join()
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, body: Body) -> Body:
        """Run the code of a request as the real server does."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            script = Path(folder) / "tmp.py"
            script.write_text(body["code"], encoding="utf-8")
            kilobytes = 1024 * body.get("memory_limit_MB", -1)
            limits = f"ulimit -S -v {kilobytes} -d {kilobytes} -s {kilobytes} && " if kilobytes > 0 else ""
            started = time.perf_counter()
            process = subprocess.Popen(
                ["bash", "-c", f'{limits}exec "$0" "$1"', sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
            )
            self._programs.add(process.pid)
            end: dict[str, Any] = {}
            try:
                stdout, stderr = process.communicate(b"", timeout=body.get("run_timeout", 10))
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                stdout, stderr = process.communicate()
                end = {"status": "TimeLimitExceeded"}
            finally:
                self._programs.discard(process.pid)
            return_code = None if end else process.returncode
            return response(
                stdout.decode()[:MOST_STDOUT],
                execution_time=time.perf_counter() - started,
                return_code=return_code,
                stderr=stderr.decode(),
                **end,
            )


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        kill_tree(int(child))


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    stand_in: SandboxFusionStandIn
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a connection that ends is part of the play
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart
    server: _Server

    def setup(self) -> None:
        super().setup()
        with self.server.stand_in._lock:
            self.server.stand_in._connections.add(self.connection)
            if self.server.stand_in._server is not self.server:  # accepted, and killed since
                hang_up(self.connection)

    def finish(self) -> None:
        self.server.stand_in._connections.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/ping":
            self.send(200, '"pong"')
        else:
            self.send(404, '{"detail":"Not Found"}')

    def do_POST(self) -> None:
        stand_in = self.server.stand_in
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/run_code":
            self.send(404, '{"detail":"Not Found"}')
            return
        missing = [name for name in ("code", "language") if name not in body]
        if missing:
            detail = [{"type": "missing", "loc": ["body", name], "msg": "Field required"} for name in missing]
            self.send(422, json.dumps({"detail": detail}))
            return
        with stand_in._lock:
            stand_in.requests.append(body)
            stand_in._running += 1
            stand_in.most_running = max(stand_in.most_running, stand_in._running)
            trouble = stand_in.behave(body)
            if trouble is not None:
                stand_in.troubles[trouble if isinstance(trouble, str) else "answer"] += 1
        try:
            self.reply(stand_in, body, trouble)
        finally:
            with stand_in._lock:
                stand_in._running -= 1

    def reply(self, stand_in: SandboxFusionStandIn, body: Body, trouble: str | Body | None) -> None:
        if isinstance(trouble, dict):
            self.send(200, json.dumps(trouble))
        elif trouble == "500":
            self.send(500, json.dumps({"detail": "boom", "traceback": []}))
        elif trouble == "503":
            self.send(503, "no healthy upstream")
        elif trouble == "429":
            self.send(429, "Too Many Requests")
        elif trouble == "drop":
            self.drop()
        elif trouble == "garbage":
            self.send(200, "<html>Welcome to nginx!</html>")
        elif trouble == "sandbox_error":
            self.send(200, json.dumps(sandbox_error(f"exception on running code {body['code']}: no space left")))
        elif trouble == "die":
            stand_in.die()
            self.drop()
        else:
            self.answer(stand_in, body, trouble)

    def answer(self, stand_in: SandboxFusionStandIn, body: Body, trouble: str | None) -> None:
        if trouble == "slow":
            time.sleep(stand_in.slow_seconds)
        answer = stand_in.answer(body)
        if trouble == "drop_after":
            self.drop()
        elif trouble == "half":
            self.send(200, json.dumps(answer), part=0.5)
            self.drop()
        elif trouble in ("cut", "empty"):
            stdout = answer["run_result"]["stdout"]
            answer["run_result"]["stdout"] = stdout[: len(stdout) // 2] if trouble == "cut" else ""
            self.send(200, json.dumps(answer))
        else:
            with stand_in._lock:  # a whole answer leaves before a kill, or nothing of it
                if stand_in._server is self.server:
                    self.send(200, json.dumps(answer))
                    stand_in.answered[body["code"]] += trouble is None

    def send(self, status: int, text: str, *, part: float = 1.0) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: int(len(data) * part)])

    def drop(self) -> None:
        self.close_connection = True
        hang_up(self.connection)
