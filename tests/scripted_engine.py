"""An engine that replays what a model would write: for tests of everything around a model, without one.

    engine = ScriptedEngine([first_rollout_ids, second_rollout_ids], tokenizer, eos_token_id=0)

It obeys stop strings, budgets and EOS as the real engines do, one token per rollout and step.
"""

import time
from collections.abc import Sequence
from typing import Literal

from torl_trl.engines.base import FinishedTurn, FinishReason, Tokenizer, TurnRequest
from torl_trl.engines.stopping import StopMatcher


class ScriptedEngine:
    """Gives rollout `i` the token ids `scripts[i]`, turn after turn, then EOS.

    `seconds_per_step` is slept in each step, a stand-in for the time of a model. `requests` keeps every request for
    inspection. The logprob of the n-th scripted token of a rollout is `-(n + 1) / 1000`.
    """

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        *,
        eos_token_id: int,
        vocab_size: int,
        mode: Literal["continuous", "rounds"] = "continuous",
        seconds_per_step: float = 0.0,
    ):
        self.mode = mode
        self.requests: list[TurnRequest] = []
        self._scripts = [[*script, eos_token_id] for script in scripts]
        self._positions = [0] * len(scripts)
        self._eos_token_id = eos_token_id
        self._matcher = StopMatcher(tokenizer, vocab_size)
        self._seconds_per_step = seconds_per_step
        self._running: dict[int, tuple[TurnRequest, list[int], list[float]]] = {}

    def add(self, request: TurnRequest) -> None:
        if request.rollout_id in self._running:
            raise ValueError(f"Rollout {request.rollout_id} already has a request in the engine: wait for its turn.")
        self.requests.append(request)
        self._running[request.rollout_id] = (request, [], [])

    def abort(self) -> None:
        self._running.clear()

    def step(self) -> list[FinishedTurn]:
        finished = self._sample_each()
        while self.mode == "rounds" and self._running:
            finished += self._sample_each()
        return finished

    def _sample_each(self) -> list[FinishedTurn]:
        time.sleep(self._seconds_per_step)
        finished = []
        for rollout_id, (request, ids, logprobs) in list(self._running.items()):
            position = self._positions[rollout_id]
            ids.append(self._scripts[rollout_id][position])
            logprobs.append(-(position + 1) / 1000)
            self._positions[rollout_id] += 1
            reason = self._finish_reason(request, ids)
            if reason is not None:
                del self._running[rollout_id]
                finished.append(FinishedTurn(rollout_id, ids, logprobs, reason))
        return finished

    def _finish_reason(self, request: TurnRequest, ids: list[int]) -> FinishReason | None:
        if ids[-1] == self._eos_token_id:
            return FinishReason.EOS
        if self._matcher.matches(ids, request.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= request.max_tokens else None
