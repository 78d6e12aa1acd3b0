"""recipes/evaluate.py, as users start it: results that last through kills, shards and engines."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import evaluate
import pytest
import torch
from launching import ROOT, launch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server_process import vllm_server

from torl_eval.engines import fingerprint
from torl_trl.errors import UserError
from torl_trl.records import read_rollouts

TINY = str(ROOT / "recipes" / "tiny" / "base")
PROBLEMS = f"tiny={ROOT / 'recipes' / 'tiny' / 'eval.jsonl'}"
SAMPLED = ["--protocol", "sampled", "--samples", "4", "--max_problems", "60"]
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


def command(folder: Path, *words: str, processes: int = 1) -> list[str]:
    """The words of an evaluation of the tiny base."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    given = ["--model", TINY, "--benchmarks", PROBLEMS, "--max_completion_length", "192", "--max_tool_calls", "2"]
    return [*start, str(ROOT / "recipes" / "evaluate.py"), *given, "--output_dir", str(folder), *words]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def evaluated(folder: Path, *words: str, processes: int = 1) -> dict:
    """Run an evaluation to its end and return its evaluation.json."""
    if "vllm" in words and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm")
    done = subprocess.run(
        command(folder, *words, processes=processes), capture_output=True, text=True, env=ENVIRONMENT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "evaluation.json").read_text())


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        evaluate.parse_arguments([str(word) for word in words])
    return str(error.value)


def test_impossible_options_are_refused_in_a_sentence(tmp_path):
    assert "--model is missing" in refused()
    assert "--samples is 4 at temperature 0" in refused("--model", "m", "--samples", "4")
    assert "--samples is 0: give at least 1" in refused("--model", "m", "--samples", "0")
    assert "belong together" in refused("--model", "m", "--engine", "vllm_server")
    assert "belong together" in refused("--model", "m", "--urls", "http://a")
    assert "--max_problems is 0" in refused("--model", "m", "--max_problems", "0")
    assert "see --help" in refused("--modell", "m")


def test_protocols_give_defaults_that_options_override():
    args = evaluate.parse_arguments(["--model", "Qwen/Qwen2.5-Math-1.5B"])
    assert (args.samples, args.temperature, args.max_tool_calls, args.max_completion_length) == (1, 0.0, 1, 3072)
    assert str(args.output_dir) == "runs/eval/Qwen_Qwen2.5-Math-1.5B_paper"
    args = evaluate.parse_arguments(
        ["--model", "m", "--protocol", "sampled", "--samples", "32", "--max_tool_calls", "0"]
    )
    assert (args.samples, args.temperature) == (32, 1.0)
    assert str(args.output_dir) == "runs/eval/m_sampled_c0"


def test_a_folder_with_another_evaluation_is_not_touched(tmp_path):
    evaluate.claim_folder(tmp_path, {"seed": 1, "model": "a"}, write=False)
    evaluate.claim_folder(tmp_path, {"seed": 1, "model": "a"}, write=True)
    evaluate.claim_folder(tmp_path, {"seed": 1, "model": "a"}, write=True)
    with pytest.raises(UserError, match=r"other settings \(model 'a'\): give another --output_dir"):
        evaluate.claim_folder(tmp_path, {"seed": 1, "model": "b"}, write=False)


def test_weights_that_were_trained_anew_are_another_evaluation(tmp_path):
    assert fingerprint("owner/model") is None
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first")
    first = fingerprint(str(tmp_path))
    assert first == fingerprint(str(tmp_path))
    weights.write_bytes(b"other")
    os.utime(weights, (1, 1))
    assert fingerprint(str(tmp_path)) != first


def test_the_paper_s_protocol_on_a_small_set(tmp_path):
    result = evaluated(tmp_path, "--engine", "transformers", "--max_problems", "20")
    (benchmark,) = result["benchmarks"].values()
    assert benchmark["rows"] == 20 and benchmark["samples"] == 1 and benchmark["se_samples"] is None
    assert 0.4 < benchmark["avg"] <= 1 and benchmark["maj"] == benchmark["avg"] == benchmark["pass_at"]["1"]
    assert result["settings"]["temperature"] == 0.0
    rows = read_rollouts(tmp_path / "rollouts" / "tiny.parquet").to_pylist()
    assert [row["group_id"] for row in rows] == list(range(20)) and all(row["full"] for row in rows)
    assert (tmp_path / "report.html").exists()
    assert "| tiny | 20 |" in (tmp_path / "evaluation.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_evaluation_ends_with_the_json_of_an_unbroken_one(engine, tmp_path):
    words = [*SAMPLED, "--engine", engine, "--batch_size", "32"]
    unbroken = evaluated(tmp_path / "unbroken", *words)
    part = tmp_path / "killed" / "parts" / "rank_0000.jsonl"
    process = subprocess.Popen(command(tmp_path / "killed", *words), env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") >= 20):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = part.read_bytes().count(b"\n")
    assert 20 <= done < 240
    assert evaluated(tmp_path / "killed", *words) == unbroken
    assert part.read_bytes().count(b"\n") == 240


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_give_what_one_gives(engine, tmp_path):
    words = [*SAMPLED, "--engine", engine, "--batch_size", "32"]
    assert evaluated(tmp_path / "two", *words, processes=2) == evaluated(tmp_path / "one", *words)
    assert all(path.stat().st_size for path in (tmp_path / "two" / "parts").glob("*.jsonl"))


@pytest.mark.slow
def test_an_adapter_is_merged_into_its_base_and_two_processes_share_it(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "adapter")
    words = ["--engine", "transformers", "--max_problems", "20", "--batch_size", "10"]
    found = evaluated(tmp_path / "of_adapter", *words, "--model", str(tmp_path / "adapter"), processes=2)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "merged")
    expected = evaluated(tmp_path / "of_merged", *words, "--model", str(tmp_path / "merged"))
    assert found["benchmarks"] == expected["benchmarks"]
    assert found["benchmarks"] != evaluated(tmp_path / "of_base", *words)["benchmarks"]


@pytest.mark.slow
@pytest.mark.vllm
def test_servers_give_the_greedy_texts_of_the_other_engines(tmp_path):
    pytest.importorskip("vllm")
    with vllm_server(TINY) as server:
        words = ["--engine", "vllm_server", "--urls", server.url, "--max_problems", "40"]
        served = evaluated(tmp_path / "served", *words)
    here = evaluated(tmp_path / "here", "--engine", "transformers", "--max_problems", "40")
    assert served["benchmarks"] == here["benchmarks"]


@pytest.mark.slow
def test_training_shows_as_a_difference_that_excludes_zero(tmp_path):
    launch(tmp_path, "--max_steps", "40", "--save_steps", "40")
    words = ["--engine", "transformers", "--protocol", "sampled", "--samples", "2"]
    evaluated(tmp_path / "before", *words)
    evaluated(tmp_path / "after", *words, "--model", str(tmp_path / "checkpoint-40"))
    compare = [sys.executable, str(ROOT / "recipes" / "evaluate.py"), "--compare"]
    done = subprocess.run([*compare, tmp_path / "before", tmp_path / "after"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tiny")]
    assert " * " in line, done.stdout  # the interval excludes 0
