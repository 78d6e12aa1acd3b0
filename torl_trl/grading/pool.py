"""The grader: decides by text what it can, and sends the rest to killable worker processes.

A worker is a plain subprocess with pipes. Not `multiprocessing`: its spawn runs the training script again in every
worker, its fork copies a process that holds CUDA and threads. Each worker has a thread here that only waits on pipes;
algebra never runs in a thread, where nothing could stop it (a big power holds the GIL and freezes the whole process).
"""

import contextlib
import json
import logging
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torl_trl.grading.equivalence import (
    MAX_ANSWER_CHARS,
    Reason,
    compare_texts,
    is_plain_number,
    is_too_large,
    is_words,
    normalize,
)
from torl_trl.grading.extraction import extract_answer

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 5.0
START_SECONDS = 120.0
"""Imports take a second on an idle machine; a starved one gets two minutes before we call it broken."""

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")


class GraderError(RuntimeError):
    """The grader failed, not the answer: it cannot start its workers, they die, or it is closed."""


class _WorkerDied(Exception):
    """A worker ended by itself; the text says what it left on stderr."""


class _TimedOut(Exception):
    """A worker did not answer in time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of one completion: `score` is +1.0 or -1.0, `extracted` the content of its last box."""

    score: float
    correct: bool
    extracted: str | None
    reason: str

    @classmethod
    def of(cls, extracted: str | None, reason: Reason) -> Self:
        correct = reason == Reason.EQUAL
        return cls(1.0 if correct else -1.0, correct, extracted, str(reason))


