"""Dead groups are replaced within the step: what is asked for, what is chosen, where the stream stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_filters import group

from torl_trl.filters import Drop, Filters, trains
from torl_trl.refill import ProblemStream, Refill, shares_of_round


class OneProcess:
    num_processes, process_index = 1, 0


def made(*, live: bool) -> list:
    samples = group(1, -1) if live else group(1, 1)
    Filters(dead_groups=True).drop_group(samples, [1.0])
    return samples


def filled(groups: list, answers: list[bool], limit: float):
    """Fill a step from problems that make live and dead groups as `answers` say, in turn."""
    refill, answers, asked = Refill(10, 1, limit, OneProcess()), iter(answers), []

    def sample(problems, position, offset):
        asked.append((len(problems), position, offset))
        return [made(live=next(answers)) for _ in problems]

    return *refill.fill(groups, sample), asked, refill


def test_a_full_step_samples_nothing_more():
    groups = [made(live=True), made(live=True)]
    chosen, left_out, asked, _ = filled(groups, [], limit=3)
    assert (chosen, left_out, asked) == (groups, [], [])


def test_dead_groups_make_room_for_those_that_train_and_the_rest_is_surplus():
    first = [made(live=True), made(live=False), made(live=True), made(live=False)]
    chosen, left_out, asked, refill = filled(first, [True, True, False, True], limit=3)
    assert asked == [(4, 0, 0)]  # two are missing, and half of the groups train
    assert all(map(trains, chosen)) and [chosen[0], chosen[2]] == [first[0], first[2]]
    assert len(chosen) == 4 and len(left_out) == 4
    assert [sample.dropped for one in left_out for sample in one].count(Drop.SURPLUS) == 2
    assert refill.stream.position == 4


def test_rounds_go_on_until_the_step_is_full_or_the_limit_is_reached():
    first = [made(live=False), made(live=False)]
    chosen, left_out, asked, _ = filled(first, [False] * 6, limit=3)
    assert sum(count for count, *_ in asked) == 6
    assert chosen == first and len(left_out) == 6  # what nobody could replace stays, and trains nothing
    chosen, left_out, asked, _ = filled([made(live=False), made(live=True)], [False, False, True, False], limit=2)
    assert [(count, offset) for count, _, offset in asked] == [(2, 0), (2, 2)]  # four of which two are left
    assert all(map(trains, chosen)) and len(left_out) == 4


def test_without_a_limit_nothing_is_sampled_again():
    first = [made(live=False), made(live=True)]
    assert filled(first, [], limit=0)[:3] == (first, [], [])


ranks = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20), st.integers(0, 24)), min_size=1, max_size=5)


@given(ranks, st.integers(1, 8))
def test_no_rank_is_asked_for_more_than_it_has_left_nor_for_anything_when_it_is_full(states, wanted):
    training = [live for live, _, _ in states]
    sampled = [live + dead for live, dead, _ in states]
    left = [rest for *_, rest in states]
    asked = shares_of_round(training, sampled, left, wanted)
    for count, live, rest in zip(asked, training, left, strict=True):
        assert 0 <= count <= rest
        assert (count == 0) is (live >= wanted or rest == 0)
        assert count <= 4 * max(0, wanted - live)


@given(st.integers(1, 20), st.integers(0, 2**40))
def test_a_stream_gives_every_problem_once_a_pass_and_anyone_the_same(size, seed):
    stream = ProblemStream(size, seed)
    for number in range(3):
        assert sorted(stream[number * size + place] for place in range(size)) == list(range(size))
    again = ProblemStream(size, seed)
    assert [again[position] for position in (2 * size, 0)] == [stream[position] for position in (2 * size, 0)]


def test_passes_differ():
    stream = ProblemStream(50, 1)
    assert [stream[place] for place in range(50)] != [stream[50 + place] for place in range(50)]


@pytest.mark.parametrize("position", [0, 17])
def test_the_position_is_saved_and_found_again(position, tmp_path):
    refill = Refill(10, 1, 2.0, OneProcess())
    refill.stream.position = position
    refill.save(tmp_path)
    other = Refill(10, 1, 2.0, OneProcess())
    other.load(tmp_path)
    assert other.stream.position == position
    other.load(tmp_path / "of a run without a refill")
    assert other.stream.position == 0
