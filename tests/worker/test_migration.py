"""Layers that migrate while all ranks train: threads take the part of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_ft.config import Batch, RunConfig
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.plan.shards import UNITS, Sharding, SliceMove, shard_optimizer
from chameleon_ft.protocol.messages import Migrate
from chameleon_ft.recovery.transition import LayerMove
from chameleon_ft.schedule import Operation, best_program
from chameleon_ft.sync import Segment, gradient_rounds, gradient_segments, tied_segments
from chameleon_ft.worker.communicators.base import CommunicationError, InFlight, Tag
from chameleon_ft.worker.execution.bad_steps import BadStepError, RecentSteps
from chameleon_ft.worker.execution.commit import CommitContext, Committer, ComputedStep, Wishes
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.gather import ParameterExchange
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayer, HeldLayers
from chameleon_ft.worker.execution.micro_batches import DatasetReads, MicroBatches
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.state_transfer.layer_messages import Allocation
from chameleon_ft.worker.state_transfer.migration import LayerMigration, RequestWindow
from tests.strategies import equal_costs
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import SEED, toy_job, toy_rank, train_plainly

CPU = torch.device("cpu")
LAYERS = 5
BATCH = Batch(micro_batches=4, micro_batch_size=2)
WHOLE = LayerRange(0, LAYERS)


@dataclass
class Slow(Line):
    """A line on which every message of a layer takes a while."""

    message_s: float = 0.0
    spoiled_tag: int | None = None
    sums: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, bytes that they stand for) of the sums of gradients that were sent"""

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        if stands_for_bytes is not None:
            time.sleep(self.message_s)
        if stands_for_bytes is not None and tag == Tag.PULLED_SUM:
            self.sums.append((tensor.nbytes, stands_for_bytes))
        if stands_for_bytes and self.spoiled_tag is not None:
            tensor = tensor.clone()
            tensor[0] ^= 1
        return super().send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes)


@dataclass
class Doubtful(RecentSteps):
    """Finds every step to be bad the first time."""

    factor: float = 0.0
    is_second: bool = True

    def why_bad(self, loss: float, grad_norm: float, sums: Sequence[float]) -> str | None:
        self.is_second = not self.is_second
        return None if self.is_second else "it is to be computed again"


