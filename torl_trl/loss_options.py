"""Options of the loss that do nothing, or harm, unless others fit: refused or said when a run is configured.

TRL takes them in any combination. Called after TRL has derived its own options.
"""

import logging
import math
from typing import TYPE_CHECKING

from torl_trl.errors import UserError
from torl_trl.filters import Filters

if TYPE_CHECKING:
    from torl_trl.config import ToRLConfig

logger = logging.getLogger(__name__)

COUNTS_TOKENS = ("dapo", "cispo", "vespo")
"""Losses whose denominator is the number of tokens that train, in the whole generation batch."""


def check_loss_options(args: "ToRLConfig") -> None:
    """Raises `UserError`; warns where a setting may be meant."""
    given = args.epsilon_high
    if args.loss_type == "cispo" and (given is None or given < 1):
        raise UserError(
            f"epsilon_high is {given!r} with loss_type: cispo, which weighs every token by its ratio up to "
            "epsilon_high itself (without it: epsilon), so that all would weigh that little: set it to 5.0, for one."
        )
    updates = args.num_iterations * args.steps_per_generation / args.gradient_accumulation_steps
    if args.loss_type != "cispo" and given is not None and given != args.epsilon and updates <= 1:
        raise UserError(
            f"epsilon_high is {given} and a rollout is used for one update, whose ratios are all 1, so that nothing "
            "is clipped: set num_iterations: 2, or remove epsilon_high."
        )
    if args.use_vllm and args.vllm_importance_sampling_correction:
        mode = args.vllm_importance_sampling_mode
        if mode.startswith("sequence"):
            logger.warning(
                "vllm_importance_sampling_mode is %s: it multiplies the ratios of all tokens, so that %d tokens with "
                "small differences pass any limit, and long rollouts train %s: token_truncate looks at each token.",
                *(mode, args.max_completion_length, "nothing" if mode.endswith("mask") else "with a cut weight"),
            )
    if args.loss_type == "dr_grpo":
        logger.warning(
            "loss_type is dr_grpo, which divides by rollouts x max_completion_length: %d, whatever their lengths, so "
            "that its steps are small: dapo with scale_rewards: none divides by tokens.",
            args.max_completion_length,
        )


def check_filters(args: "ToRLConfig") -> None:
    """Raises `UserError` for filters that cannot act as they are written."""
    band = args.accuracy_band
    numbers = isinstance(band, list | tuple) and all(isinstance(share, int | float) for share in band)
    if band is not None and not (numbers and len(band) == 2 and 0 <= band[0] <= band[1] <= 1):
        raise UserError(f"accuracy_band is {band!r}: give the lowest and the highest share, such as [0.1, 0.9].")
    filters = args.filters()
    if args.overlong_penalty_tokens > args.max_completion_length:
        raise UserError(
            f"overlong_penalty_tokens is {args.overlong_penalty_tokens}, more than max_completion_length: "
            f"{args.max_completion_length}: lower it."
        )
    if args.refill_limit and not filters.drops_groups:
        raise UserError(
            f"refill_limit is {args.refill_limit} and nothing leaves groups out: set drop_dead_groups: true or an "
            "accuracy_band, or remove it."
        )
    if filters != Filters() and args.loss_type not in COUNTS_TOKENS:
        raise UserError(
            f"loss_type is {args.loss_type}, whose denominator counts rollouts that are left out too: choose one of "
            f"{', '.join(COUNTS_TOKENS)}, or switch the filters off (drop_..., accuracy_band, "
            "mask_truncated_completions)."
        )
    if filters.drops_groups:
        _check_groups(args)


def _check_groups(args: "ToRLConfig") -> None:
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise UserError(
            f"A process has {rows} rollouts of a step, which are no whole groups of num_generations: "
            f"{args.num_generations}, and drop_dead_groups and accuracy_band need whole ones: make "
            "per_device_train_batch_size x gradient_accumulation_steps a multiple of num_generations."
        )
    groups = rows // args.num_generations
    if args.refill_limit and args.refill_limit * groups < 1:
        raise UserError(
            f"refill_limit is {args.refill_limit}, which for the {groups} groups that a process has of a step is not "
            f"one more: make it at least {math.ceil(100 / groups) / 100}."
        )
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise UserError(
            f"steps_per_generation is {args.steps_per_generation} with gradient_accumulation_steps: "
            f"{args.gradient_accumulation_steps}: drop_dead_groups and accuracy_band fill whole steps, make it a "
            "multiple."
        )
