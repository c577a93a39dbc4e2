"""The state of a rank: layers, gradients in flat buffers, the commit of a step, checkpoints, planned failures."""

from __future__ import annotations

import dataclasses
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from chameleon_ft.config import Failure, FailureKind, FailurePhase
from chameleon_ft.control.wire.messages import CheckpointSaved
from chameleon_ft.control.wire.parts import Vote
from chameleon_ft.errors import ControlError
from chameleon_ft.job import Job
from chameleon_ft.observe import FaultLog, layer_directory, mark_complete
from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime import fault_injection
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.runtime.communicators import CommunicationError, Communicators
from chameleon_ft.runtime.execution.bad_steps import BadStepError
from chameleon_ft.runtime.execution.commit import Committer
from chameleon_ft.runtime.execution.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.execution.reductions import Reductions
from chameleon_ft.runtime.execution.step_stats import StepStats
from chameleon_ft.runtime.fault_injection import FaultInjector, failures_of_incarnation
from chameleon_ft.sync import Segment
from tests.runtime.toy import SEED, toy_job

CPU = torch.device("cpu")
LAYERS = 5
WHOLE = LayerRange(0, LAYERS)


def held_layers(job: Job | None = None, layers: range = range(LAYERS)) -> HeldLayers:
    return HeldLayers(job or toy_job(LAYERS), layers, seed=SEED, device=CPU)


def no_faults(tmp_path: Path) -> FaultInjector:
    return FaultInjector(0, (), log=FaultLog(tmp_path / "faults.jsonl"), disconnect=lambda: None)


def set_gradients(held: HeldLayers, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in held.parameters(WHOLE):
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(parameter.shape, generator=random))


def weights(held: HeldLayers, layers: LayerRange = WHOLE) -> list[Tensor]:
    return [p.detach().clone() for p in held.parameters(layers)]


# --- layers ----------------------------------------------------------------------------------------------------------


def test_a_layer_is_the_same_wherever_it_is_built() -> None:
    whole, part = held_layers(), held_layers(layers=range(2, 4))
    assert part.layers == {2, 3}
    for one, other in zip(weights(part, LayerRange(2, 4)), weights(whole, LayerRange(2, 4)), strict=True):
        assert torch.equal(one, other)


def test_state_moves_to_another_rank_with_its_optimizer() -> None:
    source = held_layers()
    GradientBuffers(source, [Segment(WHOLE, (0,))])
    for step in range(3):
        set_gradients(source, step)
        source.update(step)
    target = held_layers(layers=range(1, 4))
    for layer in range(1, 4):
        target.restore(layer, source.snapshot(layer))
    part = LayerRange(1, 4)
    for held in (source, target):
        GradientBuffers(held, [Segment(part, (0,))])
        random = torch.Generator().manual_seed(9)
        for parameter in held.parameters(part):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=random))
        held.update(3)
    for one, other in zip(weights(target, part), weights(source, part), strict=True):
        assert torch.equal(one, other)


def test_a_snapshot_does_not_change_with_training() -> None:
    held = held_layers()
    GradientBuffers(held, [Segment(WHOLE, (0,))])
    set_gradients(held, 0)
    held.update(0)
    snapshot = held.snapshot(4)
    before = {key: value.clone() for key, value in snapshot.items() if isinstance(value, Tensor)}
    set_gradients(held, 1)
    held.update(1)
    assert any(key.startswith("optimizer/") for key in snapshot)
    for key, value in before.items():
        assert torch.equal(snapshot[key], value)
    changed = held.snapshot(4)
    assert not all(torch.equal(changed[key], value) for key, value in before.items())


def test_layers_without_parameters_have_nothing_to_update() -> None:
    held = held_layers(layers=range(2, 3))  # a ReLU
    assert held.update(1) == pytest.approx(0.025)
    assert GradientBuffers(held, [Segment(LayerRange(2, 3), (0,))]).square_sum(0) == 0.0
    held.restore(2, held.snapshot(2))


def test_the_learning_rate_is_set_for_each_step_or_unchanged() -> None:
    scheduled = held_layers()
    assert [scheduled.update(step) for step in range(3)] == pytest.approx([0.05, 0.025, 0.05 / 3])
    left_alone = held_layers(dataclasses.replace(toy_job(LAYERS), learning_rate=None))
    assert left_alone.update(5) == 0.05


