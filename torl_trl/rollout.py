"""The rollout loop: one function for training and evaluation, and the record it returns.

A rollout samples a prompt to its end. Each turn is a stretch of sampled tokens; between turns a tool call runs the
model's code and its observation is inserted. Sampled ids are never decoded and encoded again: only the observation is
tokenized, alone. The loop knows the engine and the interpreter only by their protocols, and needs neither torch nor
trl.

    rollouts = run_rollouts(prompt_ids, engine, interpreter, tokenizer, RolloutConfig(max_tool_calls=1))
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from torl_interpreters.base import ExecutionResult, Interpreter, InterpreterError
from torl_trl import prompts
from torl_trl.engines.base import Engine, FinishedTurn, FinishReason, Tokenizer, TurnRequest
from torl_trl.invariants import check_rollout, check_turn
from torl_trl.progress import RolloutStats

if TYPE_CHECKING:
    from torl_grading import Verdict

logger = logging.getLogger(__name__)


class StopReason(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    """The model ended its text."""
    LENGTH = "length"
    """The token budget is used up."""
    OBSERVATION_OVERFLOW = "observation_overflow"
    """The next observation would not have fit with room for one more token; counts as truncated."""
    INTERPRETER_FAILED = "interpreter_failed"
    """Our interpreter failed after its retries; the rollout has no reward and trains nothing."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Limits of a rollout; the defaults are the paper's C = 1 and the released code's 3072 tokens."""

    max_tool_calls: int = 1
    max_completion_length: int = 3072
    max_observation_chars: int = 256
    tool_trigger: prompts.ToolTrigger = "output_marker"
    interpreter_retries: int = 2


@dataclass(slots=True)
class ToolCall:
    """One code run that the model asked for. `code` is None for a malformed call: nothing ran, `result` is None."""

    code: str | None
    result: ExecutionResult | None = None
    observation: str = ""
    failures: int = 0
    """How often the interpreter failed on this call (`InterpreterError`), retried or not."""

    @property
    def status(self) -> str:
        """A result status, `malformed`, or `interpreter_failed`."""
        if self.code is None:
            return "malformed"
        return str(self.result.status) if self.result else "interpreter_failed"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch `completion_ids[start:end]`, sampled by the model or inserted, and its text."""

    start: int
    end: int
    inserted: bool
    text: str


@dataclass(slots=True)
class Rollout:
    """One sampling of a prompt to its end. The three lists are equally long and cover the whole completion.

    `env_mask` is 1 for a model token and 0 for an inserted one; `logprobs` is 0.0 at inserted tokens. The record
    keeps the true mask also where training is given another one (`interpreter_failed`).
    """

    index: int
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    stop_reason: StopReason | None = None
    hallucinated_outputs: int = 0
    """Output markers written where no call was possible: the model made up its own observation."""
    verdict: "Verdict | None" = None
    """The grader's word on the finished text; None until it is graded, and for `interpreter_failed`."""

    @property
    def completion(self) -> str:
        """The whole text, observations included."""
        return "".join(segment.text for segment in self.segments)

    @property
    def model_texts(self) -> list[str]:
        """The model's own text, a string per turn. Never splice these: an observation stands between them."""
        return [segment.text for segment in self.segments if not segment.inserted]

    @property
    def interpreter_failed(self) -> bool:
        return self.stop_reason == StopReason.INTERPRETER_FAILED

    @property
    def truncated(self) -> bool:
        return self.stop_reason in (StopReason.LENGTH, StopReason.OBSERVATION_OVERFLOW)


def run_rollouts(
    prompt_ids: Sequence[list[int]],
    engine: Engine,
    interpreter: Interpreter | None,
    tokenizer: Tokenizer,
    config: RolloutConfig,
    *,
    seed: int | Sequence[int] | None = None,
    on_finished: Callable[[Rollout], None] | None = None,
    on_progress: Callable[[RolloutStats], None] | None = None,
    stats: RolloutStats | None = None,
) -> list[Rollout]:
    """Sample every prompt to its end and return the rollouts in the order of `prompt_ids`.

    With a continuous engine a rollout whose code runs leaves the engine and the others go on. With a rounds engine
    the next round starts when all calls of this one are back, in rollout order, so that it is repeatable.
    `on_finished` is called as each rollout ends, while others still generate; `on_progress` after each engine step.
    `interpreter` may be None with `max_tool_calls=0`. One `seed` gives each place a seed of its own; a sequence has
    them, one per rollout, which then do not depend on the place.

    Raises whatever the engine raises, and `RolloutInvariantError` (a bug); then nothing is left in the engine.
    """
    if config.max_tool_calls > 0 and interpreter is None:
        raise ValueError(f"max_tool_calls is {config.max_tool_calls} and there is no interpreter: pass one, or 0.")
    loop = _Loop(engine, interpreter, tokenizer, config, seed, on_finished, on_progress, stats or RolloutStats())
    try:
        return loop.run(prompt_ids)
    except BaseException:
        engine.abort()
        raise


