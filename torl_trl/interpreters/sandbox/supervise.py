"""Watches one program: reads what it prints, ends it when it runs too long or prints too much, says how it ended.

`supervise` serves the fork server, whose program is a child of its own; `run_alone` starts a fresh Python for the
program, which is what remote services do with this file's text. Their own rules for output, time and leftover
processes do not matter then, and every backend gives the same result.
"""

import base64
import codecs
import contextlib
import json
import math
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
    """Text read from a pipe, at most `max_chars` of it; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, max_chars):
        self.parts = []
        self.room = max_chars
        self.overflow = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data):
        """Take what was read; empty data is the end."""
        text = self.decoder.decode(data, final=not data)
        self.overflow = self.overflow or len(text) > self.room
        self.parts.append(text[: self.room])
        self.room -= len(self.parts[-1])

    @property
    def text(self):
        return "".join(self.parts)


def supervise(pid, stdout, stderr, timeout, max_chars, end, ready=None, excess=None):
    """Read the pipes `stdout` and `stderr` of the child `pid` until it ends or breaks a limit.

    `end()` kills it with all that it started and returns its wait status. The clock starts now, or when `ready` gets a
    byte. `excess()`, asked now and then, names the status of a program that breaks another limit, or says None.
    Returns the fields of an ExecutionResult as a dict; their status is None when the child never was ready.
    """
    streams = {stdout: Stream(max_chars), stderr: Stream(max_chars)}
    child = watch(pid)
    poll = select.poll()
    for fd in (stdout, stderr, child) if ready is None else (stdout, stderr, child, ready):
        poll.register(fd, select.POLLIN)
    started = time.perf_counter()
    is_ready = ready is None
    deadline = started + (timeout if is_ready else STARTUP_SECONDS)
    ended = timed_out = False
    broken = None
    next_look = started + LOOK_SECONDS if excess is not None else math.inf
    while not ended and not timed_out and not broken and not any(stream.overflow for stream in streams.values()):
        for fd, _ in poll.poll(max(0.0, min(deadline, next_look) - time.perf_counter()) * 1000 + 1):
            if fd == child:
                ended = True
            elif fd == ready:
                poll.unregister(ready)
                is_ready = bool(os.read(ready, 1))
                started = time.perf_counter()
                deadline = started + timeout
            elif not take(fd, streams[fd]):
                poll.unregister(fd)
        timed_out = time.perf_counter() >= deadline
        if time.perf_counter() >= next_look and not ended:
            broken = excess()
            next_look = time.perf_counter() + LOOK_SECONDS
    seconds = time.perf_counter() - started
    wait_status = end()
    os.close(child)
    drain(streams)
    overflow = any(stream.overflow for stream in streams.values())
    code = os.waitstatus_to_exitcode(wait_status)
    status = broken or status_of(code, streams[stderr].text, timed_out and not ended, overflow)
    return {
        "status": status if is_ready else None,
        "stdout": streams[stdout].text,
        "stderr": streams[stderr].text,
        "seconds": seconds,
        "truncated": overflow,
    }


def watch(pid):
    """A descriptor that can be read when the child `pid` has ended."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    queue = select.kqueue()  # macOS (not measured)
    event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
    queue.control([event], 0)
    return os.dup(queue.fileno())


def take(fd, stream):
    """Read once; False at the end of the pipe."""
    data = os.read(fd, CHUNK)
    stream.feed(data)
    return bool(data)


def drain(streams):
    """Read what is left in the pipes of a program that was ended."""
    poll = select.poll()
    for fd in streams:
        poll.register(fd, select.POLLIN)
    deadline = time.perf_counter() + DRAIN_SECONDS
    left = len(streams)
    while left and time.perf_counter() < deadline:
        for fd, _ in poll.poll(DRAIN_SECONDS * 1000):
            if not take(fd, streams[fd]):
                poll.unregister(fd)
                left -= 1


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


def run_alone(code, program_source, timeout, max_chars, rlimits, environment, flags=(), packages="", started=None):
    """Run `code` (text) in a fresh Python in a folder of its own, with no variables but `environment`.

    `program_source` is the text of program.py, `flags` are Python's, `packages` are folders as in PATH. `started` is
    called with the Popen object. Returns as `supervise` does.
    """
    folder = tempfile.mkdtemp(prefix="torl-")
    limits = [f"{name}={value}" for name, value in rlimits.items()]
    # The program and all that it starts hold the write end: its end means that none of them is left.
    alive, held = os.pipe()
    try:
        with tempfile.TemporaryFile() as source:
            source.write(code.encode("utf-8", "replace"))
            source.seek(0)
            python = [sys.executable, *flags, "-s", "-u", "-X", "utf8", "-c", program_source]
            process = subprocess.Popen(
                [*python, str(held), packages, *limits],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=dict(environment, HOME=folder, TMPDIR=folder),
                start_new_session=True,
                pass_fds=(held,),
            )
        os.close(held)
        held = None
        if started is not None:
            started(process)

        def end():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says EPERM
                os.killpg(process.pid, signal.SIGKILL)
            _, wait_status = os.waitpid(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(wait_status)
            kill_escaped(alive, folder)
            return wait_status

        out, err = process.stdout.fileno(), process.stderr.fileno()
        with process.stdout, process.stderr:
            return supervise(process.pid, out, err, timeout, max_chars, end, alive)
    finally:
        for fd in (alive, held):
            if fd is not None:
                os.close(fd)
        delete(folder)


def kill_escaped(alive, folder):
    """Kill what left the process group (setsid), found by its environment; where there is a /proc."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    while any(event & select.POLLIN for _, event in poll.poll(DRAIN_SECONDS * 1000)):
        if not os.read(alive, 1):
            return
    if poll.poll(0):
        return
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
    """Print the fields of a result as one line after `mark`: compressed, since services cut or hang on long lines.

    What is too long even so loses half of its text, and again.
    """
    while True:
        line = base64.b64encode(zlib.compress(json.dumps(fields).encode())).decode()
        if len(line) < LONGEST_LINE:
            break
        halves = {name: fields[name][: len(fields[name]) // 2] for name in ("stdout", "stderr")}
        fields = dict(fields, truncated=True, **halves)
    sys.stdout.write("\n" + mark + line + "\n")
    sys.stdout.flush()
