"""The Sandbox Fusion interpreter: its requests, its patience with servers that fail, and what it gives up on."""

import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from stand_in_sandbox_fusion import TROUBLE, Body, SandboxFusionStandIn, answer_at_once, call_in, response
from test_trainer import RIGHT, SILENT, WRONG, make_trainer, scored_batch

from torl_grading import Grader
from torl_interpreters.sandbox_fusion import URL_VARIABLE
from torl_trl.errors import UserError
from torl_trl.interpreters import (
    ExecutionResult,
    ExecutionStatus,
    Interpreter,
    InterpreterClosed,
    InterpreterError,
    InterpreterUnavailable,
    SandboxFusionInterpreter,
    get_interpreter,
)
from torl_trl.rollout import Rollout

ROOT = Path(__file__).parent.parent
MAX_CHARS = 100_000
LIMITS = {"memory_mb": 512, "max_output_chars": MAX_CHARS, "max_file_mb": 4}


@pytest.fixture
def stand_in() -> Iterator[SandboxFusionStandIn]:
    """A server that answers `print(EXPRESSION)` without a process."""
    with SandboxFusionStandIn(answer=answer_at_once) as stand_in:
        yield stand_in


@pytest.fixture
def other() -> Iterator[SandboxFusionStandIn]:
    """A second one."""
    with SandboxFusionStandIn(answer=answer_at_once) as stand_in:
        yield stand_in


@pytest.fixture
def make() -> Iterator[Callable[..., SandboxFusionInterpreter]]:
    """Makes interpreters of the given stand-ins, with a short patience; closed when the test ends."""
    made = []

    def make(*stand_ins: SandboxFusionStandIn, **options) -> SandboxFusionInterpreter:
        options = {"url": [stand_in.url for stand_in in stand_ins], "backoff_seconds": 0.01, "slots": 4} | options
        made.append(SandboxFusionInterpreter(**options))
        return made[-1]

    yield make
    for interpreter in made:
        interpreter.close()


def answering_after(seconds: float) -> Callable[[Body], Body]:
    def answer(body: Body) -> Body:
        time.sleep(seconds)
        return answer_at_once(body)

    return answer


def programs(stand_in: SandboxFusionStandIn) -> list[str]:
    """The programs of the requests, in their order."""
    return [call_in(body)[1]["code"] for body in stand_in.requests]


# Programs that really run, at the stand-in and at a real server


