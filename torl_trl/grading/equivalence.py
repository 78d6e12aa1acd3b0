"""What can be said about two answers without computer algebra, and what must not reach it.

Most answers are decided here, in microseconds. The rest goes to math-verify in a worker process (`worker`), after a
static guard against expressions whose evaluation would not end: a signal cannot interrupt a big-integer power.
"""

import re
from enum import StrEnum

from torl_trl.grading.extraction import last_boxed

MAX_ANSWER_CHARS = 400
"""Longer answers are not compared (no gold of the usual sets comes near it)."""


class Reason(StrEnum):
    """Why a text got its score. Only `equal` is correct."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_BOX = "no_box"
    """The model's own text has no balanced box outside fences."""
    TOO_LONG = "too_long"
    GUARD = "guard"
    """The answer looks like a number too large to evaluate."""
    UNPARSED = "unparsed"
    """math-verify cannot read the answer, and it is not the solution's text."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The answer killed two workers, one after the other."""
    BAD_SOLUTION = "bad_solution"
    """The solution itself cannot be used; `check_solution` finds these when the data is loaded."""


_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_INTEGER = re.compile(r"[+-]?\d{1,60}")
_DECIMAL = re.compile(r"-?\d{1,60}(\.\d{1,15})?")
_WORDS = re.compile(r"(?=(?:[^A-Za-z]*[A-Za-z]){4})[A-Za-z][A-Za-z .'-]*")

_FINAL_STOP = re.compile(r"(?<![.,;\\])[.,;]$")
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)(?![A-Za-z])", ""),
        (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text|textbf|mathrm|mbox)[ ]?\{([^{}]*)\}", r"\1"),
        (r"\\[,!;:]", ""),
        (r"\\ |~", " "),
        (r"\s+", " "),
        (r" ?([^\w\s\\]) ?| (\\)", r"\1\2"),  # spaces beside a sign say nothing, between letters or digits they do
    )
)

_TOO_LARGE = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d{60,}",
        r"(?:\^|\*\*)[\s{(+-]*\d{5,}",  # an exponent of five digits
        r"(?:\^|\*\*)[\s{(+-]*\d+[\s})]*(?:\^|\*\*)[\s{(+-]*\d+[\s})]*(?:\^|\*\*)",  # three exponents on each other
        r"[)}\]]\s*(?:\^|\*\*)[\s{(]*\d+[\s})]*[)}\]]\s*(?:\^|\*\*)",  # ((a^b)^c)^d
        r"!\s*[)}\]\s]*!",  # iterated factorial
        r"[({][^(){}]*(?:\^|\*\*)[^(){}]*[)}]\s*!",  # (10^8)!
        r"\d[)}\s]*[)}]\s*[)}]\s*!",  # the same with the exponent in braces
    )
)
_POWER_OF_POWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d+)[\s})]*(?:\^|\*\*)[\s{(+-]*(\d+)")
_FACTORIAL = re.compile(r"(\d+)[\s)}]*!")
_NEGATIVE_SPACE = re.compile(r"\\!")


def strip_delimiters(answer: str) -> str:
    """Return the answer without math delimiters or a box around it, a final stop, and LaTeX's thousands separators.

    math-verify reads neither `30^\\circ.` nor `\\frac{1}{20,\\!000}`.
    """
    answer = _drop_stop(answer.strip()).replace(",\\!", "")
    if "\\boxed" in answer:
        answer = last_boxed(answer) or answer
    for opening, closing in _DELIMITERS:
        inner = answer[len(opening) : len(answer) - len(closing)]
        if answer.startswith(opening) and answer.endswith(closing) and inner.strip() and opening not in inner:
            answer = inner.strip()
    return _drop_stop(answer)


def _drop_stop(answer: str) -> str:
    # A sentence with a formula in it keeps its stop: math-verify needs it to find where the answer ends.
    return answer if "$" in answer.strip("$.,; ") else _FINAL_STOP.sub("", answer)


def normalize(answer: str) -> str:
    """Return a form in which equal strings surely are the same answer; spacing and typography are dropped."""
    text = strip_delimiters(answer)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


def is_plain_number(solution: str) -> bool:
    """Whether the solution is an integer or a short decimal, which every verifier reads and finds equal to itself."""
    return _DECIMAL.fullmatch(solution) is not None


def is_words(normalized: str) -> bool:
    """Whether a normalised answer is text: at least four letters and no mathematics.

    math-verify reads a word as a product of its letters, so that every anagram would be equal.
    """
    return _WORDS.fullmatch(normalized) is not None


def compare_texts(solution: str, answer: str) -> Reason | None:
    """Decide by text alone: `equal`, `different`, `too_long`, `unparsed`, or None where algebra has to tell."""
    if len(answer) > MAX_ANSWER_CHARS:
        return Reason.EQUAL if answer.strip() == solution.strip() else Reason.TOO_LONG
    left, right = normalize(solution), normalize(answer)
    if not right:
        return Reason.UNPARSED
    if left == right:
        return Reason.EQUAL
    if _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right):
        return Reason.EQUAL if int(left) == int(right) else Reason.DIFFERENT
    if is_words(left):
        return Reason.EQUAL if left.casefold() == right.casefold() else Reason.DIFFERENT
    return None


def is_too_large(answer: str) -> bool:
    """Whether evaluating the answer might not end: digit runs, huge exponents, towers of powers, large factorials.

    A static look at no more than `MAX_ANSWER_CHARS` characters. It keeps the common cases away from the workers; what
    it misses meets their time limit.
    """
    text = _NEGATIVE_SPACE.sub("", answer)
    if any(pattern.search(text) for pattern in _TOO_LARGE):
        return True
    if any(int(factorial.group(1)) > 1000 for factorial in _FACTORIAL.finditer(text)):
        return True
    return any(_power_is_large(match.group(1), match.group(2)) for match in _POWER_OF_POWER.finditer(text))


def _power_is_large(base: str, exponent: str) -> bool:
    """Whether base ** exponent, itself an exponent, has five digits or more."""
    return int(base) > 1 and (len(exponent) > 2 or int(base[:5]) ** int(exponent) >= 10_000 or len(base) > 4)
