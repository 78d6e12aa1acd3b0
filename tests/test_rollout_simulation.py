"""The simulated benchmark of the rollout loop: its virtual time is what a hand would calculate."""

import argparse
import math

import pytest
import rollout_loop
import rollout_simulated
from rollout_costs import FAST, QWEN_7B, SLOW, EngineCosts, InterpreterCosts, Workload
from rollout_simulation import EngineOptions, VirtualEngine, critical_path_seconds, interpreter_seconds, simulate
from rollout_workload import CLOSE, EOS, MARKER, OPEN, WORD, ZERO, FakeTokenizer, Script, without_calls, workload

CONTINUOUS, ROUNDS = EngineOptions(), EngineOptions(mode="rounds")
ONE_SECOND_STEPS = EngineCosts(bandwidth=math.inf, compute=math.inf, seconds_per_step=1.0, seconds_per_sequence=0.0)
SMALL = Workload(rollouts=24, group=4, mean_tokens=200, longest=800)


def script(index: int, turns: list[int], latencies: list[float]) -> Script:
    """Rollout `index` with turns of so many tokens."""
    calls = [
        [WORD] * (tokens - 4 - len(str(10 * index + call)))
        + [WORD, OPEN, *(ZERO + int(digit) for digit in str(10 * index + call)), CLOSE, MARKER]
        for call, tokens in enumerate(turns[:-1])
    ]
    last = [WORD] * (turns[-1] - 1) + [EOS]
    return Script([WORD] * 5, [*calls, last], latencies, [4] * len(latencies))


TWO = [script(0, [20, 30], [5.0]), script(1, [40, 20], [0.5])]


@pytest.mark.parametrize(
    ("options", "slots", "seconds"),
    [
        (CONTINUOUS, 2, 61),  # the second rollout: 40 steps, its call ends within the next, 20 steps
        (ROUNDS, 2, 40 + 5 + 30),
        (ROUNDS, 1, 40 + 5 + 0.5 + 30),
        (EngineOptions(max_sequences=1), 2, 20 + 40 + 30 + 20),  # the calls hide behind the other rollout
        (EngineOptions(max_sequences=1, returning_first=True), 2, 20 + 40 + 30 + 20),
    ],
)
def test_two_rollouts_take_what_a_hand_calculates(options, slots, seconds):
    outcome = simulate(TWO, options, ONE_SECOND_STEPS, slots)
    assert outcome.seconds == pytest.approx(seconds)
    assert outcome.engine_seconds == pytest.approx(outcome.seconds - outcome.stats.waiting_seconds)


def test_a_step_costs_weights_caches_and_sequences():
    costs = EngineCosts()
    decode = sum(
        costs.seconds_per_step
        + costs.seconds_per_sequence
        + (QWEN_7B.weight_bytes + QWEN_7B.kv_bytes_per_token * context) / costs.bandwidth
        for context in range(5, 15)  # the prompt is computed in the step that gives the first token
    )
    assert simulate([script(0, [10], [])], CONTINUOUS, costs, 1).seconds == pytest.approx(decode)


@pytest.mark.parametrize("tool", [FAST, SLOW])
@pytest.mark.parametrize("limit", [6, 100])
def test_steps_taken_at_once_take_as_long_as_one_by_one(tool, limit, monkeypatch):
    scripts, options = workload(SMALL, 2, tool), EngineOptions(max_sequences=limit)
    at_once = simulate(scripts, options, EngineCosts(), slots=2)
    monkeypatch.setattr(VirtualEngine, "_steps_before_event", lambda self, sequences, context, steps: 1)
    one_by_one = simulate(scripts, options, EngineCosts(), slots=2)
    assert at_once.seconds == pytest.approx(one_by_one.seconds)
    assert at_once.engine_seconds == pytest.approx(one_by_one.engine_seconds)


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_every_policy_samples_the_same_tokens(calls):
    scripts = workload(SMALL, calls, SLOW)
    everyone = [simulate(scripts, options, EngineCosts(), slots=4) for options in (CONTINUOUS, ROUNDS)]
    alone = simulate(without_calls(scripts), CONTINUOUS, EngineCosts(), slots=1)
    sampled = [
        {r.index: [i for i, m in zip(r.completion_ids, r.env_mask, strict=True) if m] for r in outcome.rollouts}
        for outcome in (*everyone, alone)
    ]
    assert sampled[0] == sampled[1] == sampled[2]
    assert all(len(rollout.calls) == calls for outcome in everyone for rollout in outcome.rollouts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("calls", [1, 4])
def test_continuous_is_never_slower_than_rounds_nor_faster_than_its_longest_rollout(seed, calls):
    scripts = workload(Workload(rollouts=24, seed=seed), calls, SLOW)
    continuous, rounds = (simulate(scripts, options, EngineCosts(), slots=4) for options in (CONTINUOUS, ROUNDS))
    assert continuous.seconds < rounds.seconds
    assert continuous.seconds >= max(critical_path_seconds(scripts, EngineCosts()), interpreter_seconds(scripts, 4))


def test_programs_beyond_the_slots_wait_in_order():
    scripts = [script(index, [20, 10], [10.0 + index]) for index in range(3)]
    outcome = simulate(scripts, CONTINUOUS, ONE_SECOND_STEPS, slots=1)
    assert [rollout.index for rollout in outcome.rollouts] == [0, 1, 2]
    assert outcome.seconds == pytest.approx(20 + 10 + 11 + 12 + 10)
    assert outcome.last_queued == pytest.approx(10 + 11)
    assert outcome.idle_share > 0


def test_a_rollout_that_returns_finds_its_whole_blocks():
    def prefilled(prefix_cache: bool) -> int:
        options = EngineOptions(prefix_cache=prefix_cache)
        return simulate([script(0, [40, 10], [1.0])], options, EngineCosts(), 1).prefilled_tokens

    observation = math.ceil(len("\nxxxx\n```\n") / 4)
    assert prefilled(False) == 5 + (5 + 40 + observation)
    assert prefilled(True) == 5 + (5 + 40 + observation - 32)  # 44 tokens were computed: two blocks of 16


def test_lengths_are_as_in_torl():
    scripts = workload(Workload(rollouts=4096), 2, InterpreterCosts(1.0, 0.5, 8))
    lengths = [script.tokens for script in scripts]
    assert sum(lengths) / len(lengths) == pytest.approx(800, rel=0.03)
    assert max(lengths) == 3072
    assert lengths == [script.tokens for script in workload(Workload(rollouts=4096), 0, FAST)]


def test_the_commands_give_flat_numbers():
    results = rollout_simulated.measure(argparse.Namespace(seeds=1, rollouts=8))
    assert results["policies/fast/C=1/ours/over_bound"] >= 1
    assert all(isinstance(value, int | float) for value in results.values())
    assert rollout_loop.microseconds_per_event(workload(SMALL, 2, FAST), FakeTokenizer()) > 0
