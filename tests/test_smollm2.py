"""The smollm2 recipe's problems, prompt and model folder; one short run of it with problems from a file."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from torl_trl import prompts
from torl_trl.command_line import parse_arguments

RECIPES = Path(__file__).parents[1] / "recipes"
FOLDER = RECIPES / "smollm2"
MODEL = RECIPES.parent / "models" / "smollm2-135m-instruct"


def load(name: str):
    """Import a script of the recipe under a name of its own: other recipes have a problems.py, too."""
    spec = spec_from_file_location(f"smollm2_{name}", FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


problems = load("problems")
get_model = load("get_model")


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def test_the_committed_problems_are_what_the_generator_writes(tmp_path):
    problems.write_problems(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_no_problem_is_in_both_splits_and_every_family_is_in_each():
    train, held_out = read("train.jsonl"), read("eval.jsonl")
    assert len(train) == problems.TRAIN_SIZE and len(held_out) == problems.EVAL_SIZE
    assert len({row["problem"] for row in train + held_out}) == len(train + held_out)
    assert {row["family"] for row in train} == {row["family"] for row in held_out} == set(problems.FAMILIES)


def test_numbers_have_two_digits_and_a_formula_has_the_value_that_python_gives_it():
    for row in read("train.jsonl"):
        assert all(len(number) == 2 for number in re.findall(r"\d+", row["problem"]))
        formula = row["problem"].removeprefix("What is ").removesuffix("?").replace("times", "*")
        if row["problem"].startswith("What is "):
            assert str(eval(formula)) == row["answer"]


def assert_shows_what_its_program_prints(example: str) -> None:
    """A worked example of a few-shot prompt: its program runs, and its output is shown and boxed."""
    called, marker, rest = example.partition(prompts.OUTPUT_MARKER)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(prompts.extract_code(called))
    output, _, answer = rest.partition(prompts.FENCE)
    assert marker and output.strip() == printed.getvalue().strip()
    assert answer.strip() == f"\\boxed{{{output.strip()}}}"


def test_the_shown_examples_are_calls_whose_output_and_answer_are_right():
    template = prompts.load_template(str(FOLDER / "few_shot.txt"))
    examples = template.split("<|im_end|>\n")[:-1]
    assert len(examples) == 2
    for example in examples:
        assert_shows_what_its_program_prints(example)


def test_the_recipe_finds_its_files_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, args, model = parse_arguments(["--config", "smollm2.yaml"], RECIPES)
    for path in (script.dataset_name, script.eval_dataset_name, script.prompt_template):
        assert Path(path).is_file()
    assert model.dtype == "float32" and model.model_name_or_path == str(get_model.FOLDER)
    assert args.max_tool_calls == 1 and args.tool_trigger == "code_fence"


def test_without_its_packages_the_model_script_says_in_one_sentence_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["get_model.py"])
    monkeypatch.setattr(get_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        get_model.main()
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "requirements/smollm2.txt" in message and message.count("\n") == 1
    assert (RECIPES.parent / "requirements" / "smollm2.txt").is_file()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    if get_model.find_weights() is None:
        pytest.skip("needs the packages of requirements/smollm2.txt")
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    get_model.save_model(get_model.find_weights(), folder)
    return folder


@pytest.mark.slow
def test_the_model_folder_is_an_ordinary_one_that_ends_its_text_as_the_examples_do(model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    tokenizer = get_model.AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.eos_token_id == config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    template = prompts.load_template(str(FOLDER / "few_shot.txt"))
    assert tokenizer.encode(template).count(tokenizer.eos_token_id) == 2


@pytest.mark.slow
def test_the_recipe_trains_on_problems_from_a_file(model_folder, shared, tmp_path):
    command = [sys.executable, str(RECIPES / "grpo_torl.py"), "--config", "smollm2.yaml"]
    options = {
        "model_name_or_path": model_folder,
        "dataset_name": shared / "data" / "train_gsm8k.jsonl",
        "max_train_problems": 16,
        "output_dir": tmp_path / "run",
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "no",
        "eval_on_start": "false",
        "save_strategy": "no",
    }
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if line["split"] == "train"]
    assert trained["tools/call_frequency"] > 0
