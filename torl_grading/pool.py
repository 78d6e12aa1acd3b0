"""The grader: decides by text what it can, and sends the rest to killable worker processes.

A worker is a plain subprocess with pipes. Not `multiprocessing`, nor pebble which stands on it: spawn and forkserver
import the training script in every worker (measured: 7 s and 765 MB a worker, and again after each kill, instead of
0.3 s and 64 MB; a script without a main guard does not start), fork copies a process that holds CUDA and threads. The
threads here only wait on pipes: algebra in a thread could not be stopped, and a big power holds the GIL.
"""

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torl_grading.equivalence import Reason, check_text, compare_texts
from torl_grading.extraction import extract_answer

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Imports take a second on an idle machine; a starved one gets two minutes before we call it broken."""
SOFT_SHARE = 0.1
"""Of the timeout, as CPU time: then a worker gives up by itself. No benchmark solution takes 0.4 s against itself."""

_PATH = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")


class GraderError(RuntimeError):
    """The grader failed, not the answer: it cannot start its workers, they die, or it is closed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of one completion: `score` is +1.0 or -1.0, `extracted` the content of its last box, `reason` one of
    `Reason`, `seconds` the wall time of the comparison without waiting for a worker."""

    score: float
    correct: bool
    extracted: str | None
    reason: str
    seconds: float = 0.0


def _verdict(extracted: str | None, reason: Reason, seconds: float) -> Verdict:
    correct = reason == Reason.EQUAL
    return Verdict(1.0 if correct else -1.0, correct, extracted, str(reason), seconds)


class _Worker:
    """One worker process, which writes to our stderr. Not thread-safe, but for `process.kill`."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONPATH": _PATH}
        # -P: a file in the working directory must not take the place of a library
        command = [sys.executable, "-P", "-W", "ignore", "-m", "torl_grading.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        try:
            self.process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        except OSError as error:
            raise GraderError(f"Grading worker {sys.executable!r} does not start: {error}.") from error
        self.ready = False

    def ask(self, request: dict[str, Any], seconds: float) -> Reason | None:
        """Return the worker's word. Raises `TimeoutError`, or `EOFError` when it has died; then the worker is done."""
        if not self.ready:
            self.ready = self._read_line(START_SECONDS)["ready"]
        with contextlib.suppress(OSError):  # then there is nothing to read either
            self.process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self.process.stdin.flush()
        reason = self._read_line(seconds)["reason"]
        return None if reason is None else Reason(reason)

    def _read_line(self, seconds: float) -> dict[str, Any]:
        poller = select.poll()  # not `select`, which cannot watch a descriptor over 1023
        poller.register(self.process.stdout, select.POLLIN)
        if not poller.poll(seconds * 1000):
            raise TimeoutError
        if line := self.process.stdout.readline():  # it comes in one piece
            return json.loads(line)
        code = self.process.wait()
        raise TimeoutError if code == -signal.SIGVTALRM else EOFError(f"exit code {code}")

    def close(self) -> None:
        self.process.kill()  # it has no children
        with contextlib.suppress(BrokenPipeError):  # a request was still in the buffer
            self.process.communicate()


class Grader(contextlib.AbstractContextManager):
    """Grades completions against solutions, in `num_workers` processes which start when first needed.

    An answer that takes over `timeout_seconds` of wall time is wrong, its worker is killed, `timeouts` counts it.
    A worker that dies by itself is replaced and the answer tried once more; an answer that kills a second one is wrong
    (`crashed`). Workers that do not start make the future raise `GraderError`: a fault of ours is never a wrong
    answer. Any thread may call any method.
    """

    def __init__(self, num_workers: int = 1, timeout_seconds: float = 5.0):
        if num_workers < 1 or timeout_seconds <= 0:
            raise ValueError(f"num_workers {num_workers!r} and timeout_seconds {timeout_seconds!r} must be positive.")
        self.num_workers, self.timeout_seconds = num_workers, timeout_seconds
        self.timeouts = self.restarts = 0  # answers out of time, and workers that died and were replaced
        self._threads = ThreadPoolExecutor(num_workers, "grader")
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._closed = False

    def submit(self, texts: Sequence[str], solution: str, *, keep_fences: bool = False) -> Future[Verdict]:
        """Grade a completion given as the model's own text, one string per turn.

        `keep_fences` lets boxes in code and output blocks count, as in the released ToRL.
        """
        if isinstance(texts, str):
            raise TypeError("texts is one string: give a list with one string per turn.")
        started = time.perf_counter()
        answer = extract_answer(texts, keep_fences=keep_fences)
        reason = Reason.NO_BOX if answer is None else compare_texts(solution, answer)
        if reason is None:
            return self._start(lambda: _verdict(answer, *self._timed_ask(solution, answer)))
        return self._start(None, _verdict(answer, reason, time.perf_counter() - started))

    def check_solution(self, solution: str) -> Future[str | None]:
        """Say why a solution cannot be graded against (a `Reason`), or None: it parses and is equal to itself."""
        decided, reason = check_text(solution)
        return self._start(None if decided else lambda: self._timed_ask(solution, None)[0], reason)

    def _start(self, function: Callable[[], Any] | None, result: Any = None) -> Future[Any]:
        with self._lock:
            self._check_open()
            if function is not None:
                return self._threads.submit(function)
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise GraderError("The grader is closed: create a new one.")

    def _timed_ask(self, solution: str, answer: str | None) -> tuple[Reason | None, float]:
        """Have a worker answer. There are no more threads than workers, so one is idle or may be started."""
        request = {"solution": solution, "answer": answer, "soft_seconds": SOFT_SHARE * self.timeout_seconds}
        started = time.perf_counter()
        for _ in range(2):
            worker = self._take()
            try:
                reason = worker.ask(request, self.timeout_seconds)
                self._idle.put(worker)
            except BaseException as error:
                self._discard(worker)
                if isinstance(error, EOFError):
                    logger.warning("A grading worker died (%s).", error)
                    with self._lock:
                        self._check_open()
                        self.restarts += 1
                    died, was_ready = str(error), worker.ready
                    continue
                if not isinstance(error, TimeoutError):
                    raise
                if not worker.ready:
                    raise GraderError(f"A grading worker was not ready after {START_SECONDS:.0f} s.") from None
                reason = Reason.TIMEOUT
            if reason == Reason.TIMEOUT:
                with self._lock:
                    self.timeouts += 1
            return reason, time.perf_counter() - started
        if was_ready:  # it worked, and died over this answer like the one before: the answer's doing
            return Reason.CRASHED, time.perf_counter() - started
        raise GraderError(f"Two grading workers in a row did not get ready ({died}).")

    def _take(self) -> _Worker:
        with self._lock:  # `close` sees the worker, or it is seen here
            self._check_open()
            with contextlib.suppress(queue.Empty):
                return self._idle.get_nowait()
            self._workers.add(worker := _Worker())
            return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()

    def close(self) -> None:
        """Kill the workers and fail what is unfinished with `GraderError`. May be called twice."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown()
        for worker in list(self._workers):
            self._discard(worker)

    def __exit__(self, *exception: object) -> None:
        self.close()
