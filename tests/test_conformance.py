"""One contract: the same program gives the same observation in every backend and every tier.

The remote backends run against stand-ins that speak their wire formats over real HTTP and really run the code; against
real services where TORL_SANDBOX_FUSION_URL, or E2B_API_KEY or E2B_DEBUG, is set.
"""

import os
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from stand_in_e2b import E2BStandIn
from stand_in_sandbox_fusion import SandboxFusionStandIn

from torl_interpreters.embedded import EmbeddedInterpreter
from torl_trl.interpreters import ExecutionStatus, Interpreter, InterpreterUnavailable, get_interpreter
from torl_trl.prompts import NO_OUTPUT, format_observation

MAX_CHARS = 256
BACKENDS = ["root", "user", "none", "plain", "sandbox_fusion", "e2b", "real sandbox_fusion", "real e2b"]
LIMITS = {"timeout_seconds": 4.0, "memory_mb": 1024, "max_output_chars": 20_000}


def open_backend(name: str, resources: ExitStack, patch: pytest.MonkeyPatch) -> Interpreter:
    if name == "sandbox_fusion":
        stand_in = resources.enter_context(SandboxFusionStandIn())
        return get_interpreter("sandbox_fusion", url=stand_in.url, slots=2, **LIMITS)
    if name == "e2b":
        stand_in = resources.enter_context(E2BStandIn())
        for variable, value in stand_in.environment.items():
            patch.setenv(variable, value)
        return get_interpreter("e2b", sandboxes=2, creations_per_second=100, **LIMITS)
    if name == "real sandbox_fusion":
        if not os.environ.get("TORL_SANDBOX_FUSION_URL"):
            pytest.skip("TORL_SANDBOX_FUSION_URL is not set")
        return get_interpreter("sandbox_fusion", **LIMITS)
    if name == "real e2b":
        if not (os.environ.get("E2B_API_KEY") or os.environ.get("E2B_DEBUG")):
            pytest.skip("neither E2B_API_KEY nor E2B_DEBUG is set")
        return get_interpreter("e2b", **LIMITS)
    try:
        return EmbeddedInterpreter(isolation=name, slots=2, **LIMITS)
    except InterpreterUnavailable as error:
        pytest.skip(f"no tier {name} here: {error}")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Interpreter]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as resources:
        yield resources.enter_context(open_backend(request.param, resources, patch))