# --- gradient buffers ------------------------------------------------------------------------------------------------


def test_gradients_accumulate_in_flat_buffers_by_element_type() -> None:
    held = held_layers()
    segments = (Segment(LayerRange(0, 3), (0, 1)), Segment(LayerRange(3, 5), (0,)))
    buffers = GradientBuffers(held, segments)
    for segment in segments:
        flat = buffers.of(segment)
        parameters = held.parameters(segment.layers)
        assert {buffer.dtype for buffer in flat} == {torch.float32, torch.float64}
        assert sum(buffer.numel() for buffer in flat) == sum(p.numel() for p in parameters)
    buffers.zero()
    for _ in range(2):
        sum(p.sum() for p in held.parameters(WHOLE)).backward()  # type: ignore[union-attr]
    for buffer in (buffer for segment in segments for buffer in buffers.of(segment)):
        assert torch.equal(buffer, torch.full_like(buffer, 2.0))
    buffers.scale(0.25)
    for parameter in held.parameters(WHOLE):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 0.5))
    buffers.zero()
    assert buffers.square_sum(0) == 0.0


def test_the_norm_counts_every_layer_once_over_all_workers() -> None:
    segments = (Segment(LayerRange(0, 2), (0, 1)), Segment(LayerRange(2, 4), (1, 2)), Segment(LayerRange(4, 5), (2,)))
    total = 0.0
    for worker, layers in [(0, range(2)), (1, range(4)), (2, range(2, 5))]:
        held = held_layers(layers=layers)
        buffers = GradientBuffers(held, segments)
        assert buffers.segments == tuple(s for s in segments if worker in s.holders)
        for segment in buffers.segments:
            for buffer in buffers.of(segment):
                buffer.fill_(2.0)
        total += buffers.square_sum(worker)
    assert total == 4.0 * sum(p.numel() for p in held_layers().parameters(WHOLE))


# --- commit ----------------------------------------------------------------------------------------------------------

CONTRIBUTIONS = 12


def committer(held: HeldLayers, tmp_path: Path, *, clip_norm: float | None, committed: int = 0) -> Committer:
    return Committer(
        worker=0,
        held=held,
        buffers=GradientBuffers(held, [Segment(WHOLE, (0,))]),
        contributions=CONTRIBUTIONS,
        clip_norm=clip_norm,
        committed=committed,
        activity=Activity(),
        faults=no_faults(tmp_path),
    )


def alone(committer: Committer, stats: StepStats, *, finish: bool = False) -> Any:
    with Reductions(committer.buffers, (), NO_PEERS) as reductions:
        return committer.commit(stats, reductions, NO_PEERS, (0,), contributions=CONTRIBUTIONS, finish=finish)


NO_PEERS: Communicators = None  # type: ignore[assignment]  # a worker without peers


@pytest.mark.parametrize("clip_norm", [None, 0.3, 1e6])
def test_a_commit_is_what_torch_does_with_the_mean_gradient(tmp_path: Path, clip_norm: float | None) -> None:
    job = toy_job(LAYERS)
    ours, theirs = held_layers(job), held_layers(job)
    commit = committer(ours, tmp_path, clip_norm=clip_norm)
    parameters = theirs.parameters(WHOLE)
    optimizer = job.optimizer(parameters)
    for step in range(3):
        set_gradients(ours, step)
        applied = alone(commit, StepStats(loss=12.0, terms=6, samples=4))
        random_numbers = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random_numbers).to(parameter.dtype) / 6
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip_norm is None else clip_norm)
        optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
        optimizer.step()
        assert applied.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert applied.lr == pytest.approx(0.05 / (step + 1))
        assert (commit.committed, commit.reduced, commit.last_vote) == (step + 1, False, applied.vote)
    for one, other in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_vote_that_is_applied_later_is_the_same_step(tmp_path: Path) -> None:
    now, later = held_layers(), held_layers()
    first, second = committer(now, tmp_path, clip_norm=0.2), committer(later, tmp_path, clip_norm=0.2)
    for held in (now, later):
        set_gradients(held, 0)
    applied = alone(first, StepStats(loss=3.0, terms=7, samples=4))
    second.reduced = True
    assert second.apply(applied.vote) == applied
    for one, other in zip(weights(now), weights(later), strict=True):
        assert torch.equal(one, other)


