r"""When are two answers the same? The rules, in text; what needs computer algebra is asked of a function (`worker`).

`same` takes answers apart: lists, tuples, intervals, ratios, names before "=", units. What is left are atoms, most of
them numbers, compared exactly here, in microseconds. In doubt two answers differ: a wrong acceptance teaches the model
to cheat. The sources of rules stand in brackets, as in `normal`.
"""

import functools
import re
from collections.abc import Callable, Iterable
from enum import StrEnum

from torl_grading.normal import normalize, number, same_number, split_unit

MAX_ANSWER_CHARS = 400
"""Longer answers are not compared (no gold of the usual sets comes near it)."""
MAX_ITEMS = 24

Algebra = Callable[[str, str], bool | None]
Reason = StrEnum("Reason", "EQUAL DIFFERENT NO_BOX TOO_LONG GUARD UNPARSED TIMEOUT CRASHED BAD_SOLUTION")
"""Why a text got its score; only `equal` is correct. `no_box`: the model's own text has no box outside fences;
`guard`: a number too large to evaluate; `unparsed`: nothing in the box, or a solution that math-verify cannot read;
`crashed`: the answer killed two workers; `bad_solution`: the solution cannot be used, as `check_solution` says."""

_TOKEN = re.compile(
    r"(?P<open>\\\{|[\[({]|\\langle|\\begin(?=\{)|\\lfloor|\\lceil)"
    r"|(?P<close>\\\}|[\])}]|\\rangle|\\end(?=\{)|\\rfloor|\\rceil)"
    r"|(?P<mark>,|;|(?<![A-Za-z\\])(?:and|or)(?![a-z])|(?<![<>!])=|:|\\approx|\\cup|\\in(?![a-z]))|\\[A-Za-z]+"
)
_BRACKETS = [pair.split() for pair in (r"\langle \rangle", r"\{ \}", "{ }", "( )", "( ]", "[ )", "[ ]")]
_VECTOR = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?\\end\{\1\}")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS = re.compile(r"(?=(?:[^A-Za-z]*[A-Za-z]){4})[A-Za-z][A-Za-z .'-]*")
_SHORT_WORDS = ("yes", "no", "odd")
_RELATION = re.compile(r"[<>]|!=|\\(?:[lg]eq?(?:slant)?|[lg]t|neq?)(?![a-z])")
# Prose around formulas, 1, 2, ..., n [MV 14], and what is no mixed number: equal as text or not at all
_PROSE = re.compile(r"(?<!\\)\$.*(?<!\\)\$|\\[()]|\\\[|\\\](?!.*\\end)|\\[lc]?dots|\.\.\.")
_BROKEN = re.compile(r"(?m)\d \d|^\d+ ?\\frac\{\d+\}\{\d+\}$|\\text\{|[-+*/^_&]$")
_NOT_IN_NAME = re.compile(r"_\{?\w+\}?|\(-?\w\)|[{}|:]|\\(?:frac|angle|overline|triangle|text|vec)(?![a-z])")
_NAME = re.compile(r"[A-Z]{1,5}'*|[A-Za-z]'*|\\[a-z]+|\([A-Za-z](?:, ?[A-Za-z])*\)|[A-Za-z]+(?: [a-z]+)*(?<=[a-z]{3})")
_OPTION = re.compile(r"\(([A-Z])\)(?:.*)|([A-Z])(?:(?:[.)]| (?=[A-Z])).*)?", re.DOTALL)
_BASED = re.compile(r"[\dA-F]+_\{?\d+\}?")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
# For a solution that is an integer or a fraction the answer must be worked out: one that restates the question
# ("1+41", "\sum_{k=1}^{100} k", "\binom{8}{4}") would be right by copying. Fractions, powers and roots may stay.
_WORKED_OUT = re.compile(r"(?:(?<![^({^])[+-]|\\frac|\\sqrt|(?:\\cdot|\\times) ?(?=10\^)|[\d.(){}^/\[\]])+")


@functools.lru_cache(maxsize=4096)
def split(text: str, *marks: str) -> tuple[str, ...]:
    """Split at the marks that are inside no bracket; () if the brackets do not balance."""
    parts, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token["open"] is not None) - (token["close"] is not None)
        if depth < 0:
            return ()
        if depth == 0 and token["mark"] in marks:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return (*parts, text[start:].strip()) if depth == 0 else ()


