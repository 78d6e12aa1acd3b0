"""Hang drills: what stands still ends in time, names its place and leaves no process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import ROOT, metrics

from torl_guards.heartbeat import EXIT_CODE, GRACE_SECONDS

HANG_TIMEOUT = 10
LIMIT = HANG_TIMEOUT + GRACE_SECONDS + 3
LAUNCHER_SECONDS = 30 + 5
"""How long torch.distributed.run waits for a rank that it has asked to end, and its own time."""

WATCHED = """
import ctypes, os, queue, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
from torl_guards.heartbeat import Heartbeat

def stands_still():
    {hang}

with Heartbeat({timeout}, sys.argv[1], 3, lambda: "Engine: busy") as heartbeat:
    for part in range(3):
        heartbeat.beat(f"part {{part}}")
        time.sleep({pause})
    stands_still()
"""
MUTEX = "libc, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); [libc.pthread_mutex_lock(m) for _ in 'ab']"


def watch(folder: Path, hang: str, *, timeout: float = 0.6, pause: float = 0.3) -> subprocess.CompletedProcess:
    code = WATCHED.format(hang=hang, timeout=timeout, pause=pause)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def dump_of(folder: Path, rank: int = 3) -> str:
    return (folder / f"hang_rank{rank}.txt").read_text()


def test_what_moves_is_left_alone_and_leaves_no_file(tmp_path):
    done = watch(tmp_path, "heartbeat.rest(); time.sleep(1.0)")
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])


@pytest.mark.parametrize(
    "hang",
    ["queue.SimpleQueue().get()", "[time.sleep(0.01) for _ in iter(int, 1)]", "threading.Event().wait()"],
    ids=["a queue", "a loop", "an event"],
)
def test_a_wait_in_python_is_interrupted_and_the_error_says_where(hang, tmp_path):
    done = watch(tmp_path, hang)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("torl_guards.heartbeat.HangError: Nothing moved for 1 s, longer than hang_timeout: 0.6 ")
    assert "since 'part 2' on rank 3: see " in error and "KeyboardInterrupt" not in done.stderr
    dump = dump_of(tmp_path)
    assert "Last beat: part 2" in dump and "Engine: busy" in dump
    assert "Thread MainThread:" in dump and "in stands_still" in dump


def test_a_wait_in_c_ends_after_the_grace(tmp_path):
    started = time.monotonic()
    done = watch(tmp_path, MUTEX)
    assert time.monotonic() - started < 1 + GRACE_SECONDS + 3 + 5  # Python starts and ends
    assert done.returncode == EXIT_CODE
    assert done.stderr.startswith("Error: Nothing moved for 1 s") and done.stderr.count("\n") == 1
    assert dump_of(tmp_path).count("stands_still") == 2  # also at the end


@pytest.mark.slow
def test_a_thread_that_hangs_while_the_run_closes_does_not_keep_it(tmp_path):
    hang = "threading.Thread(target=queue.SimpleQueue().get, name='stuck').start(); queue.SimpleQueue().get()"
    done = watch(tmp_path, hang)
    assert done.returncode == 1 and "HangError: Nothing moved" in done.stderr
    assert "Thread stuck:" in dump_of(tmp_path) and "Timeout (0:00:12)!" in dump_of(tmp_path)


@pytest.mark.slow
def test_c_code_that_lets_no_thread_run_is_ended_too(tmp_path):
    done = watch(tmp_path, "ctypes.PyDLL(None).sleep(60)")
    assert done.returncode == 1 and "in stands_still" in done.stderr


def test_a_run_that_is_told_to_end_leaves_its_stacks(tmp_path):
    done = watch(tmp_path, f"signal.raise_signal(signal.SIGTERM); {MUTEX}")
    assert done.returncode == -15 and "in stands_still" in dump_of(tmp_path)


def test_ctrl_c_is_still_an_interrupt_and_older_dumps_stay(tmp_path):
    (tmp_path / "hang_rank3.txt").write_text("an older hang\n")
    done = watch(tmp_path, "signal.raise_signal(signal.SIGINT)")
    assert done.stderr.endswith("KeyboardInterrupt\n") and dump_of(tmp_path) == "an older hang\n"


# --- whole runs ----------------------------------------------------------------------------------------------------


class Drill:
    """A finished run of hang_drill.py: its code, what it printed, seconds from what happened to its end."""

    def __init__(self, kind: str, folder: Path, *words: str, processes: int = 1):
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command += [str(ROOT / "tests" / "hang_drill.py"), kind, str(folder), "--hang_timeout", str(HANG_TIMEOUT)]
        paths = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "recipes"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
        self.folder, started = folder, set()
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            process = psutil.Popen([*command, *words], stdout=out, stderr=err, env=environment, cwd=folder)
            deadline = time.monotonic() + 400
            while process.poll() is None:
                assert time.monotonic() < deadline
                started |= set(process.children(recursive=True)) if process.is_running() else set()
                time.sleep(0.1)
        ended = time.time()
        self.code, self.errors = process.returncode, (folder / "err").read_text()
        happened = folder / "happened"
        self.seconds = ended - float(happened.read_text()) if happened.exists() else 0.0
        self.started = len(started)
        self.left = psutil.wait_procs(started, timeout=5)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "place"),
    [
        ("interpreter", 2, "in collect_returned"),
        ("engine", 2, "in stop_in_python"),
        ("engine in C", EXIT_CODE, "in stop_in_c"),
    ],
)
def test_a_run_ends_in_time_and_says_where_it_stood(kind, code, place, tmp_path):
    drill = Drill(kind, tmp_path)
    assert drill.code == code and drill.seconds < LIMIT and drill.started > 2 and drill.left == []
    dump = dump_of(tmp_path, rank=0)
    assert place in dump and "ollouts of train step 1" in dump
    assert "Engine: transformers in this process" in dump and "Interpreter: embedded in tier" in dump
    sentence = drill.errors.strip().splitlines()[-1]
    assert sentence.startswith("Error: Nothing moved for 1") and str(tmp_path / "hang_rank0.txt") in sentence
    assert "Traceback" not in drill.errors


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("kind", "code"), [("engine", 2), ("engine in C", EXIT_CODE)])
def test_a_stopped_vllm_ends_in_time_and_leaves_no_process(kind, code, tmp_path):
    pytest.importorskip("vllm", reason="needs vllm: make test VLLM=1 installs it")
    drill = Drill(kind, tmp_path, "--use_vllm", "true")
    assert drill.code == code and drill.seconds < LIMIT and drill.left == []
    assert "Engine: vLLM in this process, 128 requests unfinished" in dump_of(tmp_path, rank=0)


STEP = ("--num_generations", "8", "--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1")


@pytest.mark.slow
def test_ranks_that_wait_for_a_stopped_one_end_in_time_and_say_where_they_stood(tmp_path):
    drill = Drill("stopped rank", tmp_path, *STEP, processes=2)
    assert drill.code != 0 and drill.seconds < LIMIT + LAUNCHER_SECONDS and drill.left == []
    dump = dump_of(tmp_path, rank=0)
    assert "Last beat: the end of the rollouts of train step 2; grading and training come next" in dump
    assert "training_step" in dump and "Error: Nothing moved" in drill.errors


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_at_once_and_they_say_where_they_stood(tmp_path):
    drill = Drill("dead rank", tmp_path, *STEP, processes=2)
    assert drill.code != 0 and drill.seconds < LIMIT and drill.left == []
    dump = tmp_path / "hang_rank0.txt"  # told to end by the launcher, or by the connection that broke
    assert "training_step" in (dump.read_text() if dump.exists() else drill.errors)
    assert "SIGKILL" in drill.errors


@pytest.mark.slow
def test_all_ranks_stop_at_a_gradient_that_is_no_number_and_keep_their_batch(tmp_path):
    drill = Drill("nan", tmp_path, *STEP, processes=2)
    assert drill.code != 0 and drill.left == []
    assert "Error: The gradient norm of step 2 is nan" in drill.errors
    assert all((tmp_path / f"diverged_step_2_rank_{rank}.pt").exists() for rank in (0, 1))


@pytest.mark.slow
def test_a_run_that_moves_is_not_disturbed(tmp_path):
    words = ("--eval_strategy", "steps", "--eval_steps", "1", "--max_eval_problems", "8", "--save_steps", "1")
    drill = Drill("healthy", tmp_path, *words)
    assert drill.code == 0 and drill.left == [] and not list(tmp_path.glob("hang_*"))
    assert len(metrics(tmp_path)) == 2
