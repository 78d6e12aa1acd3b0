"""A worker process: reads one JSON request a line, answers one JSON line. Started by `pool`, never imported by it.

    {"solution": "1/2", "answer": "0.5", "soft_seconds": 2, "hard_seconds": 5.0}  ->  {"reason": "equal"}
    {"solution": "1/2", "answer": null, ...}   (check the solution itself)        ->  {"reason": null}

math-verify runs on this process's main thread, the only place where its signal timeouts work. They bound Python code;
the pool kills the process when C code does not come back. Only a reason leaves the process: never an expression or
its text, since `str()` of one can run for ever (Math-Verify #65).
"""

import functools
import json
import logging
import math
import os
import resource
import sys
import time
from typing import Any, TextIO

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from torl_trl.grading.equivalence import Reason, strip_delimiters

MEMORY_BYTES = 4 << 30
WARM_UP_SECONDS = 60
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def parse_boxed(answer: str, seconds: int) -> list[Any]:
    """Parse an answer in a box of its own: bare LaTeX is not recognised, `3\\sqrt{13}` would be read as 3.

    Returns math-verify's list: an expression and its text, only the text, or nothing after an error or a timeout.
    """
    return parse(f"\\boxed{{{strip_delimiters(answer)}}}", _EXTRACTION, parsing_timeout=seconds)


@functools.lru_cache(maxsize=4096)
def parse_solution(solution: str, seconds: int) -> list[Any]:
    """Parse a solution; a group of completions and all epochs share it."""
    return parse_boxed(solution, seconds)


def has_expression(parsed: list[Any]) -> bool:
    return any(not isinstance(item, str) for item in parsed)


def compare(solution: str, answer: str, seconds: int) -> Reason:
    """Compare an answer with the solution. Each step (two parses, up to four comparisons) has `seconds`.

    math-verify keeps its errors and timeouts to itself and says "not equal"; a step that took all its time shows one.
    """
    gold = parse_solution(solution, seconds)
    if not gold:
        return Reason.BAD_SOLUTION
    started = time.monotonic()
    target = parse_boxed(answer, seconds)
    if verify(gold, target, timeout_seconds=seconds):
        return Reason.EQUAL
    if time.monotonic() - started >= seconds:
        return Reason.TIMEOUT
    return Reason.DIFFERENT if has_expression(target) else Reason.UNPARSED


def check(solution: str, seconds: int) -> Reason | None:
    """Return why a solution cannot be used, or None: it has to parse and to be equal to itself."""
    if not has_expression(parse_solution(solution, seconds)):
        return Reason.UNPARSED
    reason = compare(solution, solution, seconds)
    return None if reason == Reason.EQUAL else reason


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process `seconds` of CPU time from now: in C code too, and when the pool is gone."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def main() -> None:
    # Replies have a descriptor of their own: a library that prints must not garble them.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        logging.disable(logging.CRITICAL)
        if sys.platform == "linux":  # elsewhere the limit is refused or ignored
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        compare(r"\frac{1}{2}", "0.5", WARM_UP_SECONDS)  # what is loaded at first use is not the first answer's time
        reply(replies, {"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            limit_cpu(request["hard_seconds"])
            if request["answer"] is None:
                reason = check(request["solution"], request["soft_seconds"])
            else:
                reason = compare(request["solution"], request["answer"], request["soft_seconds"])
            reply(replies, {"reason": reason})


if __name__ == "__main__":
    main()
