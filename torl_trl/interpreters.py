"""The interpreters by name: `get_interpreter`, and what calls of them give back (package torl_interpreters)."""

import inspect

from torl_interpreters.base import (
    ExecutionResult,
    ExecutionStatus,
    Interpreter,
    InterpreterClosed,
    InterpreterError,
    InterpreterUnavailable,
)
from torl_interpreters.e2b import E2BInterpreter
from torl_interpreters.embedded import EmbeddedInterpreter
from torl_interpreters.sandbox_fusion import SandboxFusionInterpreter
from torl_trl.errors import UserError

__all__ = [
    "E2BInterpreter",
    "EmbeddedInterpreter",
    "ExecutionResult",
    "ExecutionStatus",
    "Interpreter",
    "InterpreterClosed",
    "InterpreterError",
    "InterpreterUnavailable",
    "SandboxFusionInterpreter",
    "get_interpreter",
]

_BACKENDS = {"embedded": EmbeddedInterpreter, "sandbox_fusion": SandboxFusionInterpreter, "e2b": E2BInterpreter}


def get_interpreter(name: str, **options: object) -> Interpreter:
    """Make the interpreter called `name`; `options` are its keyword arguments.

    Raises `UserError` for another name, an option that the backend does not have, an impossible value, or a backend
    that cannot be reached or started.
    """
    if name not in _BACKENDS:
        raise UserError(f"interpreter is {name!r}: choose one of {', '.join(_BACKENDS)}.")
    known = list(inspect.signature(_BACKENDS[name]).parameters)
    for option in options:
        if option not in known:
            raise UserError(f"The interpreter {name!r} has no option {option!r}: it has {', '.join(known)}.")
    try:
        return _BACKENDS[name](**options)
    except InterpreterUnavailable as error:
        raise UserError(str(error)) from error
    except (ValueError, TypeError) as error:
        raise UserError(f"The interpreter {name!r} refuses its options: {error}") from error
