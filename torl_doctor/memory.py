"""How much memory a process of a run will take, told before any is taken.

An update is played through with tensors that have a shape and no memory (torch's `FakeTensorMode`), as the trained
model's own code would run it: attention, LoRA, gradient checkpointing and autocast are whatever they are. What the
rest of TRL's step adds is arithmetic. On a CPU, "heap" is what was freed in blocks below 32 MB, which glibc keeps
while the update takes new ones: twice what generation takes, a factor that was fitted to the cases of
benchmarks/memory.py, all but two. Not known here: what a GPU's allocator loses between blocks.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import set_zero3_state
from trl import ModelConfig, get_peft_config

from torl_trl.config import ToRLConfig

TILE = (4096, 32_768)
"""Tokens and vocabulary that TRL's LM head computes at a time (trl/kernels/chunked_logprob.py)."""
FOLD_COPIES = 8
"""Copies of a tile in float32 that it holds where there is no Triton, on a CPU."""
GENERATION_ROWS = 256
"""Rows that the transformers engine decodes together."""
BUCKET = 500_000_000
"""Elements that DeepSpeed reduces at a time, of which two buffers exist."""

VLLM_CPU_CACHE = 1 << 30
"""Bytes of vLLM's cache on a CPU, as torl_trl.generation sets it."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device of one process: of each part, and in the two phases of a step."""

    parts: dict[str, int]
    update: int
    generation: int

    @property
    def peak(self) -> int:
        return max(self.update, self.generation)


def estimate_memory(
    config: PretrainedConfig,
    args: ToRLConfig,
    model_args: ModelConfig,
    *,
    prompt_tokens: int,
    processes: int = 1,
    device_bytes: int = 0,
) -> MemoryEstimate:
    """Estimate a step in which every rollout has its full length behind prompts of `prompt_tokens`.

    `config` is the model's, `device_bytes` the memory of a GPU, of which vLLM takes a share. AdamW is assumed.
    """
    stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else 0
    parts, played = _play(config, args, model_args, prompt_tokens, is_half=stage > 0)
    all_weights, trained = parts["weights"], parts.pop("trained")
    if stage:  # half-precision weights, float32 ones for AdamW
        parts["optimizer"] = 12 * trained // processes
        parts["gradients"] = 4 * trained // (processes if stage > 1 else 1)
        parts["buckets"] = 4 * min(trained, BUCKET)
        parts["weights"] //= processes if stage == 3 else 1
    elif parse_flag_from_env("ACCELERATE_USE_FSDP"):
        for name in ("weights", "optimizer", "gradients"):
            parts[name] //= processes
    elif processes > 1:
        parts["buckets"] = parts["gradients"]  # of DDP
    lasting = parts["weights"] + parts["optimizer"]
    update = lasting + parts.get("buckets", 0) + played

    generation = parts["generation"]
    if args.use_vllm and args.vllm_mode == "colocate":
        share = int(args.vllm_gpu_memory_utilization * device_bytes)
        generation = parts["generation"] = VLLM_CPU_CACHE + all_weights if args.use_cpu else share
        update += 0 if args.vllm_enable_sleep_mode else generation
    elif args.use_vllm:
        generation = parts["generation"] = 0
    else:
        generation += all_weights if stage == 3 else 0
        if args.use_cpu:
            parts["heap"] = 2 * generation
            update += parts["heap"]
    return MemoryEstimate(parts, update, lasting + generation)


def _play(
    config: PretrainedConfig, args: ToRLConfig, model_args: ModelConfig, prompt_tokens: int, *, is_half: bool
) -> tuple[dict[str, int], int]:
    """Return bytes by part, with the number of parameters `trained`, and the most that an update adds."""
    compute = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    dtype = (args.model_init_kwargs or {}).get("dtype", model_args.dtype)
    dtype = compute if is_half else getattr(torch, str(dtype), config.dtype)  # "auto" is the model's own
    rows, length = args.per_device_train_batch_size, prompt_tokens + args.max_completion_length
    with torch.device("meta"), set_zero3_state():  # which says that nobody is to partition the weights
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=args.trust_remote_code).train()
        backbone = model.base_model
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if model_args.use_peft:
            from peft import get_peft_model

            model = get_peft_model(model, get_peft_config(model_args))
            model.enable_input_require_grads()
    with FakeTensorMode():
        _allocate(model)
        head = model.get_output_embeddings().weight
        weights = list(model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        gradients = sum(weight.nbytes for weight in trained)
        accumulates = args.gradient_accumulation_steps > 1 and not is_half
        for weight in trained if accumulates else ():
            weight.grad = torch.empty_like(weight)
        mixed = compute != torch.float32 and not is_half
        autocast = torch.autocast("cpu", compute) if mixed else nullcontext()
        with _Allocated() as memory:
            with autocast:
                ids = torch.empty(rows, length, dtype=torch.long)
                mask = torch.empty(rows, 1, length, length, dtype=torch.bool)  # of padding
                hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False)[0]
            activations = memory.now
            logits = _logits_bytes(head, rows * args.max_completion_length, compute, args)
            hidden.backward(torch.empty_like(hidden))
    parts = {
        "weights": sum(weight.nbytes for weight in weights),
        "optimizer": gradients * 2,
        "gradients": gradients,
        "activations": activations,
        "logits": logits,
        "generation": _generation_bytes(model, args, length, compute),
        "trained": sum(weight.numel() for weight in trained),
    }
    return parts, max(activations + logits, memory.most) + (gradients if accumulates else 0)


def _allocate(model: torch.nn.Module) -> None:
    """Make a meta model's tensors fake ones of a CPU, inside a `FakeTensorMode`: autocast knows no meta tensors."""
    made: dict[int, torch.Tensor] = {}  # embeddings may be tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, meta in tensors.items():
                if meta is not None and id(meta) not in made:
                    made[id(meta)] = torch.empty(meta.shape, dtype=meta.dtype)
                    if isinstance(meta, torch.nn.Parameter):
                        made[id(meta)] = torch.nn.Parameter(made[id(meta)], meta.requires_grad)
                tensors[name] = None if meta is None else made[id(meta)]


def _logits_bytes(head: torch.nn.Parameter, tokens: int, compute: torch.dtype, args: ToRLConfig) -> int:
    """Bytes while the log-probabilities of a micro-batch are computed, in the backward pass, which needs most."""
    vocabulary, width = head.shape
    elements = min(tokens, TILE[0]) * min(vocabulary, TILE[1])
    of_tile = elements * compute.itemsize + (elements * 4 * FOLD_COPIES if args.use_cpu else 0)
    return of_tile + 4 * tokens * width + (4 * head.numel() if head.requires_grad else 0)


def _generation_bytes(model: PreTrainedModel, args: ToRLConfig, length: int, compute: torch.dtype) -> int:
    """Bytes that the transformers engine adds: its cache, a row of logits each, weights that it computes with."""
    config = model.config.get_text_config()
    rows = min(GENERATION_ROWS, args.per_device_train_batch_size * args.steps_per_generation)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_width
    size = 2 if args.generation_dtype else compute.itemsize
    cache = 2 * rows * length * config.num_hidden_layers * width * size
    copies = sum(weight.numel() for weight in model.parameters()) * 2 if size == 2 else 0
    return cache + copies + 4 * 4 * rows * config.vocab_size


class _Allocated(TorchDispatchMode):
    """Counts the bytes of tensors made inside it: `now`, and at `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and id(tensor.untyped_storage()) not in known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            return

        def forget(_: weakref.ref) -> None:
            del self._storages[key]
            self.now -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.now += size
        self.most = max(self.most, self.now)
