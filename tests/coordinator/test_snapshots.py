"""Snapshots in the memory of workers: which one counts, in histories, and the plans that go back to one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import Recovery, RunConfig, Snapshots
from chameleon_ft.coordinator.commands import Command
from chameleon_ft.coordinator.decisions.cluster_state import ClusterState
from chameleon_ft.coordinator.decisions.recovery_plan import decide
from chameleon_ft.coordinator.decisions.redundancy import with_keepers
from chameleon_ft.coordinator.events import Considered, Decided, Event
from chameleon_ft.coordinator.state.checkpoints import Snapshot
from chameleon_ft.coordinator.state.checkpoints import Snapshots as StateOfSnapshots
from chameleon_ft.coordinator.state.members import Members
from chameleon_ft.cost.snapshots import host_bytes, snapshot_memory
from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.plan.shards import shard_optimizer
from chameleon_ft.plan.snapshots import lay_out_snapshot
from chameleon_ft.protocol.messages import (
    BeginSnapshot,
    CheckpointUnreadable,
    Hello,
    SnapshotResolved,
    SnapshotTaken,
    StateDiffers,
)
from chameleon_ft.protocol.parts import Member
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, Workload
from tests.coordinator.histories import History, new_state
from tests.coordinator.plans import spec_of
from tests.coordinator.test_recovery_plan import PLAN, RATE, cluster_state, context_of, quiesced
from tests.golden import refused

EVERY_THIRD = Snapshots(every=3)
HOSTS = {worker: f"host{worker}" for worker in range(6)}
SNAPSHOT = Snapshot(5, lay_out_snapshot(PLAN.placement, HOSTS))
SPREAD = CostModel(
    Workload((LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=100, optimizer_bytes=200),) * 4, 6, 2),
    Cluster(tuple(Worker(worker, host) for worker, host in HOSTS.items()), Link(1e-3, 1e9), Link(1e-3, 1e9)),
)


def keepers_of(plan: GenerationSpec, snapshots: Snapshots, memory: Mapping[str, int]) -> GenerationSpec:
    return with_keepers(replace(plan, costs=SPREAD), RunConfig(snapshots=snapshots), memory)


class SnapshotHistory(History):
    """Histories of plans with snapshots."""

    def happen(self, event: Event) -> tuple[Command, ...]:
        match event:
            case Decided(spec=spec):
                event = replace(event, spec=self.kept(spec))
            case Considered(plans=plans):
                event = replace(event, plans=tuple(map(self.kept, plans)))
        return super().happen(event)

    off: str = ""
    """Why none are taken."""

    def kept(self, plan: GenerationSpec) -> GenerationSpec:
        if self.off:
            return replace(plan, no_snapshots=self.off)
        return keepers_of(plan, EVERY_THIRD, {})

    def take(self, *workers: int, step: int | None = None, generation: int | None = None) -> None:
        for worker in workers:
            self.tell(
                worker,
                SnapshotTaken(
                    generation=self.state.generation if generation is None else generation,
                    step=self.state.committed if step is None else step,
                    held_up_s=0.25,
                ),
            )

    @property
    def complete(self) -> int | None:
        found = self.state.snapshots.complete
        return None if found is None else found.step


def training(**changes: Any) -> SnapshotHistory:
    """A run that has taken three steps."""
    history = SnapshotHistory(new_state(**{"snapshots": EVERY_THIRD, **changes}))
    history.train()
    return history


def resolved(history: History) -> list[tuple[int, bool]]:
    """Messages to a worker about snapshots; all workers have to get equal ones."""
    told = [
        [(each.step, each.is_complete) for each in history.sent(SnapshotResolved, to=history.connection(worker))]
        for worker in history.live()
    ]
    assert all(each == told[0] for each in told)
    return told[0]


# --- which one counts ------------------------------------------------------------------------------------------------


def test_a_snapshot_is_complete_once_all_workers_have_their_parts() -> None:
    history = training()
    history.commit(snapshot=True)
    history.take(0, 1, 2)
    assert (history.complete, resolved(history)) == (None, [])
    history.take(3)
    assert (history.complete, resolved(history)) == (4, [(4, True)])
    (event,) = history.events("snapshot")
    assert (event["step"], event["held_up_s"]) == (4, 0.25)


def test_one_that_a_loss_cuts_short_is_never_used() -> None:
    history = training()
    history.commit(snapshot=True)
    history.take(0, 1, 2, 3)
    history.commit(snapshot=True)
    generation = history.state.generation
    history.take(0, 1, 2)
    history.reap(3)
    history.take(0, 1, 2, generation=generation)
    assert (history.complete, history.state.snapshots.taking) == (4, None)
    history.quiesce(0, 1, 2)
    history.start()
    history.take(0, 1, 2, step=5)
    assert history.complete == 4


def test_a_report_of_an_earlier_generation_does_not_count() -> None:
    history = training()
    before = history.state.generation
    history.reap(3)
    history.quiesce(0, 1, 2)
    history.start()
    history.commit(snapshot=True)
    history.take(0, 1)
    history.take(2, generation=before)
    assert history.complete is None
    history.take(2)
    assert history.complete == history.state.committed


def test_none_begins_at_a_switch_or_the_end() -> None:
    history = training()
    history.commit(snapshot=True, finish=True)
    assert history.state.snapshots.taking is None


def test_a_switch_gives_up_the_one_that_is_being_taken() -> None:
    history = training(recovery=Recovery(respawn=True, respawn_delay_s=0.0))
    history.reap(3)
    history.quiesce(0, 1, 2)
    history.start()
    history.wait(1.0)
    history.come_back(3)
    history.wait(1.0)
    history.consider(0, 1, 2, 3)
    history.commit(snapshot=True)
    step = history.state.committed
    history.take(0, 1, 2)
    assert history.complete == step
    history.commit(snapshot=True)
    history.take(0, 1)
    history.prepare()
    history.commit(switch=True, snapshot=True)
    history.take(2, step=step + 1)
    assert history.complete == step
    assert [each.is_complete for each in history.sent(SnapshotResolved, to=history.connection(0))] == [True, False]
    history.start()
    history.commit(snapshot=True)
    history.take(0, 1, 2, 3)
    assert history.complete == step + 3


def test_what_a_lost_worker_had_is_lost_with_it() -> None:
    history = training()
    history.commit(snapshot=True)
    history.take(0, 1, 2, 3)
    assert history.state.snapshots.restorable is not None
    for worker in (3, 2, 1):
        history.reap(worker)
    complete = history.state.snapshots.complete
    assert complete is not None
    assert {keeper for _, own in complete.layout.keepers for keeper in own} == {0}


def test_a_coordinator_that_takes_over_goes_on_counting() -> None:
    history = training()
    history.commit(snapshot=True)
    history.take(0, 1)
    history.take_over()
    history.return_agent()
    for worker in range(4):
        history.return_worker(worker, known=history.state.generation)
    history.take(2, 3)
    assert history.complete == 4
    history.take_over()
    history.return_agent()
    before = len(history.sent(SnapshotResolved))
    for worker in range(4):
        history.return_worker(worker, known=history.state.generation)
    assert len(history.sent(SnapshotResolved)) == before + 4, "workers may have missed it"


def test_a_damaged_one_is_not_used_again() -> None:
    history = training()
    history.commit(snapshot=True)
    history.take(0, 1, 2, 3)
    history.reap(3)
    history.quiesce(0, 1, 2)
    history.tell(
        1,
        CheckpointUnreadable(
            generation=history.state.generation, step=4, error="a block", is_damaged=True, is_snapshot=True
        ),
    )
    assert history.complete is None
    assert history.state.checkpoints.is_reread, "what workers hold does not count"
    (event,) = history.events("snapshot_unreadable")
    assert event["message"] == "that of step 4 is damaged and is not used: worker 1: a block"


def test_one_that_may_be_wrong_is_not_used() -> None:
    history = training()
    history.commit(snapshot=True)
    history.take(0, 1, 2, 3)
    checksums = ((0, ((0, 1), (1, 2), (2, 3), (3, 4))),)
    history.tell(0, StateDiffers(generation=history.state.generation, step=4, checksums=checksums))
    assert history.complete is None


def test_workers_are_asked_for_one_when_it_pays() -> None:
    history = training(snapshots=Snapshots(every="auto"))
    requests = history.sent(BeginSnapshot, to=history.connection(0))
    assert [each.request for each in requests] == [1], "the first one measures the cost"
    history.commit(snapshot=True)
    history.take(0, 1, 2, 3)
    history.commit()
    assert history.state.snapshots.schedule.cost_s == pytest.approx(0.25, abs=0.01)
    interval_s = history.state.snapshots.schedule.interval_s
    assert interval_s is not None
    assert interval_s > 1.0
    assert len(history.sent(BeginSnapshot, to=history.connection(0))) == 1


# --- whether any are taken -------------------------------------------------------------------------------------------

START = replace(spec_of(PLAN, load="initial"), costs=SPREAD)
NEEDED = host_bytes(snapshot_memory(SNAPSHOT.layout, SPREAD.workload), HOSTS)


def test_by_default_they_are_taken_where_they_fit_the_memory_of_every_host() -> None:
    for memory in ({}, {host: 2 * size for host, size in NEEDED.items()}):
        plan = keepers_of(START, Snapshots(), memory)
        assert (plan.snapshots, plan.no_snapshots) == (SNAPSHOT.layout, ""), "unknown memory forbids nothing"
    plan = keepers_of(START, Snapshots(), {"host0": 10 * NEEDED["host0"], "host4": 2 * NEEDED["host4"] - 1})
    assert plan.snapshots is None
    assert re.fullmatch(
        r"those of the workers on host4 would take .+, more than 50% of the .+ that were available there",
        plan.no_snapshots,
    )


def test_an_interval_that_is_configured_asks_for_them_whatever_the_memory() -> None:
    assert keepers_of(START, EVERY_THIRD, dict.fromkeys(NEEDED, 1)).snapshots == SNAPSHOT.layout
    assert keepers_of(START, Snapshots(every=0), {}) == START


def test_by_default_none_are_taken_where_all_workers_hold_everything() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=2, pp=1, micro_batches=4, workers=[0, 1])
    kept = keepers_of(replace(START, plan=plan), Snapshots(), {})
    assert (kept.snapshots, kept.no_snapshots) == (None, "")


def test_a_run_says_once_that_it_takes_none() -> None:
    history = SnapshotHistory(new_state())
    history.off = "there is no room"
    history.train()
    history.reap(3)
    history.quiesce(0, 1, 2)
    history.start()
    (event,) = history.events("snapshots_off")
    assert event["reason"] == "there is no room"
    assert event["message"] == "none are taken, because there is no room"
    assert not history.sent(BeginSnapshot)


def test_a_run_that_has_trained_without_any_does_not_go_back_to_its_beginning() -> None:
    for off in ("", "there is no room"):
        history = SnapshotHistory(replace(new_state(), snapshots=StateOfSnapshots(is_fresh=True)))
        history.off = off
        history.train()
        assert history.state.snapshots.is_fresh is not bool(off)


def test_the_memory_of_a_host_is_what_its_first_worker_found() -> None:
    members = Members(count=3)
    for worker, host, memory in ((0, "a", 100), (1, "a", 60), (2, "b", None)):
        members = members.joined(worker, Hello(member=Member(worker, 0), host=host, memory_bytes=memory), now=0.0)
    assert members.host_memory() == {"a": 100}
    assert members.fence(0).host_memory() == {"a": 60}


# --- the way back ----------------------------------------------------------------------------------------------------


def back(lost: Collection[int], **changes: Any) -> tuple[GenerationSpec, ClusterState]:
    live = [worker for worker in range(6) if worker not in lost]
    layout = SNAPSHOT.layout
    for worker in lost:
        layout = layout.without(worker)
    cluster = cluster_state({worker: quiesced(7) for worker in live})
    cluster = replace(cluster, **{"snapshot": Snapshot(SNAPSHOT.step, layout), **changes})
    now = context_of(cluster)
    return decide(cluster, now, policy="reroute", rate=RATE)[0], cluster


def test_all_go_back_to_the_snapshot_if_no_holder_is_left() -> None:
    plan, cluster = back([1, 3, 5])
    assert (plan.load, plan.first_step, plan.policy) == ("snapshot", 5, "snapshot")
    assert "back to the snapshot of step 5" in plan.action
    assert "2 steps repeated" in plan.action
    assert plan.restoration is not None
    assert {each.part.layer for each in plan.restoration.rebuilt} == {2, 3}
    assert plan.transition is not None
    kept: Mapping[int, Collection[int]] = plan.transition.keep
    moved = {(m.destination, layer) for m in plan.transition.transfer.messages for layer in m.layers}
    for worker in plan.plan.workers:
        assert worker in cluster.live
        layers = set(plan.plan.placement.layers_of(worker))
        assert layers <= {*kept[worker], *(layer for to, layer in moved if to == worker)}


def test_a_newer_checkpoint_comes_before_it_and_one_of_its_step_does_not() -> None:
    assert back([1, 3, 5], checkpoints=[3, 6])[0].load == 6
    assert back([1, 3, 5], checkpoints=[5])[0].load == "snapshot"


def test_before_the_first_snapshot_all_go_back_to_the_beginning() -> None:
    plan, _ = back([1, 3, 5], snapshot=None, is_fresh=True)
    assert (plan.load, plan.first_step) == ("initial", 0)
    assert "back to the beginning" in plan.action
    with pytest.raises(NoHolderError):
        back([1, 3, 5], snapshot=None)


def test_a_layer_that_is_still_held_needs_no_snapshot() -> None:
    plan, _ = back([1, 3])
    assert plan.load == "keep"


def test_without_any_state_to_go_back_to_it_is_said_what_is_lost() -> None:
    sharding = shard_optimizer(PLAN.placement, HOSTS, 2)
    with refused(NoHolderError):
        back([1, 3, 5], sharding=sharding, snapshot=None)
    with refused(NoHolderError):
        back([1, 3], sharding=sharding, snapshot=None)


def test_owners_of_slices_are_those_of_the_snapshot() -> None:
    sharding = shard_optimizer(PLAN.placement, HOSTS, 1)
    layout = lay_out_snapshot(PLAN.placement, HOSTS, sharding).without(5)
    plan, _ = back([5], sharding=sharding, snapshot=Snapshot(5, layout))
    assert plan.load == "snapshot"
    assert "the optimizer's state of layers 2-3 is lost" in plan.action
    assert plan.restoration is not None
    assert plan.restoration.sharding is not None
    assert not plan.restoration.sharding.lost_layers
    assert {each.part.layer for each in plan.restoration.rebuilt} == {2, 3}
    assert all(each.part.stop > 0 for each in plan.restoration.rebuilt), "parameters have other holders"
