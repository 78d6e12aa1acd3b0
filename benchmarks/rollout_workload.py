"""What simulated rollouts write: a fake tokenizer, and scripts with ToRL-like lengths, calls and observations."""

import math
import random
from dataclasses import dataclass
from itertools import chain

from rollout_costs import InterpreterCosts, Workload

VOCABULARY = ["", "word ", "\n```python\n", "\n```\n", "```output", *"0123456789"]
EOS, WORD, OPEN, CLOSE, MARKER, ZERO = range(6)
CHARS_PER_TOKEN = 4


class FakeTokenizer:
    """Token ids are places in `VOCABULARY`; encoded text counts and is not kept."""

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join([VOCABULARY[token_id] for token_id in token_ids])

    def encode(self, text: str, **_: bool) -> list[int]:
        return [WORD] * math.ceil(len(text) / CHARS_PER_TOKEN)


@dataclass(frozen=True)
class Script:
    """What a rollout will write and print, and how long its programs run, whatever the policy."""

    prompt_ids: list[int]
    turns: list[list[int]]
    latencies: list[float]
    observation_chars: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.turns))


CALL_TOKENS = 12
"""A turn with a call has at least: two fences, the call's number as the program, and the marker."""


def workload(shape: Workload, tool_calls: int, interpreter: InterpreterCosts) -> list[Script]:
    """A script for each rollout. Its number of tokens does not depend on `tool_calls`."""
    scripts = []
    least = CALL_TOKENS * (tool_calls + 1)
    median = shape.mean_tokens / math.exp(shape.sigma**2 / 2)
    for index in range(shape.rollouts):
        draw = random.Random(f"{shape.seed}/{index}")
        length = min(max(round(median * math.exp(draw.gauss(0, shape.sigma))), 64), shape.longest)
        borders = sorted(draw.randint(0, length - least) for _ in range(tool_calls))
        parts = [b - a + CALL_TOKENS for a, b in zip([0, *borders], [*borders, length - least], strict=True)]
        turns = []
        for call, tokens in enumerate(parts[:-1]):
            program = [ZERO + int(digit) for digit in str(index * 10 + call)]
            ending = [OPEN, *program, CLOSE, MARKER]
            turns.append([WORD] * (tokens - len(ending)) + ending)
        turns.append([WORD] * (parts[-1] - 1) + [EOS])
        prompt = [ZERO + int(digit) for digit in str(index // shape.group)]
        latencies = [interpreter.median * math.exp(draw.gauss(0, interpreter.sigma)) for _ in range(tool_calls)]
        chars = [draw.randint(*shape.observation_chars) for _ in range(tool_calls)]
        scripts.append(Script(prompt + [WORD] * (shape.prompt_tokens - len(prompt)), turns, latencies, chars))
    return scripts


def without_calls(scripts: list[Script]) -> list[Script]:
    """The same tokens in one turn each: generation alone."""
    return [Script(script.prompt_ids, [list(chain.from_iterable(script.turns))], [], []) for script in scripts]
