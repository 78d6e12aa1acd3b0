"""The E2B interpreter against a stand-in for the service that really runs the code, and can misbehave.

The tests of the last part run against a real code-interpreter server, where E2B_DEBUG is true.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest
from stand_in_e2b import FAULTS, E2BStandIn

from torl_interpreters import e2b, remote
from torl_interpreters.base import ENVIRONMENT
from torl_trl.errors import UserError
from torl_trl.interpreters import (
    ExecutionResult,
    ExecutionStatus,
    Interpreter,
    InterpreterClosed,
    InterpreterError,
    InterpreterUnavailable,
    get_interpreter,
)

pytest.importorskip("e2b_code_interpreter", reason="needs E2B's SDK")

REPOSITORY = Path(__file__).resolve().parents[1]
QUICK = {"timeout_seconds": 5, "creations_per_second": 100, "backoff_seconds": 0.02}
NAMES = ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DEBUG", "E2B_DOMAIN")


START_TEXT = e2b._start_text
HAS_REAL_SERVER = os.environ.get("E2B_DEBUG", "").lower() == "true"


def cold_start_text(limits: dict) -> str:
    """Starts a fork server without the packages."""
    text = START_TEXT(limits)
    assert text.count("missing = warm_up()") == 1
    return text.replace("missing = warm_up()", "missing = list(PRELOAD)")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No warm-up, and no variables of the user's; the tests of a real server keep both."""
    if "real" in request.fixturenames:
        return
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(e2b, "_start_text", cold_start_text)
    monkeypatch.setattr(e2b, "DRAIN_SECONDS", 0.0)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., E2BStandIn]]:
    """Starts stand-ins, which end with the test; the SDK goes to the last one."""
    running: list[E2BStandIn] = []

    def start(**options: object) -> E2BStandIn:
        stand_in = E2BStandIn(**options).__enter__()
        running.append(stand_in)
        for name, value in stand_in.environment.items():
            monkeypatch.setenv(name, value)
        return stand_in

    yield start
    for stand_in in running:
        stand_in.stop()


def run(interpreter: Interpreter, code: str) -> ExecutionResult:
    return interpreter.submit(code).result(timeout=30)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def threads() -> int:
    """How many threads of ours there are."""
    return sum(thread.name == "interpreter-e2b" for thread in threading.enumerate())


# Programs


@pytest.mark.parametrize(
    ("code", "status", "stdout", "last_line"),
    [
        ("print(2**100)", "ok", "1267650600228229401496703205376\n", ""),
        ("2**100", "ok", "", ""),
        ("print('a')\n1/0", "error", "a\n", "ZeroDivisionError: division by zero"),
        ("print(", "error", "", "SyntaxError: '(' was never closed"),
        ("import sys; print('π \\ud800'); sys.exit(3)", "error", "π \\ud800\n", ""),
        ("print('\ud800')", "ok", "?\n", ""),
        ("input()", "error", "", "EOFError: EOF when reading a line"),
        ("import os; print('kept'); os._exit(0)", "ok", "kept\n", ""),
        ("import ctypes; ctypes.string_at(0)", "killed", "", ""),
        ("bytearray(2**31)", "memory", "", "MemoryError"),
        ("print('torl-result-0 {}')", "ok", "torl-result-0 {}\n", ""),
    ],
)
def test_a_program_ends_as_in_every_backend(shared_interpreter, code, status, stdout, last_line):
    result = run(shared_interpreter, code)
    assert (result.status, result.stdout) == (status, stdout)
    assert result.stderr.rstrip().rpartition("\n")[2] == last_line


@pytest.fixture(scope="module")
def shared_interpreter() -> Iterator[Interpreter]:
    with E2BStandIn() as stand_in, pytest.MonkeyPatch.context() as patch:
        patch.setattr(e2b, "_start_text", cold_start_text)
        for name in NAMES:
            patch.delenv(name, raising=False)
        for name, value in stand_in.environment.items():
            patch.setenv(name, value)
        with get_interpreter("e2b", timeout_seconds=5, sandboxes=1) as interpreter:
            yield interpreter


def test_every_call_has_a_fresh_interpreter_folder_and_environment(shared_interpreter):
    run(shared_interpreter, "import builtins, os; builtins.leak = 1; os.environ['LEAK'] = '1'; open('leak', 'w')")
    code = "import builtins, os; print(hasattr(builtins, 'leak'), os.listdir(), *sorted(os.environ))"
    expected = {*ENVIRONMENT, "HOME", "TMPDIR", "MPLCONFIGDIR"}
    assert run(shared_interpreter, code).stdout.split() == ["False", "[]", *sorted(expected)]


