"""A policy: which plans it proposes, and how it is simulated; the same in runs and in simulations of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.on_workers import ProposalsOnWorkers
from chameleon_ft.recovery.proposals.paper import PaperRepartition

__all__ = ["Policy", "Proposer"]

_P = TypeVar("_P")


class Proposer(Protocol[_P]):
    """Makes the plans that policies choose from.

    In runs, and in simulations of few workers, plans are `Proposal`s on named workers (`ProposalsOnWorkers`). In
    simulations of many workers they are layouts whose pipelines are counted by class (`ProposalsByClass`). Each method
    returns the plans of one kind; none if there is none, or a reason in place of a plan.
    """

    @property
    def is_intact(self) -> bool:
        """Whether no worker of the plan is lost."""

    def reroute(self, name: str) -> Sequence[_P]:
        """Peers of the lost workers do their share; nothing moves. The plan as it is if no worker is lost."""

    def reroute_decoupled(self, name: str) -> Sequence[_P]:
        """As `reroute`, with backward split that was fused, so that more of it fits bubbles; none if it was split."""

    def rejoin(self, name: str) -> Sequence[_P]:
        """Idle workers take the places of lost ones; peers do the share of places that stay empty."""

    def repair(self, name: str) -> Sequence[_P]:
        """Broken pipelines are cut anew over the workers that are left of them and idle ones; the others stay."""

    def repartition(self, name: str) -> Sequence[_P]:
        """The fastest pipelines of all live workers, and slower ones that move less or survive more losses."""

    def drop_pipelines(self, name: str) -> Sequence[_P]:
        """Broken pipelines are dropped, and idle workers make new ones as soon as there are enough."""

    def restart(self, name: str) -> Sequence[_P]:
        """Equal pipelines of all live workers, from a checkpoint."""

    def begin_anew(self, name: str) -> Sequence[_P]:
        """The plans of `repartition` from a checkpoint, if there is one: those that memory lets nothing move to too."""

    def oobleck(self, name: str) -> Sequence[_P]:
        """The best combination of Oobleck's templates."""

    def paper_repartition(self, name: str) -> PaperRepartition[_P]:
        """The pipelines of the paper's search, with the paper's estimates of them and of rerouting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy; calling it proposes plans for a context of named workers.

    Attributes:
        propose: from the kinds of plans that there are to those that the policy has scored.
        starts: what a simulation starts it with, if no plan is given: the "fastest" plan; "equal" pipelines of one
            depth; or the best of "several" plans, for a policy that never leaves the depth that it starts with.
        replans: whether it goes on with the fastest plan from a checkpoint too, not with equal pipelines.
        restarts: whether every loss sends it back to a checkpoint, so that there always are some.
    """

    propose: Callable[[Proposer[Any]], Sequence[Any]]
    starts: Literal["fastest", "equal", "several"] = "fastest"
    replans: bool = False
    restarts: bool = False

    def __call__(self, context: DecisionContext, horizon_s: float) -> list[Proposal]:
        """Propose plans, each of them once, for `horizon_s` expected seconds until the next incident."""
        found: list[Proposal] = []
        known: list[tuple[object, ...]] = []
        for proposal in self.propose(ProposalsOnWorkers(context, horizon_s)):
            plan = proposal.plan, proposal.in_flight_limits, proposal.from_checkpoint
            if proposal.plan is None or plan not in known:
                found.append(proposal)
                known.append(plan)
        return found
