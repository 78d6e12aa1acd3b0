"""The hostile set (hostile.py) in each tier, as root and as an ordinary user: nothing gets out, stays or is harmed."""

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from torl_interpreters.tiers import Tier, candidates
from torl_trl.interpreters import EmbeddedInterpreter, ExecutionResult, ExecutionStatus, InterpreterUnavailable

sys.path.insert(0, os.path.dirname(__file__))
from hostile import FAST, HOSTILE, PRELUDE, Hostile

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the programs attack Linux on x86-64"
)
CANARY = f"canary-{os.urandom(8).hex()}"
SECRET_FILES = (".ssh/id_rsa", ".cache/huggingface/token", ".netrc", "project/train.py")
SECRET_VARIABLES = ("HF_TOKEN", "WANDB_API_KEY", "E2B_API_KEY")
ORDINARY = 65534  # nobody
LIMITS = {"slots": 1, "timeout_seconds": 3.0, "memory_mb": 512, "max_output_chars": 20_000, "max_file_mb": 4}
TEMPORARY = tempfile.gettempdir()
libc = ctypes.CDLL(None)


class Host:
    """What there is to be attacked, and whether it is as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in SECRET_FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(CANARY)
            (folder / name).chmod(0o644)  # its mode alone would not keep another user out
        for parent in (folder, *folder.rglob("*/")):
            parent.chmod(0o755)
        self.victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(0)
        self.unix: list[socket.socket] = []
        self.addresses: list[str] = []
        for kind, address in (
            (socket.SOCK_DGRAM, str(folder / "dgram")),
            (socket.SOCK_STREAM, str(folder / "stream")),
            (socket.SOCK_DGRAM, f"\0{CANARY}"),
        ):
            self.unix.append(socket.socket(socket.AF_UNIX, kind))
            self.unix[-1].bind(address)
            self.unix[-1].settimeout(0)
            self.addresses.append(address)
            if kind == socket.SOCK_STREAM:
                self.unix[-1].listen()
            if not address.startswith("\0"):
                os.chmod(address, 0o777)
        self.shm = libc.shmget(0, 4096, 0o1666)
        self.posix = shared_memory.SharedMemory(create=True, size=4096)
        self.before = self.state()

    def names(self, name: str, server_pid: int) -> dict[str, object]:
        """What a program is told."""
        return {
            "name": name,
            "folder": str(self.folder),
            "secrets": [str(self.folder / file) for file in SECRET_FILES],
            "pid": os.getpid(),
            "victim": self.victim.pid,
            "server": server_pid,
            "port": self.server.getsockname()[1],
            "sockets": self.addresses[:2],
            "shm": self.shm,
            "posix": self.posix.name,
            "queue": "torl",
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
        }

    def state(self) -> list[object]:
        """All that a program may not change."""
        paths = [self.folder, *sorted(self.folder.rglob("*"))]
        files = [(str(path), *os.lstat(path)[:7], os.lstat(path).st_mtime_ns, os.listxattr(path)) for path in paths]
        texts = [(self.folder / name).read_text() for name in SECRET_FILES]
        segments = [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
        victim = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()
        return [
            files,
            texts,
            str(self.shm) in segments,
            [name for name in os.listdir("/dev/shm") if name == self.posix.name or left_in_shared_memory(name)],
            socket.gethostname(),
            victim[0] in "SR",  # neither ended nor stopped
            [victim[index] for index in (15, 16, 37, 38)],  # its priorities and scheduler
            sorted(os.sched_getaffinity(self.victim.pid)),
            self.heard(),
            len(os.listdir("/proc/self/fd")),
        ]

    def heard(self) -> list[str]:
        """What reached our sockets."""
        heard = []
        for one in (self.server, *self.unix):
            with contextlib.suppress(BlockingIOError):
                heard.append(str(one.recv(100) if one.type == socket.SOCK_DGRAM else one.accept()[1]))
        return heard

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for one in (self.server, *self.unix):
            one.close()
        libc.shmctl(self.shm, 0, None)
        self.posix.close()
        self.posix.unlink()


def left_in_shared_memory(name: str) -> bool:
    """By a program of ours, and not by another run of these tests."""
    with contextlib.suppress(FileNotFoundError):
        owner = os.lstat(f"/dev/shm/{name}").st_uid
        return owner in (os.getuid(), *range(60_000, 60_010)) and not name.startswith("psm_")
    return False


def processes() -> dict[int, tuple[int, int]]:
    """All that have not ended: their parents, and when they started, since numbers are used again."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(path.parent.name)] = int(fields[1]), int(fields[19])
    return found


