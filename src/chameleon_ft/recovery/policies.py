"""Policies: which kinds of plans each of them proposes, in runs and in simulations of any size.

To add a policy, add an entry to `POLICIES` and its name to `PolicyName` of the configuration; or register one, see
`chameleon_ft.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals import ProposalsOnWorkers
from chameleon_ft.registry import Registry

Kind: TypeAlias = Literal[
    "reroute",  # Peers of the lost workers take their micro-batches; nothing moves. The same plan if none is lost.
    "reroute_decoupled",  # As "reroute", with the fused backward of the plan split, so that more of it fits bubbles.
    "rejoin",  # Idle workers take the places of lost ones; peers do the share of places that stay empty.
    "repair",  # Broken pipelines are cut anew over their remaining workers and idle ones; the others stay.
    "repartition",  # The fastest pipelines of all live workers; slower ones that move less or survive more losses.
    "begin_anew",  # The plans of "repartition" from a checkpoint, if there is one: nothing has to move for them.
    "drop_pipelines",  # Broken pipelines are dropped; as soon as there are enough idle workers, they form new ones.
    "restart",  # Equal pipelines of all live workers, from a checkpoint.
]
"""The kinds of plans: methods of `ProposalsOnWorkers`, for named workers, and of `simulate.ProposalsByClass`, for
layouts whose pipelines are counted by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy; calling it proposes plans for a context of named workers.

    Attributes:
        kinds: the kinds of plans that are scored, in this order, each with the name of its proposals.
        planner: a planner of the registry whose plans are scored too.
        starts: how a simulation starts if no plan is given: with the "fastest" plan; with "equal" pipelines of one
            depth; or with the best of "several" plans, for a policy that never leaves the depth that it starts with.
        replans: whether it returns to a checkpoint with the fastest plan too, not only with equal pipelines.
        restarts: whether it returns to a checkpoint after every loss, so that there always is one.
        salvages: whether a run completes an interrupted step from what survivors hold of it, instead of repeating it,
            and decides on everything but rerouting while it trains.
    """

    kinds: Mapping[Kind, str] = field(default_factory=lambda: FrozenMap({}))
    planner: str | None = None
    starts: Literal["fastest", "equal", "several"] = "fastest"
    replans: bool = False
    restarts: bool = False
    salvages: bool = False

    def propose(self, proposer: Any) -> list[Any]:
        """Return the proposals of all kinds; `proposer` has a method for each `Kind`, and `planned_by`."""
        found = [each for kind, name in self.kinds.items() for each in getattr(proposer, kind)(name)]
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
