"""Rules that training relies on, checked on every turn and rollout, since TRL checks none of them.

TRL pads a mask that is too short with ones, so that observations would be trained, and takes any length.
"""

import itertools
from typing import TYPE_CHECKING

from torl_trl.engines.base import FinishedTurn

if TYPE_CHECKING:
    from torl_trl.rollout import Rollout, RolloutConfig


class RolloutInvariantError(AssertionError):
    """A rollout broke a rule that training relies on: a bug of ours or of the engine."""


def check_turn(turn: FinishedTurn, room: int) -> None:
    """A turn has at least one token and at most `room`, each with its logprob."""
    if not 1 <= len(turn.token_ids) <= room or len(turn.token_ids) != len(turn.logprobs):
        raise RolloutInvariantError(
            f"The engine returned {len(turn.token_ids)} tokens and {len(turn.logprobs)} logprobs for rollout "
            f"{turn.rollout_id}, which has room for 1 to {room}."
        )


def check_rollout(rollout: "Rollout", config: "RolloutConfig") -> None:
    """The three lists are equally long and within budget, segments cover them, the mask is 0 on inserted ones only."""
    length = len(rollout.completion_ids)
    mask: list[int] = []
    for segment in rollout.segments:
        mask += [int(not segment.inserted)] * (segment.end - segment.start)
    borders = [0, *(segment.end for segment in rollout.segments)]
    starts = [segment.start for segment in rollout.segments]
    broken = {
        "logprobs": len(rollout.logprobs) != length,
        "env_mask": rollout.env_mask != mask or len(mask) != length,
        "segments": starts != borders[:-1] or any(a >= b for a, b in itertools.pairwise(borders)),
        "length": not 1 <= length <= config.max_completion_length,
        "calls": len(rollout.calls) > config.max_tool_calls,
    }
    if any(broken.values()):
        names = ", ".join(name for name, is_broken in broken.items() if is_broken)
        raise RolloutInvariantError(
            f"Rollout {rollout.index} is inconsistent ({names}): {length} tokens of at most "
            f"{config.max_completion_length}, {len(rollout.logprobs)} logprobs, a mask of {len(rollout.env_mask)}, "
            f"segments at {borders}, {len(rollout.calls)} calls of {config.max_tool_calls}."
        )
