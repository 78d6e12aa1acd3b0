"""The weights that vLLM gets of a model with adapters: base and adapter added in copies, layer by layer.

TRL adds them in the base itself and subtracts them again, which in half precision is not what was there before: the
base would drift away from the one that the saved adapter belongs to, a little with each push.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from accelerate.utils import is_peft_model
from trl.generation.vllm_generation import VLLMGeneration


def push_copies(trl: VLLMGeneration) -> None:
    """Let TRL's weight push of a model with adapters leave its base alone.

    Where parameters are in parts (FSDP, ZeRO-3), TRL's own way stays.
    """
    whole = not trl._dist.is_fsdp and trl._dist.zero_stage != 3
    if is_peft_model(trl.model) and whole:
        trl._iter_named_params = functools.partial(merged_weights, trl)


@torch.no_grad()
def merged_weights(trl: VLLMGeneration) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as vLLM has them, and weights (as the base's), each good until the next one is asked for."""
    model = trl.model
    for name, parameter in model.named_parameters():
        wanted = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in wanted or "original_module" in wanted:  # the adapter's own; what modules_to_save replaced
            continue
        wanted = trl._fix_param_name_to_vllm(wanted, extra_prefixes=["modules_to_save.default."])
        owner, inner, _ = name.rpartition(".base_layer.")
        with _merged(model.get_submodule(owner)) if inner else contextlib.nullcontext():
            yield wanted, parameter.data


@contextlib.contextmanager
def _merged(layer: torch.nn.Module) -> Iterator[None]:
    """A PEFT layer whose base holds the sum, in copies."""
    base = layer.get_base_layer()
    kept = [(parameter, parameter.data) for parameter in base.parameters(recurse=False)]
    layer.merge(safe_merge=True)
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        layer.merged_adapters.clear()
