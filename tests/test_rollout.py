"""The rollout loop: what is sampled, inserted, masked and counted."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from toys import FakeInterpreter, byte_level_tokenizer, metaspace_tokenizer, ok

from torl_interpreters.base import ExecutionResult, ExecutionStatus, InterpreterUnavailable
from torl_trl import prompts
from torl_trl.engines.base import FinishedTurn, FinishReason
from torl_trl.interpreters import get_interpreter
from torl_trl.invariants import RolloutInvariantError
from torl_trl.progress import RolloutStats
from torl_trl.rollout import RolloutConfig, StopReason, run_rollouts

CALL = "Compute.\n```python\nprint(6 * 7)\n```\n```output"
FENCED = "Compute.\n```python\nprint(6 * 7)\n```"
ANSWER = "So \\boxed{42}."


def run(texts, answer=lambda code: ok("42\n"), tokenizer=None, mode="continuous", interpreter=None, **config):
    """Replay `texts` (one whole scripted text per rollout) and return the rollouts and the engine."""
    tokenizer = tokenizer or byte_level_tokenizer()
    scripts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    engine = ScriptedEngine(scripts, tokenizer, eos_token_id=0, vocab_size=len(tokenizer), mode=mode)
    config = RolloutConfig(**{"max_completion_length": 500} | config)
    prompt_ids = [tokenizer.encode(f"Question {i}?\n", add_special_tokens=False) for i in range(len(texts))]
    with interpreter or FakeInterpreter(answer) as interpreter:
        return run_rollouts(prompt_ids, engine, interpreter, tokenizer, config), engine


@pytest.mark.parametrize("mode", ["continuous", "rounds"])
@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer, metaspace_tokenizer])
def test_a_call_inserts_its_observation_and_the_model_goes_on(tokenizer, mode):
    tokenizer = tokenizer()
    (rollout,), _ = run([CALL + ANSWER], tokenizer=tokenizer, mode=mode)
    assert rollout.completion == f"{CALL}\n42\n```\n{ANSWER}"
    assert [segment.inserted for segment in rollout.segments] == [False, True, False]
    assert rollout.model_texts == [CALL, ANSWER]
    assert rollout.stop_reason == StopReason.EOS
    assert rollout.calls[0].code == "print(6 * 7)\n"
    assert rollout.calls[0].observation == "42"
    inserted = [token for token, mask in zip(rollout.completion_ids, rollout.env_mask, strict=True) if not mask]
    assert inserted == tokenizer.encode("\n42\n```\n", add_special_tokens=False)


def test_the_marker_is_trained_and_what_follows_it_is_masked():
    tokenizer = byte_level_tokenizer()
    (rollout,), _ = run([CALL + ANSWER])
    first_inserted = rollout.env_mask.index(0)
    assert tokenizer.decode(rollout.completion_ids[:first_inserted]).endswith("```output")


def test_a_newline_that_the_last_token_brought_is_not_inserted_again():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(tokenizer.encode("```output\n", add_special_tokens=False)[-1:]) == "put\n"
    (rollout,), _ = run([f"{CALL}\n{ANSWER}"])
    assert rollout.completion == f"{CALL}\n42\n```\n{ANSWER}"
    assert rollout.segments[1].text == "42\n```\n"


def test_the_fence_trigger_masks_the_marker_and_keeps_both_phases_in_one_turn():
    (rollout,), engine = run([FENCED + ANSWER], tool_trigger="code_fence")
    assert rollout.completion == f"{FENCED}\n```output\n42\n```\n{ANSWER}"
    assert rollout.model_texts == [FENCED, ANSWER]
    assert [request.stop for request in engine.requests] == [("```python",), ("```",), ()]


def test_the_fence_trigger_ignores_a_fence_inside_a_line_of_code():
    text = "```python\nprint('```')\n```"
    (rollout,), _ = run([text + ANSWER], tool_trigger="code_fence")
    assert rollout.calls[0].code == "print('```')\n"
    assert len(rollout.calls) == 1


def test_the_last_block_opened_in_the_turn_is_run():
    text = "```python\nprint(1)\n```\nor\n```python\nprint(2)\n```\n```output"
    (rollout,), _ = run([text + ANSWER])
    assert [call.code for call in rollout.calls] == ["print(2)\n"]


@pytest.mark.parametrize(
    "text",
    ["No code ```output", "```python\nprint(1)\n```output", "```python\n```\n```output", "```pythonx\n```output"],
)
def test_a_marker_without_a_complete_block_is_a_malformed_call_that_uses_up_a_call(text):
    (rollout,), engine = run([text + ANSWER])
    assert [call.status for call in rollout.calls] == ["malformed"]
    assert prompts.MALFORMED_CALL in rollout.completion
    assert engine.requests[-1].stop == ()


def test_after_the_last_call_a_marker_is_text_and_counted():
    (rollout,), _ = run([CALL + "More.\n```output\n41\n```\n" + ANSWER], max_tool_calls=1)
    assert len(rollout.calls) == 1
    assert rollout.hallucinated_outputs == 1
    assert rollout.completion.endswith("```output\n41\n```\n" + ANSWER)


def test_without_calls_nothing_is_executed():
    (rollout,), engine = run([CALL + ANSWER], max_tool_calls=0)
    assert rollout.calls == [] and 0 not in rollout.env_mask
    assert [request.stop for request in engine.requests] == [()]


def test_an_observation_that_does_not_fit_ends_the_rollout_as_truncated():
    tokenizer = byte_level_tokenizer()
    length = len(tokenizer.encode(CALL, add_special_tokens=False)) + 4
    (rollout,), _ = run([CALL + ANSWER], answer=lambda code: ok("7" * 200), max_completion_length=length)
    assert rollout.stop_reason == StopReason.OBSERVATION_OVERFLOW
    assert rollout.truncated and 0 not in rollout.env_mask


def test_the_budget_covers_all_turns_and_observations():
    (rollout,), engine = run([CALL + ANSWER * 100], max_completion_length=60)
    assert rollout.stop_reason == StopReason.LENGTH
    assert len(rollout.completion_ids) == 60
    inserted = rollout.env_mask.count(0)
    first_turn = rollout.env_mask.index(0)
    assert engine.requests[1].max_tokens == 60 - first_turn - inserted


def test_a_stop_string_completed_by_the_last_token_of_the_budget_ends_truncated():
    tokenizer = byte_level_tokenizer()
    length = len(tokenizer.encode(CALL, add_special_tokens=False))
    (rollout,), _ = run([CALL + ANSWER], max_completion_length=length)
    assert rollout.stop_reason == StopReason.OBSERVATION_OVERFLOW
    assert len(rollout.completion_ids) == length


@pytest.mark.parametrize(
    ("result", "observation"),
    [
        (ok("  42\n\n"), "42"),
        (ok(""), prompts.NO_OUTPUT),
        (ExecutionResult(ExecutionStatus.ERROR, "", "Traceback\n  line\nNameError: x\n", 0.1), "NameError: x"),
        (ExecutionResult(ExecutionStatus.ERROR, "3\n", "Traceback\nNameError: x\n", 0.1), "3\nNameError: x"),
        (ExecutionResult(ExecutionStatus.OK, "3\n", "Warning: old\n", 0.1), "3"),
        (ExecutionResult(ExecutionStatus.OK, "no Error here\nlast", "", 0.1), "no Error here\nlast"),
        (ExecutionResult(ExecutionStatus.TIMEOUT, "1\n2\n", "", 5.0), "1\n2\nTimeoutError"),
        (ExecutionResult(ExecutionStatus.MEMORY, "", "", 0.1), "MemoryError"),
        (ok("a" * 600), "a" * 127 + "..." + "a" * 126),
    ],
)
def test_observations_follow_the_rule(result, observation):
    (rollout,), _ = run([CALL + ANSWER], answer=lambda code: result)
    assert rollout.calls[0].observation.startswith(observation)
    assert len(rollout.calls[0].observation) <= 256


def test_the_name_of_a_special_token_in_an_observation_is_plain_text():
    (rollout,), _ = run([CALL + ANSWER], answer=lambda code: ok("<|endoftext|>"))
    assert 0 not in rollout.completion_ids[:-1]
    assert rollout.calls[0].observation == "<|endoftext|>"


@pytest.mark.parametrize("block", ["```python\r\nprint(1)\r\n```\n", "  ```python\n  print(1)\n  ```\n"])
def test_blocks_with_other_line_ends_or_an_indentation_run(block):
    (rollout,), _ = run([f"{block}```output{ANSWER}"])
    assert rollout.calls[0].code.strip() == "print(1)" and rollout.calls[0].code.startswith("print")


def test_an_interpreter_failure_is_retried_and_never_shown_to_the_model():
    failures = iter([InterpreterUnavailable("down"), InterpreterUnavailable("down"), ok("42")])
    (rollout,), _ = run([CALL + ANSWER], answer=lambda code: next(failures))
    assert rollout.calls[0].failures == 2 and rollout.calls[0].status == "ok"
    assert "down" not in rollout.completion


def test_a_lasting_interpreter_failure_marks_only_its_rollout():
    def answer(code):
        return InterpreterUnavailable("down") if "13" in code else ok("42")

    broken, fine = run([CALL.replace("6 * 7", "13") + ANSWER, CALL + ANSWER], answer=answer)[0]
    assert broken.stop_reason == StopReason.INTERPRETER_FAILED and broken.interpreter_failed
    assert broken.calls[0].status == "interpreter_failed" and 0 not in broken.env_mask
    assert fine.stop_reason == StopReason.EOS


def test_on_finished_is_called_for_each_rollout_as_it_ends():
    tokenizer = byte_level_tokenizer()
    texts = [CALL + ANSWER, "Short.", ANSWER * 3]
    scripts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    engine = ScriptedEngine(scripts, tokenizer, eos_token_id=0, vocab_size=len(tokenizer))
    order = []
    with FakeInterpreter(lambda code: ok("42"), seconds=0.2) as interpreter:
        config = RolloutConfig()
        run_rollouts([[5]] * 3, engine, interpreter, tokenizer, config, on_finished=lambda r: order.append(r.index))
    assert order == [1, 2, 0]


def test_on_a_continuous_engine_a_slow_tool_delays_only_its_own_rollout():
    tokenizer = byte_level_tokenizer()
    scripts = [tokenizer.encode(text, add_special_tokens=False) for text in [CALL + ANSWER] + [ANSWER] * 20]
    engine = ScriptedEngine(scripts, tokenizer, eos_token_id=0, vocab_size=len(tokenizer), seconds_per_step=0.002)
    ended, start = {}, time.perf_counter()
    with FakeInterpreter(lambda code: ok("42"), seconds=1.0) as interpreter:
        stats = RolloutStats()
        run_rollouts(
            [[5]] * 21,
            engine,
            interpreter,
            tokenizer,
            RolloutConfig(),
            on_finished=lambda rollout: ended.update({rollout.index: time.perf_counter() - start}),
            stats=stats,
        )
    assert max(ended[i] for i in range(1, 21)) < 0.6 < 1.0 <= ended[0]
    assert stats.waiting_seconds == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("mode", ["continuous", "rounds"])
def test_tool_time_overlaps_up_to_the_concurrency(mode):
    seconds, slots, count = 0.25, 4, 12
    interpreter = FakeInterpreter(lambda code: ok("42"), seconds=seconds, slots=slots)
    start = time.perf_counter()
    run([CALL + ANSWER] * count, interpreter=interpreter, mode=mode)
    overlapped = time.perf_counter() - start
    start = time.perf_counter()
    run([CALL + ANSWER] * count, mode=mode)
    generation = time.perf_counter() - start
    assert overlapped - generation <= 1.3 * seconds * (count / slots)


def test_real_programs_that_sleep_overlap_up_to_the_slots():
    seconds, slots, count = 1.0, 3, 6
    text = CALL.replace("print(6 * 7)", f"import time\ntime.sleep({seconds})")
    with get_interpreter("embedded", slots=slots) as interpreter:
        start = time.perf_counter()
        rollouts, _ = run([text + ANSWER] * count, interpreter=interpreter)
        assert time.perf_counter() - start <= 1.3 * seconds * (count / slots)
    assert [rollout.calls[0].observation for rollout in rollouts] == [prompts.NO_OUTPUT] * count


def test_rounds_give_the_same_rollouts_whatever_the_order_of_tool_answers():
    def slow_first(code):
        time.sleep(0.05 if len(code) % 2 else 0.0)
        return ok(str(len(code)))

    texts = [CALL.replace("6 * 7", "1" * n) + ANSWER for n in range(1, 9)]
    first, first_engine = run(texts, answer=slow_first, mode="rounds")
    second, second_engine = run(texts, answer=lambda code: ok(str(len(code))), mode="rounds")
    assert [rollout.completion_ids for rollout in first] == [rollout.completion_ids for rollout in second]
    assert first_engine.requests == second_engine.requests


class _BadEngine(ScriptedEngine):
    def step(self):
        return [FinishedTurn(request.rollout_id, [5] * 9, [0.0] * 8, FinishReason.EOS) for request in self.requests]


def test_an_engine_that_breaks_the_contract_is_noticed_and_left_empty():
    tokenizer = byte_level_tokenizer()
    engine = _BadEngine([[5]], tokenizer, eos_token_id=0, vocab_size=len(tokenizer))
    with pytest.raises(RolloutInvariantError, match="9 tokens and 8 logprobs"):
        run_rollouts([[5]], engine, None, tokenizer, RolloutConfig(max_tool_calls=0))
    engine.add(engine.requests[0])  # refused if the request were still there


FENCES = ["```python\n", "```", "```\n", "\n```\n", "```output", "```output\n", "`", "``", "```python", "``` python\n"]
WORDS = [
    "\n",
    " ",
    "print(6 * 7)\n",
    "x = 1",
    "é∑",
    "The answer",
    "\\boxed{42}",
    "output",
    "put",
    "thon\n",
    FENCED,
    CALL,
]
PIECES = st.sampled_from(FENCES + WORDS)
RESULTS = st.sampled_from(
    [
        ok("42"),
        ok(""),
        ok("`" * 300),
        ok("```output\n\\boxed{1}\n```"),
        ok("ünï\n" * 50),
        ExecutionResult(ExecutionStatus.ERROR, "a", "Traceback\nNameError: x", 0.0),
        ExecutionResult(ExecutionStatus.TIMEOUT, "", "", 0.0),
        InterpreterUnavailable("down"),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_invariants_hold_for_random_models_observations_budgets_and_limits(data):
    tokenizer = data.draw(st.sampled_from([byte_level_tokenizer, metaspace_tokenizer]))()
    vocab = len(tokenizer)
    scripts = []
    for _ in range(data.draw(st.integers(1, 4))):
        # Pieces are encoded apart, so that sampled sequences are not what the tokenizer would make of their text.
        pieces = data.draw(st.lists(st.one_of(PIECES, st.integers(1, vocab - 1)), max_size=14))
        script = []
        for piece in pieces:
            script += [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        scripts.append(script)
    config = RolloutConfig(
        max_tool_calls=data.draw(st.integers(0, 3)),
        max_completion_length=data.draw(st.integers(1, 150)),
        max_observation_chars=data.draw(st.integers(16, 64)),
        tool_trigger=data.draw(st.sampled_from(["output_marker", "code_fence"])),
        interpreter_retries=data.draw(st.integers(0, 1)),
    )
    results = data.draw(st.lists(RESULTS, min_size=1, max_size=5))
    mode = data.draw(st.sampled_from(["continuous", "rounds"]))
    engine = ScriptedEngine(scripts, tokenizer, eos_token_id=0, vocab_size=vocab, mode=mode)
    prompt_ids = [[1 + i, 2, 3] for i in range(len(scripts))]
    with FakeInterpreter(lambda code: results[len(code) % len(results)], slots=2) as interpreter:
        rollouts = run_rollouts(prompt_ids, engine, interpreter, tokenizer, config)

    for rollout, script in zip(rollouts, scripts, strict=True):
        ids, mask = rollout.completion_ids, rollout.env_mask
        assert len(ids) == len(mask) == len(rollout.logprobs)
        assert 1 <= len(ids) <= config.max_completion_length
        assert len(rollout.calls) <= config.max_tool_calls
        # No sampled token is lost, repeated or moved, and each keeps its logprob.
        sampled = [token for token, model in zip(ids, mask, strict=True) if model]
        assert sampled == [*script, 0][: len(sampled)]
        logprobs = [value for value, model in zip(rollout.logprobs, mask, strict=True) if model]
        assert logprobs == [-(n + 1) / 1000 for n in range(len(sampled))]
        # The mask is zero exactly on the inserted tokens, which are the observation's own encoding.
        for segment in rollout.segments:
            assert set(mask[segment.start : segment.end]) == ({0} if segment.inserted else {1})
            if segment.inserted:
                assert ids[segment.start : segment.end] == tokenizer.encode(segment.text, add_special_tokens=False)
        inserted = [segment for segment in rollout.segments if segment.inserted]
        assert len(inserted) <= len(rollout.calls) <= len(inserted) + 1
        for segment, call in zip(inserted, rollout.calls, strict=False):
            assert call.observation in segment.text
        # Every request continues exactly what was there before, within the budget.
        for request in (request for request in engine.requests if request.rollout_id == rollout.index):
            assert request.token_ids == rollout.prompt_ids + ids[: len(request.token_ids) - len(rollout.prompt_ids)]
            assert request.max_tokens == config.max_completion_length - len(request.token_ids) + len(
                rollout.prompt_ids
            )
        assert rollout.stop_reason is not None
        assert (rollout.stop_reason == StopReason.EOS) == (ids[-1] == 0 and bool(mask[-1]))
