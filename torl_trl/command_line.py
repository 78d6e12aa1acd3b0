"""Command line of the launch scripts: a YAML per run, every key overridable, one sentence per user error."""

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml
from trl import ModelConfig, TrlParser

from torl_trl.checkpoints import is_whole, last_whole_checkpoint
from torl_trl.config import ToRLConfig
from torl_trl.data import on_main_process
from torl_trl.engines.base import EngineError
from torl_trl.errors import UserError
from torl_trl.script_arguments import ToRLScriptArguments

PACKAGES = (
    *("torl_trl", "torl_data", "torl_doctor", "torl_eval", "torl_grading", "torl_guards", "torl_interpreters"),
    *("torl_report", "torl_sandbox"),
)
"""Whose log a user sees, from INFO on and on the main process."""

logger = logging.getLogger("torl_trl.command_line")

LOCAL_PATHS = ("model_name_or_path", "dataset_name", "eval_dataset_name", "prompt_template")
"""Keys whose value may be a path relative to the YAML's folder."""


class CommandParser(argparse.ArgumentParser):
    """For commands with options of their own: their docstring as help, one sentence instead of pages of usage."""

    def __init__(self, description: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}: see --help.")


class RecipeParser(TrlParser):
    """TRL's parser of recipes, with one sentence instead of pages of usage."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--\w+)\S*:", r"\1:", message)
        raise UserError(f"{message[:1].upper()}{message[1:]}; correct it in the YAML or on the command line.")


def parse_arguments(arguments: Sequence[str], recipes: Path) -> tuple[ToRLScriptArguments, ToRLConfig, ModelConfig]:
    """Parse `--config NAME.yaml [--key value ...]`. A relative config is looked up here, then in `recipes`.

    Raises `UserError` for a missing or unreadable file, an unknown key, or an impossible value.
    """
    parser = RecipeParser((ToRLScriptArguments, ToRLConfig, ModelConfig))
    arguments = split_equals(arguments)
    config_path = None
    if "--config" in arguments:
        config_path, position = find_config(arguments, recipes), arguments.index("--config")
        arguments[position + 1] = str(config_path)
        check_keys(parser, config_path)
    _check_flags(parser, arguments)
    try:
        script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # the checks of TRL's and transformers' own dataclasses
        raise UserError(f"{' '.join(str(error).split())}") from error
    if config_path is not None:
        for parsed in (script_args, model_args):
            _resolve_paths(parsed, config_path.parent)
    if not model_args.model_name_or_path:
        raise UserError("model_name_or_path is missing: give a model folder or a Hub id.")
    if model_args.load_in_8bit or model_args.load_in_4bit:
        raise UserError("load_in_8bit and load_in_4bit are not supported: use LoRA with dtype: bfloat16 instead.")
    training_args.resume_from_checkpoint = _checkpoint(training_args)
    return script_args, training_args, model_args


def run_main(main: Callable[[], None]) -> NoReturn:
    """Run a script's `main`; a `UserError` or `EngineError` becomes its sentence on stderr and exit code 2."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    is_main = os.environ.get("RANK", "0") == "0"
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO if is_main else logging.WARNING)
    try:
        main()
    except (UserError, EngineError) as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
    sys.exit(0)


def _checkpoint(args: ToRLConfig) -> str | None:
    """The checkpoint folder to resume from; `true` takes the last whole one of `output_dir`, if there is one."""
    name = args.resume_from_checkpoint
    if name is None or str(name).lower() == "false":
        return None
    if str(name).lower() == "true":
        last = on_main_process(lambda: last_whole_checkpoint(Path(args.output_dir)))
        if last is not None and not is_whole(last):
            raise UserError(
                f"The main process resumes from {str(last)!r}, which rank {args.process_index} does not have: give "
                "all machines an output_dir on one disk."
            )
        logger.info("resume_from_checkpoint: %s", last or f"no whole checkpoint in {args.output_dir!r}, a new run")
        return None if last is None else str(last)
    if not Path(name).is_dir():
        raise UserError(f"resume_from_checkpoint is {name!r}, which is no folder: name a checkpoint-N, or true.")
    if not is_whole(Path(name)):
        raise UserError(
            f"resume_from_checkpoint {name!r} is not whole (the run was killed while it saved, or save_only_model was "
            "true): name another checkpoint-N, or true for the last whole one."
        )
    return str(name)