def descendants() -> set[tuple[int, int]]:
    """The processes below this one, by number and start."""
    every = processes()
    below = {os.getpid()}
    while more := {pid for pid, (parent, _) in every.items() if parent in below} - below:
        below |= more
    return {(pid, every[pid][1]) for pid in below - {os.getpid()}}


def threads_named(name: str) -> list[str]:
    """All on this machine: a program that got out would not be below us."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            zombie = ") Z " in (path.parent / "stat").read_text()
            if path.read_text().strip() == name and not zombie:
                found.append(path.parent.name)
    return found


def soon(condition: object) -> bool:
    deadline = time.perf_counter() + 5
    while not condition() and time.perf_counter() < deadline:
        time.sleep(0.01)
    return condition()


class Box:
    """An interpreter of one tier, and the host around it."""

    def __init__(self, interpreter: EmbeddedInterpreter, host: Host) -> None:
        self.interpreter = interpreter
        self.host = host
        self.count = 0

    def run(self, code: str) -> tuple[ExecutionResult, str]:
        """The result and the name that its processes had."""
        self.count += 1
        name = f"h{os.getpid()}n{self.count}"
        server = getattr(self.interpreter._backend, "_server", None)
        told = f"HOST = {self.host.names(name, server._process.pid if server else os.getppid())!r}\n"
        return self.interpreter.submit(told + PRELUDE + code).result(timeout=120), name

    def contains(self, hostile: Hostile) -> None:
        """Run the program and check everything."""
        tier = self.interpreter.tier
        backend = self.interpreter._backend
        server = getattr(backend, "_server", None)
        result, name = self.run(hostile.code)
        text = result.stdout + result.stderr
        assert "ESCAPED" not in text and CANARY not in text, text
        ends = (hostile.ends_none or hostile.ends) if tier == Tier.NONE else hostile.ends
        assert result.status in ends, (result.status, text[-2000:])
        if result.status == ExecutionStatus.OK and "'done'" in hostile.code:
            assert result.stdout.endswith("done\n"), text[-2000:]
        assert result.seconds < LIMITS["timeout_seconds"] + 5
        assert len(result.stdout) <= LIMITS["max_output_chars"]
        assert soon(lambda: not threads_named(name)), threads_named(name)
        if hostile.afterwards:
            after, _ = self.run(hostile.afterwards)
            assert (after.status, after.stdout) == (ExecutionStatus.OK, "clean\n"), after
        again, _ = self.run("import numpy\nopen('f', 'w').write('x')\nprint(2**100, numpy.arange(4).sum())")
        assert (again.status, again.stdout) == (ExecutionStatus.OK, "1267650600228229401496703205376 6\n"), again
        assert getattr(backend, "_server", None) is server, "the fork server was started again"
        assert self.host.state() == self.host.before


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=TEMPORARY) as folder:
        host = Host(Path(folder))
        yield host
        host.close()


def open_box(host: Host, tier: str) -> Iterator[Box]:
    """A box in an environment with secrets; when it is closed, nothing of it may be left."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="hostile-", dir=TEMPORARY) as folder,
    ):
        os.chmod(folder, 0o755)
        patch.setattr(tempfile, "tempdir", folder)
        for variable in SECRET_VARIABLES:
            patch.setenv(variable, CANARY)
        patch.setenv("HOME", str(host.folder))
        before = descendants()
        try:
            interpreter = EmbeddedInterpreter(isolation=tier, **LIMITS)
        except InterpreterUnavailable as error:
            pytest.skip(f"no tier {tier} here: {error}")
        with interpreter:
            ours = descendants() - before
            host.before = host.state()
            yield Box(interpreter, host)
        assert soon(lambda: not ours & {(pid, started) for pid, (_, started) in processes().items()})
        assert not [name for name in os.listdir(folder) if name.startswith("torl-")]


