"""A virtual clock, and an engine and an interpreter that live on it: `run_rollouts` itself is real.

    outcome = simulate(workload(Workload(), 1, FAST), EngineOptions(), EngineCosts(), FAST.slots)

The engine is vLLM's scheduler in outline: running sequences decode a token per step, prefill shares the step up to a
token limit, requests wait when too many run, and blocks that a rollout or its prompt has computed are found again.
KV memory does not run out here. Several equal steps are taken at once, up to the next that changes anything: their
cost is a closed form, so nothing is approximated.
"""

import contextlib
import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

from rollout_costs import EngineCosts
from rollout_workload import FakeTokenizer, Script

import torl_trl.rollout as rollout_module
from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl.engines.base import FinishedTurn, FinishReason, TurnRequest
from torl_trl.progress import RolloutStats
from torl_trl.rollout import Rollout, RolloutConfig, run_rollouts


class Clock:
    """Virtual seconds, and what happens at them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, seconds: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (seconds, self._count, happens))

    @property
    def next_event(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def advance_to(self, seconds: float) -> None:
        while self.next_event <= seconds:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        self.now = seconds


class ClockQueue:
    """The loop's queue of returned calls: to block is to jump to the next event."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._items: deque = deque()

    def put(self, item: object) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self) -> object:
        while not self._items:
            self._clock.advance_to(self._clock.next_event)
        return self._items.popleft()


