"""What a dry run has in place of the real: a tiny model, and problems and an interpreter where none are reached."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config
from trl import ModelConfig

from torl_trl.config import ToRLConfig
from torl_trl.data import on_main_process, read_file, read_rows
from torl_trl.errors import UserError
from torl_trl.interpreters import InterpreterError, get_interpreter
from torl_trl.models import load_tokenizer, one_sentence
from torl_trl.script_arguments import ToRLScriptArguments
from torl_trl.shares import interpreter_options_of_rank

logger = logging.getLogger(__name__)

SHARED_OPTIONS = ("timeout_seconds", "memory_mb", "max_output_chars", "max_file_mb")
"""Options that all interpreters have."""


def stand_in(
    script_args: ToRLScriptArguments, args: ToRLConfig, model_args: ModelConfig, tiny: Path, benchmark: Callable
) -> list[str]:
    """Make the tiny model, replace data and an interpreter that are not reached, and return what was left out.

    `tiny` is the tiny recipe's folder, `benchmark` loads one by its name. A collective call. Raises `UserError` for
    what is there and broken.
    """

    def replace() -> tuple[dict[str, Any], list[str]]:
        folder = Path(args.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir {str(folder)!r} cannot be made ({error.strerror}): give another.") from error
        left_out = _make_model(model_args, args, folder / "base", tiny / "base")
        changes = {"model_name_or_path": str(folder / "base"), "model_revision": None}
        if left_out:  # the tiny recipe's tokenizer has a small vocabulary, and makes more tokens of a prompt
            changes["max_prompt_length"] = 4 * script_args.max_prompt_length
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
                unknown = isinstance(error, UserError) and error.__cause__ is None  # a backend or an option of it
                if args.interpreter == "embedded" or unknown:
                    raise
                options = {name: value for name, value in args.interpreter_options.items() if name in SHARED_OPTIONS}
                changes |= {"interpreter": "embedded", "interpreter_options": options}
                left_out.append(f"the interpreter {args.interpreter}, with the embedded one instead: {error}")
                _run_program("embedded", options)
        for line in left_out:
            logger.info("dry run: without %s", line)
        return changes, left_out

    changes, left_out = on_main_process(replace)
    for part in (script_args, args, model_args):
        for name in changes.keys() & vars(part).keys():
            setattr(part, name, changes[name])
    return left_out


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with 2 layers of width 64; heads have 32 dimensions, which every kernel knows."""
    small = copy.deepcopy(config)
    grouped = getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1 if grouped else 2, "head_dim": 32}
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(small, name, size)
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
        like = {"max_position_embeddings": 4096, "num_key_value_heads": 4, "tie_word_embeddings": True}  # Qwen2.5-Math
        config = Qwen2Config(vocab_size=len(tokenizer), **like, **ids)
        left_out.append(
            f"the model's own architecture and tokenizer, with a Qwen2 and the tiny recipe's instead: {error}"
        )
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
    if result.stdout != "42\n":
        raise InterpreterError(f"a program that prints 42 ended as {result.status} and printed {result.stdout!r}")
    logger.info("dry run: the interpreter %s ran a program", name)
