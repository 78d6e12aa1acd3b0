"""Interpreters run the code that the model writes; `get_interpreter` makes one by its name."""

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
    """Make the interpreter called `name`; `options` are its keyword arguments. Raises `ValueError` for other names."""
    if name not in _BACKENDS:
        known = ", ".join(repr(backend) for backend in _BACKENDS)
        raise ValueError(f"There is no interpreter called {name!r}: choose one of {known}.")
    return _BACKENDS[name](**options)