@pytest.fixture
def place() -> Iterator[str]:
    """An empty folder for the temporary files of another process."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=TEMPORARY) as folder:
        os.chmod(folder, 0o755)
        yield folder


@pytest.fixture(scope="module", params=["root", "user", "none"])
def box(request: pytest.FixtureRequest, host: Host) -> Iterator[Box]:
    yield from open_box(host, request.param)


@pytest.fixture(scope="module")
def best_box(host: Host) -> Iterator[Box]:
    yield from open_box(host, candidates()[0])


@pytest.fixture(scope="module")
def plain_box(host: Host) -> Iterator[Box]:
    yield from open_box(host, "plain")


@pytest.mark.parametrize("name", FAST)
def test_a_few_in_the_best_tier(best_box: Box, name: str) -> None:
    best_box.contains(HOSTILE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(box: Box, name: str) -> None:
    box.contains(HOSTILE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in HOSTILE.items() if one.plain])
def test_tier_plain_keeps_its_limits(plain_box: Box, name: str) -> None:
    plain_box.contains(HOSTILE[name])


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["root", "user", "none"])
def test_a_program_does_not_reach_the_one_in_the_next_slot(host: Host, tier: str) -> None:
    attacks = [
        "signals to all",
        "kills its process group",
        "signals to the slot",
        "a fork bomb",
        "limits of the slot",
        "memory in many processes",
        "everything is removed",
    ]
    for box in open_box(host, tier):
        with EmbeddedInterpreter(isolation=box.interpreter.tier, **LIMITS | {"slots": 2}) as two:
            box.interpreter = two
            for attack in attacks:
                code = "open('f', 'w').write('x')\nimport time; time.sleep(1.2)\nprint(open('f').read())"
                victim = two.submit(code)
                time.sleep(0.1)
                box.run(HOSTILE[attack].code)
                assert victim.result(timeout=60).stdout == "x\n", attack


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["root", "user", "none"])
def test_a_trainer_that_is_killed_leaves_nothing_even_when_a_fork_of_it_lives_on(tier: str, place: str) -> None:
    name = f"trainer{os.getpid()}"
    code = f"""
import os, time
from torl_trl.interpreters import EmbeddedInterpreter, InterpreterUnavailable
try:
    interpreter = EmbeddedInterpreter(slots=2, isolation={tier!r}, timeout_seconds=60)
except InterpreterUnavailable as error:
    print(error, flush=True)
    raise SystemExit
interpreter.submit("import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0); time.sleep(60)")
time.sleep(0.5)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print("ready", child, flush=True)
time.sleep(60)
"""
    environment = os.environ | {"TMPDIR": place}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = trainer.stdout.readline()
        if not line.startswith("ready"):
            pytest.skip(f"no tier {tier} here: {line}")
        assert threads_named(name)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    try:
        assert soon(lambda: not threads_named(name))
        assert soon(lambda: os.listdir(place) == [])
    finally:
        os.kill(int(line.split()[1]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="this run is one of an ordinary user")
def test_the_same_as_an_ordinary_user() -> None:
    """All of this file in a process of an ordinary user, in a copy of what it needs that anyone can read."""
    user = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=TEMPORARY) as name:
        folder = Path(name)
        root = Path(__file__).parents[1]
        shutil.copytree(root / "torl_trl", folder / "torl_trl", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests").mkdir()
        for file in ("pyproject.toml", "tests/hostile.py", "tests/test_hostile.py"):
            shutil.copy(root / file, folder / file)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        environment = os.environ | {"PYTHONPATH": name, "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("TORL_TEST_RESULT", None)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", "tests"]
        try:
            works = subprocess.run([sys.executable, "-c", "import pytest, numpy"], **user, capture_output=True)
        except PermissionError:
            works = None
        if works is None or works.returncode:
            pytest.skip(f"user {ORDINARY} cannot read the Python of these tests, {os.path.realpath(sys.executable)}")
        run = subprocess.run(command, **user, cwd=folder, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
