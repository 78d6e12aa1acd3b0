"""Watches one program: reads what it prints, ends it when it runs too long or prints too much, says how it ended.

`supervise` serves the fork server, whose program is a child of its own; `run_alone` starts a fresh Python for the
program, which is what remote services do with this file's text. Their own rules for output, time and leftover
processes do not matter then, and every backend gives the same result.
"""

import base64
import codecs
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import zlib

STARTUP_SECONDS = 60.0  # for Python itself, before the program; generous, because then it is the machine that is slow
DRAIN_SECONDS = 0.5  # killed processes have closed their pipes by then, or nobody could kill them
LOOK_SECONDS = 0.1
CHUNK = 65536
STACK = 8 << 20
LONGEST_LINE = 180_000


class Stream:
    """Text read from the pipe `fd`, at most `max_chars` of it; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, fd, max_chars):
        self.fd, self.room = fd, max_chars
        self.parts = []
        self.overflow = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self):
        """Read once; False at the end of the pipe."""
        data = os.read(self.fd, CHUNK)
        text = self.decoder.decode(data, final=not data)
        self.overflow = self.overflow or len(text) > self.room
        self.parts.append(text[: self.room])
        self.room -= len(self.parts[-1])
        return bool(data)

    @property
    def text(self):
        return "".join(self.parts)


def supervise(pid, stdout, stderr, timeout, max_chars, end, ready=None, excess=None):
    """Read the pipes `stdout` and `stderr` of the child `pid` until it ends or breaks a limit.

    `end()` kills it with all that it started and returns its exit code, or a signal's number below 0. The clock starts
    now, or when `ready` gets a byte. `excess()`, asked now and then, names the status of a program that breaks another
    limit, or says None. Returns the fields of an ExecutionResult as a dict; their status is None when the child never
    was ready.
    """
    out, err = Stream(stdout, max_chars), Stream(stderr, max_chars)
    pipes = {stdout: out, stderr: err}  # those that are open
    child = watch(pid)
    is_ready = ready is None
    started = time.perf_counter()
    deadline = started + (timeout if is_ready else STARTUP_SECONDS)
    next_look = started + LOOK_SECONDS
    ended = timed_out = False
    broken = None
    while not (ended or timed_out or broken or out.overflow or err.overflow):
        watched = [*pipes, child] if ready is None else [*pipes, child, ready]
        for fd in wait_for(watched, min(deadline, next_look) - time.perf_counter()):
            if fd == child:
                ended = True
            elif fd == ready:
                is_ready, ready = bool(os.read(ready, 1)), None
                started = time.perf_counter()
                deadline = started + timeout
            elif not pipes[fd].read():
                del pipes[fd]
        timed_out = time.perf_counter() >= deadline
        if time.perf_counter() >= next_look and not ended:
            broken = excess() if excess else None
            next_look = time.perf_counter() + LOOK_SECONDS
    seconds = time.perf_counter() - started
    code = end()
    os.close(child)
    deadline = time.perf_counter() + DRAIN_SECONDS
    while pipes and time.perf_counter() < deadline:
        for fd in wait_for(pipes, DRAIN_SECONDS):
            if not pipes[fd].read():
                del pipes[fd]
    overflow = out.overflow or err.overflow
    status = broken or status_of(code, err.text, timed_out and not ended, overflow)
    fields = {"stdout": out.text, "stderr": err.text, "seconds": seconds, "truncated": overflow}
    return {"status": status if is_ready else None, **fields}


def wait_for(descriptors, seconds):
    """Those that can be read or have ended, after at most `seconds`."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 1)]


def watch(pid):
    """A descriptor that can be read when the child `pid` has ended."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    queue = select.kqueue()  # macOS (not measured)
    event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
    queue.control([event], 0)
    return os.dup(queue.fileno())


def status_of(code, stderr, timed_out, overflow):
    """The name of an ExecutionStatus; `code` is an exit code, or a signal's number below 0."""
    if overflow:
        return "output_limit"
    if timed_out or code == -signal.SIGXCPU:
        return "timeout"
    if code == 0:
        return "ok"
    if code < 0:
        return "killed"
    exception = stderr.rstrip().rpartition("\n")[2].partition(":")[0]  # numpy has a MemoryError of its own
    return "memory" if exception.endswith("MemoryError") else "error"


def run_alone(code, program_source, timeout, max_chars, rlimits, environment, flags=(), packages="", excess=None):
    """Run `code` (text) in a fresh Python in a folder of its own, with no variables but `environment`.

    `program_source` is the text of program.py, `flags` are Python's, `packages` are folders as in PATH. `excess` and
    what is returned: see `supervise`.
    """
    folder = tempfile.mkdtemp(prefix="torl-")
    limits = [f"{name}={value}" for name, value in rlimits.items()]
    try:
        # The program and all that it starts hold the write end: its end means that none of them is left.
        alive, held = os.pipe()
        with open(alive, "rb", buffering=0):
            with open(held, "wb"), tempfile.TemporaryFile() as source:
                source.write(code.encode("utf-8", "replace"))
                source.seek(0)
                python = [sys.executable, *flags, "-s", "-u", "-X", "utf8", "-c", program_source]
                process = subprocess.Popen(
                    [*python, str(held), packages, *limits],
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env=dict(environment, HOME=folder, TMPDIR=folder, MPLCONFIGDIR=folder),
                    start_new_session=True,
                    pass_fds=(held,),
                )

            def end():
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says EPERM
                    os.killpg(process.pid, signal.SIGKILL)
                process.returncode = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
                kill_escaped(alive, folder)
                return process.returncode

            with process.stdout as out, process.stderr as err:
                return supervise(process.pid, out.fileno(), err.fileno(), timeout, max_chars, end, alive, excess)
    finally:
        delete(folder)


def kill_escaped(alive, folder):
    """Kill what left the process group (setsid), found by its environment; where there is a /proc."""
    deadline = time.perf_counter() + DRAIN_SECONDS
    while time.perf_counter() < deadline and wait_for([alive], DRAIN_SECONDS):
        if not os.read(alive, 1):
            return  # nobody is left
    mark = f"TMPDIR={folder}".encode()
    for process in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(process)}/environ", "rb") as environment:
            if mark in environment.read().split(b"\0"):
                os.kill(int(process), signal.SIGKILL)


def delete(folder):
    """Delete a folder that a program has filled, with anything: unreadable, deep, huge."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(folder)
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(folder):
            subprocess.run([*command, folder], **quiet)


def print_result(mark, **call):
    """Run a call and print its result."""
    # A service may set the limit of the stack to that of the memory; threads take it as the size of their stacks, and
    # none could start.
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if not 0 <= soft <= STACK:  # infinity is below 0
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, hard))
    print_fields(mark, run_alone(**call))


def print_fields(mark, fields):
    """Print the fields of a result as one line after `mark`: compressed, since services cut or hang on long lines."""
    while True:  # what is too long even so loses half of its text, and again
        line = base64.b64encode(zlib.compress(json.dumps(fields).encode())).decode()
        if len(line) < LONGEST_LINE:
            break
        halves = {name: fields[name][: len(fields[name]) // 2] for name in ("stdout", "stderr")}
        fields = dict(fields, truncated=True, **halves)
    sys.stdout.write("\n" + mark + line + "\n")
    sys.stdout.flush()
