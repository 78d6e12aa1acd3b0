"""The engine that an evaluation generates with: vLLM in this process, vLLM servers, or transformers."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from torl_trl.engines.base import Engine, Sampling
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.engines.vllm import CPU_OPTIONS, VLLMEngine
from torl_trl.engines.vllm_server import VLLMServerEngine
from torl_trl.errors import UserError
from torl_trl.models import load_config, one_sentence

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm import LLM

ENGINES = ("vllm", "vllm_server", "transformers")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to generate. `dtype` None is bfloat16 on a GPU and float32 on a CPU, where bfloat16 repeats less exactly."""

    name: str
    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str | None = None
    urls: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9

    @property
    def resolved_dtype(self) -> str:
        return self.dtype or ("bfloat16" if torch.accelerator.is_available() else "float32")


def take_devices(count: int) -> None:
    """Leave this process `count` devices of its own, of those that the processes of this machine share.

    To be called before anything asks for a device.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        first = count * int(os.environ["LOCAL_RANK"])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(first + count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + count])


def choose_engine() -> str:
    """`vllm` where it is installed, otherwise `transformers`."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        return "transformers"
    return "vllm"


def base_of(options: EngineOptions) -> str:
    """The model itself, or what the adapter was trained on."""
    adapter = find_adapter_config_file(options.model, revision=options.revision)
    if adapter is None:
        return options.model
    return json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]


def _revision_of(base: str, options: EngineOptions) -> str | None:
    """The revision to load `base_of` at; that of the options is the adapter's where the model is one."""
    return options.revision if base == options.model else "main"


def fingerprint(model: str) -> str | None:
    """What tells a folder's weights from those that it held before: names, sizes and times of its files of weights.

    None for a model from the Hub.
    """
    files = [path for pattern in ("*.safetensors", "*.bin") for path in sorted(Path(model).glob(pattern))]
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16] if files else None


def context_of(options: EngineOptions) -> int:
    """How many tokens the model can take, prompt and completion."""
    base = base_of(options)
    config = load_config(base, _revision_of(base, options), options.trust_remote_code)
    return config.get_text_config().max_position_embeddings


def eos_token_ids(options: EngineOptions, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    base = base_of(options)
    with contextlib.suppress(OSError):  # a model without that file
        more = GenerationConfig.from_pretrained(base, revision=_revision_of(base, options)).eos_token_id
        ids.update([more] if isinstance(more, int) else more or [])
    return sorted(ids)


@contextlib.contextmanager
def open_engine(
    options: EngineOptions, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, *, context: int, folder: Path
) -> Iterator[Engine]:
    """Open the engine of `options` for requests of up to `context` tokens.

    Of several processes on a machine each takes a device of its own (or `tensor_parallel_size`). An adapter is merged
    into its base first, by the first process, in `folder`. Raises `UserError` and `EngineError`.
    """
    eos = eos_token_ids(options, tokenizer)
    if options.name == "vllm_server":
        with VLLMServerEngine(options.urls, sampling, eos_token_ids=eos) as engine:
            if others := set(engine.models) - {options.model}:
                logger.warning(
                    "The servers serve %s, and the result says %r.", ", ".join(sorted(others)), options.model
                )
            yield engine
        return
    model = merged_model(options, tokenizer, folder)
    if options.name == "transformers":
        yield _transformers_engine(options, model, sampling, tokenizer, eos)
        return
    yield VLLMEngine(_vllm(options, model, context), sampling, eos_token_ids=eos)


def merged_model(options: EngineOptions, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Return the model, or for a PEFT adapter the folder of the merged weights, made once for all processes."""
    if base_of(options) == options.model:
        return options.model
    merged, aside = folder / "merged_model", folder / "merged_model.tmp"
    if os.environ.get("RANK", "0") != "0":
        while not merged.exists():
            time.sleep(1.0)
    elif not merged.exists():
        try:
            from peft import AutoPeftModelForCausalLM
        except ImportError as error:
            raise UserError(f"The model {options.model!r} is a PEFT adapter: install peft.") from error
        with one_sentence("adapter", options.model):
            adapted = AutoPeftModelForCausalLM.from_pretrained(
                options.model, revision=options.revision, dtype=options.resolved_dtype
            )
        shutil.rmtree(aside, ignore_errors=True)
        adapted.merge_and_unload().save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.rename(merged)
    return str(merged)


def _transformers_engine(
    options: EngineOptions, model: str, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> TransformersEngine:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    with one_sentence("model", model):
        loaded = AutoModelForCausalLM.from_pretrained(
            model,
            revision=options.revision if model == options.model else None,
            dtype=options.resolved_dtype,
            trust_remote_code=options.trust_remote_code,
        )
    return TransformersEngine(loaded.to(device).eval(), tokenizer, sampling, eos_token_ids=list(eos), use_seeds=True)


def _vllm(options: EngineOptions, model: str, context: int) -> "LLM":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, as TRL has it
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, on a CPU; vLLM's default is half of the memory
    try:
        from vllm import LLM
    except ImportError as error:
        raise UserError("engine is 'vllm', which is not installed: install it, or take another.") from error
    on_cpu = {} if torch.accelerator.is_available() else CPU_OPTIONS | {"max_num_batched_tokens": max(context, 8192)}
    given = {
        "model": model,
        "revision": options.revision if model == options.model else None,
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_model_len": context,
        "logprobs_mode": "processed_logprobs",
    }
    with one_sentence("model", model):
        return LLM(**given | on_cpu | {"dtype": options.resolved_dtype})
