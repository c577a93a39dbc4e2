"""Differences between states; `histories.History` also writes and reads those of each state to the next."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic_core import to_json

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.journal import PatchWriter, patched, read_parts
from chameleon_ft.coordinator.state.active_plan import ActivePlan
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.protocol.messages import HostHello
from tests.coordinator.histories import AGENT, History, new_state
from tests.coordinator.plans import a_plan


@dataclass(frozen=True)
class Point:
    x: object
    y: object


@dataclass(frozen=True)
class Empty:
    pass


PLANS = [
    data_pipeline_plan(layer_costs=[1.0] * 4, dp=2, pp=pp, micro_batches=micro_batches)
    for pp in (1, 2)
    for micro_batches in (2, 4)
]
RESTS = [RestOfStep(plan=plan, routes=()) for plan in PLANS]
ACTIVE = [ActivePlan(plan=rest.plan, first_step=1, policy="a", action="b", rest=rest) for rest in RESTS]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["", "a", float("inf")])
    | st.frozensets(st.integers(0, 2), max_size=2)
    | st.builds(Empty)
    | st.sampled_from([*PLANS, *RESTS, *ACTIVE]),
    lambda inner: (
        st.builds(Point, inner, inner)
        | st.dictionaries(st.integers(0, 3), inner, max_size=3).map(FrozenMap)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=6,
)


def as_json(value: object) -> Any:
    return json.loads(to_json(value, fallback=dict, inf_nan_mode="constants"))


@given(values=st.lists(VALUES, min_size=1, max_size=6))
def test_patches_lead_from_each_value_to_the_next_with_keys_in_their_order(values: list[object]) -> None:
    writer, parts = PatchWriter(), dict[int, Any]()
    now: Any = None
    before: object = None
    for value in values:
        patch = writer.patch(value, before)
        written = as_json({"patch": patch, "parts": writer.new_parts()})
        read_parts(written["parts"], parts)
        if patch is None:
            assert value == before
        else:
            now = patched(now, written["patch"], parts)
        if patch is not None or as_json(value) == as_json(before):
            assert json.dumps(now) == json.dumps(as_json(value))
        before = value


def test_a_plan_is_written_once_wherever_it_moves_to() -> None:
    active = ACTIVE[-1]
    writer = PatchWriter()
    assert writer.patch(Point(active, None), Point(None, None)) == {"x": 3}
    written = json.dumps(as_json(writer.new_parts()))
    assert written.count('"routes"') == 2, "of the plan, and of the rest"
    assert writer.patch(Point(None, active), Point(active, None)) == {"x": [None], "y": 3}
    assert writer.patch(Point(active.rest, active.plan), Point(active, None)) == {"x": 2, "y": 1}
    assert not writer.new_parts()


def test_a_writer_forgets_old_parts_and_writes_them_again() -> None:
    writer, parts = PatchWriter(), dict[int, Any]()
    plans = [replace(PLANS[0]) for _ in range(100)]
    for plan in (*plans, plans[0]):
        patch = writer.patch(plan)
        read_parts(as_json(writer.new_parts()), parts)
        assert patched(None, patch, parts) == as_json(plan)
    assert len(parts) == 101


@pytest.mark.parametrize("patch", ["text", [], [1, 2], 7, {"x": None}, 1.5])
def test_other_json_values_are_no_patches(patch: object) -> None:
    with pytest.raises((ValueError, KeyError)):
        patched({"y": 1}, patch, {})


def test_a_change_is_as_long_as_what_has_changed() -> None:
    workers = 32
    history = History(new_state(workers=workers, steps=100, recovery=Recovery(respawn=False)))
    sizes = history.journaled.sizes
    history.train(steps=2)
    history.reap(5)
    sizes.clear()
    history.quiesce()
    reports = sizes[: workers - 2]
    assert max(reports) < 1000, "the report of a worker is written without those of the others"
    history.start()
    history.say(AGENT + 1, HostHello(host="late", slots=1))
    history.come_back(workers)
    history.wait(0.7)
    history.consider(*history.live())
    sizes.clear()
    history.prepare()
    plan = len(to_json(a_plan(range(workers), first_step=0).plan, fallback=dict))
    assert len(sizes) == workers
    assert max(sizes) < 1000 < plan, "the answer of a worker is written without the plan that it has prepared"
