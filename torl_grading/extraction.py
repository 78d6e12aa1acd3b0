r"""Which part of a completion is its answer: the last balanced `\boxed{}` outside code, comments and tool output.

Only what the model wrote itself may count, so callers pass its text turn by turn: spliced over an observation, a box
that the tool closed or printed would become the model's. Everything here is linear in the length of the text.
"""

import re
from collections.abc import Sequence

_FENCE = re.compile(r"```|(?m:^[ \t]*~~~)")
_INLINE = re.compile(r"```[^`\n]*```")
_CLOSING = {mark: re.compile(rf"(?m)^[ \t]*{mark}(python|output)?") for mark in ("```", "~~~")}
_STRINGS = r'"(?:[^"\\\n]|\\.)*+"|' + r"'(?:[^'\\\n]|\\.)*+'"
_IN_CALL = rf"{_STRINGS}|[^()\"'\n]"
for _ in range(3):  # brackets in brackets
    _IN_CALL = rf"{_STRINGS}|[^()\"'\n]|\((?:{_IN_CALL})*+\)"
# Comments of HTML and LaTeX, which no reader sees, and code that was left without a fence: a call of print with what
# is in its brackets and a comment behind it, the rest of the line where they do not close.
_UNREAD = re.compile(rf"(?s:<!--.*?(?:-->|\Z))|(?m:^[ \t]*%.*$)|\bprint\((?:(?:{_IN_CALL})*+\)(?:[ \t]*#.*)?|.*)")
# Backslashes before "boxed" may be doubled by a model that escapes; any other escaped character is no brace.
_BRACES = re.compile(
    r"(?s)(\\{1,4}(?:boxed|fbox)\s*\{)"
    r"|\\{1,4}(?:boxed|fbox)(?:[ \t]*([+-]?\d+(?:[.,/]\d+)*)|[ \t]+([A-Za-z])\b)"  # `\boxed 5`
    r"|\\.|([{}])"
)
# What may stand between boxes that are one answer in parts; then a stream of guesses is a list, and no guess counts.
_JOINER = re.compile(
    r"(?:[\s$,;.&]|\\[\[\]()\\,;:! ]|\\q?quad\b|(?:\\text\{)?[A-Za-z() ]{0,40}\b(?:and|or)\b\s*\}?)*+"
)
_LONGEST_JOINER = 60


def drop_fences(text: str) -> str:
    """Return `text` without its fenced blocks, whatever their language; an unclosed one runs to the end.

    A block ends at the next fence at the start of a line; where that fence opens a python or output block, that block
    is dropped too. Three backticks closed on the same line are inline code.
    """
    kept, position = [], 0
    while fence := _FENCE.search(text, position):
        kept.append(text[position : fence.start()])
        inline = _INLINE.match(text, fence.start())
        position = inline.end() if inline else _block_end(text, fence.end(), fence.group().strip())
    kept.append(text[position:])
    return "\n".join(kept)


def _block_end(text: str, start: int, mark: str) -> int:
    line_end = text.find("\n", start)
    closing = _CLOSING[mark].search(text, line_end) if line_end >= 0 else None
    while closing is not None and closing.group(1):
        closing = _CLOSING[mark].search(text, closing.end())
    return closing.end() if closing else len(text)


def last_boxed(text: str) -> str | None:
    r"""Return what is inside the balanced `\boxed{}` that opens last, stripped, or None if there is none.

    Boxes with nothing but a comma, a full stop, "and" or "or" between them are one answer, a list.
    """
    boxes: list[tuple[int, int, str]] = []  # where the command starts, where its box ends, the content
    opened: list[re.Match[str] | None] = []  # None for a plain brace
    for match in _BRACES.finditer(text):
        if match.group(1):
            opened.append(match)
        elif match.group(4) == "{":
            opened.append(None)
        elif match.group(4) == "}" and opened:
            if box := opened.pop():
                boxes.append((box.start(), match.end(), text[box.end() : match.start()].strip()))
        elif content := match.group(2) or match.group(3):
            boxes.append((match.start(), match.end(), content))
    if not boxes:
        return None
    boxes.sort()
    start, _, content = boxes.pop()
    parts = [content]
    while boxes and 0 <= start - boxes[-1][1] <= _LONGEST_JOINER and _JOINER.fullmatch(text, boxes[-1][1], start):
        start, _, content = boxes.pop()
        parts.insert(0, content)
    return ", ".join(dict.fromkeys(parts)) if all(parts) else ""


def extract_answer(texts: Sequence[str], *, keep_fences: bool = False) -> str | None:
    """Return the answer: the last box of the last text that has one. `texts` holds one string per turn."""
    for text in reversed(texts):
        answer = last_boxed(text if keep_fences else _UNREAD.sub("", drop_fences(text)))
        if answer is not None:
            return answer
    return None