@functools.lru_cache(maxsize=4096)
def shape(text: str) -> tuple[str, tuple[str, ...]]:
    """Take an answer apart: a list, a "{}" set, a "()" tuple, an interval such as "[)", a ":" ratio, or an atom.

    "and" is a list of conditions that hold together: x > 1 and x < 2.
    """
    groups = [[split(item, "=") for item in split(row, ",")] for row in split(text, ";")]
    if len(groups) > 1 and all(len(group) > 1 and all(len(item) == 2 for item in group) for group in groups):
        return "list", tuple(f"({','.join(value for _, value in group)})" for group in groups)  # p=5,q=2;p=7,q=2
    if len(items := split(text, ",", ";", "and", "or")) > 1:
        return ("and" if " and " in text and _RELATION.search(text) else "list"), items
    if len(items := split(text, "\\cup")) > 1:
        return "list", items
    if (vector := _VECTOR.fullmatch(text)) and not ("&" in vector[2] and "\\\\" in vector[2]):
        return "()", tuple(item.strip() for item in re.split(r"\\\\|&", vector[2]))
    for opening, closing in _BRACKETS:
        items = split(text[len(opening) : -len(closing)].strip(), ",", ";")
        if text.startswith(opening) and text.endswith(closing) and items:  # which says that they belong together
            if opening == "{" or (len(items) == 1 and (opening + closing == "()" or _VECTOR.fullmatch(items[0]))):
                return shape(text[len(opening) : -len(closing)].strip())
            return {"\\{\\}": "{}", "\\langle\\rangle": "()"}.get(opening + closing, opening + closing), items
    if "=" not in text and len(items := split(text, ":")) > 1:
        return ":", items
    if "\\pm" in text or "\\mp" in text:
        upper, lower = (re.sub(r"\\pm ?", a, re.sub(r"\\mp ?", b, text)) for a, b in ("+-", "-+"))
        return "list", (upper.removeprefix("+"), lower)
    return "atom", (text,)


@functools.lru_cache(maxsize=4096)
def split_name(text: str) -> tuple[str, str, tuple[str, ...]]:
    r"""Return the name, the value, and what else a chain `name = other = value` claims without a variable."""
    text = next((part for part in split(text, "\\approx") if part), text)
    parts = split(text, "=", "\\in") or (text,)
    named = _NAME.fullmatch(_NOT_IN_NAME.sub("", parts[0]).strip()) is not None
    if len(parts) == 1 or not (named or not any(map(_VARIABLE.search, parts))):
        return "", text, ()
    claims = tuple(part for part in parts[named:-1] if not _VARIABLE.search(part))
    return re.sub(r"\([a-z]\)|[{}]", "", parts[0]) if named else "", parts[-1], claims


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    verdicts = set(verdicts)
    return False if False in verdicts else None if None in verdicts else True


def _same_items(gold: tuple[str, ...], answer: tuple[str, ...], algebra: Algebra) -> bool | None:
    """Compare without order; what is said twice counts once."""
    gold, answer = tuple(dict.fromkeys(gold)), tuple(dict.fromkeys(answer))
    if max(len(gold), len(answer)) > MAX_ITEMS:
        return False
    table = [[same(left, right, algebra) for right in answer] for left in gold]
    lines = [set(line) for line in (*table, *zip(*table, strict=True))]
    return _all(True if True in line else None if None in line else False for line in lines)


def same(gold: str, answer: str, algebra: Algebra) -> bool | None:
    """Whether two normal forms are the same answer; None where `algebra(gold, answer)` says None."""
    if gold == answer or not gold or not answer:
        return gold == answer != ""
    (value, unit), (other_value, other_unit) = split_unit(gold), split_unit(answer)
    left, right = number(value), number(other_value)
    if left and right:
        equal = same_number(left, right) and (unit == other_unit or not (unit and other_unit))
        if equal or "," not in value + other_value:
            return equal
    words, other_words = (_TEXT.sub(r"\1", text).replace(", ", ",").strip() for text in (gold, answer))
    if words == other_words and bool(left) == bool(right):  # 1,999 is not 1, 999
        return True
    if option := _OPTION.fullmatch(words):  # "D", "(D) Alina", "D. it can't be A" [option letters]
        chosen = _OPTION.fullmatch(other_words)
        return chosen is not None and (chosen[1] or chosen[2]) == (option[1] or option[2])
    is_text = any(map(_WORDS.fullmatch, (words, other_words))) or any(map(_TEXT.fullmatch, (gold, answer)))
    if is_text or words.casefold() in _SHORT_WORDS:
        return words.casefold() == other_words.casefold()  # math-verify reads a word as a product of letters
    if _PROSE.search(gold) or _PROSE.search(answer):
        return False
    (kind, items), (other_kind, others) = shape(gold), shape(answer)
    name, value, claims = split_name(gold) if kind == "atom" else ("", gold, ())
    other_name, other_value, other_claims = split_name(answer) if other_kind == "atom" else ("", answer, ())
    if (value, other_value) != (gold, answer):
        if name and other_name and name != other_name:
            return False
        if bool(name) != bool(other_name) and "=" in (other_value if name else value):
            return algebra(gold, answer)  # y = 1 - 2x against 2x + y = 1 [MV 26]
        claimed = [same(value, claim, algebra) for claim in claims + other_claims]  # "x = 41 = 42" claims two values
        return _all([same(value, other_value, algebra), *claimed])
    kinds = {kind, other_kind}
    pairs = zip(items, others, strict=False)
    if kinds == {"list", "()"} and len(items) == len(others) and not _RELATION.search(gold + answer):
        return _all(same(a, b, algebra) for a, b in pairs)  # (1,3) is 1,3 and not 3,1 [tuples]
    if kinds & {"list", "{}", "and"}:
        mixed = len(kinds) > 1 and kinds & {"and", "()", "[)", "(]", "[]", ":"}
        return False if mixed else _same_items(items, others, algebra)
    if kind == other_kind != "atom":
        return len(items) == len(others) and _all(same(a, b, algebra) for a, b in pairs)
    if kinds != {"atom"}:  # an interval may be written as an inequality; all else of two kinds differs
        conditions = [bool(_RELATION.search(text) or "\\mathbb" in text) for text in (gold, answer)]
        return algebra(gold, answer) if ":" not in kinds and sum(conditions) == 1 else False
    if unit or other_unit:
        stripped = split_unit(gold)[0], split_unit(answer)[0]
        return same(*stripped, algebra) if unit == other_unit or not (unit and other_unit) else False
    gold, answer = items[0], others[0]
    if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):
        return False  # 2516_8 is neither 2516 nor 1358, which may have been the question [bases]
    if number(gold) and "." not in gold and not _WORKED_OUT.fullmatch(answer):
        return False
    forms = {(bool(_RELATION.search(text)), len(split(text, "=")) > 1) for text in (gold, answer)}
    return algebra(gold, answer) if len(forms) == 1 and not _BROKEN.search(gold + "\n" + answer) else False


