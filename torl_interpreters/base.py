"""The interpreter protocol: code goes in, an `ExecutionResult` comes out of a future.

Two kinds of trouble are never mixed. The model's code failed: that is an `ExecutionResult` with a status other than
`ok`, it becomes an observation. Our service failed: that is an `InterpreterError` raised by the future, it is retried
and counted and never shown to the model as its own mistake.
"""

import math
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self, runtime_checkable

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program prints its sets in the same order
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All the variables a program sees, in every backend, beside HOME, TMPDIR and MPLCONFIGDIR (its own folder)."""


class ExecutionStatus(StrEnum):
    """How a run of the model's code ended."""

    OK = "ok"  # by itself, with exit code 0
    ERROR = "error"  # it raised an exception, or had another exit code
    TIMEOUT = "timeout"  # killed, since it ran longer than its wall or CPU time limit
    MEMORY = "memory"  # it asked for more memory than its limit
    OUTPUT_LIMIT = "output_limit"  # killed, since it printed more than its limit
    KILLED = "killed"  # by a signal that is none of the limits above


USER_PROCESSES = 4096  # the limit where the kernel counts all processes of the user, so that it binds only runaways


def kernel_limits(timeout_seconds: float, memory_mb: int, max_file_mb: int, processes: int) -> dict[str, int]:
    """The kernel's limits on a program, by the names of the module `resource`."""
    return {
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_CPU": math.ceil(timeout_seconds) + 1,  # of all threads together
        "RLIMIT_FSIZE": max_file_mb << 20,
        "RLIMIT_NPROC": processes,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
    }


def check_positive(interpreter: str, **options: float) -> None:
    """Raise `ValueError` for the first option that is not above 0."""
    for name, value in options.items():
        if value <= 0:
            raise ValueError(f"{name} of the {interpreter} interpreter is {value!r}: give a number above 0.")


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """One finished run of the model's code.

    `stdout` and `stderr` hold what was printed before the end, whatever the end was. `seconds` is the wall time from
    the start of the program to its end, `queue_seconds` the time the call waited for a free slot before that.
    `truncated` says that output was cut at the limit.
    """

    status: ExecutionStatus
    stdout: str
    stderr: str
    seconds: float
    queue_seconds: float = 0.0
    truncated: bool = False

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """From what torl_sandbox/supervise.py gives; raises `ValueError` for another status."""
        return cls(**fields | {"status": ExecutionStatus(fields["status"])})


class InterpreterError(RuntimeError):
    """The interpreter failed, not the model's code; the call may be tried again."""


class InterpreterUnavailable(InterpreterError):
    """The backend cannot be reached or started."""


class InterpreterClosed(InterpreterError):
    """`submit` was called after `close`, or `close` was called before the program ended."""


@runtime_checkable
class Interpreter(Protocol):
    """Runs model-written code. `submit` never blocks; calls beyond the backend's slots wait in its queue."""

    def submit(self, code: str) -> Future[ExecutionResult]:
        """Queue `code`. Raises `InterpreterClosed` after `close`; the future may raise `InterpreterError`."""

    def close(self) -> None:
        """Kill what runs, fail what waits with `InterpreterClosed`, free everything. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
