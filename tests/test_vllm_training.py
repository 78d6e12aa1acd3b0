"""Training with use_vllm: true on a CPU, as users start it: launch script, real engine, the weight push of TRL."""

import math

import pytest
from launching import launch, metrics

pytest.importorskip("vllm", reason="needs vllm: make test VLLM=1 installs it")

pytestmark = pytest.mark.vllm

VLLM = ("--use_vllm", "true", "--vllm_importance_sampling_correction", "true", "--max_steps")
SAMPLING = "sampling/sampling_logp_difference"


def test_three_steps_are_like_those_of_transformers_and_the_sampling_ratio_stays_at_1(tmp_path):
    """Both engines sample the same policies up to chance: 384 rollouts each, about 0.17 of them right and 0.45 with
    code, so that the difference of two runs has a standard deviation of 0.027 and 0.036. The tolerance is four."""
    folders = {name: tmp_path / name for name in ("vllm", "transformers")}
    for folder in folders.values():
        folder.mkdir()
    launch(folders["vllm"], *VLLM, "3")
    launch(folders["transformers"], "--max_steps", "3")
    ours, theirs = metrics(folders["vllm"]), metrics(folders["transformers"])
    assert [line["step"] for line in ours] == [1, 2, 3]
    for name, tolerance in (("accuracy", 0.11), ("tools/code_ratio", 0.145)):
        mean, peer = (sum(line[name] for line in lines) / 3 for lines in (ours, theirs))
        assert mean == pytest.approx(peer, abs=tolerance)
    for line in ours:
        assert line[f"{SAMPLING}/mean"] < 1e-5
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert line["rollout/tokens_per_second"] > 0
        for name in ("engine_idle_share", "tool_wait_share"):
            assert 0 <= line[f"rollout/{name}"] <= 1


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_that_sample_are_the_trained_ones_also_after_large_updates(tied, tmp_path):
    """Step one is blind to a push that fails: the engine loaded those weights itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("recipes/tiny/base", dtype="float32")
    assert model.config.tie_word_embeddings
    if not tied:
        model.config.tie_word_embeddings = False
        model.config.max_position_embeddings = 8192  # more than TRL lets vLLM prefill in one step
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained("recipes/tiny/base").save_pretrained(tmp_path / "base")
    words = ("--model_name_or_path", str(tmp_path / "base"), "--learning_rate", "0.03", "--save_strategy", "no")
    launch(tmp_path, *VLLM, "4", "--lr_scheduler_type", "constant", "--lr_scheduler_kwargs", "{}", *words)
    lines = metrics(tmp_path)
    assert len(lines) == 4
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert [line[f"{SAMPLING}/mean"] < 1e-5 for line in lines] == [True] * 4


@pytest.mark.slow
def test_two_processes_have_an_engine_each_and_train_together(tmp_path):
    words = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2", "--num_generations", "16")
    words += ("--eval_strategy", "steps", "--eval_steps", "2", "--max_eval_problems", "5")
    words += ("--per_device_eval_batch_size", "2", "--num_generations_eval", "1")
    launch(tmp_path, *VLLM, "2", *words, processes=2, env={"ACCELERATE_USE_CPU": "true"})
    from torl_trl.records import read_rollouts

    assert [line[f"{SAMPLING}/mean"] < 1e-5 for line in metrics(tmp_path)] == [True] * 2
    table = read_rollouts(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(table) == 32 and {row["engine"] for row in table} == {"vllm"}
    # A group lies on both ranks: its rollouts must not be the same ones twice.
    assert len({tuple(row["completion_ids"]) for row in table if row["group_id"] == 0}) > 8
