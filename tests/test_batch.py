"""Batch arithmetic: what a recipe states is what a step is, on any number of processes, or it is refused."""

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import as_rank_0_of

from torl_trl.batch import accumulation_steps
from torl_trl.config import ToRLConfig
from torl_trl.errors import UserError


def config(tmp_path, **options) -> ToRLConfig:
    paper = {"prompts_per_step": 128, "num_generations": 16, "per_device_train_batch_size": 16}
    return ToRLConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | paper | options)


@pytest.mark.parametrize(("processes", "steps"), [(1, 128), (2, 64), (8, 16), (16, 8)])
def test_the_paper_s_step_is_the_same_on_any_number_of_processes(processes, steps, tmp_path):
    assert accumulation_steps(128, 16, 16, processes) == steps
    with as_rank_0_of(processes):
        args = config(tmp_path)
    assert args.gradient_accumulation_steps == args.steps_per_generation == steps
    assert args.generation_batch_size == 128 * 16


@given(st.integers(1, 300), st.integers(2, 64), st.integers(1, 128), st.integers(1, 1024))
def test_what_is_derived_multiplies_back_or_is_refused(prompts, generations, per_device, processes):
    rollouts, together = prompts * generations, per_device * processes
    if rollouts % together:
        with pytest.raises(UserError):
            accumulation_steps(prompts, generations, per_device, processes)
    else:
        assert accumulation_steps(prompts, generations, per_device, processes) * together == rollouts


@given(st.integers(1, 300), st.integers(2, 64), st.integers(1, 128), st.integers(1, 64))
def test_every_value_that_a_refusal_names_works(prompts, generations, per_device, processes):
    if prompts * generations % (per_device * processes) == 0:
        return
    with pytest.raises(UserError) as error:
        accumulation_steps(prompts, generations, per_device, processes)
    named = str(error.value).partition(": give ")[2]
    for size in numbers(r"a per_device_train_batch_size of ([\d, ]+)", named):
        accumulation_steps(prompts, generations, size, processes)
    for count in numbers(r"one of ([\d, ]+) processes", named):
        accumulation_steps(prompts, generations, per_device, count)
    (multiple,) = numbers(r"a multiple of (\d+)", named)
    accumulation_steps(3 * multiple, generations, per_device, processes)
    assert all(k * generations % (per_device * processes) for k in range(1, multiple))


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(number) for number in found[1].split(", ")] if found else []


def test_a_step_that_cannot_be_shared_is_refused_with_what_works():
    with pytest.raises(UserError) as error:
        accumulation_steps(128, 16, 16, 6)
    assert str(error.value) == (
        "prompts_per_step 128 x num_generations 16 = 2048 rollouts cannot be shared by 6 x "
        "per_device_train_batch_size 16: give a prompts_per_step that is a multiple of 6 or one of "
        "1, 2, 4, 8, 16, 32, 64, 128 processes."
    )
    with pytest.raises(UserError, match="give a per_device_train_batch_size of 1, 2, 4, 8, 16, 32, 64, 128, 256 or"):
        accumulation_steps(128, 16, 24, 8)


@pytest.mark.parametrize(
    ("name", "value", "derived"),
    [
        ("gradient_accumulation_steps", 1, 128),
        ("gradient_accumulation_steps", 64, 128),
        ("steps_per_generation", 64, 128),
        ("generation_batch_size", 1024, 2048),
    ],
)
def test_what_contradicts_the_derived_value_is_refused(name, value, derived, tmp_path):
    with pytest.raises(UserError) as error:
        config(tmp_path, **{name: value})
    assert str(error.value) == (
        f"{name} is {value} and prompts_per_step 128 makes it {derived} (number of processes: 1): "
        f"remove {name} or prompts_per_step."
    )


def test_what_agrees_with_the_derived_value_is_taken(tmp_path):
    args = config(tmp_path, gradient_accumulation_steps=128, steps_per_generation=128, generation_batch_size=2048)
    assert (args.gradient_accumulation_steps, args.generation_batch_size) == (128, 2048)


@pytest.mark.parametrize("name", ["prompts_per_step", "per_device_train_batch_size"])
def test_a_number_below_one_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=f"^{name} is 0: give a number of at least 1.$"):
        config(tmp_path, **{name: 0})


def test_what_was_derived_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torl_trl")
    config(tmp_path)
    said = "A step: 128 prompts x 16 rollouts = 1 (processes) x 16 (per device) x 128 (gradient accumulation)."
    assert [record.message for record in caplog.records] == [said]


def test_without_it_all_is_as_in_trl(tmp_path):
    args = config(tmp_path, prompts_per_step=None)
    assert (args.gradient_accumulation_steps, args.steps_per_generation, args.generation_batch_size) == (1, 1, 16)
    args = config(tmp_path, prompts_per_step=None, gradient_accumulation_steps=4, steps_per_generation=8)
    assert (args.gradient_accumulation_steps, args.generation_batch_size) == (4, 128)


def test_processes_that_do_not_work_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")  # and no GPU, and use_cpu: false: each process would train by itself
    with pytest.raises(UserError, match="The launcher started 8 processes and 1 work together"):
        config(tmp_path, use_cpu=False)
