"""A run's folder (`output_dir`): its files, the resolved configuration, and reading its metrics.

config.yaml       every option of the run after defaults, YAML file and command line
metrics.jsonl     one JSON object a line: step, split ("train", "eval" or "summary"), epoch, then metrics
rollouts/         parquet files, see `torl_trl.records`
curves.png        see torl_report.curves
checkpoint-N/     written by transformers
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from torl_trl.errors import UserError

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
CURVES_NAME = "curves.png"
ROLLOUTS_NAME = "rollouts"

_SECRET = re.compile(r"(^|_)(token|api_?key|access_key|secret|secret_key|private_key|password|credentials)$")
_SPECIAL_TOKEN = re.compile(r"(^|_)(eos|bos|pad|unk|cls|sep|mask)_token$")
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")


def write_config(run_folder: Path, *parts: Any, leave_out: Collection[str] = ()) -> Path:
    """Write the options of all `parts` (dataclass instances or mappings), flat and sorted, as the run's config.yaml.

    Values become plain YAML (enums their value, paths and dtypes their text). Secrets, by the name of their key, are
    left out and named in the first line, so that the file can be shared, and used as a `--config` again; passwords
    inside URLs are cut out. `leave_out` names options that must not be given again.

    Raises `TypeError` on a value that is not plain, `ValueError` when two parts disagree on an option.
    """
    options: dict[str, Any] = {}
    for part in parts:
        for name, value in _fields_of(part).items():
            if options.setdefault(name, value) != value:
                raise ValueError(f"Option {name!r} is {options[name]!r} and {value!r} in two parts: give it once.")
    secrets: list[str] = []
    plain = _plain({name: value for name, value in options.items() if name not in leave_out}, "", secrets)
    header = "# The resolved configuration of this run.\n"
    if secrets:
        header = f"{header[:-1]} Left out as secret: {', '.join(sorted(secrets))}.\n"
    path = run_folder / CONFIG_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {str(run_folder)!r} cannot be made ({error.strerror}): give another.") from error
    write_atomically(path, header + yaml.safe_dump(plain, sort_keys=True, allow_unicode=True, width=120))
    return path


def plain_options(value: Any) -> Any:
    """Options as YAML and trackers can hold them, without secrets, which are known by the names of their keys."""
    return _plain(value, "", [])


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl. A half-written last line (no newline yet) is ignored.

    Raises `FileNotFoundError` without the file, `UserError` on any other line that is not a JSON object.
    """
    path = run_folder / METRICS_NAME
    complete = path.read_text(encoding="utf-8").split("\n")[:-1]
    lines = []
    for number, text in enumerate(complete, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{str(path)!r}, line {number}, is not JSON ({error}): mend or remove it.") from error
        if not isinstance(line, dict):
            raise UserError(f"{str(path)!r}, line {number}, is {text!r}, not a JSON object: mend or remove it.")
        lines.append(line)
    return lines


def remove_rollouts_after(run_folder: Path, step: int) -> None:
    """Remove rollout files that the coming steps write again, or that an older run left, so that runs never mix."""
    for path in (run_folder / ROLLOUTS_NAME).glob("*step_*.parquet"):
        if int(path.stem.rpartition("_")[2]) > step:
            path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old or the new content, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _fields_of(part: Any) -> dict[str, Any]:
    if is_dataclass(part):
        return {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    return dict(part)


def _is_secret(key: str) -> bool:
    return bool(_SECRET.search(key.lower())) and not _SPECIAL_TOKEN.search(key.lower())


def _plain(value: Any, place: str, secrets: list[str]) -> Any:
    """What YAML can hold of `value`; the places of secrets that are left out go to `secrets`."""
    if is_dataclass(value) or isinstance(value, Mapping):
        plain = {}
        for key, item in _fields_of(value).items():
            inner = f"{place}.{key}".lstrip(".")
            if isinstance(item, str) and item and _is_secret(str(key)):
                secrets.append(inner)
            else:
                plain[key] = _plain(item, inner, secrets)
        return plain
    if isinstance(value, Enum):
        return _plain(value.value, place, secrets)
    if isinstance(value, str):
        return _USER_INFO.sub("", str(value))
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, os.PathLike) or type(value).__module__ == "torch":  # a torch.dtype, known without torch
        return str(value).removeprefix("torch.")
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item, place, secrets) for item in value]
    raise TypeError(f"Option {place!r} is {value!r}, which YAML cannot hold: use plain values.")
