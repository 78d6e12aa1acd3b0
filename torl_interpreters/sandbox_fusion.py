"""The Sandbox Fusion interpreter: programs run at one or several Sandbox Fusion servers.

    with SandboxFusionInterpreter(url=["http://box1:8080", "http://box2:8080"], slots=32) as interpreter:
        interpreter.submit("print(2**100)").result().stdout

Each attempt is a `POST /run_code` to the least busy healthy server, with our supervisor and the program in it
(remote.py). A server that fails is set aside and pinged until it answers; calls are tried again elsewhere, if there is
an elsewhere. What counts as what: a line of our supervisor is a result. Without it, the server's own time limit is a
timeout if it fell before ours, and a supervisor killed twice in a row is `killed`; all else is a failure of ours.

What is NOT covered. Isolation between programs, and of the server from them, is the server's: its default has none.
Keep keys out of its environment and give it a machine or container of its own. A program whose call was given up, by
`close` or our time limit, runs on there until its own limits end it.
"""

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from torl_interpreters import remote
from torl_interpreters.base import ExecutionResult, ExecutionStatus, InterpreterError, InterpreterUnavailable

URL_VARIABLE = "TORL_SANDBOX_FUSION_URL"
_SLOTS_PER_SERVER = 8
_SUPERVISOR_MB = 256  # the server's memory limit binds our supervisor too
_KINDS = {429: remote.TooMany, 502: InterpreterUnavailable, 503: InterpreterUnavailable, 504: InterpreterUnavailable}
_QUEUE_SECONDS = 60.0  # what a request may wait at the server before its program starts
_PING_SECONDS = 10.0  # a busy server answers late
_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 0.1, 1.0  # between two pings of a server that was set aside, doubling


@dataclass(eq=False, slots=True)
class _Server:
    name: str  # the URL without a password
    client: httpx.AsyncClient  # one each: what a request costs httpx grows with the connections of its client
    busy: int = 0  # requests at this server
    trouble: str = ""  # why it is set aside


