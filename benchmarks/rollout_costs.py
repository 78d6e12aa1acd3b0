"""The constants of the simulated engine and interpreter, each with its source; written before anything was measured.

Nothing here is tuned to a result of benchmarks/rollout.py: it reports how its results change when each constant of
the engine is 50 % smaller or larger. Units are in the names: seconds, bytes, tokens, floating-point operations.
"""

import math
from dataclasses import dataclass, replace

BYTES_PER_WEIGHT = 2  # bfloat16, weights and KV cache


@dataclass(frozen=True)
class ModelShape:
    """What a decode step must read and compute, from the model's config.json and card."""

    parameters: float
    """In matrix products: all but the input embedding (a look-up); the output head counts."""
    layers: int
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES_PER_WEIGHT

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_PER_WEIGHT


# Hugging Face, Qwen/Qwen2.5-Math-7B and Qwen2.5-7B: config.json (28 layers, 4 KV heads of 28, hidden 3584, vocabulary
# 152,064) and card (7.61 billion parameters, 6.53 without embeddings; the head of 3584 * 152,064 comes back).
QWEN_7B = ModelShape(parameters=6.53e9 + 3584 * 152_064, layers=28, kv_heads=4, head_size=128)

# Hugging Face, Qwen/Qwen2.5-Math-1.5B and Qwen2.5-1.5B: 28 layers, 2 KV heads of 12, hidden 1536, vocabulary 151,936,
# 1.54 billion parameters, 1.31 without embeddings; the head is tied.
QWEN_1_5B = ModelShape(parameters=1.31e9 + 1536 * 151_936, layers=28, kv_heads=2, head_size=128)


@dataclass(frozen=True)
class EngineCosts:
    """One step of the engine takes

        seconds_per_step + seconds_per_sequence * sequences
        + max(weight_bytes / bandwidth, tokens * 2 * parameters / compute)
        + kv_bytes_per_token * tokens in the caches of the sequences / bandwidth

    where `tokens` are those computed in the step, one per decoding sequence and those of prefill, and the caches hold
    them too. Attention's own operations are left out: 2 % of the products at 800 tokens.
    """

    model: ModelShape = QWEN_7B

    bandwidth: float = 3.35e12 * 0.76
    """Bytes per second that steps reach. 3.35 TB/s is NVIDIA's H100 SXM data sheet. The share that vLLM reaches, and
    `seconds_per_step`, solve two published times per token of Llama-3.1-8B (15 GB without the input embedding, bf16)
    with one sequence: 6.48 ms on an H100 with vLLM 0.21 (InferenceBench, recipe "concurrency sweep"), and 13.3 ms on
    an A100 40GB, 1.555 TB/s, with vLLM 0.23 (J. Musgrave, "vLLM throughput-latency sweep on NVIDIA A100")."""

    seconds_per_step: float = 0.6e-3
    """Launch and scheduling that do not depend on the batch; see `bandwidth`."""

    seconds_per_sequence: float = 10e-6
    """Scheduling, sampling and detokenizing on the host, per sequence and step. Not published for current versions;
    the order of magnitude is that of vLLM's 0.6.0 performance post, where an 8B model on an H100 spends 38 % of the
    time on the GPU and 29 % scheduling before the improvements that it announces."""

    compute: float = 989e12 * 0.5
    """Operations per second in large batches. 989 TFLOP/s dense bf16 is NVIDIA's H100 SXM data sheet; matrix products
    alone reach 0.8 of it (S. Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS), a whole layer
    less: half is assumed."""

    block_tokens: int = 16
    """Prefix cache hits are whole blocks: vLLM's CacheConfig.DEFAULT_BLOCK_SIZE."""

    tokens_per_step: int = 4096
    """Upper limit of tokens in a step: what TRL 1.16 gives vLLM (max_num_batched_tokens in vllm_generation.py)."""

    def scaled(self, name: str, factor: float) -> "EngineCosts":
        """The same constants with one of them multiplied by `factor`."""
        return replace(self, **{name: getattr(self, name) * factor})


VARIED = ("bandwidth", "seconds_per_step", "seconds_per_sequence", "compute")
"""The constants that are measurements or assumptions; the others are exact."""


@dataclass(frozen=True)
class InterpreterCosts:
    """Seconds that a program runs: log-normal. `slots` programs run at the same time, per rank, first come first."""

    median: float
    sigma: float
    slots: int

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)


# A warm sandbox. Anchors: 64 ms median for sympy in a warm E2B kernel and 30 ms for a small program in an idle Sandbox
# Fusion (measured for this project); rStar2-Agent (arXiv 2508.20722) gives 0.3 s on average for a loaded service.
# The mean here is 0.13 s. 16 slots per rank are 128 cores for 8 GPUs.
FAST = InterpreterCosts(median=0.1, sigma=0.7, slots=16)

# A fresh Python for each call on a busy service. Anchors, measured for this project: sympy in Sandbox Fusion takes
# 0.39 s alone and 1.9 s with 4 callers on 2 cores. 64 slots per rank are a remote service of 512 for 8 ranks.
SLOW = InterpreterCosts(median=1.0, sigma=0.5, slots=64)


@dataclass(frozen=True)
class Workload:
    """Rollouts as ToRL's: lengths log-normal, cut at the budget; each makes all its calls (the worst case: in ToRL's
    Figure 5 the share with code rises to 0.8). Turns end at uniformly drawn places."""

    rollouts: int = 256
    """A rank's share of 128 prompts * 16 generations over 8 GPUs (ToRL's script)."""
    group: int = 16
    mean_tokens: float = 800.0
    """Tokens that the model writes, before the cut."""
    sigma: float = 0.65
    """At 0.65 eight in a thousand rollouts reach `longest`."""
    longest: int = 3072
    """ToRL's max_response_length."""
    prompt_tokens: int = 200
    """The template's 45 and a problem; ToRL drops prompts over 400."""
    observation_chars: tuple[int, int] = (8, 256)
    """Uniform; 256 is ToRL's cut. Four characters are a token."""
    seed: int = 0
