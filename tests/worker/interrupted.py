"""Workers of a step that can be interrupted anywhere: threads that send each other messages by a switchboard."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from chameleon_ft.config import Batch
from chameleon_ft.job.job import Job
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.schedule import Operation, OperationKind, best_program
from chameleon_ft.sync import Segment, gradient_rounds, gradient_segments, tied_segments
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.execution import executor
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.micro_batches import DatasetReads, MicroBatches
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.execution.steps import StepState, StepStats
from chameleon_ft.worker.mover import Mover
from tests.strategies import equal_costs
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import SEED, PlainStep, toy_job, toy_rank, train_plainly

CPU = torch.device("cpu")
LAYERS, MICRO_BATCHES = 5, 4
BATCH = Batch(micro_batches=MICRO_BATCHES, micro_batch_size=2)
F, B, W = OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD


class Worker:
    """A rank without a process: its layers, gradients and the state of its step."""

    def __init__(self, worker: int, job: Job, plan: Plan, segments: tuple[Segment, ...]) -> None:
        self.worker = worker
        self.job = job
        self.held = HeldLayers(job, plan.placement.layers_of(worker), seed=SEED, device=CPU)
        self.buffers = GradientBuffers(self.held, segments)
        self.state = StepState(0)
        self.progress = StepProgress()
        self.stats: StepStats | None = None
        self.error: BaseException | None = None

    def executor(self, line: Line) -> Executor:
        return Executor(
            rank=toy_rank(self.job, micro_batch_size=BATCH.micro_batch_size),
            held=self.held,
            micro_batches=MicroBatches(DatasetReads(self.job, BATCH, seed=SEED), CPU, self.job),
            communicators=line,
        )

    def run(self, rest: Rest | None, operations: tuple[Operation, ...], board: Switchboard, stop_after: int) -> None:
        """Run the program, or that of the rest; cut all lines after so many operations."""
        line = Line(self.worker, board)
        own = self.executor(line)
        sources = {} if rest is None else rest.sources
        zeros = {key for key, source in sources.items() if source != self.worker}
        try:
            with Reductions(self.buffers, operations, Mover(line), zeros=zeros) as reductions:

                def after(count: int) -> None:
                    reductions.after(count)
                    if count == stop_after:
                        board.cut.set()
                        raise CommunicationError(None, "this is the moment")

                if rest is None:
                    self.stats = own.run(self.state, operations, after=after)
                else:
                    with self.buffers.protecting(rest.protected(self.worker, operations, self.buffers)):
                        self.stats = own.resume(
                            self.state,
                            operations,
                            resends=rest.resends.get(self.worker, ()),
                            counted=rest.counted,
                            after=after,
                        )
                reductions.finish()
        except CommunicationError:
            self.state.in_flight.clear()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
            board.cut.set()
        self.progress = self.state.progress(self.buffers.totals)


@dataclass
class Rest:
    """The rest of a step, by worker."""

    programs: dict[int, list[Operation]]
    resends: dict[int, list[tuple[int, int, bool, int]]]
    counted: frozenset[int]
    sources: dict[tuple[int, ...], int]

    def protected(
        self, worker: int, operations: Iterable[Operation], buffers: GradientBuffers
    ) -> list[tuple[int, ...]]:
        added = {layer for o in operations if o.kind in (B, W) for layer in o.layers}
        return [key for key in buffers.totals if not added.isdisjoint(key)]


@contextmanager
def _one_computes_at_a_time() -> Iterator[None]:
    """The threads share torch's random numbers, of which every forward sets the key."""
    compute, lock = executor._StepExecution._compute, threading.Lock()

    def alone(self: Any, *arguments: Any) -> Sequence[Tensor] | None:
        with lock:
            return compute(self, *arguments)

    with mock.patch.object(executor._StepExecution, "_compute", alone):
        yield


