"""What generates a trainer's rollouts: its own model, vLLM in this process, or vLLM servers.

TRL makes the vLLM objects and pushes the weights before it asks for rollouts; here they become engines. Each kind of
generation gives its engine for the time of one rollout phase.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedModel
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.models import unwrap_model_for_generation

from torl_trl.config import ToRLConfig
from torl_trl.engines.base import Engine, EngineError, Sampling
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.engines.vllm import CPU_OPTIONS, VLLMEngine, keep_plain_weights
from torl_trl.engines.vllm_server import (
    VLLMServerEngine,
    authorization,
    check_health,
    context_of_server,
    wait_for_server,
)
from torl_trl.errors import UserError
from torl_trl.lora_weights import push_copies

if TYPE_CHECKING:
    from torl_trl.trainer import ToRLTrainer


MOST_IN_ENGINE = 1024
"""Rollouts that vLLM holds at a time; the others queue."""


class Generation(Protocol):
    """`name` goes into the records; `engine` opens the engine, with the weights of this step, for a rollout phase."""

    name: str

    def engine(self, sampling: Sampling) -> AbstractContextManager[Engine]: ...


def make_generation(trainer: "ToRLTrainer") -> Generation:
    if not trainer.use_vllm:
        return ModelGeneration(trainer)
    push_copies(trainer.vllm_generation)
    return ServedVLLM(trainer) if trainer.vllm_mode == "server" else ColocatedVLLM(trainer)


class ModelGeneration:
    """The trained model itself, whole on this rank, or its half-precision copy."""

    name = "transformers"

    def __init__(self, trainer: "ToRLTrainer"):
        self._trainer = trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        dtype = trainer.args.generation_dtype
        if trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and not trainer.args.ds3_gather_for_generation):
            raise UserError(
                "The transformers engine needs the whole model on each process while ranks generate different numbers "
                "of turns: use DDP or ZeRO with ds3_gather_for_generation: true, or use_vllm: true."
            )
        if dtype and (not isinstance(model, PreTrainedModel) or trainer.is_deepspeed_enabled):
            raise UserError(
                f"generation_dtype is {dtype!r} with LoRA or DeepSpeed, which it does not support: remove it."
            )
        self.copy = GenerationCopy(model, dtype) if dtype else None
        self._engine = TransformersEngine(
            model, trainer.processing_class, Sampling(), eos_token_ids=list(trainer.eos_token_ids)
        )

    @contextlib.contextmanager
    def engine(self, sampling: Sampling) -> Iterator[Engine]:
        self._engine.sampling = sampling
        with self._model() as model:
            self._engine.model = model
            yield self._engine

    @contextlib.contextmanager
    def _model(self) -> Iterator[PreTrainedModel]:
        """The model that generates, in eval mode: dropout, LoRA's for one, would sample from another policy."""
        trainer = self._trainer
        if self.copy is not None:
            yield self.copy.at(trainer.state.global_step)
            return
        with unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model:
            was_training = model.training
            model.eval()
            try:
                yield model
            finally:
                model.train(was_training)


class GenerationCopy:
    """A half-precision copy of the trained float32 weights that only generates; refreshed when the step changed."""

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


class ColocatedVLLM:
    """vLLM in this process, on the training device (vllm_mode: colocate)."""

    name = "vllm"

    def __init__(self, trainer: "ToRLTrainer"):
        self._trl = trainer.vllm_generation
        _check_context(trainer, self._trl.llm.llm_engine.model_config.max_model_len)
        self._engine = VLLMEngine(self._trl.llm, Sampling(), eos_token_ids=list(trainer.eos_token_ids))

    @contextlib.contextmanager
    def engine(self, sampling: Sampling) -> Iterator[Engine]:
        """Awake once for the whole phase. Sleeping drops the weights, and TRL pushes them only when the step changed,
        so that a second phase in a step, such as an evaluation, has to push them itself."""
        self._engine.sampling = sampling
        if self._trl.enable_sleep_mode:
            if self._trl._llm_weights_sleeping:
                self._trl.sync_weights()
            self._trl.llm.wake_up(tags=["kv_cache"])
        try:
            yield self._engine
        finally:
            if self._trl.enable_sleep_mode:
                self._trl.llm.sleep(level=2)
                self._trl._llm_weights_sleeping = True


def _check_context(trainer: "ToRLTrainer", context: int) -> None:
    """A prompt that does not fit with its completion would end the run when it comes up, hours later."""
    for dataset in filter(None, (trainer.train_dataset, trainer.eval_dataset)):
        longest = max(map(len, trainer.processing_class(text=list(dataset["prompt"]))["input_ids"]))
        if longest + trainer.args.max_completion_length > context:
            raise UserError(
                f"The longest prompt has {longest} tokens, which with max_completion_length: "
                f"{trainer.args.max_completion_length} is more than vLLM's context of {context}: lower "
                "max_completion_length or max_prompt_length, or raise vllm_max_model_length (of servers: "
                "--max-model-len)."
            )


