"""A step that is interrupted anywhere, and continued by the program of its rest, has the sums of the whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.sync import gradient_segments
from chameleon_ft.worker.communicators.base import CommunicationError, InFlight, tag_of
from chameleon_ft.worker.execution import reductions
from tests.worker.interrupted import LAYERS, Cluster, Worker, plan_of_pairs
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import toy_job

F, B, W = OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD


def test_an_activation_is_held_if_its_gradient_is_sent_again_before_it_is_used() -> None:
    """With gloo, what is released before its receiver asks for it never arrives."""
    low, high = LayerRange(0, 2), LayerRange(2, LAYERS)
    route = Route(0, (Hop(0, low), Hop(1, high)))
    plan = Plan(Placement(LAYERS, {0: (low,), 1: (high,)}), (route,))
    forward, backward = (Operation.of(kind, route, 0) for kind in (F, B))

    def stop_after_one(count: int) -> None:
        if count == 1:
            raise CommunicationError(None, "this is the moment")

    for resent_gradients, is_held in (((), False), (((0, 2),), True)):
        board = Switchboard()
        line = Line(0, board)
        worker = Worker(0, toy_job(LAYERS), plan, gradient_segments(plan.placement))
        own = worker.executor(line)
        with pytest.raises(CommunicationError):
            own.run(worker.state, [forward, backward], after=stop_after_one)
        worker.state.in_flight.clear()
        board.messages[1, 0, tag_of((False, 0, 2), num_layers=LAYERS, is_rest=True)].put(
            torch.ones(own.rank.boundaries[1].leaves[0].shape)
        )
        own.resume(
            worker.state,
            [backward],
            resends=[(0, 1, True, 1)],
            resent_gradients=resent_gradients,
            counted=(),
            after=lambda _: None,
        )
        assert ((True, 0, 1) in worker.state.in_flight) == is_held
        assert ((True, 0, 1) in worker.state.results) == is_held


VARIANTS = [
    pytest.param(split, recompute, tied, id=f"{'split' if split else 'fused'}{'-again' * recompute}{'-tied' * tied}")
    for split, recompute, tied in ((False, False, False), (False, True, True), (True, False, True), (True, True, False))
]


@pytest.mark.parametrize(("split", "recompute", "tied"), VARIANTS)
def test_whenever_a_step_is_interrupted_its_rest_completes_it(split: bool, recompute: bool, tied: bool) -> None:
    plan = plan_of_pairs(split=split, recompute=recompute)
    for worker in plan.workers:
        for count in range(len(Cluster(plan, tied=tied).program[worker]) + 1):
            cluster = Cluster(plan, tied=tied)
            cluster.run(stop=(worker, count))
            cluster.lose(worker)
            cluster.run(cluster.rest())
            cluster.assert_is_the_whole_step()


@pytest.mark.parametrize("split", [False, True])
def test_stages_before_the_first_that_is_trained_get_no_gradients(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a step nor in its rest; workers 0 and 2 have these stages alone."""
    plan, receivers, send = plan_of_pairs(split=split, recompute=True), set[int](), Line.send

    def noted(self: Line, tensor: Tensor, *, peer: int, **options: Any) -> InFlight:
        receivers.add(peer)
        return send(self, tensor, peer=peer, **options)

    monkeypatch.setattr(Line, "send", noted)
    job = toy_job(LAYERS)
    frozen = [lambda factory=factory: factory().requires_grad_(False) for factory in job.layers[:2]]
    job = replace(job, layers=[*frozen, *job.layers[2:]])
    for worker in plan.workers:
        for count in range(0, len(Cluster(plan, tied=False).program[worker]) + 1, 2):
            cluster = Cluster(plan, tied=False, job=job)
            cluster.run(stop=(worker, count))
            cluster.lose(worker)
            cluster.run(cluster.rest())
            cluster.assert_is_the_whole_step()
    assert receivers == {1, 3, 4}


@pytest.mark.parametrize(("split", "recompute", "tied"), VARIANTS)
@pytest.mark.parametrize(("first", "second"), [(1, 3), (0, 2), (3, 0), (4, 1)])
def test_a_rest_that_is_interrupted_has_a_rest(
    first: int, second: int, split: bool, recompute: bool, tied: bool
) -> None:
    plan = plan_of_pairs(split=split, recompute=recompute)
    for count in range(0, 6, 2):
        cluster = Cluster(plan, tied=tied)
        cluster.run(stop=(first, 3))
        cluster.lose(first)
        cluster.run(cluster.rest(), stop=(second, count))
        cluster.lose(second)
        cluster.run(cluster.rest())
        cluster.assert_is_the_whole_step()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lost", [1, 2, 4])
def test_totals_of_an_interrupted_sync_are_kept(lost: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "_BUCKET_BYTES", 1)
    plan = plan_of_pairs(split=True, recompute=False)
    found = set()
    for sums in range(1, 25, 3):
        cluster = Cluster(plan, tied=tied)
        cluster.run(sums=sums)
        cluster.lose(lost)
        rest = cluster.rest()
        found.add(len(rest.sources))
        cluster.run(rest)
        cluster.assert_is_the_whole_step()
    assert len(found) > 2, "some gradients are totals and others are not"


def test_a_step_that_is_reduced_is_completed_without_any_operation() -> None:
    cluster = Cluster(plan_of_pairs(split=True, recompute=False), tied=True)
    cluster.run()
    for each in cluster.workers.values():
        shared = {key for s in each.buffers.segments if len(s.holders) > 1 for key in s.keys}
        assert each.progress.totals == shared

    rest = cluster.rest()
    assert not any(rest.programs.values())
    cluster.run(rest)

    cluster.assert_is_the_whole_step()


def test_what_is_held_is_what_has_been_run() -> None:
    cluster = Cluster(plan_of_pairs(split=True, recompute=False), tied=False)
    low = LayerRange(0, 2)
    assert [str(operation) for operation in cluster.program[0]] == ["F0.0", "F2.0", "I0.0", "W0.0", "I2.0", "W2.0"]

    held = {}
    for count in (0, 2, 3, 4):
        cluster = Cluster(cluster.plan, tied=False)
        cluster.run(stop=(0, count))
        held[count] = cluster.workers[0].progress

    sent = frozenset({(0, 1), (2, 1)})
    both = frozenset({(0, low), (2, low)})
    assert held[0] == StepProgress()
    assert held[2] == StepProgress(saved=both, activations=sent)
    one = StepProgress(saved=both - {(0, low)}, activations=sent - {(0, 1)})
    assert held[3] == replace(one, deferred=both - {(2, low)})
    assert held[4] == replace(one, contributed=both - {(2, low)})
