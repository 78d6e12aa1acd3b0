"""Programs for remote services: the text they run, and the result in what it prints.

A service is not sent the bare program but `sandbox/supervise.py` with the program in it. That starts a fresh Python
without the service's environment, keeps the limits, ends all that the program started, and prints the result as one
line of JSON. So a result is the same from every service, whatever the service does with output, time and leftovers.
"""

import json
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torl_trl.interpreters.base import ENVIRONMENT, ExecutionResult, ExecutionStatus

SERVICE_SLACK_SECONDS = 30.0
"""How much longer than the program the service should wait: for the starts of two Pythons on a busy machine."""


@lru_cache
def _source(name: str) -> str:
    return (Path(__file__).parent / "sandbox" / name).read_text(encoding="utf-8")


def wrap(code: str, *, timeout_seconds: float, max_output_chars: int, rlimits: Mapping[str, int]) -> tuple[str, str]:
    """The Python text that runs `code` under our rules, and the mark that `unwrap` looks for."""
    mark = f"torl-result-{secrets.token_hex(8)} "
    call = {
        "code": code,
        "program_source": _source("program.py"),
        "timeout": timeout_seconds,
        "max_chars": max_output_chars,
        "rlimits": dict(rlimits),
        "environment": ENVIRONMENT,
    }
    # !a: a service may refuse text that is not valid UTF-8, and code may hold a lone surrogate.
    return f"{_source('supervise.py')}\n\nprint_result({mark!r}, **{call!a})\n", mark


def unwrap(stdout: str, mark: str) -> ExecutionResult | None:
    """The result in what the service printed; None when there is none: our text did not come to its end."""
    line = re.search(rf"^{re.escape(mark)}(.*)$", stdout, re.MULTILINE)
    if line is None:
        return None
    try:
        fields = json.loads(line[1])
    except json.JSONDecodeError:  # cut off by the service
        return None
    if fields["status"] is None:  # Python did not reach the program
        return None
    return ExecutionResult(**fields | {"status": ExecutionStatus(fields["status"])})
