"""The simulated scale: what must hold whatever the constants are, and the page shows the committed numbers."""

import json

import pytest
import scale
from rollout_costs import FAST, QWEN_1_5B, QWEN_7B, SLOW, EngineCosts, Workload
from rollout_workload import workload

PAGE = scale.RESULTS.parents[1] / "SCALE.md"
SMALL, LARGE = EngineCosts(model=QWEN_1_5B), EngineCosts(model=QWEN_7B)


def step(gpus, *, batch="constant", tool=FAST, costs=SMALL):
    return scale.describe(batch, gpus, tool, 0, costs, scale.Update())


def test_the_paper_s_size_is_the_same_step_as_a_constant_and_as_a_scaled_batch():
    constant, scaled = (step(8, batch=batch) for batch in scale.BATCHES)
    assert constant == scaled
    assert constant["seconds"] == pytest.approx(constant["generation_seconds"] + constant["update_seconds"])
    assert constant["rollouts_per_second"] * constant["seconds"] == pytest.approx(2048)


def test_slow_programs_take_more_cores_and_a_step_is_near_the_one_with_a_core_for_each():
    fast, slow = (step(64, tool=tool) for tool in (FAST, SLOW))
    assert slow["cores"] > fast["cores"] >= 64  # each rank has one at least
    assert slow["cores"] >= slow["cores_busy"]
    free = scale.generation_seconds("constant", 64, SLOW, 0, SMALL, 32) + slow["update_seconds"]
    assert free <= slow["seconds"] <= scale.NEAR * free
    fewer = scale.generation_seconds("constant", 64, SLOW, 0, SMALL, int(slow["cores"]) // 64 - 1)
    assert fewer + slow["update_seconds"] > scale.NEAR * free


def test_more_gpus_make_a_constant_batch_faster_but_each_of_them_does_less():
    steps = [step(gpus, costs=LARGE) for gpus in (8, 64, 512)]
    seconds = [found["seconds"] for found in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[1] < 8 and seconds[1] / seconds[2] < 8


def test_an_update_costs_padded_tokens_the_sum_of_gradients_and_a_fixed_time():
    update = scale.Update(micro_batch=1)
    scripts = workload(Workload(4), 1, FAST)
    tokens = sum(200 + script.tokens + 16 + script.observation_chars[0] // 4 for script in scripts)
    compute = 8 * tokens * QWEN_1_5B.parameters / (989e12 * 0.3)
    assert update.seconds(scripts, QWEN_1_5B, 1) == pytest.approx(compute + 5)
    assert update.seconds(scripts, QWEN_1_5B, 8) == pytest.approx(compute + 5 + 7 * QWEN_1_5B.parameters / 350e9)
    assert scale.Update(micro_batch=4).seconds(scripts, QWEN_1_5B, 1) > compute + 5


def test_the_page_shows_the_committed_numbers_and_says_that_they_are_simulated():
    page, results = PAGE.read_text(encoding="utf-8"), json.loads(scale.RESULTS.read_text(encoding="utf-8"))
    assert scale.table(results, scale.GPUS) in page
    assert f"gives {results['paper/seconds']:.0f} s for a step" in page
    assert results["simulated"] == "yes" and "simulated" in page.lower()
