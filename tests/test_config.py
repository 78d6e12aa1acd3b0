"""Configuration: inherited options are honoured or refused, values are checked with one sentence."""

import dataclasses

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig

from torl_trl.config import REFUSED, ToRLConfig
from torl_trl.errors import UserError
from torl_trl.shares import interpreter_options_of_rank, share_of_rank

HONOURED = {
    # by the engines
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length", "num_generations",
    "num_generations_eval", "ds3_gather_for_generation", "generation_batch_size", "steps_per_generation",
    # by TRL, in loading, sampling of prompts and logging
    "model_init_kwargs", "trust_remote_code", "shuffle_dataset", "log_completions", "log_multimodal",
    "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "disable_dropout",
    "cast_lm_head_to_fp32", "pad_to_multiple_of", "router_aux_loss_coef",
    # by TRL, in the loss, which gets our mask and rewards
    "beta", "num_iterations", "epsilon", "delta", "epsilon_high", "sapo_temperature_neg", "sapo_temperature_pos",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level",
    "reward_weights", "multi_objective_aggregation", "scale_rewards", "loss_type", "mask_truncated_completions",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    "off_policy_mask_threshold", "use_bias_correction_kl", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
    # by TRL, which makes the vLLM objects that ours drive
    "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_max_model_length",
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_group_port",
    # ours, and TRL's for the weights
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
}  # fmt: skip


def config(tmp_path, **options) -> ToRLConfig:
    defaults = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}
    return ToRLConfig(**defaults | options)


def test_every_inherited_option_is_honoured_or_refused():
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    inherited -= {field.name for field in dataclasses.fields(TrainingArguments)}
    assert inherited == HONOURED | set(REFUSED)
    assert not HONOURED & set(REFUSED)


REFUSED_EXAMPLES = {
    "generation_kwargs": {"stop_strings": ["x"]},
    "cache_implementation": "static",
    "chat_template_kwargs": {"a": 1},
    "max_tool_calling_iterations": 2,
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"a": 1},
    "use_transformers_paged": True,
    "vllm_structured_outputs_regex": ".*",
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_option_says_what_to_do_instead(name, tmp_path):
    with pytest.warns() if name == "use_transformers_paged" else _nothing(), pytest.raises(UserError) as error:
        config(tmp_path, **{name: REFUSED_EXAMPLES[name]})
    assert "has no effect on ToRL rollouts" in str(error.value)
    assert REFUSED[name][1] in str(error.value) or name == "use_transformers_paged"


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *exc_info):
        return None


def test_the_paper_s_values_are_the_defaults(tmp_path):
    args = config(tmp_path)
    assert (args.num_generations, args.max_completion_length, args.max_tool_calls) == (16, 3072, 1)
    assert (args.learning_rate, args.lr_scheduler_type, args.beta, args.temperature) == (1e-6, "constant", 0.0, 1.0)
    assert (args.epsilon, args.eval_temperature, args.executability_penalty) == (0.2, 0.0, False)
    assert args.vllm_importance_sampling_correction is False


def test_truncated_sampling_beside_importance_sampling_correction_is_warned_of(tmp_path, caplog):
    config(tmp_path, use_vllm=True, vllm_importance_sampling_correction=True)
    config(tmp_path, use_vllm=True, top_p=0.9)
    assert not caplog.records
    for name, value in (("top_p", 0.9), ("repetition_penalty", 1.1)):
        config(tmp_path, use_vllm=True, vllm_importance_sampling_correction=True, **{name: value})
        assert f"{name} {value}" in caplog.text and "biased" in caplog.text


def test_servers_are_one_url_or_several_or_a_host_and_port(tmp_path):
    assert config(tmp_path).server_urls() == ["http://0.0.0.0:8000"]
    several = config(tmp_path, vllm_server_base_url="http://a:1/, http://b:2/v1/")
    assert several.server_urls() == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_trigger": "output"}, "tool_trigger is 'output': choose one of output_marker, code_fence."),
        ({"grade_text": "all"}, "grade_text is 'all': choose one of own, full."),
        ({"max_tool_calls": -1}, "max_tool_calls is -1: give a number of at least 0."),
        ({"generation_dtype": "int8"}, "generation_dtype is 'int8'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size is 2 with vllm_mode: colo"),
        ({"use_vllm": True, "vllm_mode": "sever"}, "vllm_mode is 'sever': choose colocate or server."),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode is true with use_cpu"),
        ({"use_vllm": True, "vllm_server_base_url": "localhost:8000"}, "vllm_server_base_url is 'localhost:8000'"),
        ({"use_vllm": True, "vllm_server_base_url": "http://a:1,"}, "vllm_server_base_url is 'http://a:1,'"),
        ({"use_vllm": True, "vllm_server_base_url": "http://a:1,http://a:1/v1"}, "vllm_server_base_url is"),
        ({"use_vllm": True, "generation_dtype": "bfloat16"}, "generation_dtype is 'bfloat16', which vLLM ignores"),
        ({"save_rollouts_every": 0}, "save_rollouts_every is 0"),
        ({"max_observation_chars": 3}, "max_observation_chars is 3"),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 1, "save_steps": 3}, "save_steps is 3"),
        ({"num_iterations": 2, "max_steps": 1000, "save_steps": 0.005}, "save_steps is 0.005"),  # every 5 steps
    ],
)
def test_an_impossible_value_is_one_sentence(options, message, tmp_path):
    with pytest.raises(UserError) as error:
        config(tmp_path, **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("hang_timeout", "expected"), [(None, 1800), (600.0, 1800), (3600.0, 3660)])
def test_ranks_wait_for_one_that_hangs_until_its_stacks_are_written(hang_timeout, expected, tmp_path):
    assert config(tmp_path, hang_timeout=hang_timeout).ddp_timeout == expected


def test_our_own_fields_stay_few():
    own = set(ToRLConfig.__annotations__) - {field.name for field in dataclasses.fields(GRPOConfig)}
    assert len(own) <= 25


def test_a_limit_for_the_machine_is_divided_by_its_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert share_of_rank({"slots": 10, "x": 1}, "slots") == {"slots": 2, "x": 1}
    assert share_of_rank({"slots": 1}, "slots") == {"slots": 1}
    assert share_of_rank({}, "slots") == {}


@pytest.mark.parametrize(
    ("interpreter", "options", "share"),
    [
        ("embedded", {"slots": 16, "memory_mb": 512}, {"slots": 4, "memory_mb": 512}),
        ("sandbox_fusion", {"slots": 16, "url": "http://box"}, {"slots": 2, "url": "http://box"}),
        ("e2b", {"sandboxes": 20, "creations_per_second": 1}, {"sandboxes": 2, "creations_per_second": 0.125}),
        ("e2b", {"sandboxes": 4}, {"sandboxes": 1}),
        ("e2b", {"sandboxes": None}, {"sandboxes": None}),
    ],
)
def test_a_limit_of_an_interpreter_is_divided_by_the_ranks_that_share_it(monkeypatch, interpreter, options, share):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert interpreter_options_of_rank(interpreter, options) == share
