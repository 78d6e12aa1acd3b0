"""The smollm2_gsm8k recipe: its two prompts, its variant without a tool, and what its benchmark makes of two runs."""

import json
import re
from pathlib import Path

import pytest
import smollm2_gsm8k as benchmark
from test_smollm2 import assert_shows_what_its_program_prints
from transformers import AutoTokenizer

from torl_trl import prompts
from torl_trl.command_line import parse_arguments

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
MODEL = ROOT / "models" / "smollm2-135m-instruct"
END = "<|im_end|>\n"


def parse(setting: str):
    changes = [word for key, value in benchmark.SETTINGS[setting][1].items() for word in (f"--{key}", value)]
    return parse_arguments(["--config", "smollm2_gsm8k.yaml", *changes], RECIPES)


def examples(setting: str) -> list[str]:
    return prompts.load_template(parse(setting)[0].prompt_template).split(END)[:-1]


def test_the_programs_of_the_examples_print_what_is_shown_and_boxed():
    for example in examples("tool"):
        assert_shows_what_its_program_prints(example)


def test_without_the_tool_the_same_examples_are_reasoned_in_words_and_every_sum_is_right():
    with_tool, without = examples("tool"), examples("no_tool")
    assert [text.splitlines()[0] for text in with_tool] == [text.splitlines()[0] for text in without]
    assert [text.splitlines()[-1] for text in with_tool] == [text.splitlines()[-1] for text in without]
    for text in without:
        sums = re.findall(r"(\d+(?: [-+*/] \d+)+) = (\d+)", text)
        assert sums and all(eval(left) == int(right) for left, right in sums)
        assert sums[-1][1] == text.rpartition("{")[2].rstrip("}")
        assert prompts.FENCE not in text


def test_the_run_without_a_tool_changes_only_the_tool_and_what_its_prompt_needs():
    (script, args, _), (other_script, other_args, _) = parse("tool"), parse("no_tool")
    assert (args.max_tool_calls, other_args.max_tool_calls) == (1, 0)
    for part, other, may_differ in (
        (script, other_script, {"prompt_template", "max_prompt_length"}),
        (args, other_args, {"max_tool_calls"}),
    ):
        differing = {key for key, value in vars(part).items() if value != vars(other)[key]}
        assert {key for key in differing if isinstance(vars(part)[key], int | float | str)} == may_differ
    assert args.use_vllm and args.tool_trigger == "code_fence"


@pytest.mark.skipif(not MODEL.is_dir(), reason="needs models/smollm2-135m-instruct: recipes/smollm2/get_model.py")
def test_the_same_problems_fit_both_prompts():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rooms = []
    for setting in benchmark.SETTINGS:
        script = parse(setting)[0]
        template = prompts.load_template(script.prompt_template)
        question = "How many apples has Eve?"
        used = len(tokenizer(prompts.render_prompt(template, question))["input_ids"])
        rooms.append(script.max_prompt_length - used + len(tokenizer(question)["input_ids"]))
    assert rooms[0] == rooms[1] > 0


def write_run(folder: Path, **of_step: list[float]) -> None:
    """A run of six steps with two evaluations; a metric without a value was not logged."""
    folder.mkdir()
    lines = [{"step": 0, "split": "eval", "accuracy": 0.25, "reward": -0.5}]
    for number in range(6):
        times = dict.fromkeys(benchmark.TIMES, 2.0)
        values = {name.replace("__", "/"): values[number] for name, values in of_step.items()}
        lines.append({"step": number + 1, "split": "train", **times, **values})
    lines.append({"step": 6, "split": "eval", "accuracy": 0.5, "reward": 0.0})
    lines.append({"step": 6, "split": "summary", "train_runtime": 120.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_its_evaluations_and_the_first_and_last_third_of_its_steps(tmp_path, monkeypatch):
    write_run(tmp_path / "tool", reward=[-1, 0, 5, 5, 0, 1], tools__code_ratio=[1, 0, 0, 0, 1, 1])
    write_run(tmp_path / "no_tool", reward=[-1, -1, 5, 5, -1, -1])
    results = {name: benchmark.measure(tmp_path / name) for name in benchmark.SETTINGS}
    tool = results["tool"]
    assert (tool["train/reward/first"], tool["train/reward/last"]) == (-0.5, 0.5)
    assert (tool["train/tools/code_ratio/first"], tool["train/tools/code_ratio/last"]) == (0.5, 1)
    assert (tool["eval/step0/accuracy"], tool["eval/step6/accuracy"]) == (0.25, 0.5)
    assert (tool["steps"], tool["seconds"], tool["median/step_time"]) == (6, 120, 2)
    assert "train/tools/code_ratio/first" not in results["no_tool"]

    lines = benchmark.table(results).splitlines()
    assert re.split(r"\s{2,}", lines[1].strip()) == ["C = 1", "0.25 -> 0.50", "-", "-", "-", "-0.50 -> 0.50", "2"]
    monkeypatch.setattr(benchmark, "FIGURE", tmp_path / "figure.png")
    benchmark.draw(tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