class ServedVLLM:
    """vLLM servers on other devices (vllm_mode: server); every rank talks to them itself."""

    name = "vllm_server"

    def __init__(self, trainer: "ToRLTrainer"):
        self._wait_for_everyone = trainer.accelerator.wait_for_everyone
        urls = trainer.args.server_urls()
        if contexts := list(filter(None, map(context_of_server, urls))):
            _check_context(trainer, min(contexts))
        _push_to_all(trainer.vllm_generation, urls, trainer.accelerator)
        self._engine = VLLMServerEngine(urls, Sampling(), eos_token_ids=list(trainer.eos_token_ids))

    @contextlib.contextmanager
    def engine(self, sampling: Sampling) -> Iterator[Engine]:
        self._wait_for_everyone()  # only the main process has waited until the servers have the new weights
        self._engine.sampling = sampling
        yield self._engine


class PushClient(VLLMClient):
    """TRL's, which pushes weights, with the servers' key: it asks them for one thing that needs it."""

    def _get(self, url: str, **options: Any) -> dict:
        return super()._get(url, headers=authorization(), **options)


def _push_to_all(trl: vllm_generation.VLLMGeneration, urls: list[str], accelerator) -> None:
    """Let TRL's weight push, which serves one server, go to each in turn. Collective: all ranks walk the weights.

    TRL waits for a server that is gone for a minute and for a frozen one for ever, so each is asked first.
    """
    clients: list[VLLMClient | None] = [None] * len(urls)
    if accelerator.is_main_process:
        clients = [trl.vllm_client]
        for number, url in enumerate(urls[1:], start=1):
            client = PushClient(url, group_port=trl.group_port + number, connection_timeout=trl.server_timeout)
            client.init_communicator(device=accelerator.device)
            clients.append(client)
    from requests.exceptions import RequestException  # TRL's client needs it, vLLM brings it

    push = trl.sync_weights

    def push_to_each() -> None:
        for url in urls:
            check_health(url)
        for url, client in zip(urls, clients, strict=True):
            trl.vllm_client = client
            try:
                push()
            except RequestException as error:
                raise EngineError(
                    f"The vLLM server at {url} failed while it took the weights ({error}): read its log, start it "
                    "again and resume the run."
                ) from error

    trl.sync_weights = push_to_each


@contextlib.contextmanager
def vllm_for_trl(args: ToRLConfig) -> Iterator[None]:
    """Around `GRPOTrainer.__init__`, which makes the vLLM objects: what its options do not cover.

    TRL takes one server, without a key, and waits for ever where something else answers, such as the environment's
    proxy. It asks for as many places in the engine as a step has rollouts, of which vLLM refuses more than 4096. On a
    CPU its `LLM` needs other options.
    """
    if not args.use_vllm:
        yield
        return
    if importlib.util.find_spec("vllm") is None:
        raise UserError("use_vllm is true and there is no vllm: install requirements.txt, or set use_vllm: false.")
    llm, client, urls = vllm_generation.LLM, vllm_generation.VLLMClient, args.vllm_server_base_url
    others: dict[str, Any] = {}
    if args.vllm_mode == "server":
        _without_proxy(args.server_urls())
        for url in args.server_urls():
            wait_for_server(url, args.vllm_server_timeout)
        args.vllm_server_base_url = args.server_urls()[0]
    elif args.use_cpu or not torch.accelerator.is_available():
        keep_plain_weights()
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's default is half of the memory
        others = CPU_OPTIONS | {"max_num_batched_tokens": None}  # as many as the context: TRL says 4096
    vllm_generation.VLLMClient = PushClient
    vllm_generation.LLM = lambda **options: llm(
        **options | {"max_num_seqs": min(options["max_num_seqs"], MOST_IN_ENGINE)} | others
    )
    try:
        yield
    except RuntimeError as error:
        if args.vllm_mode == "server" and "weight" in str(error).lower():  # TRL's words on what a push needs
            raise UserError(f"Weights cannot be pushed to the server. {error}") from error
        raise
    finally:
        vllm_generation.LLM, vllm_generation.VLLMClient, args.vllm_server_base_url = llm, client, urls


def _without_proxy(urls: list[str]) -> None:
    """The environment's proxy is for the outside world: TRL's client would ask our servers through it."""
    hosts = sorted({urlsplit(url).hostname or "" for url in urls})
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join([*filter(None, [os.environ.get(name)]), *hosts])
