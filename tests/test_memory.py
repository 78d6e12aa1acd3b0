"""The memory estimate: what it counts, and that training takes what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import memory
import pytest
import torch
from toys import tiny_model
from transformers import Qwen2Config
from trl import ModelConfig

from torl_doctor.memory import estimate_memory
from torl_trl import ToRLConfig

QWEN_7B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18_944,
)


def estimate(folder, config=None, *, processes=1, device_bytes=0, model=None, **options):
    args = ToRLConfig(output_dir=str(folder), use_cpu=True, **{"bf16": True, "num_generations": 8} | options)
    model_args = ModelConfig(model_name_or_path="x", **model or {})
    sizes = {"prompt_tokens": 100, "processes": processes, "device_bytes": device_bytes}
    return estimate_memory(config or tiny_model().config, args, model_args, **sizes)


def test_full_training_has_weights_gradients_and_two_states_in_float32(tmp_path):
    parts = estimate(tmp_path).parts
    weights = sum(weight.nbytes for weight in tiny_model().parameters())
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (weights, weights, 2 * weights)


def test_tied_embeddings_count_once(tmp_path):
    config = Qwen2Config(**tiny_model().config.to_dict() | {"tie_word_embeddings": True})
    head = config.vocab_size * config.hidden_size * 4
    assert estimate(tmp_path).parts["weights"] - estimate(tmp_path, config).parts["weights"] == head


def test_lora_trains_its_adapters_alone(tmp_path):
    pytest.importorskip("peft")
    lora = {"use_peft": True, "dtype": "bfloat16", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    parts = estimate(tmp_path, model=lora).parts
    adapters = 2 * (32 * 4 + 4 * 32 + 32 * 4 + 4 * 16) * 4  # two layers, A and B, in float32
    assert parts["gradients"] == adapters
    assert parts["weights"] == sum(weight.numel() for weight in tiny_model().parameters()) * 2 + adapters


def test_checkpointing_takes_less_and_a_longer_rollout_takes_more(tmp_path):
    plain, checkpointed = (
        estimate(tmp_path, gradient_checkpointing=value, max_completion_length=64).update for value in (False, True)
    )
    longer = estimate(tmp_path, gradient_checkpointing=False, max_completion_length=128).update
    assert checkpointed < plain < longer


def test_vllm_takes_its_share_while_it_generates_and_with_sleep_only_then(tmp_path, monkeypatch):
    monkeypatch.setattr(ToRLConfig, "_check_vllm", lambda self: None)  # it refuses sleep without a GPU
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5, "device_bytes": 10**10}
    options["max_completion_length"] = 64
    awake, asleep = (estimate(tmp_path, vllm_enable_sleep_mode=value, **options) for value in (False, True))
    share = awake.update - asleep.update
    assert awake.parts["generation"] == share > 0
    assert asleep.peak == asleep.generation >= share


@pytest.mark.parametrize(("stage", "gigabytes"), [(2, 32), (3, 19)])
def test_zero_shares_out_what_lasts(tmp_path, stage, gigabytes):
    """The 7B recipe's header says 34 GB a GPU at stage 2."""
    pytest.importorskip("deepspeed")
    options = {"deepspeed": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}}}
    options |= {"per_device_train_batch_size": 16, "gradient_checkpointing": True, "max_completion_length": 3072}
    parts = estimate(tmp_path, QWEN_7B, processes=8, **options).parts
    lasting = sum(parts[name] for name in ("weights", "optimizer", "gradients", "buckets"))
    assert lasting == pytest.approx(gigabytes * 1e9, abs=1e9)


def test_an_estimate_takes_no_memory_and_no_random_number(tmp_path):
    state = torch.get_rng_state()
    estimate(tmp_path, QWEN_7B, max_completion_length=512)  # 30 GB, were it real
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["full, wide", "full, flat, checkpointing, short", "LoRA, deep, checkpointing"])
def test_the_estimate_is_within_15_percent_of_what_training_takes(case):
    pytest.importorskip("peft")
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux, which says what a process takes")
    command = [sys.executable, memory.__file__, "--here", "--cases", case]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["estimated_mb"] == pytest.approx(measured["measured_mb"], rel=0.15)
