"""The commit of a step: the vote, and the update."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.errors import ControlError
from chameleon_ft.plan.vote import Vote
from chameleon_ft.sync import Segment
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators
from chameleon_ft.worker.execution.bad_steps import BadStepError
from chameleon_ft.worker.execution.commit import CommitContext, Committer, ComputedStep, Wishes
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.execution.steps import StepStats
from chameleon_ft.worker.mover import Mover
from tests.golden import refused
from tests.worker.toy import toy_job, toy_rank
from tests.worker.toy_state import LAYERS, WHOLE, held_layers, no_faults, set_gradients, weights

CONTRIBUTIONS = 12


def committer(
    held: HeldLayers, tmp_path: Path, *, clip_norm: float | None, clip_value: float | None = None, committed: int = 0
) -> Committer:
    job = replace(toy_job(LAYERS), clip_norm=clip_norm, clip_value=clip_value)
    return Committer(
        rank=toy_rank(job, faults=no_faults(tmp_path)),
        held=held,
        buffers=GradientBuffers(held, [Segment(WHOLE, (0,))]),
        contributions=lambda step: CONTRIBUTIONS,
        committed=committed,
    )


NO_PEERS: Communicators = None  # type: ignore[assignment]  # a worker without peers
ALONE = CommitContext(communicators=NO_PEERS, members=(0,))


def commit_step(
    committer: Committer,
    stats: StepStats,
    *,
    context: CommitContext = ALONE,
    contributions: int = CONTRIBUTIONS,
    finish: bool = False,
) -> Any:
    with Reductions(committer.buffers, (), Mover(context.communicators)) as reductions:
        computed = ComputedStep(stats=stats, reductions=reductions, contributions=contributions)
        return committer.commit(computed, context, lambda: Wishes(finish=finish))


@pytest.mark.parametrize(("clip_norm", "clip_value"), [(None, None), (0.3, 0.02), (1e6, 0.1)])
def test_a_commit_is_what_torch_does_with_the_mean_gradient(
    tmp_path: Path, clip_norm: float | None, clip_value: float | None
) -> None:
    job = toy_job(LAYERS)
    ours, theirs = held_layers(job), held_layers(job)
    commit = committer(ours, tmp_path, clip_norm=clip_norm, clip_value=clip_value)
    parameters = theirs.parameters(WHOLE)
    optimizer = job.optimizer(parameters)
    for step in range(3):
        set_gradients(ours, step)
        applied = commit_step(commit, StepStats(loss=12.0, terms=6, samples=4))
        random_numbers = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random_numbers).to(parameter.dtype) / 6
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip_norm is None else clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(parameters, clip_value)
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
    applied = commit_step(first, StepStats(loss=3.0, terms=7, samples=4))
    second.reduced = True
    assert second.apply(applied.vote) == applied
    for one, other in zip(weights(now), weights(later), strict=True):
        assert torch.equal(one, other)


def test_a_request_to_finish_is_in_the_vote(tmp_path: Path) -> None:
    commit = committer(held_layers(), tmp_path, clip_norm=None)
    assert commit_step(commit, StepStats(loss=1.0, terms=1, samples=1), finish=True).vote.finish
    assert not commit_step(commit, StepStats(loss=1.0, terms=1, samples=1)).vote.finish


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0), (1.0, math.nan)])
def test_a_step_that_is_no_number_is_not_applied(tmp_path: Path, loss: float, gradient: float) -> None:
    held = held_layers()
    commit = committer(held, tmp_path, clip_norm=1.0)
    before = weights(held)
    next(iter(commit.buffers.of(commit.buffers.segments[0]))).fill_(gradient)
    with pytest.raises(BadStepError, match=r"^the (loss|gradient norm) is (nan|inf)$"):
        commit_step(commit, StepStats(loss=loss, terms=2, samples=2))
    assert commit.committed == 0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(held), strict=True))


def test_a_step_without_terms_is_skipped_now_and_later(tmp_path: Path) -> None:
    now, later = held_layers(), held_layers()
    first, second = committer(now, tmp_path, clip_norm=1.0), committer(later, tmp_path, clip_norm=1.0)
    before = weights(now)
    next(iter(first.buffers.of(first.buffers.segments[0]))).fill_(math.nan)
    applied = commit_step(first, StepStats(loss=0.0, terms=0.0, samples=2))
    second.reduced = True
    assert second.apply(applied.vote) == applied
    assert (applied.vote.skipped, applied.vote.empty, applied.grad_norm) == (True, True, 0.0)
    assert first.committed == second.committed == 1
    for held in (now, later):
        assert all(torch.equal(one, other) for one, other in zip(before, weights(held), strict=True))


class Deaf:
    """Communicators in which the others' share of the vote never arrives, though the sum comes back."""

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Any:
        class Done:
            def wait(self) -> None: ...

        return Done()

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> Any:
        return self.all_reduce(ballot, ())


def test_a_vote_without_every_worker_is_none(tmp_path: Path) -> None:
    commit = committer(held_layers(), tmp_path, clip_norm=None)
    deaf: Communicators = Deaf()  # type: ignore[assignment]
    stats = StepStats(loss=1.0, terms=1, samples=1)
    with pytest.raises(CommunicationError, match="the vote counted 1 of 2 workers"):
        commit_step(commit, stats, context=CommitContext(communicators=deaf, members=(0, 1)))
    assert commit.committed == 0
    assert commit.reduced, "it holds what it takes to follow, should another one have applied the step"


@pytest.mark.parametrize("contributions", [CONTRIBUTIONS - 1, CONTRIBUTIONS + 1])
def test_a_step_without_a_contribution_or_with_one_twice_is_not_applied(tmp_path: Path, contributions: int) -> None:
    commit = committer(held_layers(), tmp_path, clip_norm=None)
    stats = StepStats(loss=1.0, terms=1, samples=1)
    with refused(ControlError):
        commit_step(commit, stats, contributions=contributions)
    assert commit.committed == 0


def test_a_step_is_applied_only_from_a_reduced_gradient(tmp_path: Path) -> None:
    vote = Vote(grad_square_sum=1.0, loss_sum=1.0, terms=1, samples=1, finish=False)
    with pytest.raises(AssertionError, match="fully reduced"):
        committer(held_layers(), tmp_path, clip_norm=None).apply(vote)
