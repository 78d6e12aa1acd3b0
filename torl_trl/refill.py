"""Dead groups are replaced within the step, by rollouts of further problems (DAPO's dynamic sampling, bounded).

Ranks have their own groups (a group lies on one rank), so each replaces its own; but rounds are taken together, since
an engine may have collective calls, and all ranks draw from one stream of problems, whose position is saved.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from accelerate import Accelerator
from accelerate.utils import gather_object

from torl_trl.filters import Drop, Group, leave_out, trains

LOWEST_SHARE = 0.25
"""A round asks for at most four groups for each that is missing, however few trained so far."""

STATE_NAME = "refill.json"


class ProblemStream:
    """An endless order of problems: pass after pass over the data set, each shuffled by the seed and its number."""

    def __init__(self, size: int, seed: int):
        self.position = 0
        """How many were taken so far; the same on all ranks."""
        self._size = size
        self._seed = seed
        self._pass: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, position: int) -> int:
        """The index in the data set of the problem at `position`."""
        number, place = divmod(position, self._size)
        if self._pass[0] != number:
            order = list(range(self._size))
            Random(hash((self._seed, number))).shuffle(order)  # ints: the same in every process
            self._pass = (number, order)
        return self._pass[1][place]


def shares_of_round(training: Sequence[int], sampled: Sequence[int], left: Sequence[int], wanted: int) -> list[int]:
    """How many groups each rank samples next: enough to expect what it lacks, within what it has left.

    `training` and `sampled` count the groups of each rank so far, those that train and all; `left` is what each may
    still sample, `wanted` what each needs. All zero: every rank is full or has nothing left.
    """
    share = max(sum(training) / max(1, sum(sampled)), LOWEST_SHARE)
    return [min(rest, math.ceil(max(0, wanted - count) / share)) for count, rest in zip(training, left, strict=True)]


class Refill:
    """Fills the step of a rank with groups that train, as far as the limit allows.

    Args:
        limit: how many times a step's groups may be sampled beyond them.
    """

    def __init__(self, problems: int, seed: int, limit: float, accelerator: Accelerator):
        self.stream = ProblemStream(problems, seed)
        self._limit = limit
        self._accelerator = accelerator

    def fill(
        self, groups: list[Group], sample: Callable[[list[int], int, int], list[Group]]
    ) -> tuple[list[Group], list[Group]]:
        """Return the groups of this rank's step, as many as `groups`, and those that are left out. Collective.

        `sample(problems, position, offset)` samples one group for each index of the data set, the first of which
        stands at `position` of the stream and is number `offset` of all that this step draws from it. It is called
        on every rank in each round, with no problem where the rank needs none.
        """
        wanted, everything = len(groups), list(groups)
        left = int(self._limit * wanted)
        first = self.stream.position
        rank = self._accelerator.process_index
        while True:
            states = self._of_all_ranks((sum(map(trains, everything)), len(everything), left))
            asked = shares_of_round(*zip(*states, strict=True), wanted=wanted)
            if not any(asked):
                break
            start = self.stream.position + sum(asked[:rank])
            self.stream.position += sum(asked)
            left -= asked[rank]
            problems = [self.stream[position] for position in range(start, start + asked[rank])]
            everything += sample(problems, start, start - first)
        return _choose(everything, wanted)

    def save(self, folder: Path) -> None:
        (folder / STATE_NAME).write_text(json.dumps({"position": self.stream.position}), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on where the run stood that saved; from the start where it had no refill."""
        path = folder / STATE_NAME
        self.stream.position = json.loads(path.read_text(encoding="utf-8"))["position"] if path.exists() else 0

    def _of_all_ranks(self, state: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        return gather_object([state]) if self._accelerator.num_processes > 1 else [state]


def _choose(groups: list[Group], wanted: int) -> tuple[list[Group], list[Group]]:
    """Put those that train in the places of those that do not; what is too many is left out and trains nothing."""
    spare = [group for group in groups[wanted:] if trains(group)]
    chosen, left_out = [], [group for group in groups[wanted:] if not trains(group)]
    for group in groups[:wanted]:
        if trains(group) or not spare:
            chosen.append(group)
        else:
            chosen.append(spare.pop(0))
            left_out.append(group)
    for group in spare:
        leave_out(group, Drop.SURPLUS)
    return chosen, left_out + spare