@pytest.fixture(scope="module", params=["stand-in", "real server"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server that runs programs."""
    if request.param == "stand-in":
        with SandboxFusionStandIn() as stand_in:
            yield stand_in.url
    elif not os.environ.get(URL_VARIABLE):
        pytest.skip(f"needs a real server: {URL_VARIABLE} is not set")
    else:
        yield os.environ[URL_VARIABLE]


@pytest.fixture(scope="module")
def interpreter(url: str) -> Iterator[Interpreter]:
    with get_interpreter("sandbox_fusion", url=url, slots=2, timeout_seconds=30, **LIMITS) as interpreter:
        yield interpreter


@pytest.mark.parametrize(
    ("code", "status", "printed", "last"),
    [
        ("print(2**100)", "ok", "1267650600228229401496703205376\n", ""),
        ("import sympy; x = sympy.Symbol('x'); print(sympy.factor(x**2 - 1))", "ok", "(x - 1)*(x + 1)\n", ""),
        ("import numpy as np; print(np.linalg.det(np.eye(3)))", "ok", "1.0\n", ""),
        ("print('é ∑ 数')", "ok", "é ∑ 数\n", ""),
        ("import os; os.write(1, b'a\\xff\\xfeb')", "ok", "a\ufffd\ufffdb", ""),
        ("x = 1\nx", "ok", "", ""),
        ("import sys; print(repr(sys.stdin.read()))", "ok", "''\n", ""),
        ("import warnings; warnings.warn('careful'); print(1)", "ok", "1\n", "careful"),
        ("import threading; t = threading.Thread(target=print, args=[1]); t.start(); t.join()", "ok", "1\n", ""),
        ("print('before')\n1/0", "error", "before\n", "ZeroDivisionError: division by zero"),
        ("print(", "error", "", "SyntaxError: '(' was never closed"),
        ("input()", "error", "", "EOFError: EOF when reading a line"),
        ("import sys; print(1); sys.exit(3)", "error", "1\n", ""),
        ("print('before'); x = bytearray(4 << 30)", "memory", "before\n", "MemoryError"),
        ("import os; print('before'); os.kill(os.getpid(), 9)", "killed", "before\n", ""),
    ],
)
def test_a_program_s_end_and_text_are_those_of_every_backend(
    interpreter: Interpreter, code: str, status: str, printed: str, last: str
) -> None:
    result = interpreter.submit(code).result(timeout=60)
    assert (result.status, result.stdout) == (ExecutionStatus(status), printed), result
    assert last in result.stderr


def test_a_lone_surrogate_in_the_code_does_no_harm(interpreter: Interpreter) -> None:
    assert interpreter.submit("print('\ud800')").result(timeout=60).status == ExecutionStatus.OK


def test_long_text_arrives_whole_where_the_server_s_own_stdout_would_be_cut(interpreter: Interpreter) -> None:
    text = "数" * (MAX_CHARS - 1) + "\n"  # 600,000 characters of JSON
    result = interpreter.submit(f"import sys\nfor out in (sys.stdout, sys.stderr): out.write({text!r})").result(60)
    assert (result.status, result.truncated) == (ExecutionStatus.OK, False)
    assert result.stdout == result.stderr == text


def test_text_that_no_compression_makes_short_enough_is_cut_and_says_so(interpreter: Interpreter) -> None:
    code = f"""
import random
random.seed(0)
text = "".join(chr(random.randrange(0x4E00, 0xD000)) for _ in range({MAX_CHARS}))
print(text, end="")
"""
    scope: dict = {}
    exec(code.replace("print", "#"), scope)
    result = interpreter.submit(code).result(timeout=60)
    assert (result.status, result.truncated) == (ExecutionStatus.OK, True)
    assert len(result.stdout) == MAX_CHARS // 2 and scope["text"].startswith(result.stdout)


def test_a_flood_of_text_is_stopped_at_once_and_its_head_kept(interpreter: Interpreter) -> None:
    result = interpreter.submit("while True: print('0123456789' * 100, end='')").result(timeout=60)
    assert (result.status, result.truncated) == (ExecutionStatus.OUTPUT_LIMIT, True)
    assert result.stdout == "0123456789" * (MAX_CHARS // 10)


def test_a_timeout_keeps_what_was_printed(url: str) -> None:
    with get_interpreter("sandbox_fusion", url=url, slots=1, timeout_seconds=1.0) as interpreter:
        result = interpreter.submit("print('line')\nprint('no newline', end='')\nwhile True: pass").result(timeout=60)
    assert (result.status, result.stdout) == (ExecutionStatus.TIMEOUT, "line\nno newline")
    assert 1.0 <= result.seconds < 6


def test_a_program_sees_no_variable_of_the_server(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = interpreter.submit("import os; print(sorted(os.environ))").result(timeout=60)
    assert "HF_TOKEN" not in result.stdout and "'HOME'" in result.stdout


def test_a_program_that_kills_its_supervisor_is_killed(url: str) -> None:
    with get_interpreter("sandbox_fusion", url=url, backoff_seconds=0.01) as interpreter:
        result = interpreter.submit("import os; os.kill(os.getppid(), 9)").result(timeout=60)
    assert (result.status, result.stdout) == (ExecutionStatus.KILLED, "")


# The request


def test_a_call_is_one_documented_request(stand_in: SandboxFusionStandIn, make) -> None:
    result = make(stand_in, timeout_seconds=7, memory_mb=512, max_output_chars=1000).submit("print(6 * 7)").result(10)
    assert (result.status, result.stdout) == (ExecutionStatus.OK, "42\n")
    (body,) = stand_in.requests
    assert set(body) == {"code", "language", "run_timeout", "memory_limit_MB"}
    assert body["language"] == "python"
    assert body["run_timeout"] > 7 and body["memory_limit_MB"] > 512  # the supervisor's limits come first
    assert body["code"].isascii()
    call = call_in(body)[1]
    assert (call["code"], call["timeout"], call["max_chars"]) == ("print(6 * 7)", 7, 1000)
    assert call["rlimits"]["RLIMIT_AS"] == 512 << 20


@pytest.mark.parametrize("end", ["", "/", "/run_code", "/run_code/"])
def test_a_url_may_have_a_slash_or_the_call_s_path_at_its_end(end: str, stand_in: SandboxFusionStandIn, make) -> None:
    assert make(url=stand_in.url + end).submit("print(1)").result(10).stdout == "1\n"


def test_urls_come_from_the_variable_when_none_is_given(
    stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, f"{stand_in.url}, {other.url}/")
    interpreter = make(url=None)
    wait([interpreter.submit("print(1)") for _ in range(4)])
    assert len(stand_in.requests) == len(other.requests) == 2


def test_the_slots_of_a_default_are_those_of_the_servers_divided_by_the_ranks(
    stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(stand_in, other, slots=None).slots == 16
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert make(stand_in, other, slots=None).slots == 4


# Trouble


@pytest.mark.parametrize("trouble", TROUBLE)
def test_trouble_of_the_server_is_tried_again_and_leaves_no_trace_in_the_result(
    trouble: str, stand_in: SandboxFusionStandIn, make
) -> None:
    interpreter = make(stand_in, timeout_seconds=0.5, request_timeout_seconds=1.0, backoff_seconds=0.1)
    stand_in.slow_seconds = 1.5
    stand_in.misbehave(trouble)
    result = interpreter.submit("print(6 * 7)").result(10)
    assert (result.status, result.stdout) == (ExecutionStatus.OK, "42\n")
    assert programs(stand_in) == ["print(6 * 7)"] * 2


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("500", "HTTP 500: .*boom"),
        ("garbage", "an answer that is none of its kind: '<html>Welcome"),
        ("cut", "there is no result"),
        ("empty", "there is no result"),
        ("sandbox_error", "SandboxError: .*no space left"),
    ],
)
def test_trouble_that_stays_is_an_error_of_ours_that_says_what_it_was(
    trouble: str, message: str, stand_in: SandboxFusionStandIn, make
) -> None:
    stand_in.misbehave(*[trouble] * 3)
    with pytest.raises(InterpreterError, match=message):
        make(stand_in, retries=2).submit("print(1)").result(10)
    assert len(stand_in.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("drop", "RemoteProtocolError"),
        ("half", "RemoteProtocolError"),
        ("503", "HTTP 503: 'no healthy upstream'"),
        ("slow", "no answer to /run_code within 0.6 s"),
    ],
)
def test_a_server_that_does_not_answer_calls_is_unavailable(
    trouble: str, message: str, stand_in: SandboxFusionStandIn, make
) -> None:
    stand_in.behave = lambda body: trouble
    stand_in.slow_seconds = 0.8
    interpreter = make(stand_in, retries=1, timeout_seconds=0.3, request_timeout_seconds=0.6, backoff_seconds=0.1)
    with pytest.raises(InterpreterUnavailable, match=message):
        interpreter.submit("print(1)").result(10)


def test_a_dead_server_is_unavailable_when_the_attempts_are_used_up(stand_in: SandboxFusionStandIn, make) -> None:
    interpreter = make(stand_in, retries=3)
    stand_in.kill()
    with pytest.raises(InterpreterUnavailable, match=f"server answers, of {stand_in.url}: .*Connect"):
        interpreter.submit("print(1)").result(10)


def test_a_request_that_is_refused_is_not_tried_again(make) -> None:
    with SandboxFusionStandIn() as stand_in:
        interpreter = make(stand_in)
        interpreter._servers[0].client.base_url = f"{stand_in.url}/nothing"
        with pytest.raises(InterpreterError, match=r"HTTP 404: .*Not Found"):
            interpreter.submit("print(1)").result(10)
        assert interpreter._attempts == 1


# Answers without a result of our supervisor


def test_a_time_limit_of_the_server_s_own_is_a_timeout(stand_in: SandboxFusionStandIn, make) -> None:
    stand_in.misbehave(response(status="TimeLimitExceeded", execution_time=3.0, return_code=None))
    result = make(stand_in, timeout_seconds=10).submit("print(1)").result(10)
    assert (result.status, result.stdout, result.seconds) == (ExecutionStatus.TIMEOUT, "", 3.0)


def test_a_server_too_busy_to_end_a_program_in_time_is_our_trouble(stand_in: SandboxFusionStandIn, make) -> None:
    stand_in.misbehave(response(status="TimeLimitExceeded", execution_time=40.0, return_code=None))
    with pytest.raises(
        InterpreterError, match="a program did not end in time: the server has too much to do, lower slots"
    ):
        make(stand_in, retries=0).submit("print(1)").result(10)


@pytest.mark.parametrize("return_code", [-9, 137])
def test_a_supervisor_killed_once_is_tried_again_and_twice_is_the_program(
    return_code: int, stand_in: SandboxFusionStandIn, make
) -> None:
    killed = response(return_code=return_code)
    interpreter = make(stand_in)
    stand_in.misbehave(killed)
    assert interpreter.submit("print(1)").result(10).stdout == "1\n"
    stand_in.misbehave(killed, killed)
    assert interpreter.submit("print(1)").result(10).status == ExecutionStatus.KILLED


def test_a_python_that_cannot_run_the_supervisor_is_our_trouble(stand_in: SandboxFusionStandIn, make) -> None:
    stand_in.misbehave(response(return_code=127, stderr="bash: python: command not found\n"))
    with pytest.raises(InterpreterError, match=r"no result \(exit code 127\): 'bash: python: command not found'"):
        make(stand_in, retries=0).submit("print(1)").result(10)


# Several servers


def test_calls_spread_over_the_servers(stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make) -> None:
    stand_in.answer = other.answer = answering_after(0.02)
    interpreter = make(stand_in, other)
    futures = [interpreter.submit(f"print({i})") for i in range(40)]
    assert [future.result(10).stdout for future in futures] == [f"{i}\n" for i in range(40)]
    assert min(len(stand_in.requests), len(other.requests)) >= 15


def test_a_busy_server_gets_fewer_calls(stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make) -> None:
    stand_in.answer, other.answer = answering_after(0.2), answering_after(0.01)
    interpreter = make(stand_in, other)
    wait([interpreter.submit("print(1)") for _ in range(40)])
    assert len(stand_in.requests) < len(other.requests) / 2


def test_a_server_that_dies_is_replaced_by_the_others_and_used_again_when_it_is_back(
    stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make
) -> None:
    stand_in.answer = other.answer = answering_after(0.02)
    interpreter = make(stand_in, other)
    futures = [interpreter.submit(f"print({i})") for i in range(100)]
    futures[20].result(10)
    stand_in.kill()
    assert [future.result(10).stdout for future in futures] == [f"{i}\n" for i in range(100)]
    while_dead = len(stand_in.requests)
    stand_in.revive()
    deadline = time.perf_counter() + 10
    while len(stand_in.requests) == while_dead:
        assert time.perf_counter() < deadline
        assert interpreter.submit("print(1)").result(10).stdout == "1\n"


def test_a_server_that_fails_every_call_at_once_does_not_draw_them_all(
    stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make
) -> None:
    stand_in.behave = lambda body: "500"
    other.answer = answering_after(0.02)
    interpreter = make(stand_in, other)
    futures = [interpreter.submit(f"print({i})") for i in range(100)]
    assert [future.result(10).stdout for future in futures] == [f"{i}\n" for i in range(100)]
    assert len(stand_in.requests) < 20


def test_one_of_two_servers_at_the_start_is_enough(
    stand_in: SandboxFusionStandIn, other: SandboxFusionStandIn, make, caplog: pytest.LogCaptureFixture
) -> None:
    other.kill()
    interpreter = make(stand_in, other)
    assert f"Sandbox Fusion: the server at {other.url} does not answer (ConnectError" in caplog.text
    assert [interpreter.submit("print(1)").result(10).stdout for _ in range(4)] == ["1\n"] * 4


def test_a_warning_with_the_counts_is_given_once_a_minute(
    stand_in: SandboxFusionStandIn, make, caplog: pytest.LogCaptureFixture
) -> None:
    interpreter = make(stand_in)
    stand_in.misbehave(*["500"] * 20)
    wait([interpreter.submit("print(1)") for _ in range(20)])
    interpreter.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"{stand_in.url}: HTTP 500" in warnings[0] and "; so far 1 failures, " in warnings[0]


# The queue


def test_requests_are_never_more_than_the_slots_and_start_in_the_order_of_submit(
    stand_in: SandboxFusionStandIn, make
) -> None:
    stand_in.answer = answering_after(0.1)
    interpreter = make(stand_in, slots=3)
    started = time.perf_counter()
    futures = [interpreter.submit(f"print({i})") for i in range(30)]
    assert time.perf_counter() - started < 0.5  # all together take 1.0
    wait(futures)
    assert stand_in.most_running == 3
    order = [int(re.sub(r"\D", "", program)) for program in programs(stand_in)]
    assert all(abs(place - i) < 3 for place, i in enumerate(order))  # three connections race


def test_one_slot_keeps_the_order_exactly_and_queue_time_is_no_run_time(stand_in: SandboxFusionStandIn, make) -> None:
    stand_in.answer = answering_after(0.05)
    interpreter = make(stand_in, slots=1)
    results = [future.result(10) for future in [interpreter.submit(f"print({i})") for i in range(10)]]
    assert programs(stand_in) == [f"print({i})" for i in range(10)]
    waits = [result.queue_seconds for result in results]
    assert waits == sorted(waits) and waits[0] < 0.4 and waits[9] > 0.45
    assert all(result.seconds == 0.0 for result in results)  # the supervisor's word


def test_a_cancelled_call_is_not_sent(stand_in: SandboxFusionStandIn, make) -> None:
    stand_in.answer = answering_after(0.1)
    interpreter = make(stand_in, slots=1)
    futures = [interpreter.submit(f"print({i})") for i in range(3)]
    assert futures[1].cancel()
    assert futures[2].result(10).stdout == "2\n"
    assert programs(stand_in) == ["print(0)", "print(2)"]


# Start and end


def test_close_fails_what_runs_and_what_waits_and_frees_everything(stand_in: SandboxFusionStandIn, make) -> None:
    stand_in.answer = answering_after(1.0)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    before = threading.enumerate()
    interpreter = make(stand_in, slots=2)
    futures = [interpreter.submit("print(1)") for _ in range(5)]
    while len(stand_in.requests) < 2:
        time.sleep(0.01)
    started = time.perf_counter()
    interpreter.close()
    assert time.perf_counter() - started < 0.8
    for future in futures:
        with pytest.raises(InterpreterClosed):
            future.result(0)
    interpreter.close()
    with pytest.raises(InterpreterClosed, match="make a new one"):
        interpreter.submit("print(1)")
    assert not [thread for thread in threading.enumerate() if "Sandbox Fusion" in thread.name and thread not in before]
    deadline = time.perf_counter() + 10  # the stand-in's own ends of the connections are open until it answers
    while descriptors and len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.perf_counter() < deadline
        time.sleep(0.05)


def test_a_server_that_cannot_be_reached_is_one_sentence_at_the_start(stand_in: SandboxFusionStandIn) -> None:
    stand_in.kill()
    expected = (
        f"The Sandbox Fusion server at {stand_in.url} does not answer (ConnectError: All connection attempts failed): "
        "start it, or correct url in interpreter_options or the variable TORL_SANDBOX_FUSION_URL."
    )
    with pytest.raises(InterpreterUnavailable, match=re.escape(expected)):
        SandboxFusionInterpreter(url=stand_in.url)
    with pytest.raises(UserError, match=re.escape(expected)):
        get_interpreter("sandbox_fusion", url=stand_in.url)
    with pytest.raises(UserError, match=f"None of the Sandbox Fusion servers at {stand_in.url}, http://127.0.0.1:9 "):
        get_interpreter("sandbox_fusion", url=[stand_in.url, "http://127.0.0.1:9"])


def test_another_kind_of_server_is_one_sentence_at_the_start(stand_in: SandboxFusionStandIn) -> None:
    with pytest.raises(UserError, match=r"/v1/ping gives HTTP 404 .*, not pong"):
        get_interpreter("sandbox_fusion", url=stand_in.url + "/v2")


@pytest.mark.slow
def test_the_launch_script_ends_with_that_sentence_before_it_loads_a_model(
    stand_in: SandboxFusionStandIn, tmp_path: Path
) -> None:
    stand_in.kill()
    options = json.dumps({"url": stand_in.url})
    command = [sys.executable, str(ROOT / "recipes" / "grpo_torl.py"), "--config", "tiny.yaml"]
    command += ["--interpreter", "sandbox_fusion", "--interpreter_options", options]
    command += ["--output_dir", str(tmp_path), "--model_name_or_path", str(tmp_path / "no model")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"Error: The Sandbox Fusion server at {stand_in.url} does not")
    assert "Traceback" not in done.stderr


def test_no_url_at_all_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with pytest.raises(UserError, match="url is missing: give the address of a Sandbox Fusion server, such as"):
        get_interpreter("sandbox_fusion")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots of the Sandbox Fusion interpreter is 0: give a number above 0"),
        ({"timeout_seconds": 0}, "timeout_seconds of the Sandbox Fusion interpreter is 0"),
        ({"memory_mb": -1}, "memory_mb of the Sandbox Fusion interpreter is -1"),
        ({"max_output_chars": 0}, "max_output_chars of the Sandbox Fusion interpreter is 0"),
        ({"max_file_mb": 0}, "max_file_mb of the Sandbox Fusion interpreter is 0"),
        ({"backoff_seconds": 0}, "backoff_seconds of the Sandbox Fusion interpreter is 0"),
        ({"retries": -1}, "retries of the Sandbox Fusion interpreter is -1: give 0 or more"),
        ({"timeout_seconds": 5, "request_timeout_seconds": 5}, "give requests more time than programs"),
        ({"url": "localhost:8080"}, "url is 'localhost:8080': give an address such as http://localhost:8080"),
        ({"url": ["http://box", "ftp://box"]}, "url is 'ftp://box'"),
        ({"url": "http://box:port"}, "url is 'http://box:port': Invalid port: 'port'"),
        ({"url": []}, "url is missing"),
        ({"speed": 9}, "'sandbox_fusion' has no option 'speed': it has url, slots, timeout_seconds"),
    ],
)
def test_an_impossible_option_is_one_sentence_that_names_it(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_interpreter("sandbox_fusion", **{"url": "http://127.0.0.1:9"} | options)


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(UserError, match=r"at http://127\.0\.0\.1:9 does not answer") as caught:
        get_interpreter("sandbox_fusion", url="http://me:secret@127.0.0.1:9")
    assert "secret" not in str(caught.value)


# All of it at once


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_of_2000_calls_to_servers_that_fail_in_every_way_none_is_lost_or_doubled_or_hangs(servers: int, make) -> None:
    """A tenth of all requests meets trouble; the slow kind is rarer, as each waits for our own time limit."""
    chance, count = random.Random(0), 2000
    weights = [0.5 if trouble == "slow" else 1.0 for trouble in TROUBLE]

    def behave(body: Body) -> str | None:
        return chance.choices(TROUBLE, weights)[0] if chance.random() < 0.1 else None

    stand_ins = [SandboxFusionStandIn(answer=answer_at_once, behave=behave) for _ in range(servers)]
    try:
        options = {"timeout_seconds": 1.0, "request_timeout_seconds": 3.0, "backoff_seconds": 0.05, "retries": 8}
        for stand_in in stand_ins:
            stand_in.slow_seconds = 3.5
        interpreter = make(*stand_ins, slots=32, **options)
        returned: list[ExecutionResult] = []
        futures = [interpreter.submit(f"print({i} ** 3)") for i in range(count)]
        for future in futures:
            future.add_done_callback(lambda future: returned.append(future.result()))
        done, hanging = wait(futures, timeout=100)
        assert not hanging and len(done) == count
        assert [future.result().stdout for future in futures] == [f"{i**3}\n" for i in range(count)]
        assert {future.result().status for future in futures} == {ExecutionStatus.OK}
        assert len(returned) == count
        answered = {}
        for stand_in in stand_ins:
            for body in stand_in.requests:
                program = call_in(body)[1]["code"]
                answered[program] = answered.get(program, 0) + stand_in.answered[body["code"]]
        assert answered == {f"print({i} ** 3)": 1 for i in range(count)}
        troubles = {trouble for stand_in in stand_ins for trouble in stand_in.troubles}
        assert troubles == set(TROUBLE)
    finally:
        for stand_in in stand_ins:
            stand_in.close()


def scores(rollouts: list[Rollout]) -> list[float | None]:
    """The rewards that the trainer's accuracy reward gave."""
    return [rollout.verdict and rollout.verdict.score for rollout in rollouts]


def test_a_step_whose_server_is_killed_in_the_middle_scores_the_others_and_the_next_goes_on(
    stand_in: SandboxFusionStandIn, make, tmp_path: Path
) -> None:
    def behave(body: Body) -> str | None:
        if len(stand_in.requests) == 4:
            threading.Thread(target=stand_in.kill).start()
            return "drop"
        return None

    stand_in.behave = behave
    texts = [RIGHT, WRONG, SILENT, RIGHT]
    interpreter = make(stand_in, slots=1, retries=1)
    with Grader(num_workers=1) as grader:
        trainer = make_trainer(tmp_path, grader, interpreter=interpreter, texts=texts, max_interpreter_failures=0.5)
        inputs, batch = scored_batch(trainer)
        rollouts = [row["rollouts"] for row in inputs]
        assert [rollout.interpreter_failed for rollout in rollouts] == [False] * 4 + [True, True, False, True]
        assert scores(rollouts) == [1.0, -1.0, -1.0, 1.0, None, None, -1.0, None]
        mask = batch["completion_mask"] * batch["tool_mask"]
        assert [bool(row.any()) for row in mask] == [True] * 4 + [False, False, True, False]
        assert batch["advantages"][4:].tolist() == [0.0] * 4 and batch["advantages"][0] > 0

        stand_in.revive()
        stand_in.behave = lambda body: None
        deadline = time.perf_counter() + 10
        while interpreter.submit("print(1)").exception(10) is not None:
            assert time.perf_counter() < deadline
        inputs, batch = scored_batch(trainer)
        assert scores([row["rollouts"] for row in inputs]) == [1.0, -1.0, -1.0, 1.0] * 2
        assert (batch["completion_mask"] * batch["tool_mask"]).any(dim=1).all()