class SandboxFusionInterpreter(remote.RemoteInterpreter):
    """Runs programs at Sandbox Fusion servers, `slots` requests at a time over all of them, in the order of `submit`.

    `url` is one base URL or several; without it, those of the variable TORL_SANDBOX_FUSION_URL, separated by commas.
    `slots` should be about the cores of all servers: a server starts every program at once, and the clocks of all run
    on. Its default is 8 per server, divided by the ranks. `timeout_seconds` is wall time from the start of the
    program. `max_output_chars` counts stdout and stderr apart. `request_timeout_seconds` covers the queue and the run
    at the server; by default 90 more than `timeout_seconds`. `retries` and `backoff_seconds`: see `RemoteInterpreter`.

    Raises `InterpreterUnavailable` when no server answers, and `ValueError` for an impossible option.
    """

    def __init__(
        self,
        *,
        url: str | Sequence[str] | None = None,
        slots: int | None = None,
        timeout_seconds: float = 10.0,
        memory_mb: int = 1024,
        max_output_chars: int = 65_536,
        max_file_mb: int = 64,
        request_timeout_seconds: float | None = None,
        retries: int = 8,
        backoff_seconds: float = 0.5,
    ) -> None:
        urls = _base_urls(url)
        slots = max(1, _SLOTS_PER_SERVER * len(urls) // remote.ranks()) if slots is None else slots
        limits = {"timeout_seconds": timeout_seconds, "memory_mb": memory_mb, "max_output_chars": max_output_chars}
        limits |= {"max_file_mb": max_file_mb, "slots": slots, "backoff_seconds": backoff_seconds}
        super().__init__("Sandbox Fusion", retries, **limits)
        run_seconds = timeout_seconds + remote.SERVICE_SLACK_SECONDS
        self._request_timeout = request_timeout_seconds or run_seconds + _QUEUE_SECONDS
        if self._request_timeout <= timeout_seconds:
            raise ValueError(
                f"request_timeout_seconds is {request_timeout_seconds!r} and timeout_seconds {timeout_seconds!r}: "
                "give requests more time than programs."
            )
        self._body = {"language": "python", "run_timeout": run_seconds, "memory_limit_MB": memory_mb + _SUPERVISOR_MB}
        # Servers close idle connections after 5 seconds; ours go first, lest a request meets a closing one.
        connections = httpx.Limits(max_connections=None, max_keepalive_connections=self.slots, keepalive_expiry=3.0)
        timeout = httpx.Timeout(None, connect=_PING_SECONDS)
        self._servers: list[_Server] = []
        for each in urls:
            try:
                client = httpx.AsyncClient(base_url=each, limits=connections, timeout=timeout)
            except httpx.InvalidURL as error:
                raise ValueError(f"url is {each!r}: {error}.") from error
            self._servers.append(_Server(re.sub(r"//[^/@]*@", "//", each), client))
        self._names = ", ".join(server.name for server in self._servers)
        self._failed: defaultdict[int, set[_Server]] = defaultdict(set)  # by the slot's call: others come first
        self._start()

    async def _open(self) -> None:
        troubles = await asyncio.gather(*(self._ping(server) for server in self._servers))
        if all(troubles):
            silent = f"None of the Sandbox Fusion servers at {self._names} answers"
            if len(troubles) == 1:
                silent = f"The Sandbox Fusion server at {self._names} does not answer"
            mend = f"start it, or correct url in interpreter_options or the variable {URL_VARIABLE}"
            raise InterpreterUnavailable(f"{silent} ({troubles[0]}): {mend}.")
        for server, trouble in zip(self._servers, troubles, strict=True):
            if trouble:
                self._warn(f"the server at {server.name} does not answer ({trouble})")
                self._set_aside(server, trouble)

    async def _prepare(self, slot: int) -> None:
        if all(server.trouble for server in self._servers):
            trouble = self._servers[0].trouble
            raise InterpreterUnavailable(f"No Sandbox Fusion server answers, of {self._names}: {trouble}")

    async def _attempt(self, slot: int, code: str) -> ExecutionResult:
        failed = self._failed[slot]
        healthy = [server for server in self._servers if not server.trouble]
        server = min(healthy, key=lambda server: (server in failed, server.busy))
        server.busy += 1
        try:
            result = await self._run(server, code)
        except InterpreterError as error:
            failed.add(server)
            # A server that answers wrongly, and at once, would draw all the calls; but it is better than none.
            if isinstance(error, InterpreterUnavailable) or len(healthy) > 1:
                self._set_aside(server, str(error))
            raise type(error)(f"Sandbox Fusion at {server.name}: {error}") from error
        finally:
            server.busy -= 1
        failed.clear()
        return result

    async def _close(self) -> None:
        await asyncio.gather(*(server.client.aclose() for server in self._servers), return_exceptions=True)

    async def _run(self, server: _Server, code: str) -> ExecutionResult:
        """The result in the server's answer. Raises `InterpreterUnavailable` when it had better be left alone."""
        text, mark = remote.wrap(code, **self._limits)
        response = await _request(server, "POST", "/run_code", self._request_timeout, json=self._body | {"code": text})
        status = response.status_code
        if status != 200:  # 502 to 504: what stands before the server cannot reach it
            kind = _KINDS.get(status, InterpreterError if status >= 500 else remote.Refused)
            raise kind(f"HTTP {status}: {response.text[:200]!r}")
        try:
            answer = response.json()
            if answer["status"] == "SandboxError":
                raise InterpreterError(f"SandboxError: {answer['message'][-200:]!r}")  # its head repeats our text
            run = answer["run_result"]
            if result := remote.unwrap(run["stdout"] or "", mark):
                return result
            if run["status"] == "TimeLimitExceeded":
                if run["execution_time"] < self.timeout_seconds:  # a limit of the server's own
                    return ExecutionResult(ExecutionStatus.TIMEOUT, "", "", run["execution_time"])
                raise InterpreterError("a program did not end in time: the server has too much to do, lower slots")
            exit_code = run["return_code"]
            # A signal comes from the server's shell as 128 and its number.
            kind = remote.Doubtful if exit_code < 0 or exit_code > 128 else InterpreterError
            raise kind(f"there is no result (exit code {exit_code}): {(run['stderr'] or '').strip()[-200:]!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InterpreterError(f"an answer that is none of its kind: {response.text[:200]!r}") from error

    def _set_aside(self, server: _Server, trouble: str) -> None:
        """Send no calls to a server until it answers a ping."""
        if not server.trouble:
            server.trouble = trouble
            self._in_background(self._probe(server))

    async def _probe(self, server: _Server) -> None:
        pause = _PROBE_SECONDS
        if any(not other.trouble for other in self._servers):  # no hurry
            await asyncio.sleep(pause)
        while trouble := await self._ping(server):
            server.trouble = trouble
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PROBE_SECONDS)
        server.trouble = ""

    async def _ping(self, server: _Server) -> str:
        """What is wrong with the server; empty when nothing is."""
        try:
            response = await _request(server, "GET", "/v1/ping", _PING_SECONDS)
        except InterpreterUnavailable as error:
            return str(error)
        is_well = response.status_code == 200 and "pong" in response.text
        return "" if is_well else f"/v1/ping gives HTTP {response.status_code} {response.text[:50]!r}, not pong"


async def _request(server: _Server, method: str, path: str, seconds: float, **body: Any) -> httpx.Response:
    """The answer to a request, whatever it says; raises `InterpreterUnavailable` when there is none."""
    try:
        async with asyncio.timeout(seconds):
            return await server.client.request(method, path, **body)
    except TimeoutError as error:
        raise InterpreterUnavailable(f"no answer to {path} within {seconds:g} s") from error
    except httpx.HTTPError as error:
        raise InterpreterUnavailable(f"{type(error).__name__}: {error}") from error


def _base_urls(url: str | Sequence[str] | None) -> list[str]:
    """The URLs without a trailing slash or the path of the call. Raises `ValueError` for anything else."""
    given = os.environ.get(URL_VARIABLE, "") if url is None else url
    urls = given.split(",") if isinstance(given, str) else list(given)
    urls = [re.sub(r"/+(run_code/*)?$", "", each.strip()) for each in urls if each.strip()]
    if not urls:
        raise ValueError(
            "url is missing: give the address of a Sandbox Fusion server, such as http://localhost:8080, "
            f"or set the variable {URL_VARIABLE}."
        )
    for each in urls:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", each):
            raise ValueError(f"url is {each!r}: give an address such as http://localhost:8080.")
    return list(dict.fromkeys(urls))
