"""Where the beats of a training run come from, and what is known of engine and interpreter when they stop."""

from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torl_guards.heartbeat import Heartbeat
from torl_interpreters.base import Interpreter
from torl_trl import ToRLTrainer
from torl_trl.engines.base import Engine
from torl_trl.engines.vllm_server import VLLMServerEngine
from torl_trl.progress import RolloutStats


def watched(trainer: ToRLTrainer, interpreter: Interpreter | None) -> AbstractContextManager[Any]:
    """The context to call `trainer.train` in: it ends a run that stands still for `hang_timeout` (None: never)."""
    args = trainer.args
    if args.hang_timeout is None:
        return nullcontext()
    beats = Beats(interpreter)
    beats.heartbeat = Heartbeat(args.hang_timeout, Path(args.output_dir), args.process_index, beats.describe)
    trainer.add_callback(beats)
    trainer.phase.on_rollouts = beats.on_rollouts
    return beats.heartbeat


class Beats(TrainerCallback):
    """Makes the trainer's events, and each step of the engine, beats of `heartbeat`; of servers each finished turn."""

    heartbeat: Heartbeat

    def __init__(self, interpreter: Interpreter | None):
        self._interpreter = interpreter
        self._rollouts = "no step yet"
        self._stats, self._engine = RolloutStats(), None
        self._moved: tuple[Any, ...] = ()

    def on_rollouts(self, name: str, stats: RolloutStats, engine: Engine) -> None:
        """Takes what `RolloutPhase.on_rollouts` gives."""
        self._rollouts, self._stats, self._engine = name, stats, engine
        before, self._moved = self._moved, (name, stats.done, stats.rollouts, stats.generating, stats.executing)
        if self._moved == before and isinstance(engine, VLLMServerEngine):
            return  # its step looked whether a turn is done, and none was
        if stats.done < stats.rollouts:
            self.heartbeat.beat(f"rollouts of {name}: {self._counts()}")
        elif stats.done:
            self.heartbeat.beat(f"the end of the rollouts of {name}; grading and training come next")
        else:
            self.heartbeat.beat(f"the start of the rollouts of {name}")

    def _beat(
        self, place: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.heartbeat.beat(place.format(step=state.global_step, next=state.global_step + 1))

    on_train_begin = partialmethod(_beat, "the start of training")
    on_step_begin = partialmethod(_beat, "the start of step {next}")
    on_substep_end = partialmethod(_beat, "a micro-batch of step {next}")
    on_pre_optimizer_step = partialmethod(_beat, "the gradient of step {next}")
    on_optimizer_step = partialmethod(_beat, "the optimizer of step {next}")
    on_step_end = partialmethod(_beat, "the end of step {step}; its log, evaluation or save comes next")
    on_log = partialmethod(_beat, "the log of step {step}")
    on_prediction_step = partialmethod(_beat, "a batch of the evaluation of step {step}")
    on_evaluate = partialmethod(_beat, "the end of the evaluation of step {step}")
    on_save = partialmethod(_beat, "the save of step {step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.heartbeat.rest()  # a push to the Hub may take long

    def describe(self) -> str:
        """The state of the rollouts, the engine and the interpreter, from what is known without asking them."""
        state = f"Rollouts of {self._rollouts}: {self._counts()}, {self._stats.sampled_tokens} tokens sampled"
        return f"{state}\nEngine: {self._engine!r}\nInterpreter: {self._interpreter!r}"

    def _counts(self) -> str:
        stats = self._stats
        return (
            f"{stats.done} of {stats.rollouts} done, {stats.generating} in the engine, {stats.executing} calls running"
        )
