"""Interpreters run the code that the model writes; `get_interpreter` makes one by its name."""

import inspect

from torl_trl.errors import UserError
from torl_trl.interpreters.base import (
    ExecutionResult,
    ExecutionStatus,
    Interpreter,
    InterpreterClosed,
    InterpreterError,
    InterpreterUnavailable,
)
from torl_trl.interpreters.embedded import EmbeddedInterpreter

__all__ = [
    "EmbeddedInterpreter",
    "ExecutionResult",
    "ExecutionStatus",
    "Interpreter",
    "InterpreterClosed",
    "InterpreterError",
    "InterpreterUnavailable",
    "get_interpreter",
]

_BACKENDS = {"embedded": EmbeddedInterpreter}


def get_interpreter(name: str, **options: object) -> Interpreter:
    """Make the interpreter called `name`; `options` are its keyword arguments.

    Raises `UserError` for another name, an option that the backend does not have, or an impossible value.
    """
    if name not in _BACKENDS:
        raise UserError(f"interpreter is {name!r}: choose one of {', '.join(_BACKENDS)}.")
    known = list(inspect.signature(_BACKENDS[name]).parameters)
    for option in options:
        if option not in known:
            raise UserError(f"The interpreter {name!r} has no option {option!r}: it has {', '.join(known)}.")
    try:
        return _BACKENDS[name](**options)
    except (ValueError, TypeError) as error:
        raise UserError(f"The interpreter {name!r} refuses its options: {error}") from error
