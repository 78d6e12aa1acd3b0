"""A dry run: two steps of a recipe with a tiny model of the same kind, all else as written, before GPUs are taken.

It is the launch script's own run with other options. `prepare` makes those that this machine and a few minutes call
for, `stand_in` replaces what cannot be reached; each is one line "dry run: ...". All lies in `output_dir`/dry_run.
"""

import copy
import importlib.util
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import is_deepspeed_available
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config
from trl import ModelConfig

from torl_trl.batch import accumulation_steps
from torl_trl.command_line import _check_keys, _find_config, _Parser, _split_equals
from torl_trl.config import ToRLConfig, ToRLScriptArguments, interpreter_options_of_rank
from torl_trl.data import on_main_process, read_file, read_rows
from torl_trl.errors import UserError
from torl_trl.interpreters import InterpreterError, get_interpreter
from torl_trl.models import load_tokenizer, one_sentence

logger = logging.getLogger(__name__)

STEPS, PROMPTS = 2, 4
"""Steps, and prompts of a step; more prompts where the processes cannot share them."""
LIMITS = {"max_train_problems": 64, "max_eval_problems": 8, "max_completion_length": 64}


def prepare(arguments: Sequence[str], recipes: Path) -> tuple[list[str], list[str]]:
    """Return the command line, with `dry_run: true` that of the dry run, and what is left out on this machine.

    Works on options before their checks, which refuse what a machine lacks. Raises `UserError`.
    """
    words, parser = _split_equals(arguments), _Parser((ToRLScriptArguments, ToRLConfig, ModelConfig))
    own = list(words)
    if "--config" in own:
        path, position = _find_config(own, recipes), own.index("--config")
        _check_keys(parser, path)
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
    _say(left_out)
    return [*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))], left_out


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
    for name, what in (("vllm_enable_sleep_mode", "vLLM's sleep mode"), ("fp16", "fp16")):
        if given[name] and not gpu:
            leave_out(name, "false", f"{what}, which needs a GPU")
    if given["deepspeed"] and not (gpu or deepspeed):
        leave_out("deepspeed", "", "DeepSpeed, which on a CPU needs its package, a C++ compiler and ninja")
    return options, left_out


def _step(given: Mapping[str, Any], processes: int) -> dict[str, int]:
    """The smallest step of `PROMPTS` prompts or more with the same groups and micro-batches, at most the written."""
    generations, per_device = given["num_generations"], given["per_device_train_batch_size"]
    cycle = math.lcm(per_device * processes, generations)
    rollouts = cycle * math.ceil(PROMPTS * generations / cycle)
    if prompts := given["prompts_per_step"]:
        accumulation_steps(prompts, generations, per_device, processes)  # says what the real run would
        return {"prompts_per_step": min(prompts, rollouts // generations)}
    if given["steps_per_generation"] or given["generation_batch_size"]:
        return {}
    accumulation = rollouts // (per_device * processes)
    return {"gradient_accumulation_steps": min(given["gradient_accumulation_steps"] or 1, accumulation)}


def stand_in(
    script_args: ToRLScriptArguments, args: ToRLConfig, model_args: ModelConfig, tiny: Path, benchmark: Callable
) -> list[str]:
    """Make the tiny model, replace data and an interpreter that are not reached, and return what was left out.

    `tiny` is the tiny recipe's folder, `benchmark` loads one by its name. A collective call. Raises `UserError` for
    what is there and broken.
    """

    def replace() -> tuple[dict[str, Any], list[str]]:
        folder = Path(args.output_dir)
        left_out = _make_model(model_args, args, folder / "base", tiny / "base")
        changes = {"model_name_or_path": str(folder / "base"), "model_revision": None}
        places = {"dataset_name": (script_args.dataset_name, script_args.dataset_train_split, "train.jsonl")}
        if args.eval_strategy != "no" or args.eval_on_start:
            places["eval_dataset_name"] = (script_args.eval_data(), script_args.dataset_test_split, "eval.jsonl")
        for name, (place, split, file) in places.items():
            if error := _unreachable(place, split, script_args.dataset_config, benchmark):
                columns = {"problem": script_args.problem_column, "answer": script_args.answer_column}
                rows = [{columns.get(key, key): value for key, value in row.items()} for row in read_file(tiny / file)]
                (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                changes[name] = str(folder / file)
                left_out.append(f"the recipe's {name}, with the tiny recipe's problems instead: {error}")
        if args.max_tool_calls:
            try:
                _run_program(args.interpreter, args.interpreter_options)
            except (UserError, InterpreterError) as error:
                if args.interpreter == "embedded" or not error.__cause__:  # an option that the backend does not have
                    raise
                options = {
                    name: args.interpreter_options[name]
                    for name in args.interpreter_options.keys() & {"timeout_seconds"}
                }
                changes |= {"interpreter": "embedded", "interpreter_options": options}
                left_out.append(f"the interpreter {args.interpreter}, with the embedded one instead: {error}")
                _run_program("embedded", options)
        _say(left_out)
        return changes, left_out

    changes, left_out = on_main_process(replace)
    for part in (script_args, args, model_args):
        for name in changes.keys() & vars(part).keys():
            setattr(part, name, changes[name])
    return left_out


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


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with 2 layers of width 64; heads have 32 dimensions, which every kernel knows."""
    small = copy.deepcopy(config)
    grouped = getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1 if grouped else 2, "head_dim": 32}
    for name in sizes.keys() & {name for name in sizes if hasattr(config, name)}:
        setattr(small, name, sizes[name])
    if getattr(config, "layer_types", None):
        small.layer_types = config.layer_types[:2]
    return small


def _make_model(model_args: ModelConfig, args: ToRLConfig, folder: Path, tiny: Path) -> list[str]:
    """Save a random model of the recipe's kind with its tokenizer, and return what of it could not be loaded."""
    name, revision, left_out = model_args.model_name_or_path, model_args.model_revision, []
    try:
        with one_sentence("configuration", name):
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
        tokenizer = load_tokenizer(name, revision, args.trust_remote_code)
    except UserError as error:
        if Path(name).is_dir():
            raise
        tokenizer = load_tokenizer(str(tiny), None, False)
        ids = {key: getattr(tokenizer, key) for key in ("eos_token_id", "pad_token_id")}
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            max_position_embeddings=4096,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            **ids,
        )  # as Qwen2.5-Math-1.5B
        left_out.append(f"the model's own kind, with a Qwen2 and the tiny recipe's tokenizer instead: {error}")
    model = AutoModelForCausalLM.from_config(shrunk(config), trust_remote_code=args.trust_remote_code)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("dry run: %s with %s random parameters for %s", config.model_type, f"{model.num_parameters():,}", name)
    return left_out


def _unreachable(place: str, split: str, subset: str | None, benchmark: Callable[[str], Any]) -> UserError | None:
    if Path(place).exists():
        return None
    try:
        if "," in place or "/" not in place:
            for name in place.split(","):
                benchmark(name)
        else:
            read_rows(place, split=split, subset=subset)
    except UserError as error:
        return error
    return None


def _run_program(name: str, options: dict[str, Any]) -> None:
    with get_interpreter(name, **interpreter_options_of_rank(name, options)) as interpreter:
        result = interpreter.submit("print(6 * 7)").result()
    logger.info("dry run: the interpreter %s ran a program in %.2f s: %s", name, result.seconds, result.status)


def _say(left_out: list[str]) -> None:
    for line in left_out:
        logger.info("dry run: without %s", line)
