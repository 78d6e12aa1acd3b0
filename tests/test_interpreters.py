"""What the embedded interpreter promises, in each tier of isolation that works on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torl_interpreters.tiers import Tier
from torl_trl.errors import UserError
from torl_trl.interpreters import (
    EmbeddedInterpreter,
    ExecutionResult,
    ExecutionStatus,
    Interpreter,
    InterpreterClosed,
    InterpreterError,
    InterpreterUnavailable,
    get_interpreter,
)

TIERS = ["root", "user", "none", "plain"]
TIMEOUT = 1.0
MAX_CHARS = 20_000
LIMITS = {"slots": 2, "memory_mb": 512, "max_output_chars": MAX_CHARS, "max_file_mb": 4}


def open_tier(tier: str, **options: object) -> EmbeddedInterpreter:
    try:
        return EmbeddedInterpreter(isolation=tier, **options)
    except InterpreterUnavailable as error:
        pytest.skip(f"no tier {tier} here: {error}")


@pytest.fixture(scope="module", params=TIERS)
def interpreter(request: pytest.FixtureRequest) -> Iterator[EmbeddedInterpreter]:
    """One with time enough for a busy machine."""
    with open_tier(request.param, timeout_seconds=30, **LIMITS) as backend:
        yield backend


@pytest.fixture(scope="module", params=TIERS)
def hasty(request: pytest.FixtureRequest) -> Iterator[EmbeddedInterpreter]:
    """One whose programs time out soon."""
    with open_tier(request.param, timeout_seconds=TIMEOUT, **LIMITS) as backend:
        yield backend


@pytest.fixture(params=TIERS)
def make_interpreter(request: pytest.FixtureRequest) -> Iterator[Callable[..., EmbeddedInterpreter]]:
    """Makes interpreters of the tier, closed when the test ends."""
    made: list[EmbeddedInterpreter] = []

    def make(**options: object) -> EmbeddedInterpreter:
        made.append(open_tier(request.param, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def run(interpreter: EmbeddedInterpreter, code: str) -> ExecutionResult:
    return interpreter.submit(textwrap.dedent(code)).result(timeout=30)


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


NAME_ITSELF = "import ctypes; ctypes.CDLL(None).prctl(15, b'{}', 0, 0, 0)"
"""Gives a process a name by which the host finds it, whatever its number in the sandbox is."""


def processes_named(name: str) -> int:
    """How many there are on this machine; a zombie that init has not taken yet runs no more."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            count += f"({name})" in text and text.rpartition(")")[2].split()[0] != "Z"
    return count


def ends_soon(name: str) -> bool:
    deadline = time.perf_counter() + 2
    while processes_named(name) and time.perf_counter() < deadline:
        time.sleep(0.01)
    return not processes_named(name)


# The program's end and its text


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(2**100)", "1267650600228229401496703205376\n"),
        ("import math; print(math.comb(10, 3))", "120\n"),
        ("import numpy as np; print(np.arange(4).sum())", "6\n"),
        ("import sympy; x = sympy.Symbol('x'); print(sympy.solve(x**2 - 4))", "[-2, 2]\n"),
        ("if __name__ == '__main__':\n    print('main')", "main\n"),
        ("print('é ∑ 数')", "é ∑ 数\n"),
        ("import os; os.write(1, b'a\\xff\\xfeb')", "a\ufffd\ufffdb"),
        ("print('no newline', end='')", "no newline"),
        ("x = 1", ""),
        ("", ""),
        ("print(1)\nimport sys\nsys.exit(0)", "1\n"),
        ("print(1)\nexit()", "1\n"),
        ("import os; print(1); os._exit(0)", "1\n"),
        ("import os\nos.close(1); os.close(2)", ""),
        ("def f(n): return 1 if n == 0 else n * f(n - 1)\nprint(f(5))", "120\n"),
        ("print(sorted({'b', 'a'}), sum(i for i in range(10)), [i for i in range(3)])", "['a', 'b'] 45 [0, 1, 2]\n"),
    ],
)
def test_a_program_that_ends_well_is_ok_and_its_text_is_kept(
    interpreter: EmbeddedInterpreter, code: str, printed: str
) -> None:
    result = run(interpreter, code)
    assert (result.status, result.stdout, result.truncated) == (ExecutionStatus.OK, printed, False), result.stderr


