"""Watches one program: reads what it prints, ends it when it runs too long or prints too much, says how it ended.

`supervise` serves the fork server, whose program is a child of its own; `run_alone` starts a fresh Python for the
program, which is what remote services do with this file's text. Their own rules for output, time and leftover
processes do not matter then, and every backend gives the same result. Linux.
"""

import codecs
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

STARTUP_SECONDS = 60.0  # for Python itself, before the program; generous, because then it is the machine that is slow
DRAIN_SECONDS = 0.5  # killed processes have closed their pipes by then, or nobody could kill them
CHUNK = 65536


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


def supervise(pid, stdout, stderr, timeout, max_chars, end, ready=None):
    """Read the pipes `stdout` and `stderr` of the child `pid` until it ends or breaks a limit.

    `end()` kills it with all that it started and returns its wait status. The clock starts now, or when `ready` gets a
    byte. Returns the fields of an ExecutionResult as a dict, or None when the child ended before it was ready.
    """
    streams = {stdout: Stream(max_chars), stderr: Stream(max_chars)}
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (stdout, stderr, pidfd) if ready is None else (stdout, stderr, pidfd, ready):
        poll.register(fd, select.POLLIN)
    started = time.perf_counter()
    is_ready = ready is None
    deadline = started + (timeout if is_ready else STARTUP_SECONDS)
    ended = timed_out = False
    while not ended and not timed_out and not any(stream.overflow for stream in streams.values()):
        for fd, _ in poll.poll(max(0.0, deadline - time.perf_counter()) * 1000 + 1):
            if fd == pidfd:
                ended = True
            elif fd == ready:
                poll.unregister(ready)
                is_ready = bool(os.read(ready, 1))
                started = time.perf_counter()
                deadline = started + timeout
            elif not take(fd, streams[fd]):
                poll.unregister(fd)
        timed_out = time.perf_counter() >= deadline
    seconds = time.perf_counter() - started
    wait_status = end()
    os.close(pidfd)
    drain(streams)
    if not is_ready:
        return None
    overflow = any(stream.overflow for stream in streams.values())
    code = os.waitstatus_to_exitcode(wait_status)
    return {
        "status": status_of(code, streams[stderr].text, timed_out and not ended, overflow),
        "stdout": streams[stdout].text,
        "stderr": streams[stderr].text,
        "seconds": seconds,
        "truncated": overflow,
    }


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


def run_alone(code, program_source, timeout, max_chars, rlimits, environment):
    """Run `code` (text) in a fresh Python in a folder of its own, with no variables but `environment`.

    `program_source` is the text of program.py. Returns as `supervise` does; None when Python did not start.
    """
    folder = tempfile.mkdtemp(prefix="torl-")
    limits = [f"{name}={value}" for name, value in rlimits.items()]
    ready, started = os.pipe()
    try:
        with tempfile.TemporaryFile() as source:
            source.write(code.encode("utf-8", "replace"))
            source.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-s", "-u", "-X", "utf8", "-c", program_source, str(started), "", *limits],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=dict(environment, HOME=folder, TMPDIR=folder),
                start_new_session=True,
                pass_fds=(started,),
            )
        os.close(started)
        started = None

        def end():
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            _, wait_status = os.waitpid(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(wait_status)
            return wait_status

        out, err = process.stdout.fileno(), process.stderr.fileno()
        with process.stdout, process.stderr:
            return supervise(process.pid, out, err, timeout, max_chars, end, ready)
    finally:
        for fd in (ready, started):
            if fd is not None:
                os.close(fd)
        delete(folder)


def delete(folder):
    """Delete a folder that a program has filled, with anything: unreadable, deep, huge."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(folder)
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(folder):
            subprocess.run([*command, folder], **quiet)


def print_result(mark, **call):
    """Run a call and print its result as one line of JSON after `mark`."""
    sys.stdout.write("\n" + mark + json.dumps(run_alone(**call)) + "\n")
    sys.stdout.flush()
