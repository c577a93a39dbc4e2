"""Policies: which kinds of plans each of them proposes, in runs and in simulations of any size.

To add a policy, add an entry to `POLICIES` and its name to `PolicyName` of the configuration; or register one, see
`chameleon_ft.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals import ProposalsOnWorkers, Proposer
from chameleon_ft.registry import Registry

Kind: TypeAlias = Literal[
    "reroute", "reroute_decoupled", "rejoin", "repair", "repartition", "begin_anew", "drop_pipelines", "restart"
]
"""The kinds of plans: methods of `Proposer`, which explains them."""

_Proposed = TypeVar("_Proposed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy; calling it proposes plans for a context of named workers.

    Attributes:
        kinds: the kinds of plans that are scored, in this order, each with the name of its proposals.
        planner: a planner of the registry whose plans are scored too.
        starts: how a simulation starts if no plan is given: with the "fastest" plan; with "equal" pipelines of one
            depth; or with the best of "several" plans, for a policy that never leaves the depth that it starts with.
        replans: True if it returns to a checkpoint with the fastest plan too, not only with equal pipelines.
        restarts: True if it returns to a checkpoint after every loss, so that there always is one.
        salvages: True if a run completes an interrupted step from what survivors hold of it, instead of repeating it,
            and decides on everything but rerouting while it trains.
    """

    kinds: Mapping[Kind, str] = field(default_factory=lambda: FrozenMap({}))
    planner: str | None = None
    starts: Literal["fastest", "equal", "several"] = "fastest"
    replans: bool = False
    restarts: bool = False
    salvages: bool = False

    def propose(self, proposer: Proposer[_Proposed]) -> list[_Proposed]:
        """Return the proposals of all kinds."""
        found: list[_Proposed] = [each for kind, name in self.kinds.items() for each in getattr(proposer, kind)(name)]
        return found if self.planner is None else [*found, *proposer.planned_by(self.planner)]

    def __call__(self, context: DecisionContext, horizon_s: float) -> list[Proposal]:
        """Propose plans, each of them once, for `horizon_s` expected seconds until the next incident."""
        found: list[Proposal] = []
        plans: list[tuple[object, ...]] = []
        for proposal in self.propose(ProposalsOnWorkers(context, horizon_s, searches="repartition" in self.kinds)):
            plan = proposal.plan, proposal.in_flight_limits, proposal.from_checkpoint
            if proposal.plan is None or plan not in plans:
                found.append(proposal)
                plans.append(plan)
        return found


POLICIES: Final = Registry[Policy](
    "policy",
    "policies",
    {
        "chameleon": Policy(
            kinds={
                "reroute": "reroute",
                "rejoin": "rejoin",
                "repair": "repair",
                "repartition": "repartition",
                "begin_anew": "anew",
            },
            replans=True,
            salvages=True,
        ),
        "reroute": Policy(kinds={"reroute": "reroute", "rejoin": "reroute-rejoin"}, starts="several", salvages=True),
        "repair": Policy(kinds={"repair": "repair"}, starts="several"),
        "repartition": Policy(kinds={"repartition": "repartition"}, replans=True),
        # ReCycle (Gandhi et al., SOSP 2024, arXiv 2405.14009). Start it with pipelines of 1F1B with fused backward. The
        # peers of a lost worker fill their bubbles with its micro-batches (Adaptive Pipelining), and split their
        # backward so that more of it fits (Decoupled BackProp), with up to one and two pipeline depths of micro-batches
        # in flight where memory holds them. A worker that returns takes the place of a lost one. Its planner finds
        # schedules by mixed-integer programming; here they are by `best_program`. The Staggered Optimizer, by which a
        # stage starts its next step while others end theirs, is left out. We know no source code of ReCycle, nor
        # whether it recomputes activations: workers do if they do in the plan.
        "recycle": Policy(
            kinds={"reroute": "recycle", "reroute_decoupled": "recycle-decoupled", "rejoin": "recycle-rejoin"},
            starts="several",
        ),
        # Oobleck (Jang et al., SOSP 2023).
        "oobleck": Policy(planner="oobleck"),
        # The Chameleon paper (arXiv 2508.21613). Our predictions score its plan like any other.
        "paper": Policy(planner="paper"),
        # Per-replica fault tolerance: the unit of loss is a whole pipeline.
        "drop-replica": Policy(kinds={"drop_pipelines": "drop-replica"}, starts="several"),
        "restart": Policy(kinds={"restart": "restart"}, starts="equal", restarts=True),
    },
)
"""Every policy by its name."""
