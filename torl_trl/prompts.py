"""Text of the protocol: prompt template, fences, code extraction, observations.

One turn with its tool call, as the model sees it (design: the paper's Figure 3 and its released code):

    ... ```python
    print(6 * 7)
    ```
    ```output          <- sampled by the model, trained
    42                 <- inserted from here ...
    ```                <- ... to here, masked
"""

import re
import textwrap
from pathlib import Path
from typing import Literal

from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl.errors import UserError

TORL_TEMPLATE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it.\n"
    "User: Please integrate natural language reasoning with programs to solve the problem above, "
    "and put your final answer within \\boxed{}.\n"
    "{question}\nAssistant:\n"
)
"""`tir_base_0309` of the released code. "the problem above" stands before the problem: a quirk kept for fidelity."""

QUESTION_PLACE = "{question}"
OUTPUT_MARKER = "```output"
PYTHON_FENCE = "```python"
FENCE = "```"

ToolTrigger = Literal["output_marker", "code_fence"]

MALFORMED_CALL = "Error: there is no complete ```python block to run."
NO_OUTPUT = "(The program printed nothing.)"

_STATUS_LINES = {
    ExecutionStatus.TIMEOUT: "TimeoutError: the program ran too long and was stopped.",
    ExecutionStatus.MEMORY: "MemoryError: the program used too much memory.",
    ExecutionStatus.OUTPUT_LIMIT: "OutputLimitError: the program printed too much and was stopped.",
    ExecutionStatus.KILLED: "RuntimeError: the program was killed.",
}

_BLOCK_OPENING = re.compile(r"```python[ \t]*\r?\n")
_CLOSING_FENCE = re.compile(r"(?m)^[ \t]*```")


def load_template(value: str | None) -> str:
    """Return the prompt template: ToRL's when `value` is None, the content of a file, or the string itself.

    Raises `UserError` unless it has exactly one `{question}`.
    """
    if value is None:
        return TORL_TEMPLATE
    template = value
    if QUESTION_PLACE not in value:
        try:
            template = Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise UserError(
                f"prompt_template {shorten(value, 80)!r} is neither a text with {QUESTION_PLACE!r} nor a file that "
                "can be read: give one of them."
            ) from error
    if template.count(QUESTION_PLACE) != 1:
        raise UserError(
            f"prompt_template has {template.count(QUESTION_PLACE)} places for the question: "
            f"write {QUESTION_PLACE!r} exactly once."
        )
    return template


def render_prompt(template: str, question: str) -> str:
    """Put the question into the template; braces in either are left alone."""
    return template.replace(QUESTION_PLACE, question)


def extract_code(text: str) -> str | None:
    """Return the last ```python block opened in `text`, or None if it is not closed or there is none.

    A closing fence stands at the start of a line. `text` is one turn of the model, up to and without the marker
    that asks for the output (a marker at the start of a line would close an open block).
    """
    openings = list(_BLOCK_OPENING.finditer(text))
    if not openings:
        return None
    start = openings[-1].end()
    closing = _CLOSING_FENCE.search(text, start)
    if closing is None:
        return None
    code = textwrap.dedent(text[start : closing.start()])  # a block in a list is indented as a whole
    return code if code.strip() else None


def code_block_spans(text: str) -> tuple[list[tuple[int, int]], int]:
    """Return the (start, end) of each complete ```python block, and where a last, unclosed one starts (or the end)."""
    spans, position = [], 0
    while opening := _BLOCK_OPENING.search(text, position):
        closing = _CLOSING_FENCE.search(text, opening.end())
        if closing is None:
            return spans, opening.start()
        spans.append((opening.start(), closing.end()))
        position = closing.end()
    return spans, len(text)


def stop_strings(trigger: ToolTrigger, turn_text: str) -> tuple[str, ...]:
    """Return the strings at which generation stops next, given the text of this turn so far.

    With `output_marker` that is the marker. With `code_fence` the stop has two phases, both one turn: first the fence
    that opens a python block, then the fence that closes it (CIR, ZeroTIR and AReaL stop so).
    """
    if trigger == "output_marker":
        return (OUTPUT_MARKER,)
    return (FENCE,) if _inside_python_block(turn_text) else (PYTHON_FENCE,)


def asks_for_output(trigger: ToolTrigger, turn_text: str) -> bool:
    """Whether a turn that stopped at one of `stop_strings` asks for its code to be run now."""
    if trigger == "output_marker":
        return OUTPUT_MARKER in turn_text
    return PYTHON_FENCE in turn_text and not _inside_python_block(turn_text)


def _inside_python_block(text: str) -> bool:
    position = text.rfind(PYTHON_FENCE)
    return position >= 0 and _CLOSING_FENCE.search(text, position + len(PYTHON_FENCE)) is None


def format_observation(result: ExecutionResult, max_chars: int) -> str:
    """Turn a result into the text shown to the model (paper section 2.2; limits from the released code).

    Printed text is kept whatever came after it. An exception adds the last line of its traceback, a limit adds one
    clear line. A warning on stderr beside a normal end is not shown. Empty output is said, it is not an error.
    """
    printed = result.stdout.strip()
    if result.status == ExecutionStatus.OK:
        return shorten(printed, max_chars) or NO_OUTPUT
    if result.status == ExecutionStatus.ERROR:
        lines = result.stderr.strip().splitlines()
        last = lines[-1].strip() if lines else "RuntimeError: the program ended with an error."
    else:
        last = _STATUS_LINES[result.status]
    last = shorten(last, max_chars)
    room = max_chars - len(last) - 1
    return f"{shorten(printed, room)}\n{last}" if printed and room > 3 else last


def shorten(text: str, max_chars: int) -> str:
    """Keep head and tail of a text within `max_chars` characters, with `...` between them."""
    if len(text) <= max_chars:
        return text
    room = max_chars - 3
    head = (room + 1) // 2
    return f"{text[:head]}...{text[len(text) - (room - head) :]}"


def inserted_text(trigger: ToolTrigger, turn_text: str, observation: str) -> str:
    """Return what is inserted after a turn, so that the text reads ```` ```output\\n{observation}\\n```\\n ````.

    `turn_text` is the whole sampled turn, tokens that overshoot the stop string included: a newline that the last
    token already brought is not inserted again.
    """
    newline = "" if turn_text.endswith("\n") else "\n"
    marker = "" if trigger == "output_marker" else f"{OUTPUT_MARKER}\n"
    return f"{newline}{marker}{observation}\n{FENCE}\n"
