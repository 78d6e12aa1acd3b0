"""Prompts of an evaluation: ToRL's template, a chat, a plain question, or a template of one's own."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from torl_trl.errors import UserError
from torl_trl.prompts import QUESTION_PLACE, TORL_TEMPLATE, load_template, render_prompt

TOOL_SYSTEM = (
    "Please integrate natural language reasoning with programs to solve the problem above, "
    "and put your final answer within \\boxed{}."
)
STEPS_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
"""The system messages that Qwen2.5-Math-Instruct was tuned with, with and without a tool (its model card)."""
PLAIN_TEMPLATE = f"{QUESTION_PLACE}\n{STEPS_SYSTEM}\n"


def prompt_text(style: str, tokenizer: PreTrainedTokenizerBase, *, use_tool: bool) -> str:
    """Return the text with one `{question}` that `style` means: `torl`, `chat`, `plain`, a file, or a template.

    `chat` is the tokenizer's chat template around a system message, which says whether programs are run. Raises
    `UserError` when there is no chat template, or for a template without one place for the question.
    """
    if style == "torl":
        return TORL_TEMPLATE
    if style == "plain":
        return PLAIN_TEMPLATE
    if style != "chat":
        return load_template(style)
    if tokenizer.chat_template is None:
        raise UserError("prompt is 'chat' and the tokenizer has no chat template: take torl, plain, or a template.")
    messages = [
        {"role": "system", "content": TOOL_SYSTEM if use_tool else STEPS_SYSTEM},
        {"role": "user", "content": QUESTION_PLACE},
    ]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def prompt_ids(
    style: str, template: str, questions: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Render and tokenize; a chat template writes its special tokens itself, other prompts get the tokenizer's."""
    texts = [render_prompt(template, question) for question in questions]
    return tokenizer(texts, add_special_tokens=style != "chat")["input_ids"]
