"""The command line: YAML and overrides, and one sentence for every mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torl_trl.command_line import PACKAGES, parse_arguments, run_main
from torl_trl.errors import UserError
from torl_trl.prompts import load_template
from torl_trl.run_folder import write_config

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
MINIMAL = (
    "model_name_or_path: m\ndataset_name: d.jsonl\noutput_dir: out\nuse_cpu: true\nbf16: false\nnum_generations: 8\n"
)


def recipe(folder: Path, text: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(MINIMAL + text)
    return path


def test_a_yaml_gives_the_values_and_the_command_line_overrides_them(tmp_path):
    path = recipe(tmp_path, "learning_rate: 1e-4\nmax_tool_calls: 2\ninterpreter_options: {timeout_seconds: 3}\n")
    script_args, args, model_args = parse_arguments(["--config", str(path), "--max_tool_calls=3"], RECIPES)
    assert (args.learning_rate, args.max_tool_calls, args.interpreter_options) == (1e-4, 3, {"timeout_seconds": 3})
    assert (model_args.model_name_or_path, script_args.dataset_name) == ("m", "d.jsonl")


def test_a_written_config_is_read_again(tmp_path):
    parts = parse_arguments(["--config", "tiny.yaml"], RECIPES)
    path = write_config(tmp_path, *parts, leave_out=("generation_batch_size",))
    again = parse_arguments(["--config", str(path)], RECIPES)
    assert again[1].learning_rate == parts[1].learning_rate and again[1].reward_weights is None


def test_a_yaml_may_set_environment_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("TORL_TEST_VARIABLE", raising=False)
    parse_arguments(["--config", str(recipe(tmp_path, "env: {TORL_TEST_VARIABLE: 5}\n"))], RECIPES)
    assert os.environ.pop("TORL_TEST_VARIABLE") == "5"


def test_a_long_template_on_one_line_is_a_text_and_not_a_path(tmp_path):
    template = "word " * 100 + "{question}"
    path = recipe(tmp_path, f"prompt_template: '{template}'\n")
    assert load_template(parse_arguments(["--config", str(path)], RECIPES)[0].prompt_template) == template


@pytest.mark.parametrize("template", ["no place", "no/such/file.txt", "{question} {question}"])
def test_a_template_without_one_place_is_refused(template):
    with pytest.raises(UserError, match="prompt_template"):
        load_template(template)


def test_held_out_problems_are_not_the_training_file(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    script_args = parse_arguments(["--config", str(recipe(tmp_path))], RECIPES)[0]
    with pytest.raises(UserError, match="one file, whose problems are trained"):
        script_args.eval_data()
    script_args.eval_dataset_name = "other.jsonl"
    assert script_args.eval_data() == "other.jsonl"


def test_a_dict_can_be_given_on_the_command_line(tmp_path):
    words = ["--config", str(recipe(tmp_path)), "--interpreter_options", '{"timeout_seconds": 2, "slots": 1}']
    assert parse_arguments(words, RECIPES)[1].interpreter_options == {"timeout_seconds": 2, "slots": 1}


def test_a_config_is_found_beside_the_script_too(tmp_path, monkeypatch):
    recipe(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert parse_arguments(["--config", "run.yaml"], tmp_path)[1].num_generations == 8


def test_paths_may_be_relative_to_the_yaml(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text("{}")
    path = recipe(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert parse_arguments(["--config", str(path)], RECIPES)[0].dataset_name == str(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("max_tool_cals: 1\n", [], "run.yaml has the unknown key 'max_tool_cals': did you mean 'max_tool_calls'?"),
        ("xyzzy: 1\n", [], "run.yaml has the unknown key 'xyzzy': remove it."),
        ("", ["--max_tool_cals", "1"], "Unknown option '--max_tool_cals': did you mean '--max_tool_calls'?"),
        ("learning_rate: fast\n", [], "run.yaml: learning_rate is 'fast'; give one number."),
        ("", ["--learning_rate", "fast"], "--learning_rate: invalid float value: 'fast'"),
        ("learning_rate: null\n", [], "run.yaml: learning_rate is None; give one number."),
        ("learning_rate: .nan\n", [], "run.yaml: learning_rate is nan; give one number."),
        ("max_steps: 2.5\n", [], "run.yaml: max_steps is 2.5; give one whole number."),
        ("max_tool_calls: true\n", [], "run.yaml: max_tool_calls is True; give one whole number."),
        ("executability_penalty: 3\n", [], "run.yaml: executability_penalty is 3; give true or false."),
        ("save_strategy: no\n", [], 'save_strategy is False, as YAML reads a bare no; write "no" in quotes.'),
        ("resume_from_checkpoint: nowhere\n", [], "resume_from_checkpoint is 'nowhere', which is no folder"),
        ("load_in_4bit: true\n", [], "load_in_8bit and load_in_4bit are not supported"),
        ("dataset_streaming: true\n", [], "dataset_streaming is true, which has no effect here"),
        ("max_train_problems: -1\n", [], "max_train_problems is -1: give a number of at least 1."),
        ("", ["--num_generations", "many"], "--num_generations: invalid int value: 'many'"),
        ("grade_text: [own]\n", [], "run.yaml: grade_text is ['own']; give a text."),
        ("vllm_server_base_url: [http://a:1]\n", [], "run.yaml: vllm_server_base_url is ['http://a:1']; give a text."),
        ("report_to: {a: 1}\n", [], "report_to is {'a': 1}"),
        ("num_generations: [8]\n", [], "run.yaml: num_generations is [8]; give one whole number."),
        ("interpreter_options: fast\n", [], "interpreter_options is 'fast'"),
        ("a: b: c\n", [], "run.yaml is not valid YAML"),
        ("dataset_name: null\n", [], "dataset_name is missing"),
        ("model_name_or_path: null\n", [], "model_name_or_path is missing"),
        ("num_generations: 7\n", [], "generation_batch_size (8) must be divisible by num_generations (7)"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(text, words, message, tmp_path):
    with pytest.raises(UserError) as error:
        parse_arguments(["--config", str(recipe(tmp_path, text)), *words], RECIPES)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_config_names_those_that_there_are(tmp_path):
    recipe(tmp_path)
    with pytest.raises(UserError, match=r"'nine.yaml' is neither here nor in .* run.yaml"):
        parse_arguments(["--config", "nine.yaml"], tmp_path)


def test_a_yaml_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(UserError, match="holds a list"):
        parse_arguments(["--config", str(path)], RECIPES)


def test_a_user_sees_the_log_of_every_package():
    assert {path.parent.name for path in Path(__file__).parents[1].glob("torl_*/__init__.py")} == set(PACKAGES)


def test_a_user_error_ends_the_script_with_its_sentence_alone(capsys):
    def main():
        raise UserError("That is wrong: do this.")

    with pytest.raises(SystemExit) as exit_info:
        run_main(main)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "Error: That is wrong: do this.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "none.yaml"], "'none.yaml' is neither here"),
        (["--config", "tiny.yaml", "--dataset_name", "no.jsonl"], "no.jsonl"),
        (["--config", "tiny.yaml", "--problem_column", "nothing"], "nothing"),
        (["--config", "tiny.yaml", "--model_name_or_path", "no/model"], "no/model"),
        (["--config", "tiny.yaml", "--interpreter", "magic"], "magic"),
        (["--config", "tiny.yaml", "--dtype", "float99"], "float99"),
        (["--config", "tiny.yaml", "--attn_implementation", "magic"], "magic"),
        (["--config", "tiny.yaml", "--output_dir", "/proc/nowhere"], "/proc/nowhere"),
        (["--config", "tiny.yaml", "--model_name_or_path", "tiny"], "recipes/tiny"),
        (["--config", "tiny.yaml", "--interpreter_options", '{"speed": 9}'], "speed"),
    ],
)
@pytest.mark.slow
def test_the_script_shows_no_traceback_for_user_errors(words, message, tmp_path):
    command = [sys.executable, str(RECIPES / "grpo_torl.py"), "--output_dir", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("Error: ")