@dataclass
class Rank:
    """A rank without a process, which trains from the beginning or is a shadow holder only."""

    worker: int
    job: Job
    held: HeldLayers
    buffers: GradientBuffers
    operations: tuple[Operation, ...]
    stand_in_scale: int | None = None
    repeats: bool = False  # computes each step twice
    sums: list[tuple[int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    current: list[frozenset[int]] = field(default_factory=list)
    switches: list[bool] = field(default_factory=list)
    migrated: Future[None] = field(default_factory=Future)
    is_ending: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def begin(self, layers: LayerMigration, order: Migrate, delay_s: float) -> None:
        """Begin the migration from another thread, as a rank does."""
        time.sleep(delay_s)
        allocations = {
            move.layer: Allocation(
                HeldLayer.blank(self.job, move.layer, seed=SEED, device=CPU, is_divided=bool(order.slices))
            )
            for move in order.moves
            if move.destination == self.worker
        }
        layers.begin(order, allocations=allocations, migrated=self.migrated)

    def run(
        self,
        line: Slow,
        order: Migrate,
        members: Sequence[int],
        steps: int,
        *,
        trained: threading.Barrier,
        delay_s: float,
        sharding: Sharding | None = None,
    ) -> None:
        mover = Mover(line)
        rank = toy_rank(self.job, worker=self.worker, stand_in_scale=self.stand_in_scale)
        committer = Committer(
            rank=rank,
            held=self.held,
            buffers=self.buffers,
            contributions=lambda step: BATCH.micro_batches * LAYERS,
            committed=0,
            recent=Doubtful() if self.repeats else RecentSteps(0.0),
        )
        if sharding is not None:
            shards = {layer: sharding.layers[layer] for layer in self.held.layers}
            committer.gather = ParameterExchange.of(self.worker, self.held, shards, mover)
        executor = Executor(
            rank=rank,
            await_parameters=committer.await_parameters,
            held=self.held,
            micro_batches=MicroBatches(DatasetReads(self.job, BATCH, seed=SEED), CPU, self.job),
            communicators=line,
        )
        layers = LayerMigration(
            rank,
            held=self.held,
            buffers=self.buffers,
            mover=mover,
            committed=0,
            window=RequestWindow(None, None),
            is_ending=self.is_ending.is_set,
            await_parameters=committer.wait_for_exchange,
        )
        beginning = threading.Thread(target=self.begin, args=(layers, order, delay_s))
        beginning.start()
        try:
            with Reductions(self.buffers, self.operations, mover) as reductions:
                while committer.committed < steps:
                    state = committer.begin()
                    stats = executor.run(state, self.operations, after=reductions.after)
                    try:
                        applied = committer.commit(
                            ComputedStep(stats=stats, reductions=reductions, contributions=state.contributions()),
                            CommitContext(communicators=line, members=tuple(members), migration=layers),
                            lambda: Wishes(switch=self.is_ending.is_set()),
                        )
                    except BadStepError:
                        layers.resume(applied=False)
                        continue
                    committer.begin_exchange()
                    if layers.has_shadow_holders:
                        committer.await_parameters(migration=layers)
                    layers.resume()
                    self.switches.append(applied.vote.switch)
                    self.losses.append(applied.vote.loss_sum / applied.vote.terms)
                    self.current.append(self.held.layers)
                    if applied.vote.switch and sharding is not None:
                        break
                committer.await_parameters()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
            line.interrupt()
        finally:
            self.sums = line.sums
            beginning.join()
            trained.wait(60)  # a line that is interrupted cuts those of all ranks, which may still be in the last vote
            mover.close()


def move(*moves: tuple[int, int, int, int], hold_s: float = 0.0, slices: Sequence[SliceMove] = ()) -> Migrate:
    units = tuple((each.source, each.destination, each.layer, each.start, each.stop, 100) for each in slices)
    return Migrate(generation=1, moves=tuple(LayerMove(*each) for each in moves), slices=units, hold_s=hold_s)


def train(
    order: Migrate,
    *,
    steps: int,
    tied: bool = False,
    message_s: float = 0.0,
    spoiled_tag: int | None = None,
    delays_s: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    switches_after_s: float | None = None,
    stand_in_scale: int | None = None,
    repeats: bool = False,
    precision: Precision = Precision(),
    sharding: Sharding | None = None,
    is_ending: bool = False,
) -> list[Rank]:
    """Train in two pipelines of one stage, workers 0 and 1; each destination of the migration is a shadow holder.

    Args:
        sharding: owners of slices among workers 0 and 1; if given, ranks end with the switch.
        is_ending: whether each step is said to be the last one.
    """
    job = replace(toy_job(LAYERS, tied=tied), precision=precision)
    routes = [Route(m, (Hop(m % 2, WHOLE),)) for m in range(BATCH.micro_batches)]
    held = {0: set(WHOLE), 1: set(WHOLE)}
    shadows: dict[int, set[int]] = {}
    for each in order.moves:
        shadows.setdefault(each.destination, set()).add(each.layer)
    placement = Placement(LAYERS, {0: (WHOLE,), 1: (WHOLE,)})
    plan = Plan(placement, tuple(routes))
    program = best_program(plan, equal_costs(layers=LAYERS, micro_batches=BATCH.micro_batches, workers=2)).program
    ties = [tuple(layer for layer, _ in copies) for copies in job.tied]
    segments: tuple[Segment, ...] = (*gradient_rounds(placement, ties).order,)
    alone = (s for s in (*gradient_segments(placement), *tied_segments(placement, ties)) if len(s.holders) == 1)
    segments = (*segments, *alone)
    board, members = Switchboard(), sorted({*held, *shadows})
    trained = threading.Barrier(len(members))
    ranks = []
    for worker in members:
        owned = None if sharding is None else sharding.owned_by(worker)
        own = HeldLayers(job, held.get(worker, ()), seed=SEED, device=CPU, owned=owned)
        operations = program.of(worker) if worker in held else ()
        ranks.append(Rank(worker, job, own, GradientBuffers(own, segments), operations, stand_in_scale, repeats))
    lines = [Slow(rank.worker, board, message_s=message_s, spoiled_tag=spoiled_tag) for rank in ranks]
    threads = [
        threading.Thread(
            target=rank.run,
            args=(line, order, members, steps),
            kwargs={"trained": trained, "delay_s": delays_s[rank.worker], "sharding": sharding},
        )
        for rank, line in zip(ranks, lines, strict=True)
    ]
    for rank in ranks if is_ending else ():
        rank.is_ending.set()
    for thread in threads:
        thread.start()
    if switches_after_s is not None:
        for rank in ranks:
            rank.migrated.result(timeout=30)
        time.sleep(switches_after_s)
        for rank in ranks:
            rank.is_ending.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ranks


def state(rank: Rank, layer: int) -> dict[str, Any]:
    return rank.held.state_of(layer)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(other[k])) for k, v in one.items()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_migrate_are_those_of_their_sources_from_the_next_update_on(tied: bool) -> None:
    moves = [(0, 2, 0, 100), (1, 2, 3, 100), (0, 2, 4, 100), (1, 3, 3, 100)]
    ranks = train(move(*moves), steps=8, tied=tied, message_s=0.001)
    assert [rank.error for rank in ranks] == [None] * 4
    plain = train_plainly(toy_job(LAYERS, tied=tied), BATCH, 8)
    for rank in ranks:
        assert rank.losses == pytest.approx([step.loss for step in plain], rel=1e-6)
    assert ranks[2].held.layers == {0, 3, 4}
    assert ranks[3].held.layers == {3}
    assert not ranks[2].held.arriving
    for rank in ranks[2:]:
        for layer in rank.held.layers:
            assert equal(state(rank, layer), state(ranks[0], layer))


@pytest.mark.parametrize("precision", [Precision(), Precision("bf16", RunConfig().fp32_modules)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_slices_migrate_with_layers(tied: bool, precision: Precision) -> None:
    """Shadow holders update the slices that have moved to them, and receive what others update."""
    moves = [(0, 2, 0, 100), (1, 2, 3, 100), (0, 2, 4, 100), (1, 3, 3, 100)]
    hosts = dict.fromkeys(range(4), "a host")
    before = shard_optimizer(Placement(LAYERS, {0: (WHOLE,), 1: (WHOLE,)}), hosts, 1)
    layers_after: dict[int, Sequence[int]] = {0: tuple(WHOLE), 1: (1, 2), 2: (0, 3, 4), 3: (3,)}
    held = {w: tuple(LayerRange(layer, layer + 1) for layer in own) for w, own in layers_after.items()}
    slices = shard_optimizer(Placement(LAYERS, held), hosts, 2, before).moves_from(before)
    assert {each.destination for each in slices} == {0, 1, 2, 3}, "workers that hold a layer come to own more of it"
    ranks = train(
        move(*moves, slices=slices),
        steps=1_000,
        tied=tied,
        precision=precision,
        sharding=before,
        switches_after_s=0.0,
    )
    assert [rank.error for rank in ranks] == [None] * 4
    plain = train(move(), steps=len(ranks[0].losses), tied=tied, precision=precision)
    for rank in ranks:
        assert rank.losses == plain[0].losses
    assert [set(rank.held.layers) for rank in ranks[2:]] == [{0, 3, 4}, {3}]
    for rank in ranks:
        for layer in rank.held.layers:
            one, other = (each.held.views_of_slice(layer, (0, UNITS)) for each in (rank, plain[0]))
            assert all(map(torch.equal, one, other))
    found_any = False  # slices of layers as small as these may be empty
    for each in slices:
        found, expected = (
            ranks[worker].held.state_of_slice(each.layer, (each.start, each.stop))
            for worker in (each.destination, each.source)
        )
        assert equal(found, expected)
        found_any = found_any or bool(found)
    assert found_any


@pytest.mark.parametrize(("tied", "repeats"), [(False, False), (True, False), (False, True)])
def test_ranks_need_not_begin_in_the_same_step(tied: bool, repeats: bool) -> None:
    """Nor in the same computation of a step, if that is computed twice."""
    random = Random(1 + tied)
    for _ in range(12):
        delays_s = [random.uniform(0.0, 0.06) for _ in range(4)]
        order = move((0, 2, 0, 100), (1, 2, 3, 100), (0, 3, 4, 100))
        ranks = train(order, steps=40, tied=tied, delays_s=delays_s, repeats=repeats)
        assert [rank.error for rank in ranks] == [None] * 4
        assert [set(rank.held.layers) for rank in ranks[2:]] == [{0, 3}, {4}], delays_s
        for rank in ranks[2:]:
            assert all(equal(state(rank, layer), state(ranks[0], layer)) for layer in rank.held.layers), delays_s


def test_on_emulated_links_the_sums_of_gradients_take_as_long_as_any_gradients_of_that_size() -> None:
    """With stand-ins for layers whose optimizer has another share of the bytes, too."""
    ranks = train(move((0, 2, 1, 1_000_000), (0, 2, 2, 1_000_000)), steps=6, stand_in_scale=7)
    assert [rank.error for rank in ranks] == [None] * 3
    assert len(ranks[0].sums) > 2
    assert all(stands_for == 7 * own for own, stands_for in ranks[0].sums)


def test_a_layer_that_takes_long_delays_the_vote_and_nothing_else() -> None:
    ranks = train(move((0, 2, 1, 100), (0, 2, 2, 100)), steps=6, message_s=0.02)
    assert [rank.error for rank in ranks] == [None] * 3
    assert ranks[2].current[0] == set(), "the first step only measures how long a step is"
    assert ranks[2].held.layers == {1, 2}
    assert all(equal(state(ranks[2], layer), state(ranks[0], layer)) for layer in (1, 2))


def test_a_vote_waits_for_all_layers_if_that_is_worth_the_time() -> None:
    moves = [(source, 2 + source, layer, 100) for source in (0, 1) for layer in (0, 2, 3)]
    ranks = train(move(*moves, hold_s=20.0), steps=3, message_s=0.01, switches_after_s=0.0)
    assert [rank.error for rank in ranks] == [None] * 4
    for rank in ranks[2:]:
        assert {len(layers) for layers in rank.current} <= {0, 3}, "no step moves a part of them"
        assert rank.held.layers == {0, 2, 3}
        assert all(equal(state(rank, layer), state(ranks[0], layer)) for layer in (0, 2, 3))
    parts = train(move(*moves), steps=8, message_s=0.01)
    assert any(0 < len(layers) < 3 for rank in parts[2:] for layers in rank.current)


def test_a_vote_waits_for_the_switch() -> None:
    ranks = train(move((0, 2, 1, 100), hold_s=20.0), steps=4, switches_after_s=0.2)
    assert [rank.error for rank in ranks] == [None] * 3
    assert ranks[2].held.layers == {1}
    arrived = [bool(layers) for layers in ranks[2].current]
    assert ranks[2].switches == arrived, "the vote of the step in which the layer has arrived is the first to switch"


def test_a_vote_does_not_wait_for_ever() -> None:
    ranks = train(move((0, 2, 1, 100), hold_s=0.2), steps=6)
    assert [rank.error for rank in ranks] == [None] * 3
    assert ranks[2].held.layers == {1}


def test_no_layer_is_requested_in_the_last_step() -> None:
    """Nor after it, while a state is evaluated: its source may end before it has sent it."""
    ranks = train(move((0, 2, 1, 100), hold_s=20.0), steps=6, is_ending=True)
    assert [rank.error for rank in ranks] == [None] * 3
    assert not ranks[2].migrated.done()
    assert ranks[2].held.layers == set()


def test_a_layer_that_would_take_too_long_is_not_waited_for() -> None:
    moves = [(0, 2, layer, 100) for layer in range(LAYERS)]
    ranks = train(move(*moves, hold_s=0.3), steps=2, message_s=0.1)
    assert [rank.error for rank in ranks] == [None] * 3
    # Each layer takes more than 0.2 s: after the first, which was not known to, no other fits.
    assert all(len(layers) <= 2 for layers in ranks[2].current)


def test_what_a_small_layer_takes_says_nothing_of_a_large_one() -> None:
    order = move((0, 2, 0, 1_000_000), (0, 2, 1, 1), (0, 2, 2, 1_000_000), hold_s=20.0)
    ranks = train(order, steps=3, message_s=0.01, switches_after_s=0.0, stand_in_scale=1)
    assert [rank.error for rank in ranks] == [None] * 3
    assert {len(layers) for layers in ranks[2].current} <= {0, 3}, "no step waits for the next one with the last layer"
    assert ranks[2].held.layers == {0, 1, 2}


def test_a_layer_that_arrives_damaged_ends_the_generation() -> None:
    ranks = train(move((0, 2, 1, 100)), steps=6, spoiled_tag=0)
    assert isinstance(ranks[2].error, CommunicationError)
    assert "another checksum" in str(ranks[2].error)
    assert ranks[2].held.layers == set()
    assert not ranks[2].migrated.done()
