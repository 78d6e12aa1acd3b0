"""The order of problems, so that a resumed run sees those that an unbroken one would have seen."""

from collections.abc import Iterator

from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


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
