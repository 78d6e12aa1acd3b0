"""What ToRLTrainer costs beside TRL's plain GRPOTrainer, with the same tokens.

    python benchmarks/trainer.py [--repeats 5] [--steps 2]

A step's rollouts are written in advance (trainer_scripted.py). Two settings:

- scripted: nothing is decoded and no program runs. GRPOTrainer gets the tokens, logprobs and mask from its
  rollout_func at once, and its reward searches a string. ToRLTrainer goes through its loop, with an engine and an
  interpreter that answer at once, and grades, measures and records as always. This ratio shows the wrapper at its
  worst: a real step has generation in it.
- decoded: both decode as many tokens with the model, whose ids the script then replaces, and run the programs in the
  embedded interpreter; GRPOTrainer through a rollout_func written by hand around `run_rollouts`.

ToRLTrainer's updates leave out padding, and on a CPU the vocabulary at prompt positions (torl_trl/padding.py); `bare`
is ToRLTrainer without both, so that the wrapper is seen alone. The trainers take turns in one process; figures are
medians over the turns, and ratios are of neighbouring turns. CPU seconds are those of this process, without grader and
interpreter: on a busy machine they say more than wall time.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from machine import machine_facts
from rollout_loop import FreeEngine, Stopwatch
from rollout_workload import Script
from trainer_scripted import TOKENIZER, InstantInterpreter, Scripted, ScriptedGeneration, StepClock, Work
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import chunked_logprob

from torl_grading import Grader
from torl_interpreters.base import Interpreter
from torl_trl import AccuracyReward, ToRLConfig, ToRLTrainer, get_interpreter, run_rollouts
from torl_trl.engines.base import Sampling
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.metrics_file import MetricsFile
from torl_trl.rollout import Rollout, RolloutConfig
from torl_trl.skipping import SkippingTrainer

RESULTS = Path(__file__).parent / "results" / "trainer.json"
SIZES = {"1M": (128, 4, 352), "3M": (256, 4, 704)}
"""Hidden size, layers and width of the feed-forward part."""


class SwitchedToRLTrainer(ToRLTrainer):
    """ToRLTrainer, which keeps the padding where it is `bare`."""

    bare = False

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return (SkippingTrainer if self.bare else ToRLTrainer)._compute_loss(self, model, inputs)


def rollout_columns(rollouts: list[Rollout]) -> dict[str, list]:
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    return {name: [getattr(rollout, name) for rollout in rollouts] for name in names}


def string_reward(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 if "\\boxed{42}" in completion else -1.0 for completion in completions]


def given_rollouts(scripts: list[Script], tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> Callable:
    """A rollout_func that has the tokens ready."""
    prompts = [[tokenizer.eos_token_id]] * len(scripts)
    rollouts = run_rollouts(prompts, FreeEngine(scripts, Stopwatch()), InstantInterpreter(), tokenizer, config)
    return lambda prompts, trainer: rollout_columns(rollouts) | {"prompt_ids": tokenizer(prompts)["input_ids"]}


def decoded_rollouts(
    scripts: list[Script], tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, interpreter: Interpreter
) -> Callable:
    """A rollout_func that decodes with the trainer's model and runs the programs."""

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        model = trainer.accelerator.unwrap_model(trainer.model).eval()
        engine = Scripted(TransformersEngine(model, tokenizer, Sampling(), eos_token_ids=[]), scripts)
        rollouts = run_rollouts(tokenizer(prompts)["input_ids"], engine, interpreter, tokenizer, config)
        model.train()
        return rollout_columns(rollouts)

    return rollout_func


