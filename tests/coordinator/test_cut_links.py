"""Which workers leave when nothing passes between some pairs of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.coordinator.decisions.cluster_state import workers_to_give_up
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.recovery.generation import GenerationSpec
from tests.coordinator.plans import spec_of


def plan(dp: int, pp: int) -> GenerationSpec:
    """A plan of pipelines 0 .. pp - 1, pp .. 2 pp - 1, and so on, with one layer for each stage."""
    made = data_pipeline_plan(layer_costs=[1.0] * pp, dp=dp, pp=pp, micro_batches=dp)
    return spec_of(made)


def between(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.product(one, other))


def test_of_two_hosts_the_smaller_one_leaves() -> None:
    assert workers_to_give_up(between([0, 1], [2, 3, 4, 5]), plan(6, 1), {}) == {0, 1}
    assert workers_to_give_up(between([0, 1, 2, 3], [4, 5]), plan(6, 1), {}) == {4, 5}


def test_the_end_leaves_whose_layers_others_hold() -> None:
    # Two pipelines of three stages: 0, 1, 2 and 3, 4, 5. Without 2 and 5 the last stage has no holder.
    assert workers_to_give_up(between([2, 5], [0, 4]), plan(2, 3), {}) == {0, 4}
    # Without 0 and 1, or 2 and 3 of pipelines of one stage each, the same is left; without 0 and 3, too.
    assert len(workers_to_give_up(between([0, 1], [2, 3]), plan(4, 1), {})) == 2


def test_slow_workers_are_the_smaller_loss() -> None:
    assert workers_to_give_up([(1, 2)], plan(4, 1), {1: 0.5}) == {1}
    assert workers_to_give_up([(1, 2)], plan(4, 1), {2: 0.5}) == {2}


def test_a_worker_without_layers_is_no_loss() -> None:
    assert workers_to_give_up([(1, 9)], plan(4, 1), {}) == {9}


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1]), min_size=1))
def test_no_pair_is_left_and_fewest_leave_among_equals(pairs: set[tuple[int, int]]) -> None:
    given_up = workers_to_give_up(sorted(pairs), plan(8, 1), {})
    assert all(given_up.intersection(pair) for pair in pairs)
    fewest = min(
        len(some)
        for number in range(9)
        for some in itertools.combinations(range(8), number)
        if all(set(some).intersection(pair) for pair in pairs)
    )
    # Of equal pipelines of one worker, only the last one may not be alone.
    assert len(given_up) == fewest
