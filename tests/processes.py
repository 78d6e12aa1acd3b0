"""A run of several processes as seen from one of them, without starting the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.state import AcceleratorState
from pytest import MonkeyPatch
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank_0_of(processes: int) -> Iterator[None]:
    """The environment that launchers set, and a process group whose other members do nothing."""
    with MonkeyPatch.context() as patch:
        launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        for name, value in launched.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)