def compare_texts(solution: str, answer: str) -> Reason | None:
    """Decide by text alone, or return None where algebra has to tell."""
    if max(len(answer), len(solution)) > MAX_ANSWER_CHARS:
        different = Reason.TOO_LONG if len(answer) > MAX_ANSWER_CHARS else Reason.BAD_SOLUTION
        return Reason.EQUAL if answer.strip() == solution.strip() else different
    gold, given = normalize(solution), normalize(answer)
    verdict = same(gold, given, lambda left, right: None) if given else False
    if verdict is not None:
        return Reason.EQUAL if verdict else Reason.DIFFERENT if given else Reason.UNPARSED
    if is_too_large(gold):
        return Reason.BAD_SOLUTION
    return Reason.GUARD if is_too_large(given) else None


def check_text(solution: str) -> tuple[bool, Reason | None]:
    """Whether text alone tells if a solution can be used, and why it cannot (None: it can)."""
    text = normalize(solution)
    if not text or len(solution) > MAX_ANSWER_CHARS:
        return True, Reason.TOO_LONG if text else Reason.UNPARSED
    if is_too_large(text):
        return True, Reason.GUARD
    return any((number(text), _WORDS.fullmatch(text), _OPTION.fullmatch(text))), None


_TOO_LARGE = re.compile(
    r"\d{60,}|(?:\^|\*\*)[\s{(+-]*\d{5,}"  # an exponent of five digits
    r"|(?:(?:\^|\*\*)[\s{(+-]*\d+[\s})]*){2}(?:\^|\*\*)"  # three exponents on each other
    r"|\^\s*\{[^{}a-z^]*[-+*/][^{}a-z^]*\^"  # 9^{(10-1)^9}
    r"|[)}\]]\s*(?:\^|\*\*)[\s{(]*\d+[\s})]*[)}\]]\s*(?:\^|\*\*)"  # ((a^b)^c)^d
    r"|![\s)}\]]*!|[({][^(){}]*(?:\^|\*\*)[^(){}]*[)}]\s*!|\d[)}\s]*[)}]\s*[)}]\s*!"  # n!!, (10^8)!
    r"|(?:\\(?:sum|prod)(?![a-z]).{0,40}?\^\{?[^a-z]*(?:\d{5,}|\d\^)|\\binom\{[^{}]*(?:\d{5,}|\d\^))"
)
_POWER_OF_POWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d+)[\s})]*(?:\^|\*\*)[\s{(+-]*(\d+)")
_FACTORIAL = re.compile(r"(\d+)[\s)}]*!")


def is_too_large(answer: str) -> bool:
    """Whether evaluating the answer might not end: digit runs, huge exponents, towers of powers, large factorials.

    A static look at no more than `MAX_ANSWER_CHARS` characters; what it misses meets the workers' time limit.
    """
    text = answer.replace("\\!", "")
    if _TOO_LARGE.search(text) or any(int(factorial[1]) > 1000 for factorial in _FACTORIAL.finditer(text)):
        return True
    powers = [(int(power[1]), int(power[2])) for power in _POWER_OF_POWER.finditer(text)]
    return any(base > 1 and (exponent > 99 or base > 9999 or base**exponent >= 10_000) for base, exponent in powers)
