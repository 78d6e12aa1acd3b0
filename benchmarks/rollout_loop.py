"""CPU time of the loop per engine event, against an engine and an interpreter that cost nothing: `rollout.py loop`.

An event is a finished turn or a tool result handed to the loop. The engine hands one turn back per step, so that all
of the loop's work per step falls on one event; the interpreter answers at once. What they spend is taken off.
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from rollout_costs import FAST, Workload
from rollout_workload import FakeTokenizer, Script, workload

from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl.engines.base import FinishedTurn, FinishReason, Tokenizer, TurnRequest
from torl_trl.rollout import RolloutConfig, run_rollouts

TINY = Path(__file__).parent.parent / "recipes" / "tiny" / "base"
SIZES = (256, 2048, 16384)
CALLS = (1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="figures are medians over them")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of rollouts")


class Stopwatch:
    """CPU seconds of this thread inside the methods it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, method: Callable) -> Callable:
        def timed(*arguments: object) -> object:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - started

        return timed


class FreeEngine:
    """Hands turns back in the order of their requests, one per step."""

    mode = "continuous"

    def __init__(self, scripts: list[Script], stopwatch: Stopwatch):
        self._turns = [deque(script.turns) for script in scripts]
        self._logprobs = [-0.5] * max(len(turn) for script in scripts for turn in script.turns)
        self._requests: deque[TurnRequest] = deque()
        self.add, self.step = stopwatch.wrap(self._requests.append), stopwatch.wrap(self._step)

    def _step(self) -> list[FinishedTurn]:
        request = self._requests.popleft()
        turns = self._turns[request.rollout_id]
        turn = turns.popleft()
        reason = FinishReason.STOP if turns else FinishReason.EOS
        return [FinishedTurn(request.rollout_id, turn, self._logprobs[: len(turn)], reason)]

    def abort(self) -> None:
        self._requests.clear()


class FreeInterpreter:
    def __init__(self, stopwatch: Stopwatch):
        self._result = ExecutionResult(ExecutionStatus.OK, "x" * 128, "", 0.0)
        self.submit = stopwatch.wrap(self._submit)

    def _submit(self, code: str) -> Future[ExecutionResult]:
        future: Future[ExecutionResult] = Future()
        future.set_result(self._result)
        return future

    def close(self) -> None: ...


def with_tokenizer(scripts: list[Script], tokenizer: Tokenizer, eos_token_id: int) -> list[Script]:
    """The same numbers of tokens, in the ids of another tokenizer."""
    filler = tokenizer.encode("Let x be the sum of 12 and 30, so that we have to find x. ", add_special_tokens=False)
    call = tokenizer.encode("\n```python\nprint(6 * 7)\n```\n```output", add_special_tokens=False)

    def written(tokens: int, ending: list[int]) -> list[int]:
        words = itertools.islice(itertools.cycle(filler), max(tokens - len(ending), 0))
        return [*words, *ending]

    return [
        Script(
            script.prompt_ids,
            [written(len(t), call) for t in script.turns[:-1]] + [written(len(script.turns[-1]), [eos_token_id])],
            script.latencies,
            script.observation_chars,
        )
        for script in scripts
    ]


def microseconds_per_event(scripts: list[Script], tokenizer: Tokenizer) -> float:
    stopwatch = Stopwatch()
    engine, interpreter = FreeEngine(scripts, stopwatch), FreeInterpreter(stopwatch)
    calls = len(scripts[0].latencies)
    config = RolloutConfig(max_tool_calls=calls, max_completion_length=2 * Workload.longest)
    prompts = [script.prompt_ids for script in scripts]
    gc.collect()
    gc.freeze()  # the scripts are the benchmark's own: the collector need not visit them
    started = time.thread_time()
    rollouts = run_rollouts(prompts, engine, interpreter, tokenizer, config)
    spent = time.thread_time() - started - stopwatch.seconds
    gc.unfreeze()
    assert all(len(rollout.calls) == calls for rollout in rollouts)
    return 1e6 * spent / (len(scripts) * (2 * calls + 1))


def measure(options: argparse.Namespace) -> dict[str, float]:
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(TINY)
    results: dict[str, float] = {}
    sys.stdout.write("microseconds of CPU per engine event (and without Python's garbage collector), medians\n")
    sys.stdout.write(f"{'tokenizer':10} C" + "".join(f"{f'{size} rollouts':>18}" for size in options.sizes) + "\n")
    for name, calls in itertools.product(("fake", "tiny"), CALLS):
        sys.stdout.write(f"{name:10} {calls}")
        for size in options.sizes:
            scripts = workload(Workload(rollouts=size), calls, FAST)
            if name == "tiny":
                scripts = with_tokenizer(scripts, real, real.eos_token_id)
            tokenizer = real if name == "tiny" else FakeTokenizer()
            collected, uncollected = [], []
            for _ in range(options.repeats):
                collected.append(microseconds_per_event(scripts, tokenizer))
                gc.disable()
                uncollected.append(microseconds_per_event(scripts, tokenizer))
                gc.enable()
            key = f"{name}/C={calls}/rollouts={size}"
            results[f"{key}/us_per_event"] = statistics.median(collected)
            results[f"{key}/us_per_event_without_gc"] = statistics.median(uncollected)
            sys.stdout.write(f"{statistics.median(collected):10.1f} ({statistics.median(uncollected):5.1f})")
            sys.stdout.flush()
        sys.stdout.write("\n")
    return results
