"""Training against real vLLM servers on a CPU. The live push of weights needs NCCL and GPUs: it is replaced here, so
that servers keep the weights they started with; training leaves the trainer's as they were (learning rate 0)."""

from pathlib import Path

import pytest
from datasets import Dataset
from toys import FakeInterpreter, ok
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server_process import vllm_server

from torl_grading import Grader
from torl_trl.config import ToRLConfig
from torl_trl.data import read_rows
from torl_trl.metrics_file import MetricsFile
from torl_trl.prompts import load_template, render_prompt
from torl_trl.rewards import AccuracyReward
from torl_trl.run_folder import read_metrics

pytest.importorskip("vllm", reason="needs vllm: make test VLLM=1 installs it")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BASE = str(Path(__file__).parents[1] / "recipes" / "tiny" / "base")


def test_a_trainer_samples_from_two_servers_and_pushes_to_each(tmp_path, monkeypatch):
    from trl.generation.vllm_client import VLLMClient

    from torl_trl import ToRLTrainer

    pushed: list[str] = []

    def update_named_params(client, metadata, named_params):
        assert [name for name, _, _ in metadata] == [name for name, _ in named_params]
        pushed.append(client.base_url)

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # TRL asks for what only this mode tells
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update_named_params)
    monkeypatch.setattr(VLLMClient, "reset_prefix_cache", lambda client: None)
    rows = read_rows("recipes/tiny/train.jsonl")[:8]
    problems = [
        {
            "prompt": render_prompt(load_template(None), row["problem"]),
            "problem": row["problem"],
            "solution": str(row["answer"]),
            "problem_id": str(i),
        }
        for i, row in enumerate(rows)
    ]
    with vllm_server(BASE) as first, vllm_server(BASE) as second, Grader(num_workers=1) as grader:
        args = ToRLConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=128,
            max_steps=2,
            learning_rate=0.0,
            save_strategy="no",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=f"{first.url}, {second.url}",
            vllm_importance_sampling_correction=True,
        )
        trainer = ToRLTrainer(
            model=AutoModelForCausalLM.from_pretrained(BASE),
            reward_funcs=[AccuracyReward(grader)],
            interpreter=FakeInterpreter(lambda code: ok("1")),
            args=args,
            train_dataset=Dataset.from_list(problems),
            processing_class=AutoTokenizer.from_pretrained(BASE),
            callbacks=[MetricsFile(tmp_path)],
        )
        trainer.train()
        served = [server.log.read_text().count("POST /v1/completions") for server in (first, second)]
    assert args.vllm_server_base_url == f"{first.url}, {second.url}"
    assert pushed == [first.url, second.url] * 2
    assert min(served) > 8
    steps = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert [line["sampling/sampling_logp_difference/mean"] < 1e-5 for line in steps] == [True, True]
