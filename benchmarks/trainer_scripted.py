"""Steps whose rollouts are written in advance, so that trainers can be timed with the same tokens.

    work = Work(prompts=4, generations=8)
    trainer.phase.generation = ScriptedGeneration(trainer.phase.generation, work.scripts(tokenizer), decodes=True)

Each rollout makes one tool call, whose program is real, and ends with an answer, right in every other one. Random
weights never write code: to decode for real, an engine samples as many tokens as the script has, and the script's ids
are handed back in their place.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rollout_costs import FAST, Workload
from rollout_loop import FreeEngine, FreeInterpreter, Stopwatch
from rollout_workload import Script, workload
from transformers import PreTrainedTokenizerBase, TrainerCallback

from torl_trl.engines.base import Engine, FinishedTurn, FinishReason, Sampling, TurnRequest
from torl_trl.generation import Generation

TOKENIZER = Path(__file__).parents[1] / "recipes" / "tiny" / "base"
OBSERVATION_TOKENS = 64
"""Room for what is inserted after a program."""


@dataclass(frozen=True)
class Work:
    """The rollouts of a step; lengths in tokens, `completion_tokens` is the limit, which the first one reaches."""

    prompts: int = 2
    generations: int = 8
    per_device: int = 8
    prompt_tokens: int = 64
    mean_tokens: float = 80.0
    completion_tokens: int = 256

    @property
    def rollouts(self) -> int:
        return self.prompts * self.generations

    def scripts(self, tokenizer: PreTrainedTokenizerBase) -> list[Script]:
        """A script for each place in the step. A program is asked for within the first sixth of the limit."""
        longest = self.completion_tokens - OBSERVATION_TOKENS
        shape = Workload(self.rollouts, self.generations, mean_tokens=self.mean_tokens, longest=longest)
        filler = tokenizer.encode("Let x be the sum of 12 and 30, so that we have to find x. ")

        def written(tokens: int, ending: str, *last: int) -> list[int]:
            ids = [*tokenizer.encode(ending), *last]
            return [*itertools.islice(itertools.cycle(filler), max(0, tokens - len(ids))), *ids]

        scripts = []
        for place, drawn in enumerate(workload(shape, 1, FAST)):
            tokens = longest if place == 0 else drawn.tokens
            call = written(min(len(drawn.turns[0]), longest // 6), f"\n```python\nprint({place} * 7)\n```\n```output")
            answer = "So \\boxed{42}." if place % 2 else f"So \\boxed{{\\frac{{{place}}}{{7}}}}."
            end = written(tokens - len(call), answer, tokenizer.eos_token_id)
            scripts.append(replace(drawn, turns=[call, end]))
        return scripts

    def problems(self, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        text = tokenizer.decode(tokenizer.encode("What is the sum of 12 and 30? " * self.prompt_tokens))
        prompts = [tokenizer.decode(tokenizer.encode(f"{i}. {text}")[: self.prompt_tokens]) for i in range(64)]
        return Dataset.from_list(
            [
                {"prompt": text, "problem": text, "solution": "42", "problem_id": str(i)}
                for i, text in enumerate(prompts)
            ]
        )

    def options(self, folder: Path, **options: Any) -> dict[str, Any]:
        """Arguments that both trainers get."""
        return {
            "output_dir": str(folder),
            "per_device_train_batch_size": self.per_device,
            "gradient_accumulation_steps": self.rollouts // self.per_device,
            "num_generations": self.generations,
            "max_completion_length": self.completion_tokens,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        } | options


class Scripted:
    """An engine that does the work of another one for as many tokens, and hands back those of the script.

    A turn that comes back is computed again from its start, where vLLM's cache does not hold the script's tokens.
    """

    def __init__(self, engine: Engine, scripts: list[Script]):
        self.mode, self.abort, self._engine = engine.mode, engine.abort, engine
        self._turns = [deque(script.turns) for script in scripts]
        engine._eos_token_ids = []  # random weights sample an end now and then; vLLM still stops at the tokenizer's

    def add(self, request: TurnRequest) -> None:
        tokens = len(self._turns[request.rollout_id][0])
        self._engine.add(replace(request, max_tokens=tokens, stop=()))

    def step(self) -> list[FinishedTurn]:
        return [self._scripted(turn) for turn in self._engine.step()]

    def _scripted(self, turn: FinishedTurn) -> FinishedTurn:
        turns = self._turns[turn.rollout_id]
        ids = turns.popleft()
        reason = FinishReason.STOP if turns else FinishReason.EOS
        return replace(turn, token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=reason)


class ScriptedGeneration:
    """In place of a ToRLTrainer's own: its rollouts are the scripts, decoded for real where `decodes` is set."""

    def __init__(self, generation: Generation, scripts: list[Script], decodes: bool):
        self.name, self.decodes = generation.name, decodes
        self._generation, self._scripts = generation, scripts

    @contextmanager
    def engine(self, sampling: Sampling) -> Iterator[Engine]:
        with self._generation.engine(sampling) as engine:
            yield Scripted(engine, self._scripts) if self.decodes else FreeEngine(self._scripts, Stopwatch())


class InstantInterpreter(FreeInterpreter):
    """Prints 42 at once, whatever the program."""

    def __init__(self) -> None:
        super().__init__(Stopwatch())
        self._result = replace(self._result, stdout="42")


class StepClock(TrainerCallback):
    """Wall and CPU seconds from a step's start to the next one's, logging included; the first step is left out."""

    def __init__(self) -> None:
        self._starts: list[tuple[float, float]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._starts.clear()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._starts.append((time.perf_counter(), time.process_time()))

    @property
    def steps(self) -> list[tuple[float, float]]:
        between = itertools.pairwise(self._starts)
        return [(after[0] - before[0], after[1] - before[1]) for before, after in between][1:]
