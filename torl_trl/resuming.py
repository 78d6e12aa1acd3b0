"""A resumed run ends as the unbroken one would have: order of problems, random numbers, and no step too many."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from torl_trl.refill import Refill

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[int]):
    """TRL's `RepeatSampler`, shuffled anew from the seed and the epoch's number.

    TRL's own goes on with one generator from epoch to epoch; a run resumed in its second epoch starts that generator
    again and repeats the order of the first.
    """

    def __init__(self, sampler: RepeatSampler):
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch."""
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class ResumingTrainer(GRPOTrainer):
    """GRPOTrainer whose checkpoints hold what is needed to go on; transformers calls these methods."""

    _refill: Refill | None = None
    _train_sampler: EpochSampler

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        self._train_sampler = EpochSampler(super()._get_train_sampler(dataset))
        return self._train_sampler

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._refill is not None and self.args.should_save:
            self._refill.save(Path(output_dir))
        self.accelerator.wait_for_everyone()  # see torl_trl.checkpoints

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        if self._refill is not None:
            self._refill.load(Path(checkpoint))
        cycle = self.args.generation_cycle
        if self.state.global_step * self.args.gradient_accumulation_steps % cycle:
            logger.warning(
                "%s lies inside a generation cycle of %d micro-steps: the rollouts of its last step are not kept, so "
                "the resumed run is not the unbroken one.",
                *(checkpoint, cycle),
            )

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        """Mends two faults of transformers in a resumed run.

        It sees that a run is at its end only after a step, so that a finished one would train one more. And where
        ranks share a data loader whose first batches are skipped, it passes the epoch's number on to nobody.
        """
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
        else:
            self._train_sampler.set_epoch(epoch)
            super()._run_epoch(*args, epoch=epoch, **kwargs)