def make_trainers(
    make_model: Callable[[], PreTrainedModel],
    work: Work,
    folder: Path,
    grader: Grader,
    interpreter: Interpreter | None,
    **options: Any,
) -> dict[str, GRPOTrainer]:
    """`plain` and `ours`, each with a model of its own; without an `interpreter` they are scripted."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    scripts, problems = work.scripts(tokenizer), work.problems(tokenizer)
    args = ToRLConfig(**work.options(folder / "ours", **options))
    ours = SwitchedToRLTrainer(
        make_model(),
        [AccuracyReward(grader)],
        interpreter or InstantInterpreter(),
        args,
        problems,
        processing_class=tokenizer,
        callbacks=[MetricsFile(folder / "ours"), StepClock()],
    )
    ours.phase.generation = ScriptedGeneration(ours.phase.generation, scripts, decodes=interpreter is not None)
    if interpreter is None:
        rollout_func = given_rollouts(scripts, tokenizer, args.rollout_config())
    else:
        rollout_func = decoded_rollouts(scripts, tokenizer, args.rollout_config(), interpreter)
    plain = GRPOTrainer(
        make_model(),
        [string_reward],
        GRPOConfig(**work.options(folder / "plain", **options)),
        problems,
        processing_class=tokenizer,
        callbacks=[StepClock()],
        rollout_func=rollout_func,
    )
    trainers = {"plain": plain, "ours": ours}
    for trainer in trainers.values():
        trainer.remove_callback(PrinterCallback)
    return trainers


def step_seconds(trainer: GRPOTrainer, speed_ups: bool) -> dict[str, float]:
    """Train and return medians over the steps."""
    ours = trl.trainer.utils._use_triton
    if not speed_ups:
        trl.trainer.utils._use_triton = chunked_logprob._use_triton  # TRL's own, as `score_completions_only` found it
    trainer.bare = not speed_ups  # plain GRPOTrainer does not look at it
    try:
        trainer.train()
    finally:
        trl.trainer.utils._use_triton = ours
    (clock,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, StepClock)]
    wall, cpu = zip(*clock.steps, strict=True)
    return {"seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu)}


def compare(trainers: dict[str, GRPOTrainer], repeats: int, rollouts: int) -> dict[str, float]:
    """Let the trainers take turns; the order changes from turn to turn."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ("plain", "bare", "ours")}
    for turn in range(repeats):
        for name in list(turns)[:: -1 if turn % 2 else 1]:
            trainer = trainers["plain" if name == "plain" else "ours"]
            turns[name].append(step_seconds(trainer, speed_ups=name == "ours"))
    results = {}
    for what in ("seconds", "cpu_seconds"):
        found = {name: [turn[what] for turn in those] for name, those in turns.items()}
        results |= {f"{name}/{what}": statistics.median(values) for name, values in found.items()}
        for name in ("bare", "ours"):
            ratios = [mine / plain for mine, plain in zip(found[name], found["plain"], strict=True)]
            key = f"{name}/{what}_over_plain"
            results |= {key: statistics.median(ratios), f"{key}_min": min(ratios), f"{key}_max": max(ratios)}
        extra = [bare - plain for bare, plain in zip(found["bare"], found["plain"], strict=True)]
        results[f"bare/extra_{what}_per_rollout"] = statistics.median(extra) / rollouts
    return results


def random_model(size: str) -> PreTrainedModel:
    """A Qwen2 with the tiny recipe's tokenizer; the same weights each time."""
    hidden, layers, intermediate = SIZES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=768,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each trainer")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that count")
    options = parser.parse_args()
    work = Work()
    results: dict[str, float] = {"rollouts": work.rollouts, "repeats": options.repeats, "steps": options.steps}
    sys.stdout.write("wall: medians of a step in seconds, x plain (lowest to highest turn); cpu: of this process\n")
    columns = ("plain", "bare", "x plain", "ours", "x plain", "(min", "max)", "cpu: bare x", "ours x")
    sys.stdout.write(f"{'':14}" + "".join(f"{column:>12}" for column in columns) + "\n")
    with get_interpreter("embedded") as interpreter, Grader(num_workers=1) as grader:
        for size, setting in itertools.product(SIZES, ("scripted", "decoded")):
            runs_code = interpreter if setting == "decoded" else None
            with tempfile.TemporaryDirectory() as folder:
                trainers = make_trainers(
                    lambda size=size: random_model(size),
                    work,
                    Path(folder),
                    grader,
                    runs_code,
                    max_steps=options.steps + 2,
                    use_cpu=True,
                    bf16=False,
                    gradient_checkpointing=False,
                )
                found = compare(trainers, options.repeats, work.rollouts)
            results |= {f"{size}/{setting}/{name}": value for name, value in found.items()}
            names = ("plain/seconds", "bare/seconds", "bare/seconds_over_plain", "ours/seconds")
            names += tuple(f"ours/seconds_over_plain{which}" for which in ("", "_min", "_max"))
            names += ("bare/cpu_seconds_over_plain", "ours/cpu_seconds_over_plain")
            cells = "".join(f"{found[name]:12.3f}" for name in names)
            sys.stdout.write(f"{size:4} {setting:9}{cells}\n")
            sys.stdout.flush()
            rounded = {name: float(f"{value:.5g}") for name, value in results.items()}
            RESULTS.write_text(json.dumps(machine_facts() | rounded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
