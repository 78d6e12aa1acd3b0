"""Options of the loss that need others: refused where they cannot act, said where they may harm."""

import logging

import pytest

from torl_trl.config import ToRLConfig
from torl_trl.errors import UserError


def config(tmp_path, **options) -> ToRLConfig:
    base = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "num_generations": 4}
    return ToRLConfig(**base | {"per_device_train_batch_size": 8} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "epsilon_high is None with loss_type: cispo"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high is 0.28 with loss_type: cispo"),
        ({"epsilon_high": 0.28}, "a rollout is used for one update"),
        ({"drop_void_turns": True, "loss_type": "grpo"}, "loss_type is grpo, whose denominator"),
        ({"mask_truncated_completions": True, "loss_type": "bnpo"}, "loss_type is bnpo, whose denominator"),
        ({"refill_limit": 2.0}, "refill_limit is 2.0 and nothing leaves groups out"),
        ({"accuracy_band": [0.9, 0.1]}, r"accuracy_band is \[0.9, 0.1\]"),
        ({"accuracy_band": [0.5]}, r"accuracy_band is \[0.5\]"),
        ({"refill_limit": -1.0}, "refill_limit is -1.0"),
        ({"resample_failures": -1}, "resample_failures is -1"),
        ({"overlong_penalty_tokens": 300, "max_completion_length": 200}, "overlong_penalty_tokens is 300"),
        (
            {"drop_dead_groups": True, "per_device_train_batch_size": 2, "generation_batch_size": 4},
            None,
        ),
        (
            {"drop_dead_groups": True, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
            "steps_per_generation is 1 with gradient_accumulation_steps: 2",
        ),
    ],
)
def test_what_cannot_act_is_refused_in_one_sentence(options, message, tmp_path):
    if message is None:
        config(tmp_path, **options)
        return
    with pytest.raises(UserError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon_high": 0.28, "num_iterations": 2},
        {"epsilon_high": 0.28, "steps_per_generation": 2},
        {"epsilon_high": 0.2},  # the same as epsilon
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"drop_dead_groups": True, "refill_limit": 3.0, "accuracy_band": [0.1, 0.9], "drop_void_turns": True},
        {"drop_dead_groups": True, "loss_type": "vespo"},
        {"scale_rewards": "none"},
    ],
)
def test_what_fits_together_is_taken(options, tmp_path):
    config(tmp_path, **options)


def test_a_sequence_level_correction_is_said_to_drop_long_rollouts(tmp_path, caplog):
    options = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    with caplog.at_level(logging.WARNING, "torl_trl"):
        config(tmp_path, **options)
        assert not caplog.records
        config(tmp_path, **options, vllm_importance_sampling_mode="sequence_mask")
    assert "long rollouts train nothing" in caplog.text


def test_a_constant_denominator_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "torl_trl"):
        config(tmp_path, loss_type="dr_grpo")
    assert "divides by rollouts x max_completion_length" in caplog.text


def test_the_recipes_of_the_paper_filter_nothing(tmp_path):
    filters = config(tmp_path).filters()
    assert filters == type(filters)() and not filters.drops_groups
