"""Which tier of isolation the embedded interpreter takes, and what happens when its fork server ends."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from torl_interpreters import tiers
from torl_interpreters.server import ServerDied, ServerProcess
from torl_interpreters.tiers import Tier, candidates
from torl_trl.errors import UserError
from torl_trl.interpreters import EmbeddedInterpreter, ExecutionStatus, InterpreterUnavailable, get_interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
SERVER_TIERS = [tier for tier in ("root", "user", "none") if tier in candidates()]


def best_without_bubblewrap() -> Tier:
    return candidates()[-2]


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "find_bubblewrap", lambda: None)


def fork_servers() -> set[int]:
    """Process ids of all fork servers and their slots on this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"fork_server.py" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def server_and_slot(pids: set[int]) -> tuple[int, int]:
    """The fork server among `pids`, and the first process below it."""
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    server = min(pid for pid in pids if not Path(f"/proc/{pid}/comm").read_text().startswith("bwrap"))
    return server, min(pid for pid, parent in parents.items() if parent == server)


def footprints(pids: Iterable[int]) -> dict[int, dict[str, int]]:
    """What each of these processes holds, and its zombies; those that have ended are left out."""
    parents, found = [], {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            parents += [int(parent)] if state == "Z" else []
    for pid in pids:
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            found[pid] = {"pages": pages, "descriptors": descriptors, "zombies": parents.count(pid)}
    return found


def vanish(pids: set[int]) -> bool:
    deadline = time.perf_counter() + 10
    while fork_servers() & pids and time.perf_counter() < deadline:
        time.sleep(0.05)
    return not fork_servers() & pids


# The choice of a tier


def test_auto_takes_the_best_tier_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), EmbeddedInterpreter(slots=1) as interpreter:
        assert interpreter.tier in candidates()
        assert f"in tier '{interpreter.tier}'" in caplog.text