@dataclass(slots=True)
class _Loop:
    """The state of one `run_rollouts` call."""

    engine: Engine
    interpreter: Interpreter | None
    tokenizer: Tokenizer
    config: RolloutConfig
    seed: int | Sequence[int] | None
    on_finished: Callable[[Rollout], None] | None
    on_progress: Callable[[RolloutStats], None] | None
    stats: RolloutStats
    returned: queue.SimpleQueue[tuple[Rollout, Future[ExecutionResult]]] = field(default_factory=queue.SimpleQueue)
    turn_start: dict[int, int] = field(default_factory=dict)
    """Where a rollout's current turn starts in its `completion_ids`, by index."""
    computed: dict[int, int] = field(default_factory=dict)
    """How many tokens of a rollout the engine has computed so far, by index."""
    submitted: dict[int, float] = field(default_factory=dict)
    """When a rollout's current call was submitted, by index."""
    started: float = field(default_factory=time.perf_counter)

    def run(self, prompt_ids: Sequence[list[int]]) -> list[Rollout]:
        rollouts = [Rollout(index, list(ids)) for index, ids in enumerate(prompt_ids)]
        stats = self.stats
        stats.rollouts += len(rollouts)
        for rollout in rollouts:
            self.start_turn(rollout)
        while stats.generating or stats.executing:
            if stats.generating:
                started = time.perf_counter()
                finished = self.engine.step()
                stats.generating_seconds += time.perf_counter() - started
                if self.engine.mode == "rounds":
                    finished = sorted(finished, key=lambda turn: turn.rollout_id)
                for turn in finished:
                    stats.generating -= 1
                    self.take_turn(rollouts[turn.rollout_id], turn)
            for rollout, future in self.collect_returned():
                self.take_result(rollout, future)
            if self.on_progress is not None:
                self.on_progress(stats)
        stats.seconds += time.perf_counter() - self.started
        return rollouts

    def collect_returned(self) -> list[tuple[Rollout, Future[ExecutionResult]]]:
        """Return the calls that are back; block only when the engine has nothing to do (or waits for its round)."""
        collected = []
        wait_for = 0
        if self.stats.executing:
            wait_for = self.stats.executing if self.engine.mode == "rounds" else int(self.stats.generating == 0)
        started = time.perf_counter()
        while len(collected) < wait_for or (self.stats.executing and not self.returned.empty()):
            rollout, future = self.returned.get()
            self.stats.executing -= 1
            self.stats.tool_seconds += time.perf_counter() - self.submitted[rollout.index]
            collected.append((rollout, future))
        if wait_for:
            self.stats.waiting_seconds += time.perf_counter() - started
        if self.engine.mode == "rounds":
            collected.sort(key=lambda item: item[0].index)
        return collected

    def start_turn(self, rollout: Rollout) -> None:
        self.turn_start[rollout.index] = len(rollout.completion_ids)
        self.request(rollout, "")

    def request(self, rollout: Rollout, turn_text: str) -> None:
        """Ask the engine to go on with the rollout's current turn, whose text so far is `turn_text`."""
        calls_left = len(rollout.calls) < self.config.max_tool_calls
        stop = prompts.stop_strings(self.config.tool_trigger, turn_text) if calls_left else ()
        position = len(rollout.completion_ids)
        self.engine.add(
            TurnRequest(
                rollout_id=rollout.index,
                token_ids=rollout.prompt_ids + rollout.completion_ids,
                max_tokens=self.config.max_completion_length - position,
                stop=stop,
                seed=self.seed_at(rollout.index, position),
            )
        )
        self.stats.generating += 1

    def seed_at(self, index: int, position: int) -> int | None:
        """The seed of a request: hashes of ints are the same in every process."""
        if self.seed is None:
            return None
        key = (self.seed, index) if isinstance(self.seed, int) else (self.seed[index],)
        return hash((*key, position)) & 0x7FFFFFFF

    def take_turn(self, rollout: Rollout, turn: FinishedTurn) -> None:
        check_turn(turn, self.config.max_completion_length - len(rollout.completion_ids))
        rollout.completion_ids += turn.token_ids
        rollout.logprobs += turn.logprobs
        rollout.env_mask += [1] * len(turn.token_ids)
        self.stats.sampled_tokens += len(turn.token_ids)
        self.stats.recomputed_tokens += max(0, self.computed.get(rollout.index, 0) - turn.cached_tokens)
        # The last sampled token has not been through the model yet.
        self.computed[rollout.index] = len(rollout.prompt_ids) + len(rollout.completion_ids) - 1
        if turn.finish_reason == FinishReason.EOS:
            self.finish(rollout, StopReason.EOS)
            return
        turn_text = self.decode(rollout.completion_ids[self.turn_start[rollout.index] :])
        if turn.finish_reason == FinishReason.STOP and prompts.asks_for_output(self.config.tool_trigger, turn_text):
            self.start_call(rollout, turn_text)
        elif len(rollout.completion_ids) >= self.config.max_completion_length:
            self.finish(rollout, StopReason.LENGTH)
        else:  # the first phase of the two-phase stop, or a fence inside a line of code: the same turn goes on
            self.request(rollout, turn_text)

    def start_call(self, rollout: Rollout, turn_text: str) -> None:
        self.close_segment(rollout, turn_text, called=True)
        before_marker = turn_text
        if self.config.tool_trigger == "output_marker":
            before_marker = turn_text[: turn_text.rindex(prompts.OUTPUT_MARKER)]
        call = ToolCall(prompts.extract_code(before_marker))
        rollout.calls.append(call)
        if call.code is None:
            self.insert_observation(rollout, prompts.MALFORMED_CALL)
        else:
            self.submit(rollout, call.code)

    def submit(self, rollout: Rollout, code: str) -> None:
        self.stats.executing += 1
        self.submitted[rollout.index] = time.perf_counter()
        try:
            future = self.interpreter.submit(code)
        except InterpreterError as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda future: self.returned.put((rollout, future)))

    def take_result(self, rollout: Rollout, future: Future[ExecutionResult]) -> None:
        call = rollout.calls[-1]
        try:
            call.result = future.result()
        except InterpreterError as error:
            call.failures += 1
            if call.failures <= self.config.interpreter_retries:
                logger.warning("Interpreter failed on rollout %d, trying again: %s", rollout.index, error)
                self.submit(rollout, call.code)
                return
            logger.warning("Interpreter failed on rollout %d, it gets no reward: %s", rollout.index, error)
            self.finish(rollout, StopReason.INTERPRETER_FAILED)
            return
        self.insert_observation(rollout, prompts.format_observation(call.result, self.config.max_observation_chars))

    def insert_observation(self, rollout: Rollout, observation: str) -> None:
        rollout.calls[-1].observation = observation
        text = prompts.inserted_text(self.config.tool_trigger, rollout.segments[-1].text, observation)
        # A program may print the name of a special token: split_special_tokens keeps that plain text.
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        start = len(rollout.completion_ids)
        if start + len(ids) + 1 > self.config.max_completion_length:
            self.finish(rollout, StopReason.OBSERVATION_OVERFLOW)
            return
        rollout.completion_ids += ids
        rollout.logprobs += [0.0] * len(ids)
        rollout.env_mask += [0] * len(ids)
        rollout.segments.append(Segment(start, start + len(ids), True, text))
        self.start_turn(rollout)

    def close_segment(self, rollout: Rollout, turn_text: str, *, called: bool) -> None:
        """Record the turn's text, if any, and count the output markers in it that are no call."""
        start, end = self.turn_start[rollout.index], len(rollout.completion_ids)
        if start == end:
            return
        rollout.segments.append(Segment(start, end, False, turn_text))
        markers = turn_text.count(prompts.OUTPUT_MARKER)
        is_trigger = called and self.config.tool_trigger == "output_marker"
        rollout.hallucinated_outputs += markers - int(is_trigger)
        self.turn_start[rollout.index] = end

    def finish(self, rollout: Rollout, reason: StopReason) -> None:
        rollout.stop_reason = reason
        turn_ids = rollout.completion_ids[self.turn_start[rollout.index] :]
        if reason == StopReason.EOS:  # the token belongs to the segment, its name does not belong to the text
            turn_ids = turn_ids[:-1]
        self.close_segment(rollout, self.decode(turn_ids), called=False)
        check_rollout(rollout, self.config)
        self.stats.done += 1
        self.stats.rollout_seconds += time.perf_counter() - self.started
        if self.on_finished is not None:
            self.on_finished(rollout)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
