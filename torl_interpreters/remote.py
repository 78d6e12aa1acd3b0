"""What the backends that run programs at a remote service have in common.

A service is sent the text of `torl_sandbox/supervise` with the program in it, which starts a fresh Python without the
service's environment, keeps the limits, ends all that the program started, and prints the result as one line. So a
result is the same from every service, whatever it does with output, time and leftovers.
"""

import asyncio
import atexit
import base64
import heapq
import json
import logging
import math
import os
import random
import re
import secrets
import threading
import time
import zlib
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torl_interpreters import base
from torl_interpreters.base import ExecutionResult, InterpreterClosed, InterpreterError
from torl_interpreters.tiers import SANDBOX

logger = logging.getLogger(__name__)

SERVICE_SLACK_SECONDS = 30.0  # for the service, beyond the program's time: two Pythons start on a busy machine
_FIELDS = {"status": str, "stdout": str, "stderr": str, "seconds": float, "truncated": bool}
_MOST_BYTES = 64 << 20  # of a result, lest a forged one fills our memory
_LONGEST_PAUSE_SECONDS = 10.0
_WARN_SECONDS = 60.0  # between two warnings, however much fails


class Refused(InterpreterError):
    """The same again would be refused again."""

    retries = 0


class TooMany(InterpreterError):
    """Too many requests for now: waited out, for some five minutes."""

    retries = 35


class Doubtful(InterpreterError):
    """The program has killed what watches it, or the service is in trouble: twice, it is the program's `killed`."""

    retries = 1


