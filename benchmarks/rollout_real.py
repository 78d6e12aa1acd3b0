"""Whole-batch rounds against continuous generation, for real: vLLM on this CPU with the tiny model.

The same rollouts in both policies (seeded in float32, so that the same tokens are sampled), with an interpreter that
runs each program and hands its result back after a latency drawn for that program: log-normal, with the median
--latency and sigma 0.5. The tiny model's own texts have 40 tokens and no tail, so each rollout is given a length of
ToRL's shape, scaled to its context: log-normal with sigma 0.65, mean --tokens, cut at 3.84 times the mean (ToRL: about
800 and 3072). Until then it goes on, and then it ends. The policies take turns; ratios are of neighbouring runs.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import threading
import zlib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torl_interpreters.base import ExecutionResult, Interpreter
from torl_trl.data import read_rows
from torl_trl.engines.base import FinishedTurn, FinishReason, Sampling, TurnRequest
from torl_trl.engines.vllm import CPU_OPTIONS, VLLMEngine, keep_plain_weights
from torl_trl.interpreters import get_interpreter
from torl_trl.progress import RolloutStats
from torl_trl.prompts import load_template, render_prompt
from torl_trl.rollout import Rollout, RolloutConfig, run_rollouts

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

TINY = Path(__file__).parents[1] / "recipes" / "tiny"


class Late:
    """An interpreter whose results come later by a latency that depends on the code alone, in seconds."""

    def __init__(self, interpreter: Interpreter, median: float, sigma: float = 0.5):
        self._interpreter, self._median, self._sigma = interpreter, median, sigma
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, code: str) -> Future[ExecutionResult]:
        late: Future[ExecutionResult] = Future()
        latency = self._median * random.Random(zlib.crc32(code.encode())).lognormvariate(0, self._sigma)
        self._interpreter.submit(code).add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._loop.call_later, latency, _hand_on, done, late)
        )
        return late

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def _hand_on(done: Future[ExecutionResult], late: Future[ExecutionResult]) -> None:
    late.set_result(done.result())


class GivenLengths(VLLMEngine):
    """Ends rollout `i` when its prompt and completion have `lengths[i]` tokens, and not before."""

    def __init__(self, llm: "LLM", sampling: Sampling, *, eos_token_id: int, lengths: list[int]):
        super().__init__(llm, sampling, eos_token_ids=[eos_token_id])
        self._eos_token_id, self._lengths = eos_token_id, lengths

    def add(self, request: TurnRequest) -> None:
        left = max(1, self._lengths[request.rollout_id] - len(request.token_ids))
        super().add(replace(request, max_tokens=left))

    def step(self) -> list[FinishedTurn]:
        return [
            replace(turn, finish_reason=FinishReason.EOS) if turn.finish_reason == FinishReason.LENGTH else turn
            for turn in super().step()
        ]

    def _params(self, request: TurnRequest) -> "SamplingParams":
        params = super()._params(request)
        params.logit_bias = {self._eos_token_id: -100.0}
        return params


class Rounds:
    """An engine in whole-batch rounds, as ToRL's: a step runs all requests to their end."""

    mode = "rounds"

    def __init__(self, engine: VLLMEngine):
        self.abort, self._engine, self._running = engine.abort, engine, 0

    def add(self, request: TurnRequest) -> None:
        self._engine.add(request)
        self._running += 1

    def step(self) -> list[FinishedTurn]:
        finished: list[FinishedTurn] = []
        while len(finished) < self._running:
            finished += self._engine.step()
        self._running = 0
        return finished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency", type=float, default=1.0, help="median latency of a call, in seconds")
    parser.add_argument("--calls", type=int, default=1, help="the limit C")
    parser.add_argument("--tokens", type=float, default=200.0, help="mean length of a completion")


def _lengths(count: int, mean: float, sigma: float = 0.65) -> list[int]:
    draw = random.Random(1)
    drawn = (mean * draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(count))
    return [round(min(max(length, 0.08 * mean), 3.84 * mean)) for length in drawn]


def measure(options: argparse.Namespace) -> dict[str, float]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    keep_plain_weights()
    from vllm import LLM

    llm = LLM(
        str(TINY / "base"),
        max_num_seqs=options.rollouts,
        logprobs_mode="processed_logprobs",
        **CPU_OPTIONS,
    )
    tokenizer = llm.get_tokenizer()
    rows = read_rows(str(TINY / "eval.jsonl"))
    template = load_template(None)
    prompts = [render_prompt(template, rows[i % len(rows)]["problem"]) for i in range(options.rollouts)]
    prompt_ids = tokenizer(prompts)["input_ids"]
    lengths = [
        len(ids) + length for ids, length in zip(prompt_ids, _lengths(options.rollouts, options.tokens), strict=True)
    ]
    engine = GivenLengths(llm, Sampling(), eos_token_id=tokenizer.eos_token_id, lengths=lengths)

    def run(policy: str, interpreter: Interpreter | None, calls: int) -> tuple[RolloutStats, list[Rollout]]:
        llm.reset_prefix_cache()
        stats = RolloutStats()
        config = RolloutConfig(max_tool_calls=calls, max_completion_length=900)
        chosen = engine if policy == "continuous" else Rounds(engine)
        return stats, run_rollouts(prompt_ids, chosen, interpreter, tokenizer, config, seed=1, stats=stats)

    seconds: dict[str, list[float]] = {"rounds": [], "continuous": []}
    idle: dict[str, list[float]] = {"rounds": [], "continuous": []}
    with get_interpreter("embedded") as embedded:
        late = Late(embedded, options.latency)
        run("continuous", late, options.calls)  # the first run of an engine is slow
        for _ in range(options.repeats):
            for policy in seconds:
                stats, rollouts = run(policy, late, options.calls)
                seconds[policy].append(stats.seconds)
                idle[policy].append(1 - stats.generating_seconds / stats.seconds)
        late.close()
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    ratios = [rounds / ours for rounds, ours in zip(seconds["rounds"], seconds["continuous"], strict=True)]
    results = {
        "rollouts": options.rollouts,
        "calls": sum(len(rollout.calls) for rollout in rollouts),
        "latency_median": options.latency,
        "tokens_mean": statistics.mean(lengths),
        "tokens_max": max(lengths),
        "rounds_seconds": statistics.median(seconds["rounds"]),
        "continuous_seconds": statistics.median(seconds["continuous"]),
        "rounds_idle_share": statistics.median(idle["rounds"]),
        "continuous_idle_share": statistics.median(idle["continuous"]),
        "speedup": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
    }
    for name, value in results.items():
        sys.stdout.write(f"{name:24} {value:10.3f}\n")
    return results
