"""Configuration: inherited options are honoured or refused, values are checked with one sentence."""

import dataclasses

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig

from torl_trl.config import REFUSED, ToRLConfig, interpreter_options_of_rank, share_of_rank
from torl_trl.errors import UserError

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
    "off_policy_mask_threshold", "use_bias_correction_kl",
}  # fmt: skip


def config(tmp_path, **options) -> ToRLConfig:
    defaults = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}
    return ToRLConfig(**defaults | options)


def test_every_inherited_option_is_honoured_or_refused():
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    inherited -= {field.name for field in dataclasses.fields(TrainingArguments)}
    needs_vllm = {name for name in inherited if name.startswith("vllm_")} - set(REFUSED)
    assert "use_vllm" in REFUSED  # without it the vllm_ options have no meaning
    assert inherited - needs_vllm == HONOURED | set(REFUSED)
    assert not HONOURED & set(REFUSED)


REFUSED_EXAMPLES = {
    "generation_kwargs": {"stop_strings": ["x"]},
    "cache_implementation": "static",
    "chat_template_kwargs": {"a": 1},
    "max_tool_calling_iterations": 2,
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"a": 1},
    "use_transformers_paged": True,
    "use_vllm": True,
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_trigger": "output"}, "tool_trigger is 'output': choose one of output_marker, code_fence."),
        ({"grade_text": "all"}, "grade_text is 'all': choose one of own, full."),
        ({"max_tool_calls": -1}, "max_tool_calls is -1: give a number of at least 0."),
        ({"generation_dtype": "int8"}, "generation_dtype is 'int8'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"save_rollouts_every": 0}, "save_rollouts_every is 0"),
        ({"max_observation_chars": 3}, "max_observation_chars is 3"),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 1, "save_steps": 3}, "save_steps is 3"),
    ],
)
def test_an_impossible_value_is_one_sentence(options, message, tmp_path):
    with pytest.raises(UserError) as error:
        config(tmp_path, **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


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
