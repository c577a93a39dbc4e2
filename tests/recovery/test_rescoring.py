"""A decision with the figures of now is the one that would be made now, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.recovery import POLICIES, Checkpoints, DecisionContext, decide, rescore
from chameleon_ft.schedule import CostModel
from tests.examples import examples
from tests.recovery.contexts import after, context, contexts, rate_of

factors = st.sampled_from([0.5, 1.0, 1.25, 3.0])
seconds = st.sampled_from([0.0, 0.25, 8.0])


@settings(max_examples=examples(60), deadline=None)
@given(
    before=contexts(),
    policy=st.sampled_from(sorted(POLICIES)),
    horizons_s=st.tuples(st.sampled_from([6.0, 30.0, 1e4]), st.sampled_from([6.0, 30.0, 1e4])),
    step_factor=factors,
    transfer_factor=factors,
    phases=st.builds(StallModel, detect_s=seconds, stop_s=seconds, decide_s=seconds, regroup_s=seconds),
    repeat_s=seconds,
    unsaved_s=seconds,
    migrates=st.booleans(),
)
def test_it_is_what_would_be_decided_now(
    before: DecisionContext,
    policy: str,
    horizons_s: tuple[float, float],
    step_factor: float,
    transfer_factor: float,
    phases: StallModel,
    repeat_s: float,
    unsaved_s: float,
    migrates: bool,
) -> None:
    before = replace(before, migrates=migrates)
    now = replace(
        before,
        step_factor=step_factor,
        transfer_factor=transfer_factor,
        phases=phases,
        repeat_s=repeat_s,
        checkpoints=Checkpoints(unsaved_s=unsaved_s, longest_s=20.0),
    )
    # The published rule weighs transfers when it proposes.
    if policy == "paper":
        horizons_s, now = (horizons_s[0],) * 2, replace(now, transfer_factor=1.0, phases=before.phases)
    old = decide(before, policy, rate_of(horizons_s[0], before))
    found = rescore(old, before=before, now=now, failures=rate_of(horizons_s[1], now))
    expected = decide(now, policy, rate_of(horizons_s[1], now))
    if found is None:
        assert old.chosen != expected.chosen
        return
    assert found.course is old.course
    assert len(found.candidates) == len(expected.candidates)
    for one, other in zip(found.candidates, expected.candidates, strict=True):
        assert (one.policy, one.moved_bytes, one.reason) == (other.policy, other.moved_bytes, other.reason)
        for name in ("step_s", "stall_s", "transfer_s", "migration_s", "migration_step_s", "samples"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-9), name


def test_nothing_is_changed_where_nothing_has_changed() -> None:
    now = after(context(dp=3, pp=2), 1)
    failures = rate_of(100.0, now)
    old = decide(now, "chameleon", failures)
    assert rescore(old, before=now, now=now, failures=failures) == old


def test_steps_are_longer_by_as_much_as_operations_are() -> None:
    now = after(context(dp=3, pp=2, link=Link(0.0, float("inf"))), 1)
    cluster = Cluster(now.costs.cluster.workers, Link(0.0, float("inf")), Link(0.0, float("inf")))
    now = replace(now, costs=CostModel(now.costs.workload, cluster))
    layers = tuple(each.slowed(1.25) for each in now.costs.workload.layers)
    slower = replace(now, costs=CostModel(replace(now.costs.workload, layers=layers), cluster))
    old = decide(now, "reroute", rate_of(100.0, now))
    found = rescore(old, before=now, now=slower, failures=rate_of(100.0, slower))
    expected = decide(slower, "reroute", rate_of(100.0, now))
    assert found is not None
    assert found.chosen is not None
    assert expected.chosen is not None
    assert found.chosen.step_s == pytest.approx(expected.chosen.step_s)


def test_when_another_one_is_best_now_it_is_of_no_use() -> None:
    now = after(context(dp=3, pp=2, share=8), 1)
    old = decide(now, "chameleon", rate_of(1e5, now))
    assert old.chosen is not None
    assert old.chosen.policy == "repartition"
    assert rescore(old, before=now, now=now, failures=rate_of(1.0, now)) is None
