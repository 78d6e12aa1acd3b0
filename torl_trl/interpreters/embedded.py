"""The embedded interpreter: programs run on this machine, isolated, in processes forked from a warm one.

A fork server (sandbox/fork_server.py) has imported numpy, sympy and scipy once and forks a child for every call, in
the best tier of isolation that works here (tiers.py); a self-test decides, not a version number. Every program has no
variables of our environment, an empty folder that is deleted afterwards, no input, and limits on wall time, CPU time,
memory, file size, processes, open files and printed text. When it ends, for whatever reason, all that
it started is killed, and nothing is left over for the next one. String hashing is fixed, so that the same program
prints its sets in the same order; random numbers differ from call to call.

What is not covered. The kernel enforces the memory limit in each process; their sum is looked at ten times a second,
without what each process has in common with the server (100 MB), which a hostile program can use for something else.
The folders /tmp and /dev/shm hold `max_file_mb` each, in memory, beside that limit; in tier `none` there is one, on
disk, whose size is bounded by the time limit only. In the tiers `user` and `none`, what the kernel counts per user
(buffers of pipes, watches of files) is counted with ours until the program ends. In tier `none`, changing a file's
mode, owner or times has no effect. Tier `plain` runs programs as our user with our files and network: for programs
that mean no harm.
"""

import logging
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from torl_trl.interpreters.base import (
    USER_PROCESSES,
    ExecutionResult,
    InterpreterClosed,
    InterpreterUnavailable,
    kernel_limits,
)
from torl_trl.interpreters.plain import PlainBackend
from torl_trl.interpreters.self_test import check_isolation, check_packages
from torl_trl.interpreters.server import ServerDied, ServerProcess
from torl_trl.interpreters.tiers import Tier, candidates

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Runs one program at a time in each of its slots."""

    def call(self, slot: int, code: str, timeout_seconds: float) -> ExecutionResult: ...

    def close(self) -> None:
        """End what runs: its `call` raises."""
        ...


class ForkServerBackend:
    """A fork server that is started again when it dies; the calls under way are then run once more."""

    def __init__(self, tier: Tier, slots: int, **limits: object) -> None:
        self._start = lambda: ServerProcess(tier, slots, **limits)
        self._lock = threading.Lock()
        self._closed = False
        self._server = self._start()
        self.missing = self._server.missing

    def call(self, slot: int, code: str, timeout_seconds: float) -> ExecutionResult:
        for _ in range(2):
            server = self._server
            try:
                return server.call(slot, code, timeout_seconds)
            except ServerDied as error:
                self._replace(server, error)
        raise InterpreterUnavailable("The fork server ended twice while it ran this program.")

    def _replace(self, dead: ServerProcess, reason: ServerDied) -> None:
        with self._lock:
            if self._closed:
                raise InterpreterClosed("The embedded interpreter was closed while this program ran.") from reason
            if self._server is dead:
                dead.end()
                logger.warning("The fork server ended (%s; %s) and is started again.", reason, dead.last_words())
                self._server = self._start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._server.end()


class EmbeddedInterpreter:
    """Runs programs `slots` at a time, in the order of `submit`.

    `slots` is the total of this object; its default is the cores this process may use, divided by the local ranks.
    `timeout_seconds` is wall time from the start of the program; waiting for a slot is not included.
    `max_output_chars` counts stdout and stderr apart. `max_processes` counts a program's processes and threads, but in
    tier `user` as root its processes only; in tier `none` a program has one process, and as in `plain` the kernel
    counts all of the user's: a fixed number of 4096 applies.

    `isolation` is a tier (`root`, `user`, `none`, `plain`), which is used or refused, `auto`: the best that works
    here, or `strict`: the best that works, but none below `strict_tier`. The tier in use is `tier`.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        timeout_seconds: float = 10.0,
        memory_mb: int = 1024,
        max_output_chars: int = 65_536,
        max_processes: int = 64,
        max_file_mb: int = 64,
        isolation: str = "auto",
        strict_tier: str = "user",
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
        self._limits = given
        self.tier, self._backend = self._choose(*_wanted_tiers(isolation, strict_tier))
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix="interpreter")
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        self._lock = threading.Lock()
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
        self._backend.close()
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
        slot = self._free.get()  # as many as threads, so one is free
        try:
            return replace(self._backend.call(slot, code, self.timeout_seconds), queue_seconds=queue_seconds)
        finally:
            self._free.put(slot)

    def _choose(self, tiers: tuple[Tier, ...], refused: tuple[Tier, ...]) -> tuple[Tier, Backend]:
        """Start the first tier that passes the self-test."""
        reasons = []
        for tier in tiers:
            try:
                backend = self._start(tier)
            except InterpreterUnavailable as error:
                reasons.append(f"{tier}: {error}")
                continue
            why = f" ({'; '.join(reasons)})" if reasons else ""
            level = logging.INFO if tier.level == max(other.level for other in Tier) else logging.WARNING
            logger.log(level, "The embedded interpreter isolates programs in tier %r%s.", str(tier), why)
            return tier, backend
        below = f", and {', '.join(refused)} is refused" if refused else ""
        raise InterpreterUnavailable(
            f"The embedded interpreter cannot isolate programs as asked ({'; '.join(reasons) or 'no such tier here'}"
            f"{below}): install bubblewrap, or set interpreter_options to another isolation."
        )

    def _start(self, tier: Tier) -> Backend:
        limits = self._limits
        processes = limits["max_processes"] if tier.has_namespaces else USER_PROCESSES
        rlimits = kernel_limits(self.timeout_seconds, limits["memory_mb"], limits["max_file_mb"], processes)
        if sys.platform != "linux":  # macOS refuses it
            del rlimits["RLIMIT_AS"]
        if tier == Tier.PLAIN:
            return PlainBackend(limits["max_output_chars"], rlimits)
        backend = ForkServerBackend(
            tier,
            self.slots,
            max_output_chars=limits["max_output_chars"],
            max_file_mb=limits["max_file_mb"],
            rlimits=rlimits,
        )
        try:
            check_packages(backend, backend.missing)
            check_isolation(backend)
        except BaseException:
            backend.close()
            raise
        return backend


def _wanted_tiers(isolation: str, strict_tier: str) -> tuple[tuple[Tier, ...], tuple[Tier, ...]]:
    """The tiers to try, in order, and those that would work here and are refused."""
    names = [str(tier) for tier in Tier]
    if isolation not in ("auto", "strict", *names):
        raise ValueError(f"isolation is {isolation!r}: choose auto, strict or one of {', '.join(names)}.")
    if strict_tier not in names:
        raise ValueError(f"strict_tier is {strict_tier!r}: choose one of {', '.join(names)}.")
    if isolation == "auto":
        return candidates(), ()
    if isolation == "strict":
        allowed = tuple(tier for tier in candidates() if tier.level >= Tier(strict_tier).level)
        return allowed, tuple(tier for tier in candidates() if tier not in allowed)
    return tuple(tier for tier in candidates() if tier == isolation), ()


def _usable_cores() -> int:
    """This process's share of the machine's cores: launchers say how many ranks there are."""
    return max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # fewer than os.cpu_count() under taskset, Slurm and most containers
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