class Cluster:
    """All workers of a plan, in threads."""

    def __init__(self, plan: Plan, *, tied: bool, job: Job | None = None) -> None:
        self.plan = plan
        self.job = job or toy_job(LAYERS, tied=tied)
        self.tied = [(0, LAYERS - 1)] if tied else []
        self.workers = {worker: Worker(worker, self.job, plan, self.segments(plan.workers)) for worker in plan.workers}
        program = best_program(plan, equal_costs(layers=LAYERS, micro_batches=MICRO_BATCHES, workers=9)).program
        self.program: Mapping[int, tuple[Operation, ...]] = {worker: program.of(worker) for worker in plan.workers}

    def segments(self, alive: Iterable[int]) -> tuple[Segment, ...]:
        placement = Placement(LAYERS, {worker: self.plan.placement.ranges_of(worker) for worker in alive})
        every = (*gradient_segments(placement), *tied_segments(placement, self.tied))
        return (*gradient_rounds(placement, self.tied).order, *(s for s in every if len(s.holders) == 1))

    def run(self, rest: Rest | None = None, *, stop: tuple[int, int] = (-1, -1), sums: int = -1) -> None:
        """Run the step or its rest; when worker `stop[0]` has run `stop[1]` operations, all lines are cut.

        So they are when the workers have together received so many sums.
        """
        board = Switchboard(sums)
        programs = self.program if rest is None else {worker: tuple(own) for worker, own in rest.programs.items()}
        threads = [
            threading.Thread(
                target=each.run, args=(rest, programs[worker], board, stop[1] if worker == stop[0] else -1)
            )
            for worker, each in self.workers.items()
        ]
        with _one_computes_at_a_time():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for each in self.workers.values():
            if each.error is not None:
                raise each.error

    def lose(self, worker: int) -> None:
        del self.workers[worker]
        for each in self.workers.values():
            each.buffers.regroup(each.held, self.segments(self.workers))

    def rest(self) -> Rest:
        """Make the rest of the step, micro-batch by micro-batch, by the plainest rules that are right.

        A pipeline without a lost worker continues. Elsewhere every hop of a lost worker goes to another holder, F runs
        again on all layers whose activations are gone, I down to the lowest hop that lacks its weight gradients, and W
        where they are missing.
        """
        progress = {worker: each.progress for worker, each in self.workers.items()}
        rest = Rest(
            {worker: [] for worker in self.workers},
            defaultdict(list),
            frozenset(m for own in progress.values() for m in own.counted),
            {key: worker for worker, own in sorted(progress.items()) for key in own.totals},
        )
        for route in self.plan.routes:
            self._rest_of_route(route, rest, progress)
        return rest

    def _rest_of_route(self, route: Route, rest: Rest, progress: Mapping[int, StepProgress]) -> None:
        m, hops = route.micro_batch, []
        for hop in route.hops:
            worker = hop.worker
            if worker not in self.workers:
                # Of the same micro-batch another worker may have taken the hop over before.
                holders = [w for w in self.workers if set(hop.layers) <= self.workers[w].held.layers]
                before = [w for w in holders if any((m, hop.layers) in s for s in hops_of(progress[w]))]
                worker = (before or [holders[m % len(holders)]])[0]
            hops.append(Hop(worker, hop.layers))

        def is_in(name: str, hop: Hop) -> bool:
            return (m, hop.layers) in getattr(progress[hop.worker], name)

        def complete(hop: Hop) -> bool:
            keys = [(layer,) for layer in hop.layers] + [key for key in self.tied if set(key) & set(hop.layers)]
            return is_in("contributed", hop) or all(key in rest.sources for key in keys)

        missing = [not complete(hop) for hop in hops]
        lowest = missing.index(True) if True in missing else len(hops)
        # An input gradient is needed above the lowest hop that lacks weight gradients, unless it can be sent again.
        backward = [lacks and not is_in("deferred", hop) for lacks, hop in zip(missing, hops, strict=True)]
        for index in range(lowest, len(hops) - 1):
            if backward[index] and not backward[index + 1]:
                above = hops[index + 1]
                if (m, above.layers.start) not in progress[above.worker].gradients:
                    backward[index + 1] = True
        forward = [b and not is_in("saved", hop) for b, hop in zip(backward, hops, strict=True)]
        if m not in rest.counted:
            forward[-1] = forward[-1] or not is_in("saved", hops[-1])
        for index in range(len(hops) - 1, 0, -1):
            below = hops[index - 1]
            if forward[index] and (m, below.layers.stop - 1) not in progress[below.worker].activations:
                forward[index - 1] = True
        self._add_operations(m, hops, forward, backward, missing, rest)

    def _add_operations(
        self, m: int, hops: list[Hop], forward: list[bool], backward: list[bool], weight: list[bool], rest: Rest
    ) -> None:
        """Add what remains of a micro-batch, in an order that cannot deadlock: one micro-batch after the other."""
        last = len(hops) - 1
        for index in range(last):
            below, above = hops[index], hops[index + 1]
            if forward[index + 1] and not forward[index] and below.worker != above.worker:
                rest.resends[below.worker].append((m, below.layers.stop - 1, True, above.worker))
            if backward[index] and not backward[index + 1] and below.worker != above.worker:
                rest.resends[above.worker].append((m, above.layers.start, False, below.worker))

        def operation(kind: OperationKind, index: int) -> Operation:
            whole = Operation.of(kind, Route(m, tuple(hops)), index, self.plan.recompute)
            step = 1 if kind is F else -1
            to = index + step
            needed = 0 <= to <= last and (forward if kind is F else backward)[to]
            return whole if needed else replace(whole, send_to=None)

        for index in range(len(hops)):
            if forward[index]:
                rest.programs[hops[index].worker].append(operation(F, index))
        for index in reversed(range(len(hops))):
            worker, own = hops[index].worker, rest.programs[hops[index].worker]
            if self.plan.splits(worker):
                if backward[index]:
                    own.append(operation(OperationKind.INPUT_GRAD, index))
                if weight[index]:
                    own.append(operation(W, index))
            elif backward[index]:
                own.append(operation(B if weight[index] else OperationKind.INPUT_GRAD, index))

    def assert_is_the_whole_step(self, plain: PlainStep | None = None) -> None:
        """Compare loss and gradients with the plain loop's, by default that of the toy layers."""
        plain = plain or train_plainly(self.job, BATCH, 1)[0]
        stats = [each.stats for each in self.workers.values()]
        assert sum(s.terms for s in stats if s) == plain.terms
        assert sum(s.samples for s in stats if s) == BATCH.samples
        totals = [
            each.held.side_totals(layer for layer, *tied in each.buffers.first_held(w) if not tied)
            for w, each in self.workers.items()
        ]
        auxiliary = sum(own["auxiliary_loss"][0] for own in totals if own)
        assert auxiliary / plain.terms == pytest.approx(plain.auxiliary, rel=1e-5)
        loss = sum(s.loss for s in stats if s) + auxiliary
        assert loss / plain.terms == pytest.approx(plain.loss, rel=1e-6)
        side = [names for names in self.job.side_outputs if "share" in names]
        assert sum(own["share"][1] for own in totals if "share" in own) == MICRO_BATCHES * len(side)
        for each in self.workers.values():
            found_sums = each.held.sums(sorted(each.held.layers))
            wanted_sums = [
                plain.sums[layer, name]
                for layer in sorted(each.held.layers)
                for name in ("load", "mass")
                if (layer, name) in plain.sums
            ]
            for total, wanted_sum in zip(
                [s for s in found_sums if len(s.shape) != 1 or s.dtype == torch.int64], wanted_sums, strict=True
            ):
                assert total.grad is not None
                torch.testing.assert_close(total.grad, wanted_sum)
            for layer in each.held.layers:
                wanted = [g for (number, _), g in plain.gradients.items() if number == layer]
                found = each.held.parameters([layer])
                for parameter, gradient in zip(found, wanted, strict=True):
                    assert parameter.grad is not None
                    torch.testing.assert_close(parameter.grad / plain.terms, gradient, rtol=1e-5, atol=1e-6)
            flags = [flat.flags for own in each.buffers._flat.values() for flat in own]
            assert all(bool(own.all()) for own in flags), "some holder has given each parameter a gradient"


def hops_of(progress: StepProgress) -> tuple[frozenset[tuple[int, LayerRange]], ...]:
    return progress.contributed, progress.saved, progress.deferred


def plan_of_pairs(*, split: bool, recompute: bool) -> Plan:
    """Two pipelines over workers 0 to 3 of unequal stages, a fifth worker with all layers, and a detour."""
    low, high = LayerRange(0, 2), LayerRange(2, 5)
    whole = LayerRange(0, LAYERS)
    placement = Placement(LAYERS, {0: (low,), 1: (high,), 2: (low,), 3: (high,), 4: (whole,)})
    routes = (
        Route(0, (Hop(0, low), Hop(1, high))),
        Route(1, (Hop(2, low), Hop(3, high))),
        Route(2, (Hop(0, low), Hop(4, LayerRange(2, 3)), Hop(4, LayerRange(3, 5)))),
        Route(3, (Hop(2, low), Hop(1, high))),
    )
    again = {1: RecomputedLayers(3, 5), 2: RecomputedLayers(1, 2), 4: RecomputedLayers(2, 4, 1)} if recompute else {}
    return Plan(placement, routes, split, again)
