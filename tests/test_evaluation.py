"""Evaluation: every sample once, the same result whatever the order, the shards or the restarts."""

import copy
import json
import random

import pytest
from scripted_engine import ScriptedEngine
from toys import FakeInterpreter, byte_level_tokenizer, ok, tiny_model

from torl_eval.evaluation import Protocol, make_items, run_items, sample_seed
from torl_eval.parts import Parts
from torl_eval.prompting import prompt_ids, prompt_text
from torl_eval.results import summarize
from torl_grading import Grader
from torl_interpreters.base import InterpreterUnavailable
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.errors import UserError
from torl_trl.rollout import RolloutConfig

PROTOCOL = Protocol(samples=3, temperature=1.0, seed=5, rollout=RolloutConfig(1, 24))
PROBLEMS = {
    name: [{"problem": f"{name}: {i} + 1?", "problem_id": f"{name}{i}", "solution": str(i + 1)} for i in range(count)]
    for name, count in (("first", 4), ("second", 3))
}


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=1) as grader:
        yield grader


def items_of(problems=PROBLEMS, protocol=PROTOCOL, context=256):
    return make_items(problems, lambda texts: byte_level_tokenizer()(texts)["input_ids"], protocol, context=context)


def run(folder, grader, items, *, rank=0, world_size=1, interpreter=None, batch_size=4):
    protocol, tokenizer = PROTOCOL, byte_level_tokenizer()
    engine = TransformersEngine(tiny_model(), tokenizer, protocol.sampling, eos_token_ids=[0], use_seeds=True)
    interpreter = interpreter or FakeInterpreter(lambda code: ok("1"))
    with Parts(folder, rank) as parts:
        run_items(
            *(items, parts, protocol, engine, interpreter, tokenizer, grader),
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
        )
        parts.read()
        return parts.rows


def result(rows, items, grader):
    table = {}
    for item in items:
        table.setdefault(item.benchmark, {}).setdefault(item.problem_id, []).append(rows[item.key])
    return summarize(table, {"first": "First", "second": "Second"}, grader)


def texts(rows):
    return {key: row["completion"] for key, row in rows.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, grader):
    """An unbroken run of one process."""
    return dict(run(tmp_path_factory.mktemp("whole"), grader, items_of()))


def test_every_sample_is_there_once_and_repeats_differ(whole):
    assert whole.keys() == {item.key for item in items_of()}
    assert len({whole["first", "first0", sample]["completion"] for sample in range(3)}) == 3


def test_two_runs_with_one_seed_agree(whole, tmp_path, grader):
    again = run(tmp_path, grader, items_of())
    assert texts(again) == texts(whole)
    assert result(again, items_of(), grader) == result(whole, items_of(), grader)


def test_the_order_of_problems_does_not_matter(whole, tmp_path, grader):
    shuffled = {name: random.Random(1).sample(PROBLEMS[name], len(PROBLEMS[name])) for name in ("second", "first")}
    again = run(tmp_path, grader, items_of(shuffled), batch_size=5)
    assert texts(again) == texts(whole)
    averages = {
        name: benchmark["avg"] for name, benchmark in result(again, items_of(shuffled), grader)["benchmarks"].items()
    }
    assert averages == {name: found["avg"] for name, found in result(whole, items_of(), grader)["benchmarks"].items()}


def test_two_processes_do_what_one_does(whole, tmp_path, grader):
    first = run(tmp_path, grader, items_of(), rank=0, world_size=2)
    assert 0 < len(first) < len(whole)
    assert texts(run(tmp_path, grader, items_of(), rank=1, world_size=2)) == texts(whole)


def test_a_killed_run_goes_on_where_it_was(whole, tmp_path, grader):
    run(tmp_path, grader, items_of())
    path = tmp_path / "rank_0000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:50])  # the kill came in the middle of a line
    rows = run(tmp_path, grader, items_of())
    assert result(rows, items_of(), grader) == result(whole, items_of(), grader)
    written = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert len(written) == len(whole) == len({tuple(key) for key in written})


