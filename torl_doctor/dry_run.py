"""A dry run: two steps of a recipe with a tiny model of the same kind, all else as written, before GPUs are taken.

It is the launch script's own run with other options, in `output_dir`/dry_run. `prepare` makes those that this machine
and a few minutes call for, `torl_doctor.stand_ins` what is not reached. Each change is said, "dry run: ...".
"""

import importlib.util
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import is_deepspeed_available
from trl import ModelConfig

from torl_trl.batch import accumulation_steps
from torl_trl.command_line import RecipeParser, check_keys, find_config, split_equals
from torl_trl.config import ToRLConfig
from torl_trl.script_arguments import ToRLScriptArguments

logger = logging.getLogger(__name__)

STEPS, PROMPTS = 2, 4
"""Steps, and prompts of a step; more prompts where the processes cannot share them."""
LIMITS = {"max_train_problems": 64, "max_eval_problems": 8, "max_completion_length": 64}


def prepare(arguments: Sequence[str], recipes: Path) -> tuple[list[str], list[str]]:
    """Return the command line, with `dry_run: true` that of the dry run, and what is left out on this machine.

    Works on options before their checks, which refuse what a machine lacks. Raises `UserError`.
    """
    words, parser = split_equals(arguments), RecipeParser((ToRLScriptArguments, ToRLConfig, ModelConfig))
    parser.allow_abbrev = False
    own = list(words)
    if "--config" in own:
        path, position = find_config(own, recipes), own.index("--config")
        check_keys(parser, path)
        parser.set_defaults_with_config(**yaml.safe_load(path.read_text(encoding="utf-8")))
        del own[position : position + 2]
    given = vars(parser.parse_known_args(own)[0])
    if not given["dry_run"]:
        return words, []
    options, left_out = dry_options(
        given,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        gpu=torch.accelerator.is_available(),
        vllm=importlib.util.find_spec("vllm") is not None,
        deepspeed=is_deepspeed_available() and bool(shutil.which("c++") and shutil.which("ninja")),
    )
    logger.info("dry run: %s", ", ".join(f"{name} {value}" for name, value in options.items()))
    for line in left_out:
        logger.info("dry run: without %s", line)
    values = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [*words, *(str(word) for name, value in values.items() for word in (f"--{name}", *value))], left_out


def dry_options(
    given: Mapping[str, Any], *, processes: int, gpu: bool, vllm: bool, deepspeed: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return what a dry run changes in the options `given`, and what it leaves out and why. Raises `UserError`.

    The flags say what the machine has: a GPU, vLLM, and what DeepSpeed needs on a CPU.
    """
    output = given["output_dir"] or "trainer_output"
    options = {"output_dir": str(Path(output, "dry_run")), "resume_from_checkpoint": "false", "max_steps": STEPS}
    options |= {"eval_steps": STEPS, "logging_steps": 1} | _step(given, processes)
    options |= {name: min(given[name] or limit, limit) for name, limit in LIMITS.items()}
    if given["overlong_penalty_tokens"]:
        options["overlong_penalty_tokens"] = min(given["overlong_penalty_tokens"], LIMITS["max_completion_length"])
    if given["push_to_hub"]:
        options["hub_model_id"] = f"{given['hub_model_id'] or Path(output).resolve().name}-dry-run"
    if not gpu:
        options["use_cpu"] = "true"
    left_out = []

    def leave_out(name: str, value: str, line: str) -> None:
        options[name] = value
        left_out.append(line)

    if given["use_vllm"] and not (vllm or gpu):
        leave_out("use_vllm", "false", "vLLM, which is not installed: the model itself generates")
    elif given["use_vllm"] and given["vllm_mode"] == "server":
        leave_out("vllm_mode", "colocate", "vLLM servers, which hold the real model: vLLM runs in this process")
    filters = ("drop_void_turns", "drop_dead_groups", "mask_truncated_completions")
    if given["accuracy_band"]:
        options["accuracy_band"] = [0, 1]
    if given["accuracy_band"] or any(given[name] for name in filters):
        options |= dict.fromkeys(filters[1:], "false") | {"refill_limit": 0}
        leave_out(filters[0], "false", "the filters, which would leave out all that a random model writes")
    for name, what in (("vllm_enable_sleep_mode", "vLLM's sleep mode"), ("fp16", "fp16")):
        if given[name] and not gpu:
            leave_out(name, "false", f"{what}, which needs a GPU")
    if given["deepspeed"] and not (gpu or deepspeed):
        options["dtype"] = "float32"  # which DeepSpeed keeps behind half precision
        leave_out("deepspeed", "", "DeepSpeed, which on a CPU needs its package, a C++ compiler and ninja")
    return options, left_out


def _step(given: Mapping[str, Any], processes: int) -> dict[str, int]:
    """The smallest step of `PROMPTS` prompts or more with the same groups and micro-batches, at most the written."""
    generations, per_device = given["num_generations"], given["per_device_train_batch_size"]
    if min(generations or 0, per_device) < 1:
        return {}  # which the checks refuse
    cycle = math.lcm(per_device * processes, generations)
    rollouts = cycle * math.ceil(PROMPTS * generations / cycle)
    if prompts := given["prompts_per_step"]:
        accumulation_steps(prompts, generations, per_device, processes)  # says what the real run would
        return {"prompts_per_step": min(prompts, rollouts // generations)}
    if given["steps_per_generation"] or given["generation_batch_size"]:
        return {}
    accumulation = rollouts // (per_device * processes)
    return {"gradient_accumulation_steps": min(given["gradient_accumulation_steps"] or 1, accumulation)}


def log_end(args: ToRLConfig, model_args: ModelConfig, left_out: list[str]) -> None:
    """The last line: what was tried, and what was left out."""
    tried = {
        "LoRA": model_args.use_peft,
        "vLLM": args.use_vllm,
        "DeepSpeed": args.deepspeed,
        f"the interpreter {args.interpreter}": args.max_tool_calls,
        "evaluation": args.eval_strategy != "no" or args.eval_on_start,
        "saving": args.save_strategy != "no",
        "a push to the Hub": args.push_to_hub,
    }
    done = ", ".join([f"{STEPS} steps", *(what for what, was_tried in tried.items() if was_tried)])
    short = "; ".join(line.partition(",")[0] for line in left_out) or "nothing"
    logger.info("dry run: tried %s; left out: %s", done, short)
