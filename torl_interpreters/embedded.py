"""The embedded interpreter: programs run on this machine, isolated, in processes forked from a warm one.

A fork server (torl_sandbox/fork_server) has imported numpy, sympy and scipy once and forks a child for every call, in
the best tier of isolation that works here (tiers.py); a self-test decides, not a version number. Every program has no
variables of our environment, an empty folder that is deleted afterwards, no input, and limits on wall time, CPU time,
memory, file size, processes, open files and printed text. When it ends, for whatever reason, all that it started is
killed, and nothing is left over for the next one. Random numbers differ from call to call.

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
from queue import SimpleQueue

from torl_interpreters import base
from torl_interpreters.plain import PlainBackend
from torl_interpreters.self_test import check
from torl_interpreters.server import ForkServerBackend
from torl_interpreters.tiers import Tier, candidates

logger = logging.getLogger(__name__)


class EmbeddedInterpreter(base.Interpreter):
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
        numbers = {"slots": slots, "timeout_seconds": timeout_seconds, "memory_mb": memory_mb}
        numbers |= {"max_output_chars": max_output_chars, "max_processes": max_processes, "max_file_mb": max_file_mb}
        base.check_positive("embedded", **numbers)
        self.slots, self.timeout_seconds, self._numbers = slots, timeout_seconds, numbers
        self.tier, self._backend = self._choose(isolation, strict_tier)
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix="interpreter")
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"embedded in tier {self.tier}, {self.slots - self._free.qsize()} of {self.slots} slots busy"

    def submit(self, code: str) -> Future[base.ExecutionResult]:
        with self._lock:
            if self._closed:
                raise base.InterpreterClosed("The embedded interpreter is closed: make a new one.")
            return self._executor.submit(self._call, code, time.perf_counter())

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._backend.close()
        self._executor.shutdown(wait=True)

    def _call(self, code: str, submitted: float) -> base.ExecutionResult:
        queue_seconds = time.perf_counter() - submitted
        if self._closed:
            raise base.InterpreterClosed("The embedded interpreter was closed before this program started.")
        slot = self._free.get()  # as many as threads, so one is free
        try:
            fields = self._backend.call(slot, code, self.timeout_seconds)
        finally:
            self._free.put(slot)
        return base.ExecutionResult.of(fields | {"queue_seconds": queue_seconds})

    def _choose(self, isolation: str, strict_tier: str) -> tuple[Tier, ForkServerBackend | PlainBackend]:
        """Start the first tier that is wanted and passes the self-test."""
        if isolation not in ("auto", "strict", *Tier):
            raise ValueError(f"isolation is {isolation!r}: choose auto, strict or one of {', '.join(Tier)}.")
        if strict_tier not in tuple(Tier):
            raise ValueError(f"strict_tier is {strict_tier!r}: choose one of {', '.join(Tier)}.")
        lowest = Tier(strict_tier).level if isolation == "strict" else 0
        reasons = []
        for tier in candidates():
            if isolation not in ("auto", "strict", tier) or tier.level < lowest:
                continue
            try:
                backend = self._start(tier)
            except base.InterpreterUnavailable as error:
                reasons.append(f"{tier}: {error}")
                continue
            why = f" ({'; '.join(reasons)})" if reasons else ""
            level = logging.INFO if tier.level == Tier.ROOT.level else logging.WARNING
            logger.log(level, "The embedded interpreter isolates programs in tier %r%s.", str(tier), why)
            return tier, backend
        refused = ", ".join(tier for tier in candidates() if tier.level < lowest)
        below = f", and {refused} is refused" if refused else ""
        raise base.InterpreterUnavailable(
            f"The embedded interpreter cannot isolate programs as asked ({'; '.join(reasons) or 'no such tier here'}"
            f"{below}): install bubblewrap, or set interpreter_options to another isolation."
        )

    def _start(self, tier: Tier) -> ForkServerBackend | PlainBackend:
        sizes = self._numbers
        processes = sizes["max_processes"] if tier.has_namespaces else base.USER_PROCESSES
        rlimits = base.kernel_limits(self.timeout_seconds, sizes["memory_mb"], sizes["max_file_mb"], processes)
        if sys.platform != "linux":  # macOS refuses it
            del rlimits["RLIMIT_AS"]
        if tier == Tier.PLAIN:
            return PlainBackend(sizes["max_output_chars"], rlimits)
        limits = {name: sizes[name] for name in ("max_output_chars", "max_file_mb")}
        backend = ForkServerBackend(tier, self.slots, **limits, rlimits=rlimits)
        check(backend)
        return backend


def _usable_cores() -> int:
    """This process's share of the machine's cores: launchers say how many ranks there are."""
    # Fewer than os.cpu_count() under taskset, Slurm and most containers; not known on macOS.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
