"""What only a trainer that is set up can tell: model, data and options that do not work together."""

import inspect
from typing import TYPE_CHECKING

import torch

from torl_interpreters.base import Interpreter
from torl_trl.errors import UserError
from torl_trl.rewards import AccuracyReward

if TYPE_CHECKING:
    from torl_trl.trainer import ToRLTrainer

HALF_PRECISION_MIN_LR = 1e-5
"""Pure half-precision AdamW at lr 1e-6 leaves 98 % of the weights where they were (measured)."""


def check_setup(trainer: "ToRLTrainer", interpreter: Interpreter | None) -> None:
    """Raises `UserError` for settings that cannot work."""
    args = trainer.args
    if args.max_tool_calls > 0 and interpreter is None:
        raise UserError(
            f"max_tool_calls is {args.max_tool_calls} and there is no interpreter: pass one, or set it to 0."
        )
    if not any(isinstance(function, AccuracyReward) for function in trainer.reward_funcs):
        raise UserError("No AccuracyReward is among the reward functions: add one, metrics need its verdicts.")
    if args.filters().drops_groups:
        for name, function in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
            if isinstance(function, torch.nn.Module) or inspect.iscoroutinefunction(function):
                raise UserError(
                    f"The reward function {name!r} is a model or asynchronous, and drop_dead_groups and accuracy_band "
                    "need rewards before TRL computes them: give a plain function, or switch them off."
                )
    needed = args.generation_batch_size // trainer.num_generations
    if trainer.train_dataset is not None and len(trainer.train_dataset) < needed:
        raise UserError(
            f"There are {len(trainer.train_dataset)} problems and a step takes {needed}, so that no step would be "
            "made: lower per_device_train_batch_size or gradient_accumulation_steps, or give more problems."
        )
    half = {name for name, p in trainer.model.named_parameters() if p.requires_grad and p.element_size() < 4}
    if half and not trainer.is_deepspeed_enabled and args.learning_rate < HALF_PRECISION_MIN_LR:
        raise UserError(
            f"dtype is half precision and learning_rate is {args.learning_rate}, so that most updates round "
            f"to nothing: set dtype: float32 (with bf16: true for speed), or a learning rate of at least "
            f"{HALF_PRECISION_MIN_LR}."
        )
