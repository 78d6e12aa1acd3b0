"""The engine protocol: turn requests go in, finished turns come out.

`run_rollouts` knows an engine only by this protocol. Token ids in, token ids out: an engine never sees text, except
for the stop strings it watches for.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol


class FinishReason(StrEnum):
    """Why the engine stopped a turn."""

    EOS = "eos"
    """An end-of-sequence token was sampled; it is the last of `token_ids`."""
    STOP = "stop"
    """A stop string was completed by the last token, which may reach beyond it."""
    LENGTH = "length"
    """`max_tokens` tokens were sampled."""


class EngineError(RuntimeError):
    """The engine itself failed, not the model: the run cannot go on. One sentence with a remedy."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; `temperature` 0 is greedy. Names and meaning as in TRL's GRPOConfig."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Continue `token_ids` (prompt and completion so far) by 1 to `max_tokens` sampled tokens.

    `stop` holds the stop strings; only newly sampled text is searched for them. `seed` makes the turn repeatable on
    engines that sample per request; engines that sample per batch ignore it.
    """

    rollout_id: int
    token_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """What was sampled for a request: at least one token, the stop string and EOS included, never padding.

    `logprobs[i]` belongs to `token_ids[i]`, under the distribution that it was drawn from. `cached_tokens` counts the
    tokens at the start of the request that the engine had in its cache and did not compute again.
    """

    rollout_id: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    cached_tokens: int = 0


class Tokenizer(Protocol):
    """What the loop and the engines need of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = ...) -> list[int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class Engine(Protocol):
    """Generates turns.

    `mode` is `continuous` (requests may be added while others run; `step` hands back whatever finished meanwhile) or
    `rounds` (`step` runs all added requests to their end, so the next round starts when all tool calls are back).
    """

    mode: Literal["continuous", "rounds"]

    def add(self, request: TurnRequest) -> None:
        """Queue a request. A rollout has at most one request in the engine."""
        ...

    def step(self) -> list[FinishedTurn]:
        """Make progress and return the turns that finished; may be empty in continuous mode."""
        ...

    def abort(self) -> None:
        """Drop every request, so that the next use starts clean."""
        ...
