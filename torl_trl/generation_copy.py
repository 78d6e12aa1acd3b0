"""Generating in half precision while the weights that are trained stay in float32."""

import torch
from transformers import PreTrainedModel


class GenerationCopy:
    """A half-precision copy of the trained weights that only generates; refreshed when the step has changed."""

    def __init__(self, source: PreTrainedModel, dtype: str):
        self._source = source
        self._step = -1
        self._model = type(source)(source.config).to(device=source.device, dtype=getattr(torch, dtype)).eval()
        for target, buffer in zip(self._model.buffers(), source.buffers(), strict=True):
            target.data = buffer.data.clone()  # RoPE's frequencies stay in float32, as in a half-precision load

    @torch.no_grad()
    def at(self, step: int) -> PreTrainedModel:
        """The copy with the weights of `step`."""
        if self._step != step:
            for target, weights in zip(self._model.parameters(), self._source.parameters(), strict=True):
                target.copy_(weights)
            self._step = step
        return self._model