def ranks() -> int:
    """How many processes of this run share a service."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@lru_cache
def _source(name: str) -> str:
    return (SANDBOX / name).read_text(encoding="utf-8")


def new_mark() -> str:
    """What stands before a result, so that no other text is taken for one."""
    return f"torl-result-{secrets.token_hex(8)} "


def wrap(code: str, *, timeout_seconds: float, max_output_chars: int, rlimits: Mapping[str, int]) -> tuple[str, str]:
    """The Python text that runs `code` under our rules, and the mark that `unwrap` looks for."""
    mark = new_mark()
    call = {
        "code": code,
        "program_source": _source("program.py"),
        "timeout": timeout_seconds,
        "max_chars": max_output_chars,
        "rlimits": dict(rlimits),
        "environment": base.ENVIRONMENT,
    }
    # !a: a service may refuse text that is not valid UTF-8, and code may hold a lone surrogate.
    return f"{_source('supervise.py')}\n\nprint_result({mark!r}, **{call!a})\n", mark


def unwrap(stdout: str, mark: str) -> ExecutionResult | None:
    """The result in what the service printed; None when there is none, or it is cut, forged or has no status."""
    line = re.search(rf"^{re.escape(mark)}(\S+)$", stdout, re.MULTILINE)
    if line is None:
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(line[1], validate=True), _MOST_BYTES)
        fields = json.loads(data)
        if {name: type(value) for name, value in fields.items()} != _FIELDS or not 0 <= fields["seconds"] < math.inf:
            return None
        texts = {name: fields[name].encode("utf-8", "replace").decode() for name in ("stdout", "stderr")}
        return ExecutionResult.of(fields | texts)
    except (ValueError, AttributeError, RecursionError, zlib.error):
        return None


class RemoteInterpreter(base.Interpreter):
    """Runs programs at a service, `slots` at a time, in the order of `submit`.

    A failure of ours is tried again `retries` times, or as often as its class says, after `backoff_seconds`, twice
    that, and so on up to 10 seconds, give or take a half. A subclass has coroutines, which run in one thread; it calls
    `_start` when it is made. `service` is its name, `numbers` are the limits of programs, `slots`, `backoff_seconds`
    and options of its own, all of which must be above 0.
    """

    def __init__(self, service: str, retries: int, **numbers: float) -> None:
        base.check_positive(service, **numbers)
        if retries < 0:
            raise ValueError(f"retries of the {service} interpreter is {retries!r}: give 0 or more.")
        self.slots, self.timeout_seconds = numbers["slots"], numbers["timeout_seconds"]
        sizes = numbers["memory_mb"], numbers["max_file_mb"]
        rlimits = base.kernel_limits(self.timeout_seconds, *sizes, base.USER_PROCESSES)
        self._limits = {name: numbers[name] for name in ("timeout_seconds", "max_output_chars")} | {"rlimits": rlimits}
        self._service, self._retries, self._backoff = service, retries, numbers["backoff_seconds"]
        self._waiting: deque[tuple[str, Future[ExecutionResult], float]] = deque()  # code, future, time of submit
        self._free = list(range(self.slots))  # a heap: the lowest first, so that few calls use few slots
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts = self._failures = 0
        self._next_warning = -math.inf
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        busy = f"{self.slots - len(self._free)} of {self.slots} slots busy, {len(self._waiting)} programs waiting"
        return f"{self._service}, {busy}; {self._failures} failures in {self._attempts} attempts so far"

    def _start(self) -> None:
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name=f"interpreter-{self._service}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            opening.result()
        except BaseException:  # also Ctrl-C
            opening.cancel()
            self.close()
            raise

    def submit(self, code: str) -> Future[ExecutionResult]:
        future: Future[ExecutionResult] = Future()
        with self._lock:  # so that no call slips in behind `close`
            if self._closed:
                raise InterpreterClosed(f"The {self._service} interpreter is closed: make a new one.")
            self._loop.call_soon_threadsafe(self._enqueue, code, future, time.perf_counter())
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @abstractmethod
    async def _open(self) -> None:
        """Reach the service; raises `InterpreterUnavailable`."""

    @abstractmethod
    async def _prepare(self, slot: int) -> None:
        """Make `slot` ready for an attempt; raises `InterpreterError`."""

    @abstractmethod
    async def _attempt(self, slot: int, code: str) -> ExecutionResult:
        """Run `code` in `slot`, which is ready; raises `InterpreterError`."""

    @abstractmethod
    async def _close(self) -> None:
        """Free everything."""

    def _enqueue(self, *call: Any) -> None:
        self._waiting.append(call)
        self._start_worker()

    def _start_worker(self) -> None:
        if self._free:
            self._in_background(self._work(heapq.heappop(self._free)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop does not keep it
        task.add_done_callback(self._tasks.discard)

    async def _work(self, slot: int) -> None:
        """Answer calls until none waits. When no slot can be made ready, the last worker fails those that wait."""
        try:
            while self._waiting:
                await self._patiently(lambda: self._prepare(slot))
                if self._waiting:  # another worker may have been faster
                    await self._answer(slot, *self._waiting.popleft())
                    if len(self._waiting) > 1:  # the service answers, and slots could not be made ready before
                        self._start_worker()
        except Exception as error:  # whatever it is, nobody else would tell the callers
            if len(self._free) == self.slots - 1:
                self._fail_waiting(error)
        finally:
            heapq.heappush(self._free, slot)

    async def _answer(self, slot: int, code: str, future: Future[ExecutionResult], submitted: float) -> None:
        async def attempt() -> ExecutionResult:
            self._attempts += 1
            await self._prepare(slot)
            return await self._attempt(slot, code)

        queue_seconds = time.perf_counter() - submitted
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = await self._patiently(attempt)
            future.set_result(replace(result, queue_seconds=queue_seconds))
        except Doubtful:
            future.set_result(ExecutionResult(base.ExecutionStatus.KILLED, "", "", 0.0, queue_seconds))
        except asyncio.CancelledError:
            future.set_exception(InterpreterClosed("The interpreter was closed while this program ran."))
            raise
        except Exception as error:
            future.set_exception(error)

    async def _patiently(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """What `attempt` returns in the end; raises its last error."""
        failures: Counter[int | None] = Counter()
        while True:
            try:
                return await attempt()
            except InterpreterError as error:
                self._warn(error)
                retries = getattr(error, "retries", None)
                failures[retries] += 1
                if failures[retries] > (self._retries if retries is None else retries):
                    raise
            pause = min(self._backoff * 2 ** (failures.total() - 1), _LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    def _warn(self, what: object) -> None:
        self._failures += 1
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARN_SECONDS
            so_far = f"{self._failures} failures, {self._attempts} attempts to run a program"
            logger.warning("%s: %s; so far %s.", self._service, what, so_far)

    def _fail_waiting(self, error: Exception) -> None:
        for _, future, _ in self._waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._waiting.clear()

    async def _shut_down(self) -> None:
        while self._tasks:  # an end may begin another
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting(InterpreterClosed("The interpreter was closed before this program started."))
        await self._close()
