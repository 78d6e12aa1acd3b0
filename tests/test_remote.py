"""What the remote backends share: results in printed text, the queue, and how often which failure is tried again."""

import asyncio
import base64
import json
import subprocess
import sys
import threading
import zlib

import pytest

from torl_interpreters.remote import Doubtful, Refused, RemoteInterpreter, TooMany, unwrap, wrap
from torl_trl.interpreters import (
    ExecutionResult,
    ExecutionStatus,
    InterpreterClosed,
    InterpreterError,
    InterpreterUnavailable,
)

LIMITS = {"timeout_seconds": 5, "max_output_chars": 1000, "rlimits": {"RLIMIT_CORE": 0}}
FIELDS = {"status": "ok", "stdout": "1\n", "stderr": "", "seconds": 0.5, "truncated": False}


def line(data: bytes | object, mark: str = "mark ") -> str:
    """A line with a result, or with bytes instead."""
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    return f"\n{mark}{base64.b64encode(zlib.compress(data)).decode()}\n"


def test_a_wrapped_program_prints_its_result():
    text, mark = wrap("print('π')\nprint('torl-result-0 x')\n1/0", **LIMITS)
    printed = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    result = unwrap(f"noise{printed}noise", mark)
    assert (result.status, result.stdout) == (ExecutionStatus.ERROR, "π\ntorl-result-0 x\n")
    assert "ZeroDivisionError" in result.stderr


def test_a_result_is_what_stands_behind_its_own_mark():
    assert unwrap(line(FIELDS), "mark ") == ExecutionResult(ExecutionStatus.OK, "1\n", "", 0.5)
    assert unwrap(line(FIELDS), "other ") is None
    assert unwrap(line(FIELDS)[:-9], "mark ") is None
    assert unwrap(line(FIELDS | {"stdout": "\ud800"}), "mark ").stdout == "?"  # which nothing could write down


@pytest.mark.parametrize(
    "forged",
    [
        *({name: value for name, value in FIELDS.items() if name != left_out} for left_out in FIELDS),
        FIELDS | {"queue_seconds": 0.0},
        *(FIELDS | {name: None} for name in FIELDS),
        FIELDS | {"status": "fine"},
        FIELDS | {"stdout": 1},
        FIELDS | {"seconds": "1"},
        FIELDS | {"seconds": -1.0},
        FIELDS | {"seconds": float("inf")},
        FIELDS | {"truncated": 0},
        [],
        "ok",
        None,
        b"[" * 100_000,
        b"\xff",
        b" " * (100 << 20),
    ],
    ids=lambda forged: repr(forged)[:60],
)
def test_a_forged_result_is_none(forged):
    assert unwrap(line(forged), "mark ") is None
    assert unwrap(f"\nmark {json.dumps(FIELDS)}\n", "mark ") is None


class Toy(RemoteInterpreter):
    """Programs are Python expressions, over `self`; `troubles` come first, one an attempt."""

    def __init__(self, *troubles: Exception, not_ready: Exception | None = None, **options) -> None:
        defaults = {"slots": 1, "timeout_seconds": 1, "memory_mb": 1, "max_output_chars": 1, "max_file_mb": 1}
        super().__init__("toy", **defaults | {"retries": 2, "backoff_seconds": 0.001} | options)
        self.troubles = list(troubles)
        self.not_ready = not_ready
        self.used: list[int] = []
        self._start()

    async def _open(self) -> None: ...

    async def _prepare(self, slot: int) -> None:
        if self.not_ready:
            raise self.not_ready

    async def _attempt(self, slot: int, code: str) -> ExecutionResult:
        self.used.append(slot)
        if self.troubles:
            raise self.troubles.pop(0)
        return ExecutionResult(ExecutionStatus.OK, str(eval(code)), "", 0.0)

    async def _close(self) -> None: ...


