"""Which part of a completion is its answer: the last balanced `\\boxed{}` outside code and tool output.

Only what the model wrote itself may count, so callers pass its text turn by turn: spliced over an observation, a box
that the tool closed or printed would become the model's. Everything here is linear in the length of the text.
"""

import re
from collections.abc import Sequence

_FENCE = "```"
_INLINE = re.compile(r"```[^`\n]*```")
_LINE_FENCE = re.compile(r"(?m)^[ \t]*```(python|output)?")
# Backslashes before "boxed" may be doubled by a model that escapes; any other escaped character is no brace.
_BRACES = re.compile(r"(?s)(\\+boxed[ \t]*\{)|\\.|([{}])")


def drop_fences(text: str) -> str:
    """Return `text` without its fenced blocks, whatever their language; an unclosed one runs to the end.

    A block ends at the next fence at the start of a line; where that fence opens a python or output block, that block
    is dropped too. Three backticks closed on the same line are inline code.
    """
    kept, position = [], 0
    while (start := text.find(_FENCE, position)) >= 0:
        kept.append(text[position:start])
        inline = _INLINE.match(text, start)
        position = inline.end() if inline else _block_end(text, start)
    kept.append(text[position:])
    return "\n".join(kept)


def _block_end(text: str, start: int) -> int:
    line_end = text.find("\n", start)
    closing = _LINE_FENCE.search(text, line_end) if line_end >= 0 else None
    while closing is not None and closing.group(1):
        closing = _LINE_FENCE.search(text, closing.end())
    return closing.end() if closing else len(text)


def last_boxed(text: str) -> str | None:
    """Return what is inside the balanced `\\boxed{}` that opens last, stripped, or None if there is none."""
    best: tuple[int, int] | None = None
    opened: list[int] = []  # where the content of a box starts, or -1 for a plain brace
    for match in _BRACES.finditer(text):
        if match.group(1):
            opened.append(match.end())
        elif match.group(2) == "{":
            opened.append(-1)
        elif match.group(2) == "}" and opened:
            start = opened.pop()
            if start >= 0 and (best is None or start > best[0]):
                best = (start, match.start())
    return text[best[0] : best[1]].strip() if best else None


def extract_answer(texts: Sequence[str], *, keep_fences: bool = False) -> str | None:
    """Return the answer: the last box of the last text that has one. `texts` holds one string per turn."""
    for text in reversed(texts):
        answer = last_boxed(text if keep_fences else drop_fences(text))
        if answer is not None:
            return answer
    return None