def test_calls_do_not_share_their_random_numbers(shared_interpreter):
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert len({run(shared_interpreter, code).stdout for _ in range(3)}) == 3


def test_a_flood_of_output_is_cut_at_its_limit(shared_interpreter):
    result = run(shared_interpreter, "while True: print('x' * 1000)")
    assert (result.status, len(result.stdout), result.truncated) == (ExecutionStatus.OUTPUT_LIMIT, 65_536, True)


def test_a_program_that_runs_too_long_times_out_and_keeps_its_output_and_its_sandbox(serve):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK | {"timeout_seconds": 0.3}) as interpreter:
        result = run(interpreter, "print('kept')\nwhile True: pass")
        assert (result.status, result.stdout) == (ExecutionStatus.TIMEOUT, "kept\n")
        assert run(interpreter, "print(1)").stdout == "1\n"
    assert len(stand_in.created) == 1


def test_a_fork_bomb_ends_with_its_time_and_the_next_program_runs(serve):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK | {"timeout_seconds": 0.5}) as interpreter:
        bomb = "import os\nwhile True:\n try: os.fork() or os.setsid()\n except OSError: pass"
        assert run(interpreter, bomb).status == ExecutionStatus.TIMEOUT
        assert run(interpreter, "print(1)").stdout == "1\n"
    assert len(stand_in.created) == 1


def test_a_program_has_sympy_at_hand(serve, monkeypatch, caplog):
    monkeypatch.setattr(e2b, "_start_text", START_TEXT)
    serve()
    with get_interpreter("e2b", **QUICK) as interpreter:
        result = run(interpreter, "import sys; print('sympy' in sys.modules)\nimport sympy; print(sympy.sqrt(8))")
    assert result.stdout == "True\n2*sqrt(2)\n"
    assert not caplog.records


def test_a_program_cannot_reach_the_kernel_the_network_or_other_files(shared_interpreter):
    code = """
import os, socket
kill, connect = lambda: os.kill(os.getppid(), 9), lambda: socket.create_connection(("127.0.0.1", 49999))
for attempt in (kill, connect, lambda: open("/etc/hosts")):
    try: attempt()
    except PermissionError as error: print(error.errno)
"""
    assert run(shared_interpreter, code).stdout.split() == ["1", "1", "13"]


