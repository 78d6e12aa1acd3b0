"""Turns from a vLLM engine in this process, continuously: requests join and leave while others run.

Drives `llm.llm_engine` of the `LLM` that TRL made (vllm_mode: colocate). A rollout that waits for its code is in no
request; when it comes back its prefix is found in vLLM's cache.
"""

import itertools
import math
from typing import TYPE_CHECKING, Literal

import torch

from torl_trl.engines.base import EngineError, FinishedTurn, Sampling, TurnRequest
from torl_trl.engines.stopping import vllm_finish_reason

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

CPU_VERSIONS = "0.31."
"""Of vLLM: those on which `keep_plain_weights` was tested."""
CPU_OPTIONS = {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False}
"""Of an `LLM` on a CPU: it would choose bfloat16, and fails on a seeded request that it prefills in parts."""


class VLLMEngine:
    """An engine over a vLLM `LLM` without tensor parallelism (its ranks would have to step together).

    The `LLM` must have been made with `logprobs_mode="processed_logprobs"`, as TRL does, so that logprobs belong to
    the distribution at the sampling temperature. Raises `EngineError` for a request that cannot fit its context.
    """

    mode: Literal["continuous"] = "continuous"

    def __init__(self, llm: "LLM", sampling: Sampling, *, eos_token_ids: list[int]):
        self.sampling = sampling
        self._engine = llm.llm_engine
        self._eos_token_ids = eos_token_ids
        self._max_length: int = self._engine.model_config.max_model_len
        self._numbers = itertools.count()  # vLLM must never see an id twice, not even after an abort
        self._rollouts: dict[str, int] = {}  # requests in the engine, by vLLM's id

    def __repr__(self) -> str:
        return f"vLLM in this process, {len(self._rollouts)} requests unfinished"

    def add(self, request: TurnRequest) -> None:
        length = len(request.token_ids) + request.max_tokens
        if length > self._max_length:
            raise EngineError(
                f"A rollout may take {length} tokens with its prompt and vLLM's context has {self._max_length}: lower "
                "max_completion_length or max_prompt_length, or raise vllm_max_model_length."
            )
        request_id = f"{request.rollout_id}-{next(self._numbers)}"
        self._engine.add_request(request_id, {"prompt_token_ids": request.token_ids}, self._params(request))
        self._rollouts[request_id] = request.rollout_id

    def step(self) -> list[FinishedTurn]:
        """One step of the scheduler: a token for every running sequence, or a stretch of prefill."""
        outputs = [output for output in self._engine.step() if output.finished]
        return [_finished_turn(output, self._rollouts.pop(output.request_id)) for output in outputs]

    def abort(self) -> None:
        self._engine.abort_request(list(self._rollouts))
        self._rollouts.clear()

    def _params(self, request: TurnRequest) -> "SamplingParams":
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p or 0.0,
            repetition_penalty=self.sampling.repetition_penalty,
            max_tokens=request.max_tokens,
            stop=list(request.stop),
            stop_token_ids=self._eos_token_ids,
            seed=request.seed,
            logprobs=0,  # only those of the sampled tokens
            detokenize=bool(request.stop),  # text is looked at for stop strings only
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _finished_turn(output: "RequestOutput", rollout_id: int) -> FinishedTurn:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, token_ids, strict=True)]
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(
            f"vLLM gave a logprob that is no number (rollout {rollout_id}): the weights may have diverged, look at "
            "the loss and the gradient norm of the last steps."
        )
    if (reason := vllm_finish_reason(completion.finish_reason, completion.stop_reason)) is None:
        raise EngineError(f"vLLM ended a turn with {completion.finish_reason!r}: its log says why.")
    return FinishedTurn(rollout_id, token_ids, logprobs, reason, output.num_cached_tokens or 0)


def keep_plain_weights() -> None:
    """Keep vLLM's weights on a CPU as they are loaded, so that new ones can be written over them.

    vLLM for CPUs packs weights for its kernels when it loads a model: TRL's `sync_weights` fails on packed layers, and
    the packed head of a model with tied embeddings would stay as it was. This takes vLLM's own fallback, plain linear
    layers. It must run in the process of the engine, before that is made. On other devices nothing is packed.
    """
    import vllm
    from vllm.model_executor.layers import utils

    if not vllm.__version__.startswith(CPU_VERSIONS) or not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise EngineError(
            f"vllm {vllm.__version__} on a CPU is not known here, its weights could be stale: install {CPU_VERSIONS}0."
        )

    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
