"""The self-test of a tier: real programs, run as any other, that work and that try to get out."""

import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Protocol

from torl_trl.interpreters.base import ExecutionResult, ExecutionStatus, InterpreterUnavailable

_WORK = """
import colorsys, xml.dom.minidom  # not loaded before: the program can read Python's files
assert 2**100 == 1267650600228229401496703205376
open("file", "w").write("text")
"""
_USES = {
    "numpy": "import numpy; assert abs(numpy.linalg.det(numpy.eye(3)) - 1) < 1e-9",
    "sympy": "import sympy; assert str(sympy.factor(sympy.Symbol('z')**2 - 1)) == '(z - 1)*(z + 1)'",
    "scipy": "import scipy.special; assert scipy.special.binom(4, 2) == 6",
}
_SECONDS = 30.0  # for a program here, whatever the limit of others is: the machine may be busy
_ESCAPE = """
import os, socket
def works(action):
    try:
        action()
    except OSError:
        return False
    return True
print([
    name
    for name, action in (
        ("read a file of ours", lambda: open({secret!r}).read()),
        ("change it", lambda: open({secret!r}, "r+")),
        ("reach the network", lambda: socket.create_connection(("127.0.0.1", {port}), 1)),
    )
    if works(action)
])
"""


class Backend(Protocol):
    def call(self, slot: int, code: str, timeout_seconds: float) -> ExecutionResult: ...


def check_packages(backend: Backend, missing: Sequence[str]) -> None:
    """Ordinary programs work. Raises `InterpreterUnavailable` with the reason when they do not."""
    program = "\n".join([_WORK, *(use for name, use in _USES.items() if name not in missing), "print('works')"])
    result = backend.call(0, program, _SECONDS)
    if (result.status, result.stdout) != (ExecutionStatus.OK, "works\n"):
        last = result.stderr.strip().rpartition("\n")[2] or f"it ended as {result.status}"
        raise InterpreterUnavailable(f"an ordinary program does not work: {last}")


def check_isolation(backend: Backend) -> None:
    """A program cannot reach a file or a port of ours. Raises `InterpreterUnavailable` when it can."""
    with tempfile.NamedTemporaryFile("w", prefix="torl-") as secret, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(secret.name, 0o644)
        result = backend.call(0, _ESCAPE.format(secret=secret.name, port=server.getsockname()[1]), _SECONDS)
    if (result.status, result.stdout) != (ExecutionStatus.OK, "[]\n"):
        raise InterpreterUnavailable(f"a program can {result.stdout.strip() or result.stderr.strip()[-200:]}")