@pytest.mark.parametrize(
    ("code", "printed", "last"),
    [
        ("print('before')\n1/0", "before\n", "ZeroDivisionError: division by zero"),
        ("print('before')\nprint(", "", "SyntaxError: '(' was never closed"),
        ("x = 1\n  y = 2", "", "IndentationError: unexpected indent"),
        ("a\0b", "", "source code string cannot contain null bytes"),
        ("undefined", "", "NameError: name 'undefined' is not defined"),
        ("import nothing_of_this_name", "", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("input()", "", "EOFError: EOF when reading a line"),
        ("raise SystemExit('no solution')", "", "no solution"),
        ("def f(): return f()\nf()", "", "RecursionError: maximum recursion depth exceeded"),
        ("raise KeyboardInterrupt", "", "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_an_error_with_the_text_before_it_and_the_traceback(
    interpreter: EmbeddedInterpreter, code: str, printed: str, last: str
) -> None:
    result = run(interpreter, code)
    assert (result.status, result.stdout) == (ExecutionStatus.ERROR, printed)
    assert last_line(result.stderr).endswith(last)


def test_a_traceback_shows_the_program_and_nothing_of_ours(interpreter: EmbeddedInterpreter) -> None:
    result = run(interpreter, "def f():\n    1/0\nf()")
    files = [line.split(",")[0].strip() for line in result.stderr.splitlines() if "File " in line]
    assert files == ['File "<program>"'] * 2


def test_another_exit_code_is_an_error(interpreter: EmbeddedInterpreter) -> None:
    assert run(interpreter, "import sys; sys.exit(3)").status == ExecutionStatus.ERROR
    assert run(interpreter, "import os; os._exit(3)").status == ExecutionStatus.ERROR


def test_a_warning_on_stderr_is_no_error(interpreter: EmbeddedInterpreter) -> None:
    result = run(interpreter, "import warnings; warnings.warn('careful'); print(1)")
    assert (result.status, result.stdout) == (ExecutionStatus.OK, "1\n")
    assert "careful" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
def test_a_signal_that_is_no_limit_of_ours_is_killed(interpreter: EmbeddedInterpreter, number: int) -> None:
    result = run(interpreter, f"import os; print('before'); os.kill(os.getpid(), {int(number)})")
    assert (result.status, result.stdout) == (ExecutionStatus.KILLED, "before\n")


def test_standard_input_is_empty(interpreter: EmbeddedInterpreter) -> None:
    assert run(interpreter, "import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_a_huge_program_arrives_whole(interpreter: EmbeddedInterpreter) -> None:
    code = "x = 0\n" + "x += 1\n" * 50_000 + "print(x)"
    assert run(interpreter, code).stdout == "50000\n"


def test_a_lone_surrogate_in_the_code_does_no_harm(interpreter: EmbeddedInterpreter) -> None:
    assert run(interpreter, "print('\ud800')").status == ExecutionStatus.OK


# Limits


@pytest.mark.parametrize("tail", ["while True: pass", "import time; time.sleep(60)", "import sys; sys.stdin.close()"])
def test_a_timeout_keeps_what_was_printed(hasty: EmbeddedInterpreter, tail: str) -> None:
    code = f"print('line')\nprint('no newline', end='')\n{tail}\nwhile True: pass"
    result = run(hasty, code)
    assert (result.status, result.stdout) == (ExecutionStatus.TIMEOUT, "line\nno newline")
    assert TIMEOUT <= result.seconds < TIMEOUT + 5


def test_a_program_that_ignores_signals_is_killed_at_its_timeout(hasty: EmbeddedInterpreter) -> None:
    code = """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        print('ready')
        while True: pass
    """
    result = run(hasty, code)
    assert (result.status, result.stdout) == (ExecutionStatus.TIMEOUT, "ready\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_text_is_stopped_at_once_and_its_head_kept(interpreter: EmbeddedInterpreter, stream: str) -> None:
    result = run(interpreter, f"import sys\nwhile True: sys.{stream}.write('0123456789' * 100)")
    text = getattr(result, stream)
    assert (result.status, result.truncated) == (ExecutionStatus.OUTPUT_LIMIT, True)
    assert text == "0123456789" * (MAX_CHARS // 10)
    assert result.seconds < 10


def test_text_up_to_the_limit_is_whole(interpreter: EmbeddedInterpreter) -> None:
    result = run(interpreter, f"print('é' * {MAX_CHARS - 1})")
    assert (result.status, result.truncated) == (ExecutionStatus.OK, False)
    assert result.stdout == "é" * (MAX_CHARS - 1) + "\n"
    assert run(interpreter, f"print('é' * {MAX_CHARS})").status == ExecutionStatus.OUTPUT_LIMIT


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on address space")
@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(4 << 30)",
        "import numpy as np; x = np.ones((1 << 20, 1 << 13))",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "x = 'ab' * (1 << 40)",
    ],
)
def test_too_much_memory_is_a_memory_result(interpreter: EmbeddedInterpreter, code: str) -> None:
    result = run(interpreter, f"print('before')\n{code}")
    assert (result.status, result.stdout) == (ExecutionStatus.MEMORY, "before\n")


def test_a_too_large_file_is_an_error(interpreter: EmbeddedInterpreter) -> None:
    result = run(interpreter, "open('big', 'wb').write(bytes(8 << 20))")
    assert (result.status, last_line(result.stderr)) == (ExecutionStatus.ERROR, "OSError: [Errno 27] File too large")


# What a program sees, and what it leaves behind


def test_the_environment_holds_nothing_of_ours(
    interpreter: EmbeddedInterpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    result = run(interpreter, "import os; print(sorted(os.environ))")
    assert result.status == ExecutionStatus.OK
    assert "TOKEN" not in result.stdout and "API_KEY" not in result.stdout


def test_python_variables_of_ours_do_not_reach_the_program(
    interpreter: EmbeddedInterpreter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secret_module.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "No module named" in run(interpreter, "import secret_module").stderr


def test_each_program_has_an_empty_folder_of_its_own_that_is_emptied(interpreter: EmbeddedInterpreter) -> None:
    code = """
        import os, pathlib, tempfile
        print(os.listdir(), tempfile.gettempdir() == os.getcwd() == os.environ['HOME'])
        pathlib.Path('left').write_text('behind')
        pathlib.Path('folder').mkdir()
        os.chdir('folder')
        for _ in range(1200):
            os.mkdir('deep')
            os.chdir('deep')
        os.chmod('.', 0)
    """
    results = [run(interpreter, code) for _ in range(6)]  # more than slots
    assert {(result.status, result.stdout) for result in results} == {(ExecutionStatus.OK, "[] True\n")}


def test_nothing_is_left_over_from_one_program_to_the_next(interpreter: EmbeddedInterpreter) -> None:
    run(interpreter, "import builtins, sys, json; builtins.print = None; json.dumps = None; leak = 1")
    result = run(interpreter, "import json; print(json.dumps([1]), 'leak' in globals())")
    assert result.stdout == "[1] False\n"


def test_the_same_program_prints_the_same_set_order_every_time(interpreter: EmbeddedInterpreter) -> None:
    code = "print({f'name{i}' for i in range(50)})"
    assert len({run(interpreter, code).stdout for _ in range(3)}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their name in /proc")
@pytest.mark.parametrize(
    "leave", ["", "os.setsid()", "os.setsid(); os.dup2(os.open(os.devnull, os.O_RDWR), 1); os.dup2(1, 2)"]
)
@pytest.mark.parametrize("end", ["", "import time; time.sleep(60)"], ids=["normal end", "timeout"])
def test_children_of_the_program_are_dead_after_the_call(hasty: EmbeddedInterpreter, leave: str, end: str) -> None:
    if hasty.tier == Tier.NONE:
        pytest.skip("tier none lets no program start another process")
    name = f"left{time.monotonic_ns() % 10**9}"
    code = f"""
        import os, time
        reader, writer = os.pipe()
        if os.fork() == 0:
            {leave or "pass"}
            {NAME_ITSELF.format(name)}
            if os.fork() == 0:
                os.write(writer, b'!')
                time.sleep(60)
            os.write(writer, b'!')
            os._exit(0)
        ready = b''
        while len(ready) < 2:
            ready += os.read(reader, 100)
        print('started')
        {end or "pass"}
    """
    result = run(hasty, code)
    assert (result.status, result.stdout) == (
        ExecutionStatus.TIMEOUT if end else ExecutionStatus.OK,
        "started\n",
    ), result.stderr
    assert ends_soon(name)


def test_multiprocessing_works(interpreter: EmbeddedInterpreter) -> None:
    if interpreter.tier == Tier.NONE:
        pytest.skip("tier none lets no program start another process")
    code = """
        import multiprocessing
        def square(x): return x * x
        if __name__ == '__main__':
            with multiprocessing.get_context('fork').Pool(2) as pool:
                print(pool.map(square, range(4)))
    """
    assert run(interpreter, code).stdout == "[0, 1, 4, 9]\n"


# The queue


def test_calls_start_in_the_order_of_submit_and_wait_for_a_slot(
    make_interpreter: Callable[..., EmbeddedInterpreter],
) -> None:
    interpreter = make_interpreter(slots=1)
    futures = [interpreter.submit("import time; time.sleep(0.2); print(time.time())") for _ in range(5)]
    assert not futures[-1].done()
    results = [future.result(timeout=30) for future in futures]
    ends = [float(result.stdout) for result in results]
    assert ends == sorted(ends)
    waits = [result.queue_seconds for result in results]
    assert waits == sorted(waits) and waits[4] > 0.8
    assert all(result.seconds > 0.1 for result in results)  # from where we see the start, late on a busy machine


def test_waiting_for_a_slot_does_not_use_up_the_program_s_time(
    make_interpreter: Callable[..., EmbeddedInterpreter],
) -> None:
    interpreter = make_interpreter(slots=1, timeout_seconds=1.0)
    futures = [interpreter.submit("import time; time.sleep(0.5)") for _ in range(4)]
    assert [future.result(timeout=30).status for future in futures] == [ExecutionStatus.OK] * 4
    assert futures[-1].result().queue_seconds > 1.0


def test_slots_run_side_by_side(make_interpreter: Callable[..., EmbeddedInterpreter]) -> None:
    interpreter = make_interpreter(slots=4)
    started = time.perf_counter()
    futures = [interpreter.submit("import time; time.sleep(0.5)") for _ in range(8)]
    assert all(future.result(timeout=30).status == ExecutionStatus.OK for future in futures)
    assert 1.0 <= time.perf_counter() - started < 3.5  # one after the other: 4.0


# Closing, and trouble of our own


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their name in /proc")
def test_close_kills_what_runs_and_fails_what_waits(make_interpreter: Callable[..., EmbeddedInterpreter]) -> None:
    interpreter = make_interpreter(slots=1, timeout_seconds=60)
    name = f"runs{time.monotonic_ns() % 10**9}"
    running = interpreter.submit(f"{NAME_ITSELF.format(name)}; import time; time.sleep(60)")
    waiting = [interpreter.submit("print(1)") for _ in range(3)]
    while not processes_named(name):
        assert not running.done()
        time.sleep(0.01)
    started = time.perf_counter()
    interpreter.close()
    assert time.perf_counter() - started < 5
    for future in (running, *waiting):
        with pytest.raises(InterpreterClosed):
            future.result(timeout=1)
    assert ends_soon(name)
    interpreter.close()
    with pytest.raises(InterpreterClosed):
        interpreter.submit("print(1)")


def test_an_interpreter_is_a_context_manager_and_meets_the_protocol(
    make_interpreter: Callable[..., EmbeddedInterpreter],
) -> None:
    interpreter = make_interpreter()
    assert isinstance(interpreter, Interpreter)
    with interpreter as entered:
        assert entered is interpreter
    with pytest.raises(InterpreterClosed):
        interpreter.submit("print(1)")


def test_an_unknown_interpreter_is_one_sentence_that_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="interpreter is 'docker': choose one of embedded"):
        get_interpreter("docker")


def test_an_unknown_option_is_one_sentence_that_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="'embedded' has no option 'speed': it has slots, timeout_seconds"):
        get_interpreter("embedded", speed=9)


@pytest.mark.parametrize("option", ["slots", "timeout_seconds", "memory_mb", "max_output_chars"])
def test_an_impossible_limit_is_one_sentence_that_names_it(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} of the embedded interpreter is 0"):
        get_interpreter("embedded", **{option: 0})


def test_a_python_that_cannot_be_started_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedInterpreter(slots=1, isolation="plain") as interpreter:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(InterpreterUnavailable, match="/nonexistent/python"):
            interpreter.submit("print(1)").result(timeout=30)
        monkeypatch.undo()
        assert interpreter.submit("print(1)").result(timeout=30).stdout == "1\n"


def test_a_python_that_ends_before_the_program_is_our_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'libpython is missing' >&2\nexit 127\n")
    broken.chmod(0o755)
    with EmbeddedInterpreter(slots=1, isolation="plain") as interpreter:
        monkeypatch.setattr(sys, "executable", str(broken))
        with pytest.raises(InterpreterError, match="libpython is missing"):
            interpreter.submit("print(1)").result(timeout=30)


def test_no_place_for_temporary_folders_is_our_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        EmbeddedInterpreter(slots=1, isolation="plain") as interpreter,
        pytest.raises(InterpreterUnavailable, match="missing"),
    ):
        interpreter.submit("print(1)").result(timeout=30)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors through /proc")
def test_calls_leave_no_descriptors_and_no_threads(
    make_interpreter: Callable[..., EmbeddedInterpreter],
) -> None:
    interpreter = make_interpreter(slots=2, timeout_seconds=0.3)
    codes = ["print(1)", "1/0", "while True: pass", "while True: print('x' * 1000)"]
    for code in codes:
        run(interpreter, code)
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for code in codes * 3:
        run(interpreter, code)
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) <= before


def test_importing_the_interpreters_loads_neither_torch_nor_trl() -> None:
    code = (
        "import sys, torl_trl.interpreters; print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"
