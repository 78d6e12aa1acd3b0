"""One rollout phase of a trainer: dataset rows in, finished rollouts out, whose grading has begun."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from torl_interpreters.base import Interpreter
from torl_trl.engines.base import Engine, EngineError, Sampling
from torl_trl.generation import Generation
from torl_trl.progress import ProgressBar, RolloutStats
from torl_trl.rollout import Rollout, RolloutConfig, run_rollouts

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


class RolloutPhase:
    """Samples rows with the engine that has the weights of this step.

    Args:
        on_finished: called with each rollout and its row as it ends, while others are still generated.
        resamples: how often a rollout whose interpreter failed is sampled anew before it is given up.
        shows_bar: whether this rank shows its progress.
    """

    def __init__(
        self,
        generation: Generation,
        interpreter: Interpreter | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        on_finished: Callable[[Rollout, Row], None],
        *,
        resamples: int = 0,
        shows_bar: bool = False,
    ):
        self.on_rollouts: Callable[[str, RolloutStats, Engine], None] | None = None
        """Called with the title as a phase starts and after each step of its engine."""
        self.generation = generation
        """What opens the engine of a phase; it may be replaced by one that has engines of its own."""
        self._interpreter = interpreter
        self._tokenizer = tokenizer
        self._config = config
        self._on_finished = on_finished
        self._resamples = resamples
        self._shows_bar = shows_bar

    def run(
        self, rows: Sequence[Row], sampling: Sampling, *, seed: int, title: str, stats: RolloutStats
    ) -> list[Rollout]:
        """Sample each row's prompt to its end, in order; adds to `stats`. Opens the engine even without any row,
        since with some of them that is a collective call."""
        bar = ProgressBar(stats.rollouts + len(rows), description=title, disable=not self._shows_bar)

        def show(stats: RolloutStats) -> None:
            bar.update(stats)
            if self.on_rollouts is not None:
                self.on_rollouts(title, stats, engine)

        def sample(engine: Engine, indices: Sequence[int], seed: int) -> list[Rollout]:
            chosen = [rows[index] for index in indices]
            return run_rollouts(
                self._tokenizer(text=[row["prompt"] for row in chosen])["input_ids"],
                engine,
                self._interpreter,
                self._tokenizer,
                self._config,
                seed=seed,
                on_finished=lambda rollout: self._on_finished(rollout, chosen[rollout.index]),
                on_progress=show,
                stats=stats,
            )

        with self.generation.engine(sampling) as engine, bar:
            show(stats)
            rollouts = sample(engine, range(len(rows)), seed) if rows else []
            for attempt in range(1, self._resamples + 1):
                failed = [rollout.index for rollout in rollouts if rollout.interpreter_failed]
                if not failed:
                    break
                logger.warning("The interpreter failed in %d rollouts, which are sampled again.", len(failed))
                stats.resampled += len(failed)
                for index, rollout in zip(failed, sample(engine, failed, hash((seed, attempt))), strict=True):
                    rollout.index, rollouts[index] = index, rollout
        return rollouts


def fail_together(accelerator: Accelerator, failure: Exception | None) -> None:
    """Raise this rank's failure, or another's, on every rank (a collective call)."""
    if accelerator.num_processes > 1:
        said = [(accelerator.process_index, str(failure))] if failure else []
        for rank, words in gather_object(said):
            if failure is None:
                raise EngineError(f"Rank {rank} failed in its rollouts: {words}")
    if failure is not None:
        raise failure
