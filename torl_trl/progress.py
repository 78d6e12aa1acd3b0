"""Where the rollouts stand: counts and times kept while they run, and the bar that shows them."""

import time
from dataclasses import dataclass

from tqdm import tqdm

SECONDS_BETWEEN_UPDATES = 0.5


@dataclass(slots=True)
class RolloutStats:
    """Where `run_rollouts` stands and where its time went, kept while it runs; adds up over calls."""

    rollouts: int = 0
    done: int = 0
    resampled: int = 0
    """Rollouts sampled again because their interpreter had failed."""
    generating: int = 0
    """Requests in the engine now."""
    executing: int = 0
    """Calls in the interpreter now."""
    sampled_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens that the engine had computed in earlier turns of a rollout and computed again when it came back."""
    seconds: float = 0.0
    generating_seconds: float = 0.0
    """Inside the engine."""
    waiting_seconds: float = 0.0
    """The engine idle because every live rollout waited for its code."""
    rollout_seconds: float = 0.0
    """From start to finish, summed over rollouts."""
    tool_seconds: float = 0.0
    """The part of it that rollouts waited for their calls."""


class ProgressBar:
    """A bar over rollouts with what the others are doing; `disable` it on other ranks. Quiet without a terminal.

    with ProgressBar(len(prompts)) as bar:
        run_rollouts(..., on_progress=bar.update)
    """

    def __init__(self, rollouts: int, *, description: str = "rollouts", disable: bool = False):
        self._bar = tqdm(
            total=rollouts, desc=description, leave=False, disable=disable or None
        )  # None: ask a terminal
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def update(self, stats: RolloutStats) -> None:
        """Show `stats`, at most twice a second: the loop calls this after every engine step."""
        now = time.monotonic()
        if self._bar.disable or now < self._shown + SECONDS_BETWEEN_UPDATES:
            return
        self._shown = now
        speed = stats.sampled_tokens / (now - self._started)
        self._bar.set_postfix_str(
            f"{stats.generating} generating, {stats.executing} executing, {speed:.0f} tokens/s", refresh=False
        )
        self._bar.n = stats.done
        self._bar.refresh()
