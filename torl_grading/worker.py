"""A worker process: reads one JSON request a line, answers one JSON line. Started by `pool`, never imported by it.

    {"solution": "1/2", "answer": "0.5", "soft_seconds": 1.0}  ->  {"reason": "equal"}

Without an answer (null) the solution itself is checked. After `soft_seconds` of CPU time (a busy machine does not
count) a signal stops Python code, after twice as many the kernel ends the process. Only a reason leaves it: never an
expression or its text, since `str()` of one can run for ever (Math-Verify #65).
"""

import functools
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import BooleanAtom

from torl_grading.equivalence import Reason, same, shape, split, split_name
from torl_grading.normal import normalize, number, split_unit

MEMORY_BYTES = 4 << 30
# Units are dropped in `normal`: math-verify would drop the letter of "2m", "5n" or "3s".
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_BOX = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALIZATION),)
_PROBES = (sympy.Rational(7, 5), sympy.Rational(23, 11), sympy.Rational(1, 3))
# Read as constants, so that `\gamma + 1` is 1, and what follows `E_1` is lost.
_NO_CONSTANTS = {"\\gamma": "\\varsigma", "E": "\\varrho", "I": "\\varpi"}
_NO_VARIABLE = re.compile(
    r"\\(?:begin|end|mathbb)\*?\{[^{}]*\}(?:\{[lcr|]*\})?|\\[A-Za-z]+|\b(?:a?(?:sin|cos|tan)|log|ln|exp)\b"
)


@functools.lru_cache(maxsize=4096)
def read(answer: str) -> Any:
    r"""Return the sympy expression of a whole answer, or None.

    It is parsed in a box of its own: bare LaTeX is not recognised, `3\sqrt{13}` would be read as 3. Sometimes only a
    part is read, so that every letter must come back as the name of something.
    """
    text = re.sub(r"\\gamma(?![a-z])|(?<![A-Za-z\\])[EI](?=_)", lambda match: _NO_CONSTANTS[match[0]], answer)
    if not split(text) or "'" in text or "\\{" in text:  # a part would be lost
        return None
    parsed = parse(f"\\boxed{{{text}}}", _BOX, parsing_timeout=None)
    expression = next((item for item in parsed if not isinstance(item, str)), None)
    if expression is None or expression.has(sympy.zoo, sympy.nan):
        return None
    named = [str(name) for name in expression.atoms(sympy.Symbol)] + ["e", "i"]
    named += [function.func.__name__ for function in expression.atoms(AppliedUndef)]
    named += ["d"] if expression.has(sympy.Derivative, sympy.Integral) else []
    letters = set(re.findall("[a-z]", _NO_VARIABLE.sub(" ", text).lower()))
    return expression if letters <= set("".join(named).lower()) else None


def algebra(gold: str, answer: str) -> bool:
    """Whether two answers are equal: by probing, or math-verify says so, in whichever order they come."""
    capitals, others = (set(re.findall("[A-Z]", _NO_VARIABLE.sub("", text))) for text in (gold, answer))
    left, right = (read(text) for text in sorted((gold, answer)))
    if capitals != others or left is None or right is None:  # math-verify takes X for x
        return False
    verdict = _probe(left, right)
    return verify(left, right, allow_set_relation_comp=True, timeout_seconds=None) if verdict is None else verdict


def _probe(left: Any, right: Any) -> bool | None:
    """Compare the values of two expressions, or of two equations up to a factor, where the variables are fractions.

    Most wrong answers end here, cheaply. It also keeps apart what math-verify takes for equal: tiny numbers, which it
    compares with zero [MV 14], and equations without a solution it can find [MV 60]. None: math-verify has to tell.
    """
    if isinstance(left, BooleanAtom) or isinstance(right, BooleanAtom):
        return False
    equations = isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq)
    if equations:
        left, right = left.lhs - left.rhs, right.lhs - right.rhs
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return None
    symbols, ratios = sorted(left.free_symbols | right.free_symbols, key=str), []
    exact = not (left.has(sympy.Float) or right.has(sympy.Float))
    for probe in _PROBES if symbols else _PROBES[:1]:
        values = {symbol: probe + sympy.Rational(index, 7) for index, symbol in enumerate(symbols)}
        a, b = (side.subs(values).doit() for side in (left, right))
        if a.is_Rational and b.is_Rational and a != b and exact and not equations:
            return False
        a, b = a.evalf(60), b.evalf(60)
        if a.is_number and b.is_number and a.is_finite and b.is_finite:
            if not equations and abs(a - b) > (1e-40 if exact else 2e-6) * max(abs(a), abs(b)):
                return False
            ratios.append(a / b if b else sympy.nan)
    if equations:
        return None if len(ratios) > 1 and all(abs(ratio / ratios[0] - 1) < 1e-9 for ratio in ratios) else False
    return True if exact and ratios and (not symbols or (left - right).expand() == 0) else None


def is_readable(text: str) -> bool:
    """Whether each part of a solution in normal form can be compared."""
    kind, items = shape(text)
    parts = items if kind != "atom" else (split_unit(split_name(text)[1])[0],)
    if parts != (text,):
        return all(map(is_readable, parts))
    return number(text) is not None or text.startswith("\\text{") or read(text) is not None


@functools.lru_cache(maxsize=4096)
def seconds_to_read(solution: str) -> float:
    """CPU time that a solution in normal form takes to read (what was read stays in the cache of `read`)."""
    started = time.process_time()
    is_readable(solution)
    return time.process_time() - started


def answer_request(solution: str, answer: str | None, soft_seconds: float) -> Reason | None:
    """Compare, or check the solution if there is no answer."""
    bad, good = (Reason.UNPARSED, None) if answer is None else (Reason.DIFFERENT, Reason.EQUAL)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * soft_seconds)  # unhandled: the kernel ends the process, in C code too
    try:
        signal.setitimer(signal.ITIMER_PROF, soft_seconds, 0.1)  # again and again, should somebody swallow the first
        gold = normalize(solution)
        if answer is None:
            return good if is_readable(gold) else bad
        # Half of it, and more only where the solution itself is slow: hanging answers must not hold up the rest.
        seconds = min(soft_seconds, 0.5 * soft_seconds + 5 * seconds_to_read(gold))
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
        return good if same(gold, normalize(answer), algebra) else bad
    except KeyboardInterrupt:  # by the timer; not an `Exception`, which sympy and math-verify would swallow
        return Reason.TIMEOUT
    except MemoryError:  # caches have filled this process, and every later answer would fail: a new one is started
        raise
    except Exception:  # sympy raises anything over what it cannot do; then nothing says that the two are equal
        return bad
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> None:
    # Replies have a descriptor of their own: a library that prints must not garble them.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="ascii") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        logging.disable(logging.CRITICAL)
        signal.signal(signal.SIGPROF, signal.default_int_handler)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if sys.platform == "linux" and not 0 <= hard < MEMORY_BYTES:  # elsewhere the limit is refused or ignored
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
        same(r"\sqrt{12}+x", r"x+2\sqrt{3}", algebra)  # what is loaded at first use is not the first answer's time
        replies.write('{"ready": true}\n')
        for line in sys.stdin:
            replies.write(json.dumps({"reason": answer_request(**json.loads(line))}) + "\n")


if __name__ == "__main__":
    main()
