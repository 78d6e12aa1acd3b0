"""A resumed run ends as the unbroken one would have: order of problems, random numbers, and no step too many."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from torl_trl.refill import Refill


class EpochSampler(Sampler[int]):
    """TRL's `RepeatSampler`, shuffled anew from the seed and the epoch's number.

    TRL's own goes on with one generator from epoch to epoch; a run resumed in its second epoch starts that generator
    again and repeats the order of the first.
    """

    def __init__(self, sampler: RepeatSampler):
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Called by transformers' Trainer, through accelerate's data loader, before each epoch."""
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class ResumingTrainer(GRPOTrainer):
    """GRPOTrainer whose checkpoints hold what is needed to go on; transformers calls these methods."""

    _refill: Refill | None = None

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        return EpochSampler(super()._get_train_sampler(dataset))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._refill is not None and self.is_world_process_zero():
            self._refill.save(Path(output_dir))
        self.accelerator.wait_for_everyone()  # see torl_trl.checkpoints

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._refill is not None and checkpoint is not None:
            self._refill.load(Path(checkpoint))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Transformers sees that a run is at its end only after a step: a finished one would train one more."""
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)