def test_without_bubblewrap_auto_falls_back_and_warns(no_bubblewrap: None, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedInterpreter(slots=1) as interpreter:
        assert interpreter.tier == best_without_bubblewrap()
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert f"in tier '{interpreter.tier}'" in warning and "there is no bubblewrap" in warning


@pytest.mark.parametrize("isolation", ["strict", "user"])
def test_what_is_asked_for_and_not_there_is_refused_in_one_sentence(no_bubblewrap: None, isolation: str) -> None:
    with pytest.raises(UserError, match=r"cannot isolate .*user: .*there is no bubblewrap.*install bubblewrap"):
        get_interpreter("embedded", isolation=isolation)


def test_strict_goes_down_to_the_named_tier(no_bubblewrap: None) -> None:
    with EmbeddedInterpreter(slots=1, isolation="strict", strict_tier="none") as interpreter:
        assert interpreter.tier == Tier.NONE


def test_a_tier_whose_programs_reach_our_files_fails_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel that accepts a protection and does not keep it."""
    monkeypatch.setattr("torl_interpreters.tiers.SYSTEM_PATHS", ("/",))
    with pytest.raises(InterpreterUnavailable, match=r"a program can .*'read a file of ours'"):
        EmbeddedInterpreter(slots=1, isolation="none")


@pytest.mark.parametrize(("option", "value"), [("isolation", "docker"), ("strict_tier", "high")])
def test_an_unknown_tier_is_one_sentence(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{option} is '{value}': choose .*root, user, none, plain"):
        get_interpreter("embedded", **{option: value})


# Programs


@pytest.mark.parametrize("tier", SERVER_TIERS)
def test_random_numbers_differ_from_call_to_call(tier: str) -> None:
    code = (
        "import random, numpy, sympy.core.random as s\n"
        "print(random.random(), numpy.random.rand(), numpy.random.default_rng().random(), s.rng.random())"
    )
    with EmbeddedInterpreter(slots=2, isolation=tier) as interpreter:
        results = [interpreter.submit(code).result(timeout=30) for _ in range(8)]
    columns = list(zip(*(result.stdout.split() for result in results), strict=True))
    assert [len(set(column)) for column in columns] == [8] * 4, results[0]


# The server's end


@pytest.mark.parametrize("tier", SERVER_TIERS)
@pytest.mark.parametrize("victim", ["server", "slot"])
def test_a_server_that_ends_is_started_again_and_its_calls_are_run_once_more(tier: str, victim: str) -> None:
    before = fork_servers()
    with EmbeddedInterpreter(slots=2, isolation=tier) as interpreter:
        server, slot = server_and_slot(fork_servers() - before)
        futures = [interpreter.submit(f"import time; time.sleep(0.5); print({n})") for n in range(6)]
        time.sleep(0.7)  # two are done, two run
        os.kill(server if victim == "server" else slot, signal.SIGKILL)
        results = [future.result(timeout=60) for future in futures]
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(6)]
        assert vanish({server, slot})
    assert vanish(fork_servers() - before)


def test_a_program_under_which_the_server_ends_twice_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise ServerDied("gone")

    with EmbeddedInterpreter(slots=1) as interpreter:
        monkeypatch.setattr(ServerProcess, "call", die)
        with pytest.raises(InterpreterUnavailable, match="ended twice"):
            interpreter.submit("print(1)").result(timeout=30)
        monkeypatch.undo()
        assert interpreter.submit("print(1)").result(timeout=30).stdout == "1\n"


@pytest.mark.parametrize("tier", SERVER_TIERS)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_when_the_trainer_is_killed_its_servers_end_with_their_programs(tier: str, busy: bool) -> None:
    before = fork_servers()
    code = f"""
import time
from torl_trl.interpreters import EmbeddedInterpreter
interpreter = EmbeddedInterpreter(slots=2, isolation={tier!r}, timeout_seconds=60)
if {busy}:
    interpreter.submit("while True: pass")
print("ready", flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "ready\n"
    time.sleep(0.2)
    ours = fork_servers() - before
    assert ours
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert vanish(ours)


@pytest.mark.slow
@pytest.mark.parametrize("tier", SERVER_TIERS)
def test_ten_thousand_calls_leak_no_memory_no_descriptor_and_no_zombie(tier: str) -> None:
    before = fork_servers()
    with EmbeddedInterpreter(slots=2, isolation=tier) as interpreter:
        codes = [
            "print(2**100)",
            "1/0",
            "open('left', 'w').write('x' * 1000)",
            "import sympy; print(sympy.factorint(91))",
        ]

        def run(count: int) -> None:
            futures = [interpreter.submit(codes[n % len(codes)]) for n in range(count)]
            statuses = {future.result(timeout=300).status for future in futures}
            assert statuses == {ExecutionStatus.OK, ExecutionStatus.ERROR}

        run(500)
        time.sleep(0.5)  # slots get ready for their next program
        first = footprints((fork_servers() - before) | {os.getpid()})
        run(10_000)
        time.sleep(0.5)
        last = footprints(first)
    staying = first.keys() & last.keys()  # the prepared programs come and go
    assert len(staying) >= 3  # this process, the server, a slot
    servers = staying - {os.getpid()}
    for name, allowed, pids in (("pages", 1.1, servers), ("descriptors", 1.0, staying), ("zombies", 1.0, staying)):
        earlier, later = (sum(found[pid][name] for pid in pids) for found in (first, last))
        assert later <= allowed * earlier, name


def test_forks_of_the_trainer_do_not_keep_a_closed_server_alive() -> None:
    """As the workers of a data loader do, which inherit our descriptors."""
    before = fork_servers()
    interpreter = EmbeddedInterpreter(slots=1)
    ours = fork_servers() - before
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        closer = threading.Thread(target=interpreter.close)
        closer.start()
        closer.join(10)
        assert not closer.is_alive()
        assert vanish(ours)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