@pytest.fixture
def without_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our fork server does not come up in the sandboxes."""
    monkeypatch.setattr(e2b, "_start_text", lambda limits: "raise RuntimeError('the kernel has no Landlock')")


def test_where_the_fork_server_does_not_start_each_call_has_a_python_and_one_warning_says_so(
    serve, without_server, caplog
):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK, sandboxes=2) as interpreter:
        calls = [interpreter.submit(f"print({n})\ninput()") for n in range(6)]
        assert [call.result(timeout=30).stdout for call in calls] == [f"{n}\n" for n in range(6)]
        assert calls[0].result().status == ExecutionStatus.ERROR
    assert len(stand_in.created) == 2
    (warning,) = caplog.records
    assert "fork server does not start in a sandbox (RuntimeError: the kernel has no Landlock)" in warning.message


def test_a_program_that_kills_its_sandbox_twice_is_killed_and_the_next_one_runs(serve, without_server):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK) as interpreter:
        assert run(interpreter, "import os; os.kill(os.getppid(), 9)").status == ExecutionStatus.KILLED
        assert run(interpreter, "print(1)").stdout == "1\n"
        assert len(stand_in.created) == 3


# The pool


def test_sandboxes_are_created_as_calls_wait_never_more_than_the_limit_and_never_faster_than_the_rate(serve):
    stand_in = serve()
    with get_interpreter("e2b", timeout_seconds=5, sandboxes=3, creations_per_second=5) as interpreter:
        assert len(stand_in.created) == 1
        calls = [interpreter.submit(f"import time; time.sleep(0.2); print({n})") for n in range(12)]
        assert [call.result(timeout=30).stdout for call in calls] == [f"{n}\n" for n in range(12)]
        assert len(stand_in.created) == stand_in.most_alive == 3
    gaps = [after - before for before, after in zip(stand_in.creations, stand_in.creations[1:], strict=False)]
    assert min(gaps) >= 0.18
    assert stand_in.most_running == 1
    assert stand_in.alive == set()


def test_what_a_sandbox_is_asked_for_keeps_programs_off_the_internet(serve):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK, lifetime_seconds=120, template="mine"):
        body = stand_in.bodies[0]
    assert (body["templateID"], body["timeout"], body["allow_internet_access"]) == ("mine", 120, False)


def test_calls_are_served_in_the_order_of_their_submission(serve):
    serve()
    order: list[int] = []
    with get_interpreter("e2b", **QUICK, sandboxes=1) as interpreter:
        calls = [interpreter.submit(f"print({n})") for n in range(8)]
        for n, call in enumerate(calls):
            call.add_done_callback(lambda _, n=n: order.append(n))
        wait(calls, timeout=30)
    assert order == list(range(8))


def test_waiting_counts_as_queue_time_and_not_as_run_time(serve):
    serve()
    with get_interpreter("e2b", **QUICK, sandboxes=1) as interpreter:
        first = interpreter.submit("import time; time.sleep(0.5)")
        second = interpreter.submit("pass").result(timeout=30)
    assert first.result().queue_seconds < 0.3 < second.queue_seconds
    assert second.seconds < 0.3


def test_a_waiting_call_can_be_cancelled(serve):
    serve()
    with get_interpreter("e2b", **QUICK, sandboxes=1) as interpreter:
        running = interpreter.submit("import time; time.sleep(0.3); print(1)")
        waiting, last = interpreter.submit("print(2)"), interpreter.submit("print(3)")
        assert waiting.cancel()
        assert (running.result(30).stdout, last.result(30).stdout) == ("1\n", "3\n")
        with pytest.raises(CancelledError):
            waiting.result()


def test_a_sandbox_is_replaced_before_its_lifetime_ends(serve, monkeypatch):
    monkeypatch.setattr(e2b, "SERVICE_SLACK_SECONDS", 0.5)
    stand_in = serve()
    with get_interpreter("e2b", sandboxes=1, timeout_seconds=0.5, creations_per_second=10, lifetime_seconds=2) as it:
        started = time.monotonic()
        while time.monotonic() < started + 2.5:
            assert run(it, "print(1)").stdout == "1\n"
    assert len(stand_in.created) in (2, 3, 4)  # each was used for half of its life
    assert it._failures == 0


def test_a_sandbox_that_does_not_answer_in_time_is_replaced(serve, monkeypatch):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK | {"timeout_seconds": 1}) as interpreter:
        monkeypatch.setattr(interpreter, "_call_seconds", 0.5)
        stand_in.misbehave("execute", "hang")
        assert run(interpreter, "print(1)").stdout == "1\n"
        wait_until(lambda: len(stand_in.alive) == 1)
        assert len(stand_in.created) == 2


@pytest.mark.parametrize("fault", FAULTS["execute"])
def test_a_call_that_meets_trouble_is_run_again(serve, fault):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK) as interpreter:
        stand_in.misbehave("execute", fault)
        assert run(interpreter, "print(6 * 7)").stdout == "42\n"
        keeps = fault in ("slow", "429")
        wait_until(lambda: len(stand_in.alive) == 1)
        assert len(stand_in.created) == (1 if keeps else 2)


@pytest.mark.parametrize("fault", FAULTS["create"])
def test_a_creation_that_meets_trouble_is_tried_again_and_leaves_no_sandbox_behind(serve, fault):
    stand_in = serve()
    stand_in.misbehave("create", fault)
    with get_interpreter("e2b", **QUICK) as interpreter:
        assert run(interpreter, "print(6 * 7)").stdout == "42\n"
        assert len(stand_in.alive) == 1
    assert stand_in.alive == set()


def test_too_many_requests_are_waited_out_however_many(serve, monkeypatch):
    monkeypatch.setattr(remote, "_LONGEST_PAUSE_SECONDS", 0.05)
    stand_in = serve()
    stand_in.misbehave("create", *["429"] * 10)
    with get_interpreter("e2b", **QUICK) as interpreter:
        stand_in.misbehave("execute", *["429"] * 10)
        assert run(interpreter, "print(1)").stdout == "1\n"
    assert len(stand_in.created) == 1


def test_too_many_requests_end_after_the_time_for_them(serve, monkeypatch):
    monkeypatch.setattr(remote.TooMany, "retries", 3)
    serve(max_sandboxes=0)
    with pytest.raises(UserError, match=r"create a sandbox: RateLimitException: .*maximum number"):
        get_interpreter("e2b", **QUICK)


def test_fewer_sandboxes_than_asked_for_serve_all_calls(serve, monkeypatch):
    monkeypatch.setattr(remote, "_LONGEST_PAUSE_SECONDS", 0.2)
    serve(max_sandboxes=2)
    with get_interpreter("e2b", **QUICK, sandboxes=5) as interpreter:
        calls = [interpreter.submit(f"print({n})") for n in range(20)]
        assert [call.result(timeout=30).stdout for call in calls] == [f"{n}\n" for n in range(20)]


def test_sandboxes_that_die_after_some_calls_are_replaced(serve):
    stand_in = serve(calls_per_sandbox=4)  # one of them starts our server
    with get_interpreter("e2b", **QUICK, sandboxes=2) as interpreter:
        calls = [interpreter.submit(f"print({n})") for n in range(12)]
        assert [call.result(timeout=30).stdout for call in calls] == [f"{n}\n" for n in range(12)]
    assert len(stand_in.created) >= 4
    assert stand_in.most_alive <= 2


def test_a_service_that_goes_away_fails_its_calls_and_is_used_again_when_it_is_back(serve):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK, sandboxes=2) as interpreter:
        stand_in.misbehave("execute", *["502"] * 100)
        stand_in.misbehave("create", *["503"] * 100)
        for call in [interpreter.submit("print(1)") for _ in range(5)]:
            with pytest.raises(InterpreterError, match="E2B did not"):
                call.result(timeout=30)
        for planned in stand_in._planned.values():
            planned.clear()
        assert run(interpreter, "print(2)").stdout == "2\n"


def test_many_calls_of_which_one_in_ten_meets_trouble_all_have_their_own_result(serve):
    stand_in = serve(fault_share=0.1, slow_seconds=0.1)
    with get_interpreter("e2b", **QUICK, sandboxes=4) as interpreter:
        calls = [interpreter.submit(f"print({n} ** 2)") for n in range(600)]
        _, not_done = wait(calls, timeout=60)
        assert not not_done
        assert [call.result().stdout for call in calls] == [f"{n**2}\n" for n in range(600)]
        assert {kind for request, kind in stand_in.faults if request == "execute"} == set(FAULTS["execute"])
        assert stand_in.most_alive <= 4
        assert stand_in.most_running == 1
    wait_until(lambda: stand_in.alive == set())


# The start and the end


def test_close_kills_every_sandbox_and_leaves_no_thread(serve):
    stand_in, before = serve(), threads()
    interpreter = get_interpreter("e2b", **QUICK, sandboxes=3)
    wait([interpreter.submit("import time; time.sleep(0.3)") for _ in range(3)], timeout=30)
    assert len(stand_in.alive) == 3
    interpreter.close()
    interpreter.close()
    assert stand_in.alive == set()
    assert threads() == before
    with pytest.raises(InterpreterClosed):
        interpreter.submit("print(1)")


def test_close_ends_running_and_waiting_calls_at_once(serve):
    stand_in = serve()
    interpreter = get_interpreter("e2b", **QUICK | {"timeout_seconds": 60}, sandboxes=2)
    calls = [interpreter.submit("import time; time.sleep(60)") for _ in range(6)]
    wait_until(lambda: sum(sandbox.running for sandbox in list(stand_in.sandboxes.values())) == 2)
    started = time.monotonic()
    interpreter.close()
    assert time.monotonic() - started < 5
    for call in calls:
        with pytest.raises(InterpreterClosed):
            call.result(timeout=0)
    assert stand_in.alive == set()


def test_close_kills_a_sandbox_that_was_still_being_created(serve):
    stand_in = serve(slow_seconds=0.5)
    interpreter = get_interpreter("e2b", **QUICK, sandboxes=2)
    stand_in.misbehave("create", "slow")
    calls = [interpreter.submit("import time; time.sleep(60)") for _ in range(2)]
    wait_until(lambda: len(stand_in.creations) == 2)
    interpreter.close()
    assert len(stand_in.created) == 2
    assert stand_in.alive == set()
    assert all(isinstance(call.exception(timeout=0), InterpreterClosed) for call in calls)


def test_a_kill_that_fails_is_tried_again(serve):
    stand_in = serve()
    with get_interpreter("e2b", **QUICK):
        stand_in.misbehave("kill", "500", "drop")
    assert stand_in.alive == set()


@pytest.mark.parametrize("end", ["1 / 0", *(pytest.param(end, marks=pytest.mark.slow) for end in ("", "exit(1)"))])
def test_the_end_of_python_kills_the_sandboxes(serve, end):
    stand_in = serve()
    code = f"""
