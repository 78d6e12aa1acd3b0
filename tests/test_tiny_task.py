"""The tiny recipe's problems, programs, documents and committed base model."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from torl_trl import prompts

TINY = Path(__file__).parents[1] / "recipes" / "tiny"
sys.path.insert(0, str(TINY))

import problems  # noqa: E402
import solutions  # noqa: E402

BASE = TINY / "base"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def drawn() -> list[problems.Problem]:
    rng = Random(11)
    return [problems.draw_problem(rng) for _ in range(120)]


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TINY / name).read_text(encoding="utf-8").splitlines()]


def test_the_committed_problems_are_what_the_generator_writes(tmp_path):
    problems.write_splits(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()


def test_no_problem_is_in_both_splits_and_every_family_is_in_each():
    train, held_out = read("train.jsonl"), read("eval.jsonl")
    assert not {row["problem"] for row in train} & {row["problem"] for row in held_out}
    names = {family.name for family in problems.FAMILIES}
    assert len(names) >= 8
    assert {row["family"] for row in train} == {row["family"] for row in held_out} == names


def test_a_right_program_prints_the_answer_for_its_kind(drawn):
    for problem in drawn:
        for source in solutions.PROGRAMS[problem.family].right[problem.kind]:
            assert solutions.execute(source.format(**problem.values)).stdout.strip() == str(problem.answer), problem


def test_a_program_for_another_kind_is_seldom_right(drawn):
    runs = [
        solutions.execute(source.format(**problem.values)).stdout.strip() == str(problem.answer)
        for problem in drawn
        for kind, sources in solutions.PROGRAMS[problem.family].right.items()
        if kind != problem.kind
        for source in sources
    ]
    assert sum(runs) / len(runs) < 0.05


def test_failing_programs_fail_with_the_line_that_python_prints():
    seen = {}
    rng = Random(0)
    while len(seen) < len(problems.FAMILIES):
        problem = problems.draw_problem(rng)
        seen[problem.family] = problem
    for problem in seen.values():
        for template in solutions.PROGRAMS[problem.family].failing:
            source = template.format(**problem.values)
            shown = prompts.format_observation(solutions.execute(source), 256)
            ran = subprocess.run([sys.executable, "-I", "-c", source], capture_output=True, text=True, timeout=60)
            assert ran.returncode != 0 and ran.stderr.strip().splitlines()[-1] == shown


def test_a_document_reads_like_a_rollout(drawn):
    rng = Random(5)
    calls = 0
    for problem in drawn:
        passages = solutions.write_solution(problem, rng)
        assert not passages[-1].inserted and passages[-1].text.count("\\boxed{") == 1
        for asked, observed in pairwise(passages):
            if not observed.inserted:
                continue
            calls += 1
            assert asked.text.endswith(prompts.OUTPUT_MARKER)
            code = prompts.extract_code(asked.text.removesuffix(prompts.OUTPUT_MARKER))
            observation = prompts.format_observation(solutions.execute(code.removesuffix("\n")), 256)
            assert observed.text == f"\n{observation}\n```\n"
    assert calls > 25


def test_the_mixture_starts_like_the_paper():
    rng = Random(3)
    documents = []
    for _ in range(1000):
        problem = problems.draw_problem(rng)
        documents.append((problem, solutions.write_solution(problem, rng)))
    with_code = [(problem, passages) for problem, passages in documents if len(passages) > 1]
    right = [passages[-1].text.endswith(f"\\boxed{{{problem.answer}}}.") for problem, passages in with_code]
    assert 0.36 < len(with_code) / len(documents) < 0.44
    assert sum(right) / len(right) < 0.6
    assert any(len(passages) == 5 for _, passages in with_code)  # a failed program mended in a second call


def test_the_tokenizer_is_of_qwens_kind(tokenizer):
    words = tokenizer.tokenize(prompts.TORL_TEMPLATE.replace(prompts.QUESTION_PLACE, ""))
    assert len(words) <= 50
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.encode("x", add_special_tokens=True) == tokenizer.encode("x", add_special_tokens=False)
    for text in ("print(x)\n```\n```output\n12\n```\n", "é😀\x00 any\tbytes  \r\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_committed_base_is_a_small_qwen2(tokenizer):
    assert sum(path.stat().st_size for path in BASE.rglob("*") if path.is_file()) <= 5_000_000
    model = AutoModelForCausalLM.from_pretrained(BASE)
    assert model.config.model_type == "qwen2"
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