OK, ERROR = ExecutionStatus.OK, ExecutionStatus.ERROR
# name: (program, status, observation)
SNIPPETS = {
    "a printed result": ("print(2**100)", OK, "1267650600228229401496703205376"),
    "nothing printed": ("x = 1", OK, NO_OUTPUT),
    "a last bare expression is not echoed": ("2 + 2", OK, NO_OUTPUT),
    "text without a newline": ("print('no newline', end='')", OK, "no newline"),
    "unicode": ("print('é ∑ 数 𝔽')", OK, "é ∑ 数 𝔽"),
    "broken bytes": ("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb\\n')", OK, "a\ufffd\ufffdb"),
    "a lone surrogate": ("print('\\ud800')", OK, "\\ud800"),
    "an exception": ("1/0", ERROR, "ZeroDivisionError: division by zero"),
    "text before an exception": ("print('before')\n1/0", ERROR, "before\nZeroDivisionError: division by zero"),
    "a chained exception": (
        "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('no such key')",
        ERROR,
        "ValueError: no such key",
    ),
    "a syntax error": ("print('before')\nprint(", ERROR, "SyntaxError: '(' was never closed"),
    "an indentation error": ("x = 1\n  y = 2", ERROR, "IndentationError: unexpected indent"),
    "an unknown module": ("import torl_nothing", ERROR, "ModuleNotFoundError: No module named 'torl_nothing'"),
    "an exit code": ("import sys; print(1); sys.exit(3)", ERROR, "1\nRuntimeError: the program ended with an error."),
    "an exit with a message": ("raise SystemExit('no solution')", ERROR, "no solution"),
    "exit": ("print(1)\nexit()\nprint(2)", OK, "1"),
    "os._exit keeps what was printed": ("import os; print('kept', end=''); os._exit(0)", OK, "kept"),
    "a warning beside stdout": ("import warnings; warnings.warn('careful'); print(1)", OK, "1"),
    "text on stderr beside stdout": ("import sys; print('noise', file=sys.stderr); print(1)", OK, "1"),
    "input()": ("print(input())", ERROR, "EOFError: EOF when reading a line"),
    "standard input": ("import sys; print(repr(sys.stdin.read()))", OK, "''"),
    "recursion": ("def f(n): return 1 if n == 0 else n * f(n - 1)\nprint(f(20))", OK, "2432902008176640000"),
    "deep recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(990))", OK, "990"),
    "endless recursion": ("def f(): return f()\nf()", ERROR, "RecursionError: maximum recursion depth exceeded"),
    "functions calling each other": (
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\nprint(even(10))",
        OK,
        "True",
    ),
    "classes": (
        """
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
            y: int = 2
            def norm(self): return self.x**2 + self.y**2
        print(Point(3), Point(3).norm())
        """,
        OK,
        "Point(x=3, y=2) 13",
    ),
    "f-strings": ("x = 3.14159\nname = 'pi'\nprint(f'{name}={x:.2f} {x!r:>8} {{}}')", OK, "pi=3.14  3.14159 {}"),
    "main": ("if __name__ == '__main__':\n    print(__name__)", OK, "__main__"),
    "comprehension scopes": (
        "k = 3\nprint([i * k for i in range(3)], {j: k for j in 'a'}, sum(x % k == 0 for x in range(10)))",
        OK,
        "[0, 3, 6] {'a': 3} 4",
    ),
    "a list changed by the last line": ("L = []\nL.append(1)\nprint(L)\nL.append(2)", OK, "[1]"),
    "integers of more than 4300 digits": (
        "print(10**5000)",
        ERROR,
        "ValueError: Exceeds the limit (4300 digits) for integer string conversion; use "
        "sys.set_int_max_str_digits() to increase the limit",
    ),
    "their digits when asked for": (
        "import sys; sys.set_int_max_str_digits(0); print(len(str(10**5000)))",
        OK,
        "5001",
    ),
    "sympy": ("from sympy import *\nx = symbols('x')\nprint(factor(x**3 - 1))", OK, "(x - 1)*(x**2 + x + 1)"),
    "sympy pretty printing": (
        "from sympy import *\nx = symbols('x')\npprint(x**2 / 3)\npprint(sqrt(x), use_unicode=False)",
        OK,
        "2\nx \n──\n3 \n  ___\n\\/ x",
    ),
    "numpy": ("import numpy as np\nprint(np.arange(6).reshape(2, 3) / 2)", OK, "[[0.  0.5 1. ]\n [1.5 2.  2.5]]"),
    "scipy": ("from scipy.special import comb\nprint(comb(10, 3, exact=True))", OK, "120"),
    "set order": ("print({f'n{i}' for i in range(4)} == set(), hash('a') % 1000)", OK, "False 19"),
    "threads": (
        """
        import threading
        found = []
        threads = [threading.Thread(target=lambda n=n: found.append(n * n)) for n in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sorted(found))
        """,
        OK,
        "[0, 1, 4, 9]",
    ),
    "a thread that outlives the main one": (
        "import threading\nthreading.Timer(0.2, print, ['late']).start()\nprint('early')",
        OK,
        "early\nlate",
    ),
    "exit hooks": ("import atexit\natexit.register(print, 'bye')\nprint('hello')", OK, "hello\nbye"),
    "a file of its own": ("open('f', 'w').write('text')\nprint(open('f').read())", OK, "text"),
    "a module of its own": ("open('m.py', 'w').write('X = 7')\nimport m\nprint(m.X)", OK, "7"),
    "pickle of a class": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
        OK,
        "A",
    ),
    "the arguments": ("import sys; print(sys.argv)", OK, "['program.py']"),
    "long text keeps head and tail": ("print('a' * 1000)", OK, "a" * 127 + "..." + "a" * 126),
    "a timeout keeps what was printed": (
        "print('partial', end='')\nwhile True: pass",
        ExecutionStatus.TIMEOUT,
        "partial\nTimeoutError: the program ran too long and was stopped.",
    ),
    "a flood of text": (
        "while True: print('0123456789' * 100)",
        ExecutionStatus.OUTPUT_LIMIT,
        None,
    ),
    "memory": (
        "print('before')\nx = bytearray(4 << 30)",
        ExecutionStatus.MEMORY,
        "before\nMemoryError: the program used too much memory.",
    ),
    "a crash": (
        "import os, signal\nprint('before')\nos.kill(os.getpid(), signal.SIGSEGV)",
        ExecutionStatus.KILLED,
        None,
    ),
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_every_backend_gives_the_same_observation(backend: Interpreter, name: str) -> None:
    code, status, observation = SNIPPETS[name]
    result = backend.submit(textwrap.dedent(code)).result(timeout=120)
    assert result.status == status, result
    if observation is not None:
        assert format_observation(result, MAX_CHARS) == observation


@pytest.mark.slow
def test_a_plot_is_no_error(backend: Interpreter) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('f.png')\nplt.show()\nprint('done')"
    result = backend.submit(code).result(timeout=120)
    if "No module named 'matplotlib'" in result.stderr:
        pytest.skip("no matplotlib there")
    assert result.status in (OK, ExecutionStatus.TIMEOUT)  # its import takes a second, on a busy machine more
    assert result.status == ExecutionStatus.TIMEOUT or format_observation(result, MAX_CHARS) == "done"