from torl_interpreters import e2b
from torl_trl.interpreters import get_interpreter
e2b._start_text = lambda limits: "raise RuntimeError('takes long')"
interpreter = get_interpreter("e2b", sandboxes=1)
print(interpreter.submit("print(6 * 7)").result().stdout)
interpreter.submit("import time; time.sleep(60)")
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("42", 1 if end else 0)
    assert len(stand_in.created) == 1
    assert stand_in.alive == set()


def test_without_a_key_one_sentence_says_so(monkeypatch):
    with pytest.raises(
        UserError, match=r"^The e2b interpreter needs an API key: set the variable E2B_API_KEY[^.]*\.$"
    ):
        get_interpreter("e2b")


def test_without_the_sdk_one_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b_code_interpreter", None)
    with pytest.raises(UserError, match=r"^The e2b interpreter needs E2B's SDK: pip install 'e2b-code-interpreter"):
        get_interpreter("e2b")


def test_a_key_that_is_refused_is_not_tried_again(serve, monkeypatch):
    stand_in = serve()
    monkeypatch.setenv("E2B_API_KEY", "wrong")
    with pytest.raises(UserError, match=r"AuthenticationException: 401: .*Invalid API key\.$"):
        get_interpreter("e2b", **QUICK)
    assert len(stand_in.creations) == 1


