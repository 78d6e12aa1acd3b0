r"""What a rollout shows: the behaviours of the paper's section 3.4, and a few more, each found by an exact rule.

    find_labels(row)    # a full row of `torl_trl.records` -> some keys of LABELS, in their order

Rules err on the quiet side: they look at text only, and a comparison that text cannot decide (it would take algebra)
counts for nothing. What the words of the rules mean:

program     the code of a call that was executed, whatever its status; malformed and failed calls are none
failed      any status but ok
printed     the last line of an ok program's observation; none if it printed nothing or the line itself was shortened
stated      the last `\boxed{}` of the model's own text outside fences; without one in that turn, what follows "answer
            is" as a number or inline formula that ends its sentence
equals      as the grader compares texts, without a label before "=", ": " or "is" in what was printed; the brackets
            of a Python list may be left out
differs     both are a number, or equally many of them, written out and without a unit; and they are other numbers
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torl_grading.equivalence import MAX_ANSWER_CHARS, Reason, compare_texts, split
from torl_grading.extraction import drop_fences, extract_answer
from torl_grading.normal import normalize, number
from torl_trl.prompts import NO_OUTPUT
from torl_trl.records import segment_texts

BEHAVIOURS = ("code_corrected", "disagreement_rechecked", "answer_verified_by_code")
"""Those that the paper shows."""

LABELS = {
    "code_corrected": "A program failed, and a later, different program of the rollout ran ok.",
    "disagreement_rechecked": "The model stated an answer, a program then printed a result that differs from it, and "
    "afterwards the model ran another program or its last stated answer differs from the earlier one.",
    "answer_verified_by_code": "A boxed answer stood in the model's own text when a program ran, and what that "
    "program printed equals it.",
    "wrong_although_code_right": "The rollout is graded wrong, and some program printed what equals the solution.",
    "right_without_code": "The rollout is graded correct, and no program was executed.",
    "code_changed_after_error": "A program failed, and the next one is different, however that ended.",
}
"""Each label and its rule."""

_SAID = re.compile(
    r"\banswer is:? *(\$[^$\n]{1,80}\$|\\\([^\n]{1,80}?\\\)|[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?)(?=[.;!]?\s*$|[.;!]\s)",
    re.MULTILINE,
)
_LABEL = re.compile(r"\A(?:[A-Za-z][^=:]*?(?:=|:\s|\bis\s)\s*)+")


@dataclass(frozen=True, slots=True)
class _Program:
    """An executed call; `turn` is the model's turn that it ended."""

    turn: int
    code: str
    ok: bool
    printed: str | None


@dataclass(frozen=True, slots=True)
class _View:
    """A row as the rules look at it; `boxed` and `stated` hold the answers that stood there after each turn."""

    boxed: list[str | None]
    stated: list[str | None]
    programs: list[_Program]
    solution: str
    correct: bool | None


def find_labels(row: Mapping[str, Any]) -> list[str]:
    """Return the labels of a row of rollouts, in the order of `LABELS`.

    A row that is not full, or was recorded before rollouts had segments, has none.
    """
    if not row["full"] or row["segments"] is None:
        return []
    boxed, stated = [None], [None]  # before the first turn
    for inserted, text in segment_texts(row):
        if not inserted:
            box = extract_answer([text])
            boxed.append(boxed[-1] if box is None else box)
            stated.append((_said(text) or stated[-1]) if box is None else box)
    programs = [
        _Program(turn, call["code"].strip(), call["status"] == "ok", _printed(call))
        for turn, call in enumerate(row["calls"], start=1)  # every call ends a turn, in order
        if call["status"] not in ("malformed", "interpreter_failed")
    ]
    view = _View(boxed, stated, programs, row["solution"], row["correct"])
    return [label for label in LABELS if _RULES[label](view)]


def _code_corrected(view: _View) -> bool:
    failed: set[str] = set()
    for program in view.programs:
        if not program.ok:
            failed.add(program.code)
        elif failed - {program.code}:
            return True
    return False


def _code_changed_after_error(view: _View) -> bool:
    pairs = zip(view.programs, view.programs[1:], strict=False)
    return any(not first.ok and first.code != then.code for first, then in pairs)


def _disagreement_rechecked(view: _View) -> bool:
    for place, program in enumerate(view.programs):
        stated = view.stated[program.turn]
        if stated is None or program.printed is None or not _differ(stated, program.printed):
            continue
        reran = any(later.code != program.code for later in view.programs[place + 1 :])
        if reran or _differ(stated, view.stated[-1]):
            return True
    return False


def _answer_verified_by_code(view: _View) -> bool:
    for program in view.programs:
        boxed = view.boxed[program.turn]
        if boxed is not None and program.printed is not None and _equal(boxed, program.printed):
            return True
    return False


def _wrong_although_code_right(view: _View) -> bool:
    printed = (program.printed for program in view.programs if program.printed is not None)
    return view.correct is False and any(_equal(view.solution, line) for line in printed)


def _right_without_code(view: _View) -> bool:
    return view.correct is True and not view.programs


_RULES: dict[str, Callable[[_View], bool]] = {
    "code_corrected": _code_corrected,
    "disagreement_rechecked": _disagreement_rechecked,
    "answer_verified_by_code": _answer_verified_by_code,
    "wrong_although_code_right": _wrong_although_code_right,
    "right_without_code": _right_without_code,
    "code_changed_after_error": _code_changed_after_error,
}


def _printed(call: Mapping[str, Any]) -> str | None:
    """The last line of a call's output. Where "..." stands in it, a part of it may be missing."""
    if call["status"] != "ok" or call["observation"] == NO_OUTPUT:
        return None
    line = call["observation"].rpartition("\n")[2].strip()
    return None if not line or "..." in line else line


def _said(turn: str) -> str | None:
    said = _SAID.findall(drop_fences(turn)) if "answer is" in turn else ()
    return said[-1] if said else None


@functools.lru_cache(maxsize=4096)
def _equal(answer: str, printed: str) -> bool:
    value = _LABEL.sub("", printed)
    if compare_texts(answer, value) == Reason.EQUAL:
        return True
    is_list = value.startswith("[") and value.endswith("]")
    return is_list and compare_texts(answer, value[1:-1]) == Reason.EQUAL


def _differ(answer: str, other: str) -> bool:
    values, others = _values(answer), _values(other)
    return len(values) == len(others) > 0 and values != others and not _equal(answer, other)


def _values(text: str) -> list[Fraction]:
    """The numbers that an answer consists of, sorted; [] if there is anything else in it."""
    if len(text) > MAX_ANSWER_CHARS:
        return []
    text = _LABEL.sub("", normalize(_LABEL.sub("", text)))  # "x = 5", and "$x = 5$"
    if text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1]
    numbers = [number(text)] if number(text) else [number(part) for part in split(text, ",", "and", "or")]
    return sorted(value for value, _ in numbers) if all(numbers) else []
