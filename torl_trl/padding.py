"""Updates without what costs time and trains nothing: columns of padding, the vocabulary at prompt positions."""

from typing import Any

import trl.trainer.utils

PER_TOKEN = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
"""Keys of TRL's batches with one value per completion token; the last may be one value per row instead."""


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Cut the columns of a micro-batch that are padding in every row; the loss stays the same.

    TRL pads all rows of a generation batch to the longest one before it splits them, so most micro-batches carry
    columns of nothing through the model: `prompt_*` (rows, length) from the left, per-token values from the right.
    """
    start = int(batch["prompt_mask"].any(dim=0).int().argmax())
    length = batch["completion_mask"].shape[1]
    width = max(1, int(batch["completion_mask"].any(dim=0).sum()))
    cut = {name: value[:, start:] for name, value in batch.items() if name in ("prompt_ids", "prompt_mask")}
    for name in PER_TOKEN:
        value = batch.get(name)
        if value is not None and value.shape[1] == length:
            cut[name] = value[:, :width]
    return batch | cut


def score_completions_only() -> None:
    """Let TRL's fused LM head leave out positions without a label on a CPU, as it does on a GPU.

    Elsewhere it computes the vocabulary for every position, prompts included, to spare compiled devices changing
    shapes. On a CPU, where nothing is compiled, that is most of an update with a short completion.
    """
    trl.trainer.utils._use_triton = lambda device: device.type in ("cpu", "cuda", "xpu")
