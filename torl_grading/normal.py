r"""The normal form of an answer, and the numbers and units that can be read from it without computer algebra.

Sources of the rules, in brackets: a kind of public test case, or an issue of Math-Verify ("MV 14").
"""

import functools
import re
from fractions import Fraction

from torl_grading.extraction import last_boxed

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_FINAL_STOP = re.compile(r"(?<![.,;\\])[.,;]$")
_SIGNS = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le "}
_SIGNS |= {"≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "°": r"^\circ ", "√": r"\sqrt", "\u00a0": " "}
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:\\text\{\s*)?(?:the )?(?:final )?answer(?: is\b|:)[: ]*\}?", ""),  # [prose in the box]
        (r"\\\\(?=(?:[dtc]?frac|sqrt|left|right|text|le|ge|pi|infty|cup)(?![a-z]))", r"\\"),  # escaped twice
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?|\\displaystyle|\\limits", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)(?![a-z]) ?\{", r"\\text{"),
        (r"\\text\{([^{}A-Za-z]*[A-Za-z]?[^{}A-Za-z]*)\}", r"\1"),  # a letter or a number is no text [MV 37]
        (r",? *(?:\\text\{,?\s*(?:and|AND)\s*\}|\b(?:and|AND)\b)", " and "),
        (r",? *(?:\\text\{,?\s*(?:or|OR)\s*\}|(?<![A-Za-z\\])(?:or(?![a-z])|OR\b))", " or "),
        (r"(\d)(?:\{,\}|,\\!|\\[, ])(?=\d{3}(?!\d))", r"\1"),  # LaTeX's thousands separators [thousands]
        (r"(\d)\{,\}(?=\d)", r"\1."),  # and its decimal comma
        (r"(?<!\\)\\[,;:! ]|\\+$|\\q?quad(?![a-z])|~", " "),
        (r"^\\approx|\+(?=\\infty)|\^\{?\\prime\}?$", ""),
        (r"^\$([^$]*)\$ ?(?=\S)", r"\1 "),  # `$28$ percent` [percent]
        (r"\\?\bsqrt ?\(([^()]*)\)|\\sqrt ?(\d)", r"\\sqrt{\1\2}"),  # \sqrt(2) would be read as nothing [MV 41]
        (r"\\frac ?(\w|\\pi(?![a-z]))", r"\\frac{\1}"),
        (r"\\frac ?(\{[^{}]*\}) ?(\w|\\pi(?![a-z]))", r"\\frac\1{\2}"),
        (r"(\w)_(\w)(?!\w)", r"\1_{\2}"),
        (r"\s+", " "),
        (r" ?([^\w\s\\,.]) ?| (\\)| ([,.])", r"\1\2\3"),  # beside a sign a space says nothing, after a comma it does
    )
)


def strip_delimiters(answer: str) -> str:
    """Return the answer without math delimiters or a box around it and without a final stop."""
    answer = answer.strip()
    if "$" not in answer.strip("$.,; "):  # a sentence with a formula in it keeps its stop
        answer = _FINAL_STOP.sub("", answer)
    if "\\boxed" in answer or "\\fbox" in answer:
        answer = last_boxed(answer) or answer
    for opening, closing in _DELIMITERS:
        inner = answer[len(opening) : len(answer) - len(closing)].strip()
        if answer.startswith(opening) and answer.endswith(closing) and inner and opening not in inner:
            return strip_delimiters(inner)
    return answer


@functools.lru_cache(maxsize=4096)
def normalize(answer: str) -> str:
    """Return a form in which equal strings surely are the same answer; spacing and typography are dropped."""
    text = strip_delimiters(answer).translate(str.maketrans(_SIGNS))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return strip_delimiters(text.strip())


_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:"
    r"(?P<decimal>\d+(?:\.\d*)?|\.\d+)(?:(?:\\times|\\cdot) ?10\^\{?(?P<power>[+-]?\d{1,3})\}?|e(?P<e>[+-]\d{1,3}))?"
    r"|(?P<grouped>[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?)"
    r"|(?P<comma>0,\d{3,}|[1-9]\d{0,2}(?:\.\d{3})+,\d+)"  # decimal comma, where it cannot be a list of two
    r"|(?:(?P<whole>\d+)(?= |\\))? ?(?:\\frac\{(?P<n>-?\d+)\}\{(?P<d>-?\d+)\}|(?P<top>\d+)/(?P<bottom>\d+)))"
)
_UNIT = re.compile(
    r"(?<=[\w})])(?:(?P<sign>\^\{?\\circ\}?|\\degree|\\?%|\\?\$)|(?:\\text\{(?P<text>[A-Za-z][A-Za-z ./-]*)\}"
    r"|(?<=[\d}])(?P<words>[ckm]m|kg| (?:(?:square|cubic) )?(?:[ckm]m|kg|ft|mph|inch(?:es)?|feet|miles?|met(?:er|re)s?"
    r"|hours?|minutes?|seconds?|days?|years?|degrees?|percent|pct|dollars?|cents?|points?|units?|[ap]\.?m)))"
    r"(?P<power>\^\{?[23]\}?)?)\.?$"
)
_NO_UNIT = re.compile(r"\b(?:or|and|more|less|least|most|not?|if|is|than|about|over|under)\b")
_SAME_UNIT = {"percent": "%", "pct": "%", "\\%": "%", "degree": "^\\circ", "\\degree": "^\\circ", "dollar": "$"}


@functools.lru_cache(maxsize=4096)
def number(text: str) -> tuple[Fraction, bool] | None:
    """Return the value of a number that is written out, and whether it is a decimal that may be rounded.

    Integers, decimals, fractions, mixed numbers, powers of ten, thousands separated by comma or space.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    decimal = match["decimal"] or (match["grouped"] or "").replace(",", "").replace(" ", "")
    decimal = decimal or (match["comma"] or "").replace(".", "").replace(",", ".")
    if decimal:
        value = Fraction(decimal) * Fraction(10) ** int(match["power"] or match["e"] or 0)
    else:
        top, bottom, whole = int(match["n"] or match["top"]), int(match["d"] or match["bottom"]), match["whole"]
        if bottom == 0 or (whole and not 0 < top < bottom):
            return None  # 4 4/0 and 11 6/6 are no numbers [mixed numbers]
        value = int(whole or 0) + Fraction(top, bottom)
    return (-value if match["sign"] == "-" else value), len(decimal.partition(".")[2]) >= 6


def same_number(left: tuple[Fraction, bool], right: tuple[Fraction, bool]) -> bool:
    """Whether two numbers are equal, or one is the other rounded to six decimals or more, as in math-verify.

    The relative bound keeps tiny numbers apart [MV 14].
    """
    (a, rounded), (b, also_rounded) = left, right
    close = abs(a - b) * 2_000_000 <= min(Fraction(1), 4 * max(abs(a), abs(b)))
    return a == b or ((rounded or also_rounded) and close)


@functools.lru_cache(maxsize=4096)
def split_unit(text: str) -> tuple[str, str]:
    """Return a value and its unit, "" for none. A percent sign is a unit: 10% is 10, and 0.1 is neither."""
    if text.startswith(("\\$", "$")):
        return text.lstrip("\\$"), "$"
    match = _UNIT.search(text)
    unit = (match["sign"] or match["text"] or match["words"]).strip().lower().replace(".", "") if match else ""
    if not unit or _NO_UNIT.search(unit):
        return text, ""
    unit = _SAME_UNIT.get(unit.rstrip("s"), unit.rstrip("s")).replace("{", "").replace("}", "")
    return text[: match.start()].rstrip(), unit + (match["power"] or "").strip("^{}")
