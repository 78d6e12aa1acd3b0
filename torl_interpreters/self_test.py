"""The self-test of a tier: real programs, run as any other, that work and that try to get out."""

import os
import socket
import tempfile

from torl_interpreters.base import ExecutionStatus, InterpreterUnavailable
from torl_interpreters.server import ForkServerBackend, ServerProcess

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


def check(server: ServerProcess | ForkServerBackend) -> None:
    """Ordinary programs work, and none can reach a file or a port of ours.

    Otherwise closes the server and raises `InterpreterUnavailable` with the reason.
    """
    program = "\n".join([_WORK, *(use for name, use in _USES.items() if name not in server.missing), "print('works')"])
    try:
        result = server.call(0, program, _SECONDS)
        if (result["status"], result["stdout"]) != (ExecutionStatus.OK, "works\n"):
            last = result["stderr"].strip().rpartition("\n")[2] or f"it ended as {result['status']}"
            raise InterpreterUnavailable(f"an ordinary program does not work: {last}")
        with tempfile.NamedTemporaryFile("w", prefix="torl-") as file, socket.create_server(("127.0.0.1", 0)) as port:
            os.chmod(file.name, 0o644)
            result = server.call(0, _ESCAPE.format(secret=file.name, port=port.getsockname()[1]), _SECONDS)
        if (result["status"], result["stdout"]) != (ExecutionStatus.OK, "[]\n"):
            can = result["stdout"].strip() or result["stderr"].strip()[-200:]
            raise InterpreterUnavailable(f"a program can {can}")
    except BaseException:
        server.close()
        raise