def test_a_request_to_finish_is_in_the_vote(tmp_path: Path) -> None:
    commit = committer(held_layers(), tmp_path, clip_norm=None)
    assert alone(commit, StepStats(loss=1.0, terms=1, samples=1), finish=True).vote.finish
    assert not alone(commit, StepStats(loss=1.0, terms=1, samples=1)).vote.finish


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0), (1.0, math.nan)])
def test_a_step_that_is_no_number_is_not_applied(tmp_path: Path, loss: float, gradient: float) -> None:
    held = held_layers()
    commit = committer(held, tmp_path, clip_norm=1.0)
    before = weights(held)
    next(iter(commit.buffers.of(commit.buffers.segments[0]))).fill_(gradient)
    with pytest.raises(BadStepError, match=r"^the (loss|gradient norm) is (nan|inf)$"):
        alone(commit, StepStats(loss=loss, terms=2, samples=2))
    assert commit.committed == 0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(held), strict=True))


class Deaf:
    """Communicators in which the others' share of the vote never arrives, though the sum comes back."""

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Any:
        class Done:
            def wait(self) -> None: ...

        return Done()

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> Any:
        return self.all_reduce(ballot, ())


def test_a_vote_without_everybody_is_none(tmp_path: Path) -> None:
    commit = committer(held_layers(), tmp_path, clip_norm=None)
    deaf: Communicators = Deaf()  # type: ignore[assignment]
    stats = StepStats(loss=1.0, terms=1, samples=1)
    with (
        Reductions(commit.buffers, (), deaf) as reductions,
        pytest.raises(CommunicationError, match="the vote counted 1 of 2 workers"),
    ):
        commit.commit(stats, reductions, deaf, (0, 1), contributions=CONTRIBUTIONS, finish=False)
    assert commit.committed == 0
    assert commit.reduced, "it holds what it takes to follow, should another one have applied the step"


@pytest.mark.parametrize("contributions", [CONTRIBUTIONS - 1, CONTRIBUTIONS + 1])
def test_a_step_without_a_contribution_or_with_one_twice_is_not_applied(tmp_path: Path, contributions: int) -> None:
    commit = committer(held_layers(), tmp_path, clip_norm=None)
    stats = StepStats(loss=1.0, terms=1, samples=1)
    with (
        Reductions(commit.buffers, (), NO_PEERS) as reductions,
        pytest.raises(ControlError, match=f"of step 0 have {contributions} contributions of micro-batches to layers"),
    ):
        commit.commit(stats, reductions, NO_PEERS, (0,), contributions=contributions, finish=False)
    assert commit.committed == 0


def test_a_step_is_applied_only_from_a_reduced_gradient(tmp_path: Path) -> None:
    vote = Vote(grad_square_sum=1.0, loss_sum=1.0, terms=1, samples=1, finish=False)
    with pytest.raises(AssertionError, match="fully reduced"):
        committer(held_layers(), tmp_path, clip_norm=None).apply(vote)


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Collected:
    """The reports of a writer."""

    def __init__(self, checkpoints: Path) -> None:
        self.reports: list[tuple[int, int, tuple[int, ...], str | None]] = []
        self.seconds: list[tuple[float, float]] = []
        self.begun: list[int] = []
        self.thread: int | None = None
        self.writer = CheckpointWriter(checkpoints, saved=self.saved, before_write=self.begun.append)

    def saved(self, part: CheckpointSaved) -> None:
        self.reports.append((part.generation, part.step, part.layers, part.error))
        self.seconds.append((part.copy_s, part.write_s))
        self.thread = threading.get_ident()


def trained() -> HeldLayers:
    held = held_layers()
    GradientBuffers(held, [Segment(WHOLE, (0,))])
    set_gradients(held, 0)
    held.update(0)
    return held


