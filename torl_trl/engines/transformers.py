"""Turns from a transformers model, in rounds: a batch of requests runs to its end.

The loop decodes a batch step by step with a KV cache. Rows that ended leave the batch, so that a long row does not
carry the short ones along; what all rows have in common at their start (the prompt template) is computed once. Rows
have their own stop strings and their own budget, which `model.generate` does not offer per row.
"""

import itertools
from typing import Literal

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torl_trl.engines.base import FinishedTurn, FinishReason, Sampling, TurnRequest
from torl_trl.engines.stopping import StopMatcher


class TransformersEngine:
    """An engine over a model in this process.

    Sampling uses torch's global generator of the model's device, or the seeds of the requests if `use_seeds`.
    `model` is read at each round: set it to another object of the same tokenizer to generate with other weights.
    """

    mode: Literal["rounds"] = "rounds"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer,
        sampling: Sampling,
        *,
        eos_token_ids: list[int],
        max_batch_size: int = 256,
        use_seeds: bool = False,
    ):
        self.model = model
        self.sampling = sampling
        self.use_seeds = use_seeds
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_batch_size = max_batch_size
        self._matcher = StopMatcher(tokenizer, len(tokenizer))
        self._requests: list[TurnRequest] = []

    def __repr__(self) -> str:
        return f"transformers in this process, {len(self._requests)} requests for the next round"

    def add(self, request: TurnRequest) -> None:
        self._requests.append(request)

    def abort(self) -> None:
        self._requests.clear()

    @torch.no_grad()  # not inference_mode: what a model caches in its forward must stay usable in training
    def step(self) -> list[FinishedTurn]:
        """Run all requests to their end. Batches hold requests of like length, in a fixed order."""
        requests, self._requests = self._requests, []
        requests.sort(key=lambda request: (len(request.token_ids), request.rollout_id))
        finished = []
        for start in range(0, len(requests), self._max_batch_size):
            finished += _Batch(self, requests[start : start + self._max_batch_size]).run()
        return finished

    def finish_reason(self, sampled_ids: list[int], request: TurnRequest) -> FinishReason | None:
        """Why a row ends after its last sampled token, or None if it goes on."""
        if sampled_ids[-1] in self._eos_token_ids:
            return FinishReason.EOS
        if self._matcher.matches(sampled_ids, request.stop):
            return FinishReason.STOP
        if len(sampled_ids) >= request.max_tokens:
            return FinishReason.LENGTH
        return None


class _Batch:
    """Rows decoded together. Tensors hold the live rows only; `rows` maps them to requests."""

    def __init__(self, engine: TransformersEngine, requests: list[TurnRequest]):
        self.engine = engine
        self.requests = requests
        self.sampled: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.reasons: list[FinishReason | None] = [None] * len(requests)
        self.uniforms = _uniforms(requests) if engine.use_seeds else None  # (rows, tokens)

    def run(self) -> list[FinishedTurn]:
        model, device = self.engine.model, self.engine.model.device
        processors = _logits_processors(self.engine.sampling)
        rows = list(range(len(self.requests)))
        logits, cache, ids, mask = self.prefill(model, device)
        for step in itertools.count():
            tokens, logprobs = self.sample(processors, rows, step, ids, logits)
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if self.reasons[row] is None:
                    self.sampled[row].append(token)
                    self.logprobs[row].append(logprob)
                    self.reasons[row] = self.engine.finish_reason(self.sampled[row], self.requests[row])
            live = [position for position, row in enumerate(rows) if self.reasons[row] is None]
            if not live:
                break
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            if len(live) <= 0.8 * len(rows):  # selecting copies the cache: not for every row that ends
                keep = torch.tensor(live, device=device)
                cache.batch_select_indices(keep)
                ids, mask, rows = ids[keep], mask[keep], [rows[position] for position in live]
            logits = self.forward(model, ids[:, -1:], mask, cache)
        return [
            FinishedTurn(request.rollout_id, sampled, logprobs, reason)
            for request, sampled, logprobs, reason in zip(
                self.requests, self.sampled, self.logprobs, self.reasons, strict=True
            )
        ]

    def prefill(
        self, model: PreTrainedModel, device: torch.device
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
        """Return logits of the last position (rows, vocabulary), the cache, ids and mask (rows, length).

        Layout of a row: common start, padding, rest. The padding is masked and takes no position. It repeats a token
        of the row, which a repetition penalty punishes anyway. A sliding window counts slots, padding included, so
        models that have one get all padding on the left.
        """
        inputs = [request.token_ids for request in self.requests]
        common = 0 if _has_sliding_window(model) else _common_start(inputs)
        width = max(map(len, inputs))
        padded = [ids[:common] + ids[:1] * (width - len(ids)) + ids[common:] for ids in inputs]
        ids = torch.tensor(padded, device=device)
        mask = torch.ones_like(ids)
        for row, row_ids in enumerate(inputs):
            mask[row, common : common + width - len(row_ids)] = 0
        cache = DynamicCache(config=model.config)
        if common:
            self.forward(model, ids[:1, :common], mask[:1, :common], cache)
            cache.batch_repeat_interleave(len(inputs))
        return self.forward(model, ids[:, common:], mask, cache), cache, ids, mask

    @staticmethod
    def forward(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Run new ids (rows, new) behind the cache; return the logits of the last position (rows, vocabulary)."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def sample(
        self, processors: LogitsProcessorList, rows: list[int], step: int, ids: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the token of number `step` per row; return tokens and their logprobs (rows,)."""
        logprobs = processors(ids, logits).log_softmax(dim=-1)
        if self.engine.sampling.temperature == 0.0:
            tokens = logprobs.argmax(dim=-1)
        elif self.uniforms is not None:
            drawn = self.uniforms[rows, step].to(logprobs.device)
            sums = logprobs.double().exp().cumsum(dim=-1)
            tokens = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True).squeeze(1)
        else:
            tokens = torch.multinomial(logprobs.exp(), num_samples=1).squeeze(1)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _uniforms(requests: list[TurnRequest]) -> torch.Tensor:
    """A number in [0, 1) for each token of each request (requests, tokens), from the request's seed alone."""
    rows = []
    for request in requests:
        generator = torch.Generator().manual_seed(request.seed)
        rows.append(torch.rand(request.max_tokens, generator=generator, dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _logits_processors(sampling: Sampling) -> LogitsProcessorList:
    """Processors in the order of `model.generate`."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 0.0:
        if sampling.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p is not None:
            processors.append(MinPLogitsWarper(sampling.min_p))
    return processors


def _has_sliding_window(model: PreTrainedModel) -> bool:
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return any(layer_type != "full_attention" for layer_type in layer_types) or (
        not layer_types and getattr(model.config.get_text_config(), "sliding_window", None) is not None
    )


def _common_start(rows: list[list[int]]) -> int:
    """Length of the longest common start that leaves every row at least one token."""
    shortest, longest = min(rows), max(rows)
    limit = min(map(len, rows)) - 1
    common = next(
        (position for position, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b),
        limit,
    )
    return min(common, limit)
