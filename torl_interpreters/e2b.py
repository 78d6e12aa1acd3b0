"""The E2B interpreter: programs run in E2B's cloud sandboxes, virtual machines of their own away from ours.

    with E2BInterpreter(sandboxes=20) as interpreter:  # needs the variable E2B_API_KEY
        interpreter.submit("print(2**100)").result().stdout

Each slot has one sandbox at most, which serves one call at a time: two programs would share its two cores and memory.
It is created when calls wait, kept for those that follow, replaced before its lifetime ends and after any trouble. The
kernel of E2B's code interpreter runs only text of ours (torl_sandbox/kernel), which starts the embedded interpreter's
fork server there in tier `none`: the same isolation, limits and results as here. Where that does not come up, a call
starts a fresh Python (remote.py), slower and able to reach all of its sandbox; a warning says so.

What is NOT covered. A process of ours that is killed outright cannot kill its sandboxes: they live, and cost money,
until `lifetime_seconds` are over. A program that takes down its sandbox costs that and a second one.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torl_interpreters import remote
from torl_interpreters.base import ExecutionResult, InterpreterError, InterpreterUnavailable
from torl_interpreters.remote import SERVICE_SLACK_SECONDS, ranks
from torl_interpreters.tiers import SANDBOX

PLAN_SANDBOXES, PLAN_CREATIONS_PER_SECOND = 20, 1.0  # the most of E2B's free plan
CREATE_SECONDS = 60.0  # E2B needs about one
START_SECONDS = 180.0  # importing numpy, sympy and scipy from a cold disk
CLOSE_SECONDS = 20.0  # for a kill, and for a creation that is on its way when all is closed
# The SDK's transport ends cancelled requests in threads of its own. Python's end must not overtake them, or the
# process aborts (curioswitch/pyqwest#164; measured: one exit in seven, none of 60 with this pause).
DRAIN_SECONDS = 0.2
LOST = ("ContextRestarting", "ServerDied")  # the kernel, or our server beside it, has died


@dataclass(eq=False, slots=True)
class _Sandbox:
    box: Any  # the SDK's AsyncSandbox
    expires: float
    has_server: bool = False


class E2BInterpreter(remote.RemoteInterpreter):
    """Runs programs in E2B sandboxes, in the order of `submit`.

    `sandboxes` and `creations_per_second` are this object's share of what your plan allows; their defaults are the
    free plan's, divided by the ranks. `timeout_seconds` is wall time from the start of the program, `memory_mb` is for
    each of its processes, `max_output_chars` counts stdout and stderr apart. E2B ends a sandbox after
    `lifetime_seconds` (3600 at most in the free plan). `template` names a sandbox template of yours, derived from the
    one of E2B's code interpreter. `retries` and `backoff_seconds`: see `RemoteInterpreter`.

    Waits until there is a first sandbox; raises `InterpreterUnavailable`, in one sentence, when there can be none.
    """

    def __init__(
        self,
        *,
        sandboxes: int | None = None,
        timeout_seconds: float = 10.0,
        memory_mb: int = 1024,
        max_output_chars: int = 65_536,
        max_file_mb: int = 64,
        creations_per_second: float | None = None,
        lifetime_seconds: int = 1800,
        template: str | None = None,
        retries: int = 8,  # an attempt may need a new sandbox, which is three requests that can fail
        backoff_seconds: float = 0.5,
    ) -> None:
        sandboxes = max(1, PLAN_SANDBOXES // ranks()) if sandboxes is None else sandboxes
        rate = PLAN_CREATIONS_PER_SECOND / ranks() if creations_per_second is None else creations_per_second
        # In debug mode there is one server, however many are asked for, and its one kernel runs one call at a time.
        is_debug = os.environ.get("E2B_DEBUG", "").lower() == "true"
        slots = 1 if is_debug else sandboxes
        numbers = {"sandboxes": sandboxes, "creations_per_second": rate, "lifetime_seconds": lifetime_seconds}
        numbers |= {"timeout_seconds": timeout_seconds, "memory_mb": memory_mb, "max_output_chars": max_output_chars}
        numbers |= {"max_file_mb": max_file_mb, "slots": slots, "backoff_seconds": backoff_seconds}
        super().__init__("e2b", retries, **numbers)
        self._call_seconds = timeout_seconds + SERVICE_SLACK_SECONDS
        if lifetime_seconds <= self._call_seconds:
            raise ValueError(
                f"lifetime_seconds of the e2b interpreter is {lifetime_seconds!r}, in which a call may not end: give "
                f"many times timeout_seconds + {SERVICE_SLACK_SECONDS:g}, {self._call_seconds:g}."
            )
        self._sdk = _sdk(is_debug)
        self._creation = {"template": template, "timeout": lifetime_seconds, "allow_internet_access": False}
        self._interval = 1 / rate
        self._start_text = _start_text({"max_file_mb": max_file_mb, **self._limits})
        self._sandboxes: dict[int, _Sandbox] = {}  # by slot
        self._alive: dict[str, Any] = {}  # all that the service has for us, by their ids, until they are killed
        self._creating = asyncio.Lock()
        self._key = uuid.uuid4()
        self._next_creation = 0.0
        self._request: asyncio.Future[Any] | None = None
        self._last_failure = (0.0, InterpreterError())
        self._start()

    async def _open(self) -> None:
        try:
            await self._patiently(lambda: self._prepare(0))
        except InterpreterError as error:
            raise InterpreterUnavailable(f"{error}.") from error

    async def _prepare(self, slot: int) -> None:
        if slot in self._sandboxes and self._sandboxes[slot].expires - time.monotonic() < self._call_seconds:
            await self._kill(self._sandboxes.pop(slot).box)
        if slot not in self._sandboxes:
            sandbox = await self._create()
            try:
                await self._start_server(sandbox)
            except InterpreterError:
                await self._kill(sandbox.box)
                raise
            self._sandboxes[slot] = sandbox

    async def _create(self) -> _Sandbox:
        asked = time.monotonic()
        async with self._creating:
            failed, error = self._last_failure
            if failed > asked:  # an outage is one for all that wait here
                raise type(error)(str(error)) from error
            await asyncio.sleep(self._next_creation - time.monotonic())
            self._next_creation = time.monotonic() + self._interval
            expires = time.monotonic() + self._creation["timeout"]
            self._request = asyncio.ensure_future(self._ask_for_one())
            try:  # shielded from `close`: a sandbox that nobody knows could not be killed
                box = await _ask("create a sandbox", asyncio.shield(self._request), CREATE_SECONDS)
            except InterpreterError as error:
                self._request.cancel()
                self._last_failure = time.monotonic(), error
                if getattr(error.__cause__, "status_code", None):  # else it may exist: the same key gives that one
                    self._key = uuid.uuid4()
                raise
            self._key = uuid.uuid4()
            return _Sandbox(box, expires)

    async def _ask_for_one(self) -> Any:
        # retries=0: the SDK's own retries would be creations beyond the rate.
        options = {"idempotency_key": str(self._key), "request_timeout": CREATE_SECONDS, "retries": 0}
        box = await self._sdk.create(**self._creation, **options)
        self._alive[box.sandbox_id] = box
        return box

    async def _start_server(self, sandbox: _Sandbox) -> None:
        # timeout=0 for the SDK, here and below: its own limit fires at twice its value.
        request = sandbox.box.run_code(self._start_text, timeout=0)
        error = (await _ask("start our server in a sandbox", request, START_SECONDS)).error
        if error and error.name in LOST:
            raise InterpreterError(f"E2B's sandbox failed at its start: {error.name}")
        sandbox.has_server = error is None
        if error:
            self._warn(
                f"the fork server does not start in a sandbox ({error.name}: {error.value}); calls start a fresh "
                "Python there, which is slower, and not isolated from it"
            )

    async def _attempt(self, slot: int, code: str) -> ExecutionResult:
        sandbox = self._sandboxes[slot]
        if sandbox.has_server:
            mark = remote.new_mark()
            text = f"ask({mark!r}, {code!a}, {self.timeout_seconds!r})"
        else:
            text, mark = remote.wrap(code, **self._limits)
        try:
            execution = await _ask("run a program", sandbox.box.run_code(text, timeout=0), self._call_seconds)
            if result := remote.unwrap("".join(execution.logs.stdout), mark):
                return result
            if execution.error and execution.error.name in LOST:
                raise remote.Doubtful(f"E2B's sandbox died: {execution.error.name}: {execution.error.value}")
            raise InterpreterError(f"E2B's answer to a program has no result in it: {execution.error}")
        except remote.TooMany:  # nothing is wrong with the sandbox
            raise
        except InterpreterError:
            await self._kill(self._sandboxes.pop(slot).box)
            raise

    async def _kill(self, box: Any) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._patiently(lambda: _ask("kill a sandbox", box.kill(), CLOSE_SECONDS / 2))
            self._alive.pop(box.sandbox_id, None)
        except (InterpreterError, TimeoutError) as error:
            self._warn(f"a sandbox lives until its lifetime ends ({error or 'no answer to the kill'})")

    async def _close(self) -> None:
        if self._request:
            await asyncio.wait([self._request], timeout=CLOSE_SECONDS)
            self._request.cancel()
        await asyncio.gather(*(self._kill(box) for box in list(self._alive.values())))
        await asyncio.sleep(DRAIN_SECONDS)


async def _ask(what: str, request: Awaitable[Any], seconds: float) -> Any:
    """The answer to a request to E2B; raises `InterpreterError` for whatever goes wrong, and after `seconds`."""
    try:
        return await asyncio.wait_for(request, seconds)
    except TimeoutError as error:
        raise InterpreterError(f"E2B did not {what} within {seconds:g} seconds") from error
    except Exception as error:  # the SDK raises what is not derived from its own: httpx's, json's, plain `Exception`
        name, text, status = type(error).__name__, " ".join(str(error).split())[:300], getattr(error, "status_code", 0)
        kind = InterpreterError
        if status == 429 or text.startswith("429 "):  # the second is how running code reports it
            kind = remote.TooMany
        elif what.startswith("create") and (status in (400, 401, 403, 404) or name == "AuthenticationException"):
            kind = remote.Refused
        raise kind(f"E2B did not {what}: {name}: {text}") from error


def _sdk(is_debug: bool) -> Any:
    """The SDK's AsyncSandbox; raises `InterpreterUnavailable` when it cannot work."""
    try:
        from e2b_code_interpreter import AsyncSandbox  # here, since few runs need it
    except ModuleNotFoundError as error:
        raise InterpreterUnavailable(
            "The e2b interpreter needs E2B's SDK: pip install 'e2b-code-interpreter>=2.11.5' 'e2b>=2.63'."
        ) from error
    if not is_debug and not os.environ.get("E2B_API_KEY"):
        raise InterpreterUnavailable(
            "The e2b interpreter needs an API key: set the variable E2B_API_KEY to one from your E2B dashboard."
        )
    return AsyncSandbox


def _start_text(limits: dict[str, Any]) -> str:
    """The text that starts our server in a sandbox: what needs the standard library only of our packages."""
    limits = {name: value for name, value in limits.items() if name != "timeout_seconds"}
    names = ("base", "tiers", "server", "self_test")
    paths = {f"torl_interpreters/{name}.py": Path(__file__).with_name(f"{name}.py") for name in names}
    paths |= {f"torl_sandbox/{path.name}": path for path in SANDBOX.glob("*.py")}
    files = {place: path.read_text(encoding="utf-8") for place, path in paths.items()}
    files["torl_interpreters/__init__.py"] = ""
    kernel = (SANDBOX / "kernel.py").read_text(encoding="utf-8")
    return f"{kernel}\n\nstart({files!a}, {limits!a})\n"
