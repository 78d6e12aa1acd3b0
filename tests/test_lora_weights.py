"""What vLLM gets of a model with adapters, and that the base stays what the saved adapter belongs to."""

from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toys import tiny_model
from trl.generation.vllm_generation import VLLMGeneration

from torl_trl.lora_weights import push_copies


def generation_of(model) -> VLLMGeneration:
    trl = object.__new__(VLLMGeneration)
    trl.model = model
    trl._dist = SimpleNamespace(is_fsdp=False, zero_stage=0, gather_params=lambda parameters: nullcontext())
    return trl


def adapted(dtype: torch.dtype, **options):
    base = deepcopy(tiny_model()).to(dtype)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_names_and_weights_are_those_of_trl(options):
    model = adapted(torch.float32, **options)
    theirs = {name: weight.clone() for name, weight in generation_of(model)._iter_named_params()}
    trl = generation_of(adapted(torch.float32, **options))
    push_copies(trl)
    ours = {name: weight.clone() for name, weight in trl._iter_named_params()}
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    base = dict(tiny_model().named_parameters())
    assert sum(not torch.equal(ours[name], base[name]) for name in ours) >= 7  # of a layer: the adapter is in them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_push_changes_a_bit_of_a_half_precision_base(dtype):
    model = adapted(dtype)
    trl = generation_of(model)
    push_copies(trl)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "lora" not in name}
    for _ in range(5):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.mul_(1.1)
        assert all(weight.dtype == dtype for _, weight in trl._iter_named_params())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name in before)
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_a_push_that_fails_half_way_leaves_the_base_alone():
    model = adapted(torch.bfloat16)
    trl = generation_of(model)
    push_copies(trl)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    weights = trl._iter_named_params()
    for _ in range(4):
        next(weights)
    weights.close()
    assert all(map(torch.equal, model.parameters(), before))


def test_other_models_keep_trl_s_way():
    trl = generation_of(tiny_model())
    push_copies(trl)
    assert "_iter_named_params" not in vars(trl)