@contextlib.contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Let `run_rollouts` wait and read the time on `clock`."""
    loop, time = rollout_module._Loop, rollout_module.time
    rollout_module._Loop = functools.partial(loop, returned=ClockQueue(clock), started=clock.now)
    rollout_module.time = SimpleNamespace(perf_counter=lambda: clock.now)
    try:
        yield
    finally:
        rollout_module._Loop, rollout_module.time = loop, time


class VirtualInterpreter:
    """Runs program number `10 * rollout + call` for the seconds of its script, in slots, first come first."""

    def __init__(self, scripts: list[Script], slots: int, clock: Clock):
        self._scripts = scripts
        self._clock = clock
        self._free_at = [0.0] * slots

    def submit(self, code: str) -> Future[ExecutionResult]:
        index, call = divmod(int(code), 10)
        seconds = self._scripts[index].latencies[call]
        started = max(self._clock.now, heapq.heappop(self._free_at))
        heapq.heappush(self._free_at, started + seconds)
        printed = "x" * self._scripts[index].observation_chars[call]
        queued = started - self._clock.now
        result = ExecutionResult(ExecutionStatus.OK, printed, "", seconds, queued)
        future: Future[ExecutionResult] = Future()
        self._clock.at(started + seconds, lambda: future.set_result(result))
        return future

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineOptions:
    """What a user can choose about the engine and the policy."""

    mode: str = "continuous"
    max_sequences: int = 100_000
    returning_first: bool = False
    """Whether, of the requests that wait, rollouts that come back from a call go before those not yet begun."""
    prefix_cache: bool = True


@dataclass(slots=True)
class Sequence:
    """A request in the engine."""

    request: TurnRequest
    turn: list[int]
    reason: FinishReason
    computed: int = 0
    """Tokens in the KV cache."""
    cached: int = 0
    left: int = field(init=False)
    """Tokens to sample."""

    def __post_init__(self) -> None:
        self.left = len(self.turn)

    @property
    def prefill(self) -> int:
        """Tokens of the request that are still to compute."""
        return len(self.request.token_ids) - self.computed


class VirtualEngine:
    """Replays scripts at the cost of `EngineCosts`."""

    def __init__(self, scripts: list[Script], options: EngineOptions, costs: EngineCosts, clock: Clock):
        self.mode = options.mode
        self.busy_seconds = 0.0
        self.prefilled_tokens = 0
        self._options, self._costs, self._clock = options, costs, clock
        self._turns = [deque(script.turns) for script in scripts]
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._in_cache: dict[int, int] = {}
        self._prompts_in_cache: set[tuple[int, ...]] = set()
        self._prompt_tokens = len(scripts[0].prompt_ids) if scripts else 0
        self._added = 0

    def add(self, request: TurnRequest) -> None:
        turns = self._turns[request.rollout_id]
        turn = turns.popleft()
        assert len(turn) <= request.max_tokens
        reason = FinishReason.STOP if turns else FinishReason.EOS
        self._added += 1
        is_new = request.rollout_id not in self._in_cache
        order = (int(is_new and self._options.returning_first), self._added)
        heapq.heappush(self._waiting, (order, Sequence(request, turn, reason)))

    def abort(self) -> None:
        self._waiting, self._prefilling, self._decoding = [], [], []

    def step(self) -> list[FinishedTurn]:
        finished = self._step()
        while self.mode == "rounds" and (self._waiting or self._prefilling or self._decoding):
            finished += self._step()
        return finished

    def _step(self) -> list[FinishedTurn]:
        """One step with prefill, or as many equal steps as pass before a turn ends or a call comes back."""
        decoding, chunks = self._decoding, self._schedule_prefill()
        sequences = len(decoding) + len(chunks)
        tokens = len(decoding) + sum(chunk for _, chunk in chunks)
        context = sum(s.computed + 1 for s in decoding) + sum(s.computed + chunk for s, chunk in chunks)
        steps = 1
        if not chunks:
            steps = min(sequence.left for sequence in decoding)
            if self.mode == "continuous":
                steps = self._steps_before_event(sequences, context, steps)
        seconds = self.seconds(sequences, tokens, context, steps)
        self.busy_seconds += seconds
        self.prefilled_tokens += tokens - len(decoding)
        self._clock.advance_to(self._clock.now + seconds)
        return self._sample(chunks, steps)

    def _schedule_prefill(self) -> list[tuple[Sequence, int]]:
        """Share what the decoding sequences leave of the token limit, in order; admit waiting requests to the rest."""
        budget = self._costs.tokens_per_step - len(self._decoding)
        chunks = []
        for sequence in self._prefilling:
            if budget > 0:
                chunks.append((sequence, min(budget, sequence.prefill)))
                budget -= chunks[-1][1]
        while self._waiting and budget > 0:
            if len(self._prefilling) + len(self._decoding) >= self._options.max_sequences:
                break
            sequence = heapq.heappop(self._waiting)[1]
            self._find_in_cache(sequence)
            self._prefilling.append(sequence)
            chunks.append((sequence, min(budget, sequence.prefill)))
            budget -= chunks[-1][1]
        return chunks

    def _steps_before_event(self, sequences: int, context: int, steps: int) -> int:
        """The fewest steps that reach the next event of the clock, `steps` at most."""
        wait = self._clock.next_event - self._clock.now
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds(sequences, sequences, context, middle) < wait:
                low = middle
            else:
                high = middle
        return high

    def seconds(self, sequences: int, tokens: int, context: int, steps: int) -> float:
        """The time of `steps` steps, in which the caches grow by a token per sequence from step to step."""
        costs, model = self._costs, self._costs.model
        products = max(model.weight_bytes / costs.bandwidth, 2 * model.parameters * tokens / costs.compute)
        each = costs.seconds_per_step + costs.seconds_per_sequence * sequences + products
        read = context * steps + sequences * steps * (steps - 1) / 2
        return each * steps + read * model.kv_bytes_per_token / costs.bandwidth

    def _find_in_cache(self, sequence: Sequence) -> None:
        """vLLM finds whole blocks, and computes at least the last token again."""
        request = sequence.request
        if not self._options.prefix_cache:
            return
        prompt = tuple(request.token_ids[: self._prompt_tokens])
        known = self._in_cache.get(request.rollout_id, self._prompt_tokens if prompt in self._prompts_in_cache else 0)
        self._prompts_in_cache.add(prompt)
        block = self._costs.block_tokens
        sequence.computed = sequence.cached = min(known, len(request.token_ids) - 1) // block * block

    def _sample(self, chunks: list[tuple[Sequence, int]], steps: int) -> list[FinishedTurn]:
        decoding = self._decoding
        for sequence in decoding:
            sequence.computed += steps
            sequence.left -= steps
        for sequence, chunk in chunks:
            is_last = chunk == sequence.prefill
            sequence.computed += chunk
            if is_last:
                sequence.left -= 1
                self._prefilling.remove(sequence)
                decoding.append(sequence)
        ended = [sequence for sequence in decoding if sequence.left == 0]
        if ended:
            self._decoding = [sequence for sequence in decoding if sequence.left]
        for sequence in ended:
            self._in_cache[sequence.request.rollout_id] = sequence.computed
        return [
            FinishedTurn(s.request.rollout_id, s.turn, [0.0] * len(s.turn), s.reason, cached_tokens=s.cached)
            for s in ended
        ]


@dataclass(frozen=True)
class Outcome:
    """What a simulated step took, in virtual seconds."""

    seconds: float
    engine_seconds: float
    prefilled_tokens: int
    rollouts: list[Rollout]
    """In the order in which they finished."""
    stats: RolloutStats

    @property
    def idle_share(self) -> float:
        return 1 - self.engine_seconds / self.seconds

    @property
    def last_executing(self) -> float:
        """Seconds that programs of the rollout that finished last ran."""
        return sum(call.result.seconds for call in self.rollouts[-1].calls)

    @property
    def last_queued(self) -> float:
        """Seconds that they waited for a slot."""
        return sum(call.result.queue_seconds for call in self.rollouts[-1].calls)


def simulate(scripts: list[Script], options: EngineOptions, costs: EngineCosts, slots: int) -> Outcome:
    """Run the real loop over the scripts, in virtual time."""
    clock, stats = Clock(), RolloutStats()
    engine = VirtualEngine(scripts, options, costs, clock)
    calls = max(len(script.latencies) for script in scripts)
    # Room for the observations too, so that every policy and number of calls samples the same tokens.
    longest = max(s.tokens + sum(chars + 16 for chars in s.observation_chars) for s in scripts)
    config = RolloutConfig(max_tool_calls=calls, max_completion_length=longest)
    interpreter = VirtualInterpreter(scripts, slots, clock) if calls else None
    prompts = [script.prompt_ids for script in scripts]
    finished: list[Rollout] = []
    with virtual_time(clock):
        run_rollouts(prompts, engine, interpreter, FakeTokenizer(), config, on_finished=finished.append, stats=stats)
    return Outcome(clock.now, engine.busy_seconds, engine.prefilled_tokens, finished, stats)


def interpreter_seconds(scripts: list[Script], slots: int) -> float:
    """The least time in which the slots can run all programs."""
    latencies = [seconds for script in scripts for seconds in script.latencies]
    return max(sum(latencies) / slots, max(latencies, default=0.0))


def critical_path_seconds(scripts: list[Script], costs: EngineCosts) -> float:
    """The longest rollout with the engine and the interpreter to itself: no policy can be faster."""
    longest = 0.0
    for script in scripts:
        engine = VirtualEngine([], EngineOptions(), costs, Clock())
        decode = engine.seconds(1, 1, len(script.prompt_ids), script.tokens)
        longest = max(longest, decode + sum(script.latencies))
    return longest
