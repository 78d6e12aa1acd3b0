"""Who is left out of a step, and why; on hand-made rollouts and groups."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rewards import make_rollout

from torl_grading import Verdict
from torl_interpreters.base import ExecutionStatus
from torl_trl.filters import Drop, Filters, Sample, filter_metrics, has_void_turn, leave_out, total_reward, trains
from torl_trl.rollout import Rollout, StopReason

CODE = "```python\nprint(6 * 7)\n```\n```output"
SEEN = "\n42\n```\n"
BOX = r"So \boxed{42}."
OK = ExecutionStatus.OK


def sample(score: float, *texts: str, stop: StopReason = StopReason.EOS, statuses=()) -> Sample:
    """A graded rollout of one reward function; a NaN has no verdict."""
    rollout = make_rollout(*(texts or (BOX,)), stop=stop, statuses=statuses)
    rollout.env_mask = [1, 0, 1]
    if not math.isnan(score):
        rollout.verdict = Verdict(score=score, correct=score > 0, extracted="42", reason="equal")
    return Sample({}, rollout, 0, [score])


def group(*scores: float) -> list[Sample]:
    samples = [sample(score) for score in scores]
    for one in samples:
        if math.isnan(one.scores[0]):
            one.rollout.stop_reason = StopReason.INTERPRETER_FAILED
    return samples


def drops(samples: list[Sample], filters: Filters) -> list[Drop | None]:
    filters.drop_rollouts(samples)
    if filters.drops_groups:
        filters.drop_group(samples, [1.0])
    return [one.dropped for one in samples]


@pytest.mark.parametrize(
    ("texts", "statuses", "is_void"),
    [
        ((BOX,), (), False),
        (("I do not know.",), (), True),
        (("",), (), True),
        ((CODE, SEEN, BOX), (OK,), False),
        ((CODE, SEEN, "Fine."), (OK,), True),
        ((CODE, SEEN, CODE, SEEN, BOX), (OK, OK), False),
        (
            ("```python\nprint(1)\n```output", "\nerror\n```\n", BOX),
            (None,),
            True,
        ),  # a malformed call: no complete block
        (
            ("```python\nprint(r'\\boxed{42}')", "", "x"),
            (),
            True,
        ),  # neither a complete block nor a box outside of code
        ((CODE, "\n\\boxed{42}\n```\n", "Done."), (OK,), True),  # the box is the program's, not the model's
        (("```python\nprint(1)\n```\nand no call, without a box",), (), False),
    ],
)
def test_a_void_turn_has_neither_a_complete_block_nor_a_boxed_answer(texts, statuses, is_void):
    rollout = make_rollout(*texts, statuses=statuses)
    assert has_void_turn(rollout) is is_void
    expected = Drop.VOID_TURN if is_void else None
    assert drops([Sample({}, rollout, 0, [1.0])], Filters(void_turns=True)) == [expected]
    assert drops([Sample({}, rollout, 0, [1.0])], Filters()) == [None]


def test_a_rollout_cut_off_by_its_budget_is_left_out_where_truncated_ones_are():
    samples = [sample(1.0, stop=stop) for stop in (StopReason.LENGTH, StopReason.OBSERVATION_OVERFLOW, StopReason.EOS)]
    assert drops(samples, Filters(truncated=True)) == [Drop.TRUNCATED, Drop.TRUNCATED, None]
    assert drops(samples, Filters()) == [None] * 3


def test_a_rollout_whose_interpreter_failed_is_left_out_always():
    assert drops(group(math.nan, 1.0), Filters()) == [Drop.INTERPRETER_FAILED, None]


def test_who_is_left_out_has_an_empty_training_mask_and_keeps_its_record():
    one = sample(1.0)
    assert one.training_mask == [1, 0, 1]
    one.dropped = Drop.VOID_TURN
    assert one.training_mask == [0, 0, 0] and one.rollout.env_mask == [1, 0, 1]


@pytest.mark.parametrize("scores", [(1.0,) * 4, (-1.0,) * 4, (math.nan, 1.0, 1.0), (math.nan, math.nan)])
def test_a_group_of_equal_rewards_is_dead(scores):
    dropped = drops(group(*scores), Filters(dead_groups=True))
    expected = [Drop.INTERPRETER_FAILED if math.isnan(score) else Drop.DEAD_GROUP for score in scores]
    assert dropped == expected
    assert drops(group(*scores), Filters()).count(Drop.DEAD_GROUP) == 0


def test_a_group_in_which_only_left_out_rollouts_differ_is_dead():
    samples = [sample(1.0), sample(1.0), sample(-1.0, "void")]
    # The void one's reward stays in the mean, 1/3, so that the others have an advantage.
    assert drops(samples, Filters(dead_groups=True, void_turns=True)) == [None, None, Drop.VOID_TURN]
    truncated = [sample(1.0, stop=StopReason.LENGTH), sample(0.0), sample(-1.0, stop=StopReason.LENGTH)]
    # 0 is the mean of 1, 0 and -1: the only one that would train has no advantage.
    assert drops(truncated, Filters(dead_groups=True, truncated=True)) == [
        Drop.TRUNCATED,
        Drop.DEAD_GROUP,
        Drop.TRUNCATED,
    ]


@pytest.mark.parametrize(
    ("scores", "in_band"),
    [
        ((1, -1, -1, -1), True),
        ((1, 1, 1, -1), False),
        ((-1, -1, -1, -1), False),
        ((1, math.nan, -1, -1, -1), True),  # of four that were graded
        ((math.nan, math.nan), False),
    ],
)
def test_a_band_keeps_groups_by_their_share_of_right_answers(scores, in_band):
    samples = group(*scores)
    dropped = drops(samples, Filters(accuracy_band=(0.25, 0.5)))
    assert trains(samples) is in_band
    assert (Drop.OUT_OF_BAND in dropped) is (not in_band and not all(map(math.isnan, scores)))


def test_a_total_is_trl_s_weighted_sum_without_functions_that_gave_none():
    assert total_reward([1.0, -0.5], [1.0, 2.0]) == 0.0
    assert total_reward([1.0, math.nan], [3.0, 2.0]) == 3.0
    assert math.isnan(total_reward([math.nan, math.nan], [1.0, 1.0]))


def test_the_metrics_count_every_rollout_that_was_sampled():
    step = group(1, -1) + group(1, 1)
    left_out = group(1, -1)
    for start in (0, 2):
        Filters(dead_groups=True).drop_group(step[start : start + 2], [1.0])
    leave_out(left_out, Drop.SURPLUS)
    ratios = filter_metrics(step, left_out, group_size=2)
    assert (ratios["filter/dead_group"].numerator, ratios["filter/dead_group"].denominator) == (2, 6)
    assert (ratios["filter/surplus"].numerator, ratios["filter/void_turn"].numerator) == (2, 0)
    assert (ratios["filter/full"].numerator, ratios["filter/full"].denominator) == (1, 2)
    assert filter_metrics(step[:3], left_out, group_size=2)["filter/full"].denominator == 0  # ranks share a group
    assert (ratios["filter/extra_generation"].numerator, ratios["filter/extra_generation"].denominator) == (2, 4)


@given(st.lists(st.sampled_from([1.0, -1.0, 0.5, math.nan]), min_size=1, max_size=8))
def test_a_group_is_dead_exactly_where_trl_would_give_no_advantage(scores):
    samples = group(*scores)
    drops(samples, Filters(dead_groups=True))
    known = [score for score in scores if not math.isnan(score)]
    assert trains(samples) is (len(set(known)) > 1)


def test_reading_a_void_turn_takes_a_rollout_of_any_kind():
    assert has_void_turn(Rollout(0, [1], stop_reason=StopReason.EOS)) is False  # not one turn: none is void