class _Worker:
    """One worker process. Not thread-safe, but for `kill`."""

    def __init__(self, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115, `close` closes it
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        inherited = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), inherited] if inherited else [str(_ROOT)])
        try:
            self.process = subprocess.Popen(
                # -P: a file in the working directory must not take the place of a library
                [sys.executable, "-P", "-m", "torl_trl.grading.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self.stderr.close()
            raise GraderError(f"Grading worker {sys.executable!r} does not start: {error}.") from error
        self.buffer = b""
        self.ready = False

    def ask(self, solution: str, answer: str | None) -> Reason | None:
        """Grade one answer, or check the solution. Raises `_TimedOut` or `_WorkerDied`; then the worker is done."""
        if not self.ready:
            self.read_line(START_SECONDS)
            self.ready = True
        request = {
            "solution": solution,
            "answer": answer,
            "soft_seconds": max(1, int(self.timeout_seconds / 2)),
            "hard_seconds": self.timeout_seconds,
        }
        try:
            self.process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise _WorkerDied(self.last_words()) from error
        reason = self.read_line(self.timeout_seconds)["reason"]
        return None if reason is None else Reason(reason)

    def read_line(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self.buffer:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _TimedOut
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                raise _WorkerDied(self.last_words())
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def last_words(self) -> str:
        self.process.kill()
        code = self.process.wait()
        self.stderr.seek(0)
        lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return f"exit code {code}, {lines[-1] if lines else 'nothing on stderr'}"

    def kill(self) -> None:
        self.process.kill()  # it has no children

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a request was still in the buffer
            self.process.stdin.close()
        self.stderr.close()


@dataclass(slots=True)
class _Job:
    solution: str
    answer: str | None
    future: "Future[Any]"


class Grader:
    """Grades completions against solutions, in `num_workers` processes which start when first needed.

    An answer that takes over `timeout_seconds` of wall time is wrong, its worker is killed, `timeouts` counts it.
    A worker that dies by itself is replaced and the answer tried once more; an answer that kills a second one is wrong
    (`crashed`). Workers that do not start make the future raise `GraderError`: a fault of ours is never a wrong
    answer. Any thread may call any method.
    """

    def __init__(self, num_workers: int = 1, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS):
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers!r}: give at least 1.")
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds!r}: give a positive number of seconds.")
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self.timeouts = 0
        """Answers and solutions that ran out of time, here or by the worker's own soft limit."""
        self.restarts = 0
        """Workers that died by themselves and were replaced."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._closed = False

    def submit(self, texts: Sequence[str], solution: str, *, keep_fences: bool = False) -> Future[Verdict]:
        """Grade a completion given as the model's own text, one string per turn.

        `keep_fences` lets boxes in code and output blocks count, as in the released ToRL.
        """
        if isinstance(texts, str):
            raise TypeError("texts is one string: give a list with one string per turn.")
        done: Future[Verdict] = Future()
        extracted = extract_answer(texts, keep_fences=keep_fences)
        reason = Reason.NO_BOX if extracted is None else self._decide(solution, extracted)
        if reason is not None:
            self._check_open()
            done.set_result(Verdict.of(extracted, reason))
            return done

        def finish(answered: Future[Reason]) -> None:
            if answered.cancelled():
                done.cancel()
            elif error := answered.exception():
                done.set_exception(error)
            else:
                done.set_result(Verdict.of(extracted, answered.result()))

        self._enqueue(solution, extracted).add_done_callback(finish)
        return done

    def check_solution(self, solution: str) -> Future[str | None]:
        """Say why a solution cannot be graded against (a `Reason`), or None: it parses and is equal to itself."""
        normalized = normalize(solution)
        if is_plain_number(normalized) or is_words(normalized):
            reason = None
        elif not normalized:
            reason = str(Reason.UNPARSED)
        elif len(solution) > MAX_ANSWER_CHARS:
            reason = str(Reason.TOO_LONG)
        elif is_too_large(solution):
            reason = str(Reason.GUARD)
        else:
            return self._enqueue(solution, None)
        self._check_open()
        done: Future[str | None] = Future()
        done.set_result(reason)
        return done

    @staticmethod
    def _decide(solution: str, answer: str) -> Reason | None:
        reason = compare_texts(solution, answer)
        if reason is not None:
            return reason
        if len(solution) > MAX_ANSWER_CHARS or is_too_large(solution):
            return Reason.BAD_SOLUTION
        return Reason.GUARD if is_too_large(answer) else None

    def _check_open(self) -> None:
        if self._closed:
            raise GraderError("The grader is closed: create a new one.")

    def _enqueue(self, solution: str, answer: str | None) -> "Future[Any]":
        job = _Job(solution, answer, Future())
        with self._lock:
            self._check_open()
            self._jobs.put(job)
            if len(self._threads) < self.num_workers:
                # Daemon: a script that forgets `close` must still end; its workers end with their pipe.
                thread = threading.Thread(target=self._serve, name="grader", daemon=True)
                self._threads.append(thread)
                thread.start()
        return job.future

    def _serve(self) -> None:
        """Answer jobs with one worker, until `close`."""
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                reason, worker = self._run(job, worker)
            except BaseException as error:
                if worker is not None:
                    self._discard(worker)
                worker = None
                job.future.set_exception(error)
            else:
                job.future.set_result(reason)
        if worker is not None:
            self._discard(worker)

    def _run(self, job: _Job, worker: _Worker | None) -> tuple[Reason | None, _Worker | None]:
        last_words, was_ready = "", False
        for _ in range(2):
            worker = worker or self._start()
            try:
                reason = worker.ask(job.solution, job.answer)
            except _TimedOut:
                started = worker.ready
                self._discard(worker)
                worker = None
                if not started:
                    raise GraderError(f"A grading worker was not ready after {START_SECONDS:.0f} s.") from None
                reason = Reason.TIMEOUT
            except _WorkerDied as error:
                was_ready = worker.ready
                self._discard(worker)
                worker, last_words = None, str(error)
                self._check_open()
                with self._lock:
                    self.restarts += 1
                logger.warning("A grading worker died (%s).", last_words)
                continue
            if reason == Reason.TIMEOUT:
                with self._lock:
                    self.timeouts += 1
            return reason, worker
        if was_ready:  # it worked, and died over this answer like the one before: the answer's doing
            return Reason.CRASHED, None
        raise GraderError(f"Two grading workers in a row did not get ready ({last_words}).")

    def _start(self) -> _Worker:
        worker = _Worker(self.timeout_seconds)
        with self._lock:
            self._workers.add(worker)
            closed = self._closed
        if closed:
            self._discard(worker)
            self._check_open()
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()

    def close(self) -> None:
        """Kill the workers and fail what is unfinished with `GraderError`. May be called twice."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for worker in self._workers:
                worker.kill()
        if not threads:
            return
        waiting = []
        try:
            while (job := self._jobs.get_nowait()) is not None:
                waiting.append(job)
        except queue.Empty:
            pass
        for _ in threads:
            self._jobs.put(None)
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(GraderError("The grader was closed before it answered."))
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
