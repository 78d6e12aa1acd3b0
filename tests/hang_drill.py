"""The launch script with one part that hangs or breaks: `python hang_drill.py KIND FOLDER [options of the recipe]`.

When it happens, the time is written to FOLDER/happened.
"""

import ctypes
import os
import queue
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import grpo_torl
import launching
import torch

from torl_interpreters.embedded import EmbeddedInterpreter
from torl_trl import ToRLTrainer
from torl_trl.command_line import run_main
from torl_trl.engines.base import Engine
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.engines.vllm import VLLMEngine

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = os.environ.get("RANK", "0")


def happens() -> None:
    (FOLDER / "happened").write_text(str(time.time()))


class Silent(EmbeddedInterpreter):
    """Runs programs and never says what came out."""

    def submit(self, code: str) -> Future:
        super().submit(code)
        happens()
        return Future()


def stop_in_python(engine: Engine) -> None:
    happens()
    queue.SimpleQueue().get()


def stop_in_c(engine: Engine) -> None:
    happens()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # waits for itself, and takes no interrupt


class Struck(ToRLTrainer):
    """Rank 1 stops, dies or computes NaN in the update of step 2."""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        if RANK != "1" or self.state.global_step != 1:
            return loss
        happens()
        if KIND == "nan":
            return loss * torch.nan
        os.kill(os.getpid(), signal.SIGSTOP if KIND == "stopped rank" else signal.SIGKILL)
        return loss


if __name__ == "__main__":
    if KIND == "interpreter":
        grpo_torl.get_interpreter = lambda name, **options: Silent(**options)
    elif KIND.startswith("engine"):
        TransformersEngine.step = VLLMEngine.step = stop_in_c if KIND == "engine in C" else stop_in_python
    elif KIND != "healthy":
        grpo_torl.ToRLTrainer = Struck
    recipe = ["--config", "tiny.yaml", "--output_dir", str(FOLDER), *launching.SHORT]
    sys.argv[:] = [launching.SCRIPT, *recipe, *sys.argv[3:]]
    run_main(grpo_torl.main)