def test_a_finished_run_is_not_done_again(whole, tmp_path, grader):
    run(tmp_path, grader, items_of())
    interpreter = FakeInterpreter(lambda code: 1 / 0)
    assert texts(run(tmp_path, grader, items_of(), interpreter=interpreter)) == texts(whole)
    assert interpreter.codes == []


def test_rollouts_whose_interpreter_failed_have_no_result_and_are_sampled_again(tmp_path, grader):
    tokenizer = byte_level_tokenizer()
    script = tokenizer.encode("```python\nprint(1)\n```\n```output", add_special_tokens=False)
    answer = tokenizer.encode("\\boxed{1}", add_special_tokens=False)
    protocol = Protocol(samples=3, temperature=1.0, rollout=RolloutConfig(1, 200, interpreter_retries=0))
    items = items_of(protocol=protocol)[:6]

    def attempt(interpreter):
        engine = ScriptedEngine([script + answer] * 6, tokenizer, eos_token_id=0, vocab_size=len(tokenizer))
        with Parts(tmp_path, 0) as parts:
            run_items(items, parts, protocol, engine, interpreter, tokenizer, grader)
        return engine

    down = iter([True, True])
    with pytest.raises(UserError, match=r"failed in 2 of 6 rollouts.*same command again"):
        attempt(FakeInterpreter(lambda code: InterpreterUnavailable("down") if next(down, False) else ok("1")))
    engine = attempt(FakeInterpreter(lambda code: ok("1")))
    assert len({request.rollout_id for request in engine.requests}) == 2


def test_a_dead_interpreter_ends_the_evaluation_early(tmp_path, grader):
    tokenizer = byte_level_tokenizer()
    protocol = Protocol(samples=40, temperature=1.0, rollout=RolloutConfig(1, 200, interpreter_retries=0))
    items = items_of(protocol=protocol)
    script = tokenizer.encode("```python\nprint(1)\n```\n```output", add_special_tokens=False)
    engine = ScriptedEngine([script] * len(items), tokenizer, eos_token_id=0, vocab_size=len(tokenizer))
    dead = FakeInterpreter(lambda code: InterpreterUnavailable("down"))
    with Parts(tmp_path, 0) as parts, pytest.raises(UserError, match="failed in 21 of"):
        run_items(items, parts, protocol, engine, dead, tokenizer, grader)


def test_a_long_prompt_gets_what_is_left_of_the_context_and_one_that_fills_it_is_refused(caplog):
    problems = {"first": [{"problem": text, "problem_id": text[:1], "solution": "1"} for text in ("x" * 30, "1?")]}
    length = len(byte_level_tokenizer()("x" * 30)["input_ids"])
    items = items_of(problems, context=length + 5)
    assert [item.max_tokens for item in items if item.problem_id == "x"] == [5] * 3
    assert "1 problems leave less than max_completion_length 24" in caplog.text
    with pytest.raises(UserError, match="Problem x of first has a prompt of"):
        items_of(problems, context=length)


def test_a_seed_belongs_to_a_sample_of_a_problem():
    seeds = {sample_seed(seed, problem, sample) for seed in (0, 1) for problem in "ab" for sample in range(50)}
    assert len(seeds) == 200
    assert sample_seed(0, "a", 0) == 2871435964208650792


def test_prompts_are_torls_a_chat_a_plain_question_or_a_template(tmp_path):
    tokenizer = byte_level_tokenizer()
    assert prompt_text("torl", tokenizer, use_tool=True).endswith("{question}\nAssistant:\n")
    assert prompt_text("plain", tokenizer, use_tool=False).startswith("{question}")
    assert prompt_text("Q: {question}", tokenizer, use_tool=True) == "Q: {question}"
    with pytest.raises(UserError, match="no chat template"):
        prompt_text("chat", tokenizer, use_tool=True)


def test_a_chat_is_the_chat_templates_own_tokens():
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    text = prompt_text("chat", tokenizer, use_tool=True)
    assert "with programs" in text and "with programs" not in prompt_text("chat", tokenizer, use_tool=False)
    (ids,) = prompt_ids("chat", text, ["2 + 2?"], tokenizer)
    expected = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": text.split("system: ")[1].split("\n")[0]},
            {"role": "user", "content": "2 + 2?"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert tokenizer.decode(ids) == expected and ids[0] == 0
