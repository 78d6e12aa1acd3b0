"""A heartbeat: a run that stands still says where, and ends in bounded time.

    with Heartbeat(timeout_seconds, run_folder, rank, describe) as heartbeat:
        ...
        heartbeat.beat("rollouts of train step 12: 100 of 128 done")

A run can stand still in four ways, and each has its way out:

- Python waits (for a call that never comes back): the main thread is interrupted, interpreters and graders close.
- C code waits, in a collective for one: it takes no interrupt, the process ends after `GRACE_SECONDS`.
- C code runs and keeps the interpreter lock, so that no thread of ours runs: a timer of `faulthandler` ends it.
- Another rank died, and the launcher ends this one with SIGTERM: the stacks are written, then it ends as it would.

Processes that we started end with us (see torl_sandbox.fork_server and torl_grading.worker), however that comes.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torl_trl.errors import UserError

GRACE_SECONDS = 10.0
"""What an interrupted run has to close its interpreters, before it is ended as it is."""
EXIT_CODE = 3
"""Of a process that took no interrupt."""
_BACKSTOP_SECONDS = 2.0  # by which faulthandler comes after us
_LONGEST_LOOK = 1.0


class HangError(UserError):
    """Nothing moved for longer than hang_timeout."""


class Heartbeat(AbstractContextManager):
    """Ends the run when no `beat` comes for `timeout_seconds`, with a dump in `folder`/hang_rank`rank`.txt.

    The watch begins with the first beat and rests after `rest`. `describe` gives the state of engine and interpreter;
    it is called from another thread in a run that hangs, so it must not wait for a lock. From the last beat to the end
    of the process it takes at most `timeout_seconds` + `GRACE_SECONDS` + 3 s.

    The file is there from the start, with a line that says which process it belongs to, and is taken away at the end
    of a run that did not hang. To be entered in the main thread. Where the main thread takes an interrupt, `__exit__`
    raises `HangError`, and the rest of the process, too, has `GRACE_SECONDS` from then on.
    """

    def __init__(self, timeout_seconds: float, folder: Path, rank: int, describe: Callable[[], str]):
        self.timeout_seconds, self.path = timeout_seconds, Path(folder) / f"hang_rank{rank}.txt"
        self._rank, self._describe = rank, describe
        self._place, self._last = "", 0.0  # of the last beat; 0.0: nothing to watch
        self._look_seconds = min(_LONGEST_LOOK, timeout_seconds / 4)
        self._sentence: str | None = None  # once it hangs
        self._lock = threading.Lock()
        self._left = threading.Event()  # by the main thread

    def beat(self, place: str) -> None:
        """Something moved: `place` says what, and what comes next if that is known. Costs next to nothing."""
        self._place, self._last = place, time.monotonic()

    def rest(self) -> None:
        """What follows may take as long as it takes, until the next beat."""
        self._last = 0.0

    def __enter__(self) -> "Heartbeat":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._size_before = self.path.stat().st_size  # of what an earlier run left
        self._write(f"Rank {self._rank}, process {os.getpid()} on {socket.gethostname()}, {_now()}: watched.\n")
        # Not through a handler in Python: in a collective it would not run, and the launcher would wait.
        faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)
        self._interrupt_before = signal.signal(signal.SIGINT, self._on_interrupt)  # ignored in a background job
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        with self._lock:  # the watch has ended, or ends without a word
            signal.signal(signal.SIGINT, self._interrupt_before)
            faulthandler.unregister(signal.SIGTERM)
            if self._sentence is not None:  # the timer goes on: what closes now, may hang too
                raise HangError(self._sentence) from None
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
        self._thread.join()
        os.truncate(self.path, self._size_before)
        if self._size_before == 0:
            self.path.unlink()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._sentence is not None:
            if not self._left.is_set():  # else it comes too late, and is not needed
                raise KeyboardInterrupt  # passes every `except Exception` on its way to `__exit__`
        elif callable(self._interrupt_before):
            self._interrupt_before(number, frame)

    # --- the watching thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        armed_for = 0.0
        while not self._left.wait(self._look_seconds):
            last = self._last
            with self._lock:
                if self._left.is_set():
                    return
                if last != armed_for:
                    self._arm(last)
                    armed_for = last
                if not last or time.monotonic() < last + self.timeout_seconds:
                    continue
                self._dump(self._place, time.monotonic() - last)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # wakes it from a wait, too
            if not self._left.wait(GRACE_SECONDS):
                self._end()

    def _arm(self, last: float) -> None:
        """Set the timer that needs no lock of Python's. To stderr: the file would say nothing of the place."""
        if not last:
            faulthandler.cancel_dump_traceback_later()
            return
        seconds = last + self.timeout_seconds + GRACE_SECONDS + _BACKSTOP_SECONDS - time.monotonic()
        faulthandler.dump_traceback_later(max(seconds, 0.1), exit=True, file=sys.__stderr__)

    def _dump(self, place: str, seconds: float) -> None:
        faulthandler.dump_traceback_later(GRACE_SECONDS + _BACKSTOP_SECONDS, exit=True, file=self._file)
        self._sentence = (
            f"Nothing moved for {seconds:.0f} s, longer than hang_timeout: {self.timeout_seconds:g} allows, since "
            f"{place!r} on rank {self._rank}: see {self.path} for the state and all stacks, mend what hangs, then go "
            "on with resume_from_checkpoint: true."
        )
        self._write(f"{_now()}: nothing moved for {seconds:.1f} s.\nLast beat: {place}\n\n{stacks()}\n")
        try:
            state = self._describe()
        except Exception as error:  # a run that hangs may be in any state
            state = f"The state cannot be told: {type(error).__name__}: {error}"
        self._write(f"{state}\n\nStacks below this line are of the end, {GRACE_SECONDS:g} s later.\n")

    def _end(self) -> NoReturn:
        sys.stderr.write(f"Error: {self._sentence}\n")  # as torl_trl.command_line.run_main would
        faulthandler.dump_traceback(self._file, all_threads=True)
        os._exit(EXIT_CODE)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def stacks() -> str:
    """The stack of every thread with the thread's name, the main thread first, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames: list[tuple[int, Any]] = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames
        if number != own
    )


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