def outcome(*troubles: Exception) -> tuple[object, int]:
    """The status, or the kind of error, of a call that meets `troubles`; and how many attempts it had."""
    with Toy(*troubles) as interpreter:
        future = interpreter.submit("6 * 7")
        error = future.exception(10)
        return type(error) if error else str(future.result().status), len(interpreter.used)


OURS, BAD, BUSY, MAYBE = InterpreterError("x"), Refused("x"), TooMany("x"), Doubtful("x")


@pytest.mark.parametrize(
    ("troubles", "expected"),
    [
        ([], ("ok", 1)),
        ([OURS] * 2, ("ok", 3)),
        ([OURS] * 3, (InterpreterError, 3)),
        ([InterpreterUnavailable("x")] * 3, (InterpreterUnavailable, 3)),
        ([BAD], (Refused, 1)),
        ([MAYBE], ("ok", 2)),
        ([MAYBE, OURS, OURS], ("ok", 4)),
        ([OURS, MAYBE, BUSY, MAYBE], ("killed", 4)),
        ([OURS, OURS, MAYBE, OURS], (InterpreterError, 4)),
        ([BUSY, OURS] * 2 + [BUSY] * 3, ("ok", 8)),
        ([KeyError("a bug")], (KeyError, 1)),
    ],
)
def test_each_kind_of_failure_is_tried_again_as_often_as_it_makes_sense(troubles, expected):
    assert outcome(*troubles) == expected


def test_too_many_requests_are_waited_out_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(TooMany, "retries", 9)
    monkeypatch.setattr("torl_interpreters.remote._LONGEST_PAUSE_SECONDS", 0.001)
    assert outcome(*[BUSY] * 9) == ("ok", 10)
    assert outcome(*[BUSY] * 11) == (TooMany, 10)


def test_few_calls_use_few_slots():
    with Toy(slots=3) as interpreter:
        for n in range(5):
            assert interpreter.submit(f"{n}").result(10).stdout == str(n)
        assert set(interpreter.used) == {0}


def test_slots_that_could_not_be_made_ready_come_back_when_the_service_does():
    class Limping(Toy):
        """Only slot 0 can be made ready, until a call is answered."""

        async def _prepare(self, slot: int) -> None:
            if slot and not self.used:
                raise InterpreterUnavailable("not yet")

        async def _attempt(self, slot: int, code: str) -> ExecutionResult:
            await asyncio.sleep(0.05)
            return await super()._attempt(slot, code)

    with Limping(slots=3, retries=0) as interpreter:
        futures = [interpreter.submit("1") for _ in range(9)]
        assert [future.result(10).stdout for future in futures] == ["1"] * 9
        assert set(interpreter.used) == {0, 1, 2}


@pytest.mark.parametrize("not_ready", [InterpreterUnavailable("gone"), KeyError("a bug")])
def test_calls_fail_when_no_slot_can_be_made_ready_and_later_ones_go_on(not_ready):
    with Toy(slots=2, not_ready=not_ready) as interpreter:
        futures = [interpreter.submit("1") for _ in range(5)]
        assert [type(future.exception(10)) for future in futures] == [type(not_ready)] * 5
        interpreter.not_ready = None
        assert interpreter.submit("6 * 7").result(10).stdout == "42"
        assert interpreter.used == [0]


def test_close_fails_what_waits_and_ends_the_thread():
    interpreter = Toy(not_ready=InterpreterUnavailable("gone"), retries=9, backoff_seconds=60)
    futures = [interpreter.submit("1") for _ in range(3)]
    assert futures[1].cancel()
    interpreter.close()
    interpreter.close()
    assert [type(future.exception()) for future in (futures[0], futures[2])] == [InterpreterClosed] * 2
    with pytest.raises(InterpreterClosed, match="The toy interpreter is closed: make a new one"):
        interpreter.submit("1")
    assert not [thread for thread in threading.enumerate() if thread.name == "interpreter-toy"]
