"""The step loop of a rank, in cases that whole runs rarely reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.schedule import best_program
from chameleon_ft.sync import gradient_segments
from chameleon_ft.worker import step_loop
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.execution.commit import Committer
from chameleon_ft.worker.execution.steps import StepRecorder
from chameleon_ft.worker.generation import Generation
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.step_loop import StepLoop
from tests.strategies import equal_costs
from tests.worker.interrupted import LAYERS, MICRO_BATCHES, Worker
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import toy_job


@pytest.mark.parametrize("run_before", range(1, 12))
def test_no_operation_begins_in_a_generation_that_is_over(run_before: int) -> None:
    layers = LayerRange(0, LAYERS)
    plan = Plan(
        placement=Placement(LAYERS, {0: (layers,)}),
        routes=tuple(Route(number, (Hop(0, layers),)) for number in range(MICRO_BATCHES)),
        split_backward=True,
    )
    worker = Worker(0, toy_job(LAYERS), plan, gradient_segments(plan.placement))
    costs = equal_costs(layers=LAYERS, micro_batches=MICRO_BATCHES, workers=1)
    program, segments = best_program(plan, costs).program, tuple(gradient_segments(plan.placement))
    order = WorkerOrders(generation=1, worker=0, members=(0,), first_step=0, program=program, segments=segments)
    executor = worker.executor(Line(0, Switchboard()))
    committer = Committer(
        rank=executor.rank,
        held=worker.held,
        buffers=worker.buffers,
        contributions=lambda step: MICRO_BATCHES * LAYERS,
        committed=0,
    )

    def is_over(generation: int) -> bool:
        return committer.state is not None and len(committer.state.spans) >= run_before

    unused: Any = None
    loop = StepLoop(
        config=SimpleNamespace(steps=1, health=SimpleNamespace(check_every=0)),  # type: ignore[arg-type]
        client=SimpleNamespace(is_over=is_over, finishing=False),  # type: ignore[arg-type]
        generation=Generation(order=order, communicators=executor.communicators),
        committer=committer,
        executor=executor,
        evaluator=None,
        snapshots=None,
        migration=unused,
        check=unused,
        mover=Mover(executor.communicators),
        recorder=StepRecorder(log=unused, worker=0, every=0),
        writer=unused,
        first_committed=lambda: None,
    )
    with pytest.raises(CommunicationError, match="the generation is over"):
        loop.run()
    assert committer.state is not None
    assert [kind for kind, _, _ in committer.state.spans] == [each.kind for each in order.operations[:run_before]]
    progress = committer.state.progress(())
    # What the last operation has made counts.
    assert len(progress.saved) + len(progress.deferred) + len(progress.contributed) > 0


@pytest.mark.parametrize("finish", [False, True])
def test_a_checkpoint_that_is_left_out_is_reported_unless_the_last_one_follows(finish: bool) -> None:
    left_out = []
    loop: Any = SimpleNamespace(
        _report_committed=lambda *_, **__: None,
        _leave_out_checkpoint=lambda: left_out.append(8),
        committer=SimpleNamespace(committed=8),
        generation=SimpleNamespace(order=SimpleNamespace(first_step=0)),
        writer=SimpleNamespace(left_out=8),
        snapshots=None,
    )
    applied: Any = SimpleNamespace(vote=SimpleNamespace(checkpoint=False, finish=finish))
    unused: Any = None
    StepLoop._committed(loop, applied, unused, request=0, start_s=0.0)
    assert left_out == ([] if finish else [8])


def test_the_time_of_a_step_includes_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(step_loop, "wait_for_stream", done.append)
    computed: Any = SimpleNamespace(stats=SimpleNamespace(end_s=0.0))
    loop: Any = SimpleNamespace(
        _checkpoint_is_due=lambda request, *, evaluate: False,
        _snapshot_is_due=lambda: False,
        _commit_context=lambda: None,
        _committed=lambda applied, stats, **_: done.append(f"it ended after {stats.end_s > 0.0 and done[-1]}"),
        client=SimpleNamespace(checkpoint_request=0, finishing=False),
        committer=SimpleNamespace(
            commit=lambda *_, **__: SimpleNamespace(vote="a vote"), begin_exchange=lambda: done.append("exchange begun")
        ),
        executor=SimpleNamespace(rank=SimpleNamespace(device="the device")),
        evaluator=None,
        migration=SimpleNamespace(has_shadow_holders=False, resume=lambda: None),
    )
    StepLoop._commit(loop, computed, start_s=0.0)
    assert done == ["exchange begun", "the device", "it ended after the device"]
