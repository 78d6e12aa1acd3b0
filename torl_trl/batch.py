"""Arithmetic of a step: its rollouts over processes, micro-batches and gradient accumulation.

A recipe states what the paper states, prompts and rollouts a step. How many micro-batches a process adds up for that
depends on how many processes there are, so it is derived here, and the same recipe is the same run on 1 GPU as on 16.
"""

import logging
import math
import os

from trl import GRPOConfig

from torl_trl.errors import UserError

logger = logging.getLogger(__name__)

DERIVED = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
"""Options that follow from `prompts_per_step` and the number of processes."""


def accumulation_steps(prompts: int, generations: int, per_device: int, processes: int) -> int:
    """Return how many micro-batches of `per_device` rollouts each process adds up for `prompts` x `generations`.

    Raises `UserError`, naming the values that work, where that is no whole number.
    """
    rollouts = prompts * generations
    steps, rest = divmod(rollouts, per_device * processes)
    if rest:
        prompts_step = per_device * processes // math.gcd(per_device * processes, generations)
        remedies = [f"a prompts_per_step that is a multiple of {prompts_step}"]
        if rollouts % processes == 0:
            remedies.insert(0, f"a per_device_train_batch_size of {_divisors(rollouts // processes)}")
        if rollouts % per_device == 0:
            remedies.append(f"one of {_divisors(rollouts // per_device)} processes")
        raise UserError(
            f"prompts_per_step {prompts} x num_generations {generations} = {rollouts} rollouts cannot be shared by "
            f"{processes} x per_device_train_batch_size {per_device}: give {' or '.join(remedies)}."
        )
    return steps


def derive_batch(args: GRPOConfig, prompts: int) -> None:
    """Set gradient accumulation so that a step is `prompts` prompts, all of whose rollouts make one update.

    Called before TRL and DeepSpeed read `args`. Raises `UserError` where it cannot be, or was set to something else.
    """
    for name, value in (
        ("prompts_per_step", prompts),
        ("per_device_train_batch_size", args.per_device_train_batch_size),
    ):
        if value < 1:
            raise UserError(f"{name} is {value!r}: give a number of at least 1.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # what launchers set
    steps = accumulation_steps(prompts, args.num_generations, args.per_device_train_batch_size, processes)
    for name, derived in zip(DERIVED, (steps, steps, prompts * args.num_generations), strict=True):
        given = getattr(args, name)
        if given not in (None, derived):
            raise UserError(
                f"{name} is {given} and prompts_per_step {prompts} makes it {derived} (number of processes: "
                f"{processes}): remove {name} or prompts_per_step."
            )
    args.gradient_accumulation_steps = args.steps_per_generation = steps
    args.generation_batch_size = None  # TRL derives it, and refuses it beside steps_per_generation
    logger.info(
        "A step: %d prompts x %d rollouts = %d (processes) x %d (per device) x %d (gradient accumulation).",
        *(prompts, args.num_generations, processes, args.per_device_train_batch_size, steps),
    )


def _divisors(number: int) -> str:
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)