def test_a_service_that_cannot_be_reached_stops_the_start(serve):
    serve().stop()
    before = threads()
    with pytest.raises(InterpreterUnavailable, match="E2B did not create a sandbox: ConnectError"):
        e2b.E2BInterpreter(**QUICK, retries=0)
    assert threads() == before


@pytest.mark.slow
def test_the_launch_script_says_it_in_one_sentence_before_it_loads_a_model(tmp_path):
    command = [
        sys.executable,
        REPOSITORY / "recipes" / "grpo_torl.py",
        "--config",
        "tiny.yaml",
        "--interpreter",
        "e2b",
    ]
    done = subprocess.run(
        [*command, "--output_dir", tmp_path / "run", "--model_name_or_path", "/there/is/no/model"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    sentence = (
        "Error: The e2b interpreter needs an API key: set the variable E2B_API_KEY to one from your E2B dashboard."
    )
    assert done.stderr.splitlines()[-1] == sentence
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [{"sandboxes": 0}, {"timeout_seconds": -1}, {"creations_per_second": 0}, {"lifetime_seconds": 30}],
)
def test_impossible_options_are_refused_with_their_name(options):
    with pytest.raises(UserError, match=next(iter(options))):
        get_interpreter("e2b", **options)


def test_importing_the_interpreters_does_not_import_the_sdk():
    code = "import sys, torl_trl.interpreters; print('e2b' in sys.modules, 'e2b_code_interpreter' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_default_limits_are_the_free_plan_divided_by_the_ranks(serve, monkeypatch):
    serve()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with get_interpreter("e2b") as interpreter:
        assert interpreter.slots == 5
        assert interpreter._interval == 4


# A real server


@pytest.fixture(scope="module")
def real() -> Iterator[Interpreter]:
    if not HAS_REAL_SERVER:
        pytest.skip("needs a code-interpreter server on localhost:49999 and E2B_DEBUG=true")
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.delenv(name, raising=False)
        patch.setenv("E2B_DEBUG", "true")
        patch.setattr(e2b, "_start_text", START_TEXT)
        with get_interpreter("e2b", timeout_seconds=2) as interpreter:
            yield interpreter


@pytest.mark.parametrize(
    ("code", "status", "stdout"),
    [
        ("print(2**100)", "ok", "1267650600228229401496703205376\n"),
        ("import sympy; x = sympy.symbols('x'); print(sympy.factor(x**2 - 1))", "ok", "(x - 1)*(x + 1)\n"),
        ("print('a')\n1/0", "error", "a\n"),
        ("print('kept')\nwhile True: pass", "timeout", "kept\n"),
        (
            "import time\nprint('kept')\nwhile True:\n try: time.sleep(9)\n except BaseException: pass",
            "timeout",
            "kept\n",
        ),
        ("while True: print('x' * 1000)", "output_limit", None),
        ("bytearray(2**31)", "memory", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "killed", ""),
        ("print(input())", "error", ""),
        ("get_ipython()", "error", ""),
        ("print('π \\ud800 日本')", "ok", "π \\ud800 日本\n"),
        ("!ls", "error", ""),
    ],
)
def test_a_real_server_gives_the_same_results(real, code, status, stdout):
    result = run(real, code)
    assert result.status == status
    assert stdout is None or result.stdout == stdout


def test_a_real_server_gives_every_one_of_many_calls_its_result(real):
    calls = [real.submit(f"print({n})") for n in range(50)]
    assert [call.result(timeout=60).stdout for call in calls] == [f"{n}\n" for n in range(50)]


def test_a_real_server_goes_on_after_a_program_that_killed_it(real):
    code = f"import os; os.kill(os.getppid(), {int(signal.SIGKILL)})"
    assert run(real, code).status in (ExecutionStatus.KILLED, ExecutionStatus.ERROR)
    assert run(real, "print(1)").stdout == "1\n"