def test_a_checkpoint_is_read_by_any_placement(tmp_path: Path) -> None:
    held = trained()
    collected = Collected(tmp_path)
    collected.writer.submit(3, 7, {layer: held.snapshot(layer) for layer in (0, 2, 4)}, copy_s=0.5)
    collected.writer.submit(3, 7, {layer: held.snapshot(layer) for layer in (1, 3)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    assert collected.reports == [(3, 7, (0, 2, 4), None), (3, 7, (1, 3), None)]
    assert [copy_s for copy_s, _ in collected.seconds] == [0.5, 0.0]
    assert all(write_s > 0 for _, write_s in collected.seconds)
    assert collected.begun == [7, 7]
    assert collected.thread != threading.get_ident()
    for layers in (range(3), range(2, 5)):
        other = held_layers(layers=layers)
        for layer in layers:
            state = read_layer(tmp_path, 7, layer)
            other.restore(layer, state)
            expected = held.snapshot(layer)
            assert other.snapshot(layer).keys() == expected.keys()
            for key, value in other.snapshot(layer).items():
                assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]


def test_a_layer_may_be_written_twice(tmp_path: Path) -> None:
    # Its first writer was lost, or the last checkpoint is taken again by the survivors.
    held = trained()
    collected = Collected(tmp_path)
    for _ in range(2):
        collected.writer.submit(3, 7, {0: held.snapshot(0)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    assert [report[3] for report in collected.reports] == [None, None]
    assert read_layer(tmp_path, 7, 0).keys() == held.snapshot(0).keys()


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_next_one_is_written(tmp_path: Path) -> None:
    held = trained()
    collected = Collected(tmp_path)
    layer_directory(tmp_path, 7, 0).parent.write_text("in the way")
    collected.writer.submit(3, 7, {0: held.snapshot(0)}, copy_s=0.0)
    collected.writer.submit(3, 8, {0: held.snapshot(0)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    (_, step, layers, error), after = collected.reports
    assert (step, layers) == (7, (0,))
    assert error is not None
    assert after == (3, 8, (0,), None)


def held_up_writer(checkpoints: Path) -> tuple[CheckpointWriter, threading.Event]:
    """Return a writer that has begun a checkpoint, and the event for which it waits."""
    begun, go_on = threading.Event(), threading.Event()

    def before_write(step: int) -> None:
        begun.set()
        go_on.wait()

    writer = CheckpointWriter(checkpoints, saved=lambda part: None, before_write=before_write)
    assert writer.join(unless=lambda: True)
    writer.submit(3, 7, {0: trained().snapshot(0)}, copy_s=0.0)
    begun.wait()
    return writer, go_on


def test_a_writer_that_is_busy_votes_against_the_next_checkpoint(tmp_path: Path) -> None:
    writer, go_on = held_up_writer(tmp_path)
    assert not writer.votes_for(8, is_due=True, request=0)
    assert writer.left_out == 8
    assert not writer.votes_for(9, is_due=False, request=1), "a request is answered later"
    assert writer.left_out == 0
    go_on.set()
    assert writer.join(unless=lambda: False)
    assert writer.votes_for(10, is_due=True, request=0)
    assert writer.votes_for(11, is_due=False, request=1)
    assert not writer.votes_for(12, is_due=False, request=0)
    assert writer.left_out == 0


def test_waiting_for_a_checkpoint_can_be_given_up(tmp_path: Path) -> None:
    writer, go_on = held_up_writer(tmp_path)
    assert writer.is_busy
    assert not writer.join(unless=lambda: True)
    go_on.set()
    assert writer.join(unless=lambda: False)
    assert writer.join(unless=lambda: True), "nothing is left to wait for"


def test_a_complete_checkpoint_is_not_touched_again(tmp_path: Path) -> None:
    held = trained()
    collected = Collected(tmp_path)
    collected.writer.submit(3, 7, {layer: held.snapshot(layer) for layer in range(LAYERS)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    mark_complete(tmp_path, 7, model="a model", num_layers=LAYERS)
    written = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    collected.writer.submit(3, 7, {0: held.snapshot(0)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == written
    assert collected.reports[-1] == (3, 7, (0,), None), "it is there, and that is what was asked for"


# --- planned failures ------------------------------------------------------------------------------------------------


class Injector(FaultInjector):
    """One that fails only on paper."""

    def __init__(self, worker: int, failures: list[Failure], log: FaultLog) -> None:
        super().__init__(worker, failures, log=log, disconnect=lambda: None)
        self.failed: list[tuple[FailureKind, FailurePhase | None, int | None]] = []

    def fail(self, kind: FailureKind, *, phase: FailurePhase | None, step: int | None) -> None:
        self.failed.append((kind, phase, step))


def planned(worker: int, step: int, phase: FailurePhase = "sync") -> Failure:
    return Failure(step=step, worker=worker, phase=phase, kind="hang")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(["sync", "vote"])), max_size=5))
def test_each_planned_failure_of_this_worker_happens_once_in_its_phase(
    failures: list[tuple[int, int, FailurePhase]],
) -> None:
    injector = Injector(1, [planned(*failure) for failure in failures], FaultLog(Path("unused")))
    phases: tuple[FailurePhase, ...] = ("sync", "vote")
    for step in range(10):
        for phase in phases:
            injector.at(phase, step)
            injector.at(phase, step)  # the step may be run again
    expected = [("hang", phase, step) for step in range(10) for phase in phases]
    assert sorted(injector.failed, key=str) == sorted(
        (e for e in expected for w, step, phase in failures if w == 1 and e[1:] == (phase, step)), key=str
    )


def test_a_failure_that_was_missed_happens_at_the_next_chance() -> None:
    # A phase such as "recovery" or "checkpoint" does not come in every step.
    injector = Injector(1, [planned(1, 4, "recovery")], FaultLog(Path("unused")))
    injector.at("recovery", 3)
    assert injector.failed == []
    injector.at("recovery", 8)
    assert injector.failed == [("hang", "recovery", 8)]


def test_failures_are_added_while_it_runs() -> None:
    injector = Injector(1, [], FaultLog(Path("unused")))
    injector.plan(planned(1, 0))
    injector.at("sync", 12)
    assert injector.failed == [("hang", "sync", 12)]


def test_a_disconnect_is_noted_and_carried_out(tmp_path: Path) -> None:
    log = FaultLog(tmp_path / "faults.jsonl")
    cut = threading.Event()
    injector = FaultInjector(
        2, [Failure(step=1, worker=2, phase="vote", kind="disconnect")], log=log, disconnect=cut.set
    )
    injector.at("vote", 1)
    assert cut.is_set()
    noted = log.last(2)
    assert noted is not None
    assert (noted["kind"], noted["phase"], noted["step"]) == ("disconnect", "vote", 1)


def test_a_worker_computes_at_the_injected_speed_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(
        fault_injection, "time", SimpleNamespace(perf_counter=lambda: 5.0, sleep=lambda seconds: slept.append(seconds))
    )
    failures = [Failure(step=step, worker=1, kind="slow", factor=factor) for step, factor in ((2, 0.25), (4, 1.0))]
    injector = FaultInjector(1, failures, log=FaultLog(Path("unused")), disconnect=lambda: None)
    for step in range(6):
        injector.at("forward", step)
        injector.slow_down(3.0)
    assert slept == [6.0, 6.0], "in the steps 2 and 3, three times the two seconds that the operation has taken"


def test_an_incarnation_has_the_failures_up_to_the_one_that_ends_it() -> None:
    def at(step: int, kind: FailureKind = "slow", worker: int = 1) -> Failure:
        return Failure(step=step, worker=worker, kind=kind, factor=0.5 if kind == "slow" else None)

    failures = [at(1), at(2, "kill"), at(3, "hang"), at(4, worker=0), at(5), at(6)]
    found = [failures_of_incarnation(failures, 1, number) for number in (1, 2, 3, 4)]
    assert found == [[at(1), at(2, "kill")], [at(3, "hang")], [at(5), at(6)], []]


# --- activity --------------------------------------------------------------------------------------------------------


def test_what_a_rank_is_doing() -> None:
    activity = Activity()

    def state() -> tuple[str, bool, bool, int | None]:
        found = activity.position(1)
        assert found.since_s >= 0
        return found.doing, found.waiting, found.for_message, found.peer

    assert state() == ("starting", True, False, None)
    activity.begin("F3")
    assert state() == ("F3", False, False, None)
    with activity.waiting("F4 of worker 2", for_message=True, peer=2):
        assert state() == ("F4 of worker 2", True, True, 2)
    with activity.waiting("loading layers"):
        assert state() == ("loading layers", True, False, None)
    assert state() == ("F3", False, False, None)
    activity.idle("quiesced")
    assert state() == ("quiesced", True, False, None)