def split_equals(arguments: Sequence[str]) -> list[str]:
    """`--key=value` to two words, since TRL's parser knows `--config file` only."""
    words: list[str] = []
    for word in arguments:
        if word.startswith("--") and "=" in word:
            words += word.split("=", 1)
        else:
            words.append(word)
    return words


def find_config(arguments: list[str], recipes: Path) -> Path:
    """The file that --config names, here or in `recipes`. Raises `UserError`."""
    position = arguments.index("--config") + 1
    if position >= len(arguments):
        raise UserError("--config has no value: name a YAML file, such as tiny.yaml.")
    name = arguments[position]
    for path in (Path(name), recipes / name):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.name for path in recipes.glob("*.yaml"))) or "none"
    raise UserError(f"--config {name!r} is neither here nor in {recipes.name}/ (which has {known}): name a YAML file.")


def check_keys(parser: RecipeParser, path: Path) -> None:
    """Raise `UserError` unless the YAML has options that the parser knows, with values that they take."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path.name} holds a {type(config).__name__}: write one `key: value` per line.")
    actions = {action.dest: action for action in parser._actions}
    hints = {name: hint for parsed in parser.dataclass_types for name, hint in get_type_hints(parsed).items()}
    config.pop("env", None)  # environment variables, set by TRL's parser
    for key, value in config.items():
        if key not in actions:
            raise UserError(f"{path.name} has the unknown key {key!r}{_suggestion(str(key), set(actions))}.")
        if key.endswith("_strategy") and isinstance(value, bool):
            raise UserError(f'{path.name}: {key} is {value!r}, as YAML reads a bare no; write "no" in quotes.')
        if not _is_value(actions[key], hints.get(key), value):
            raise UserError(f"{path.name}: {key} is {value!r}; give {_kind(actions[key])}.")


def _is_value(action: argparse.Action, hint: Any, value: Any) -> bool:
    """Whether a value from a YAML is one that the option's converter takes; YAML values never meet it otherwise."""
    if value is None:
        return action.type not in (int, float) or action.default is None  # the first are numbers that are not optional
    if action.nargs in ("+", "*") and isinstance(value, list):
        return all(_is_value(action, hint, item) for item in value)
    if isinstance(value, list | dict):  # options that take them take their JSON text too, so that the hint must tell
        return any((get_origin(part) or part) is type(value) for part in (hint, *get_args(hint)))
    return _takes(action, str(value)) and value == value  # a number that is not equal to itself is NaN


def _takes(action: argparse.Action, text: str) -> bool:
    convert = action.type or str
    try:
        convert(text)
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return True


def _kind(action: argparse.Action) -> str:
    if _takes(action, "text"):
        return "a text"
    if not _takes(action, "2"):
        return "true or false"
    return "one number" if _takes(action, "0.5") else "one whole number"


def _check_flags(parser: RecipeParser, arguments: list[str]) -> None:
    known = set(parser._option_string_actions) | {"--config"}
    for word in arguments:
        if word.startswith("--") and word not in known:
            raise UserError(f"Unknown option {word!r}{_suggestion(word, known)}.")


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else ": remove it"


def _resolve_paths(parsed: Any, folder: Path) -> None:
    for name in LOCAL_PATHS:
        value = getattr(parsed, name, None)
        if isinstance(value, str) and value:
            with contextlib.suppress(OSError):  # a template on one line is too long for a file's name
                beside = folder / value
                if not Path(value).exists() and beside.exists():
                    setattr(parsed, name, str(beside))
