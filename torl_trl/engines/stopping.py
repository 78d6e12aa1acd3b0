"""Stop strings on token ids, for engines that have no detokenizer of their own.

A stop string may end inside a token: the whole token is kept, as vLLM does. Most tokens cannot complete a given stop
string, so a set of those that can is made once, and text is decoded only when one of them is sampled.
"""

from torl_trl.engines.base import FinishReason, Tokenizer


def vllm_finish_reason(reason: str | None, stop_reason: int | str | None) -> FinishReason | None:
    """What vLLM's two reasons mean: a stop at a token id, or at none, is the end of the text; None if it gave up."""
    if reason == "stop":
        return FinishReason.STOP if isinstance(stop_reason, str) else FinishReason.EOS
    return FinishReason.LENGTH if reason == "length" else None


class StopMatcher:
    """Tells whether the last sampled token completed a stop string."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._texts: list[str] | None = None
        self._completing: dict[tuple[str, ...], frozenset[int]] = {}

    def matches(self, sampled_ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the last of `sampled_ids` completes one of `stop`; only text sampled in this request counts.

        Tokens of a stop string have at least one character each, so a window of its length in tokens is enough.
        """
        if not stop or sampled_ids[-1] not in self._completing_ids(stop):
            return False
        window = max(map(len, stop)) + 1
        text = self._decode(sampled_ids[-window:])
        return any(string in text for string in stop)

    def _completing_ids(self, stop: tuple[str, ...]) -> frozenset[int]:
        if stop not in self._completing:
            if self._texts is None:
                self._texts = [self._decode([token_id]) for token_id in range(self._vocab_size)]
            tails = [string[start:] for string in stop for start in range(len(string))]
            self._completing[stop] = frozenset(
                token_id
                for token_id, text in enumerate(self._texts)
                if any(text.startswith(tail) for tail in tails) or any(string in text for string in stop)
            )
        return self._completing[stop]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
