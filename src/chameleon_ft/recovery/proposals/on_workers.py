"""All kinds of plans on named workers, for one context; see `Proposer`."""

from __future__ import annotations

from functools import cached_property

from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals import drop_replica, oobleck, paper, rejoin, repair, repartition, reroute, restart
from chameleon_ft.recovery.proposals.paper import PaperRepartition
from chameleon_ft.search import InfeasibleError, SearchResult

__all__ = ["ProposalsOnWorkers"]


class ProposalsOnWorkers:
    """A `Proposer` of plans for `context`, with `horizon_s` expected seconds until the next incident."""

    def __init__(self, context: DecisionContext, horizon_s: float) -> None:
        self._context = context
        self._horizon_s = horizon_s

    @property
    def is_intact(self) -> bool:
        """See `Proposer`, as for all that follows."""
        return not self._context.lost

    def reroute(self, name: str) -> list[Proposal]:
        return reroute.propose(name, self._context)

    def reroute_decoupled(self, name: str) -> list[Proposal]:
        return reroute.propose_decoupled(name, self._context)

    def rejoin(self, name: str) -> list[Proposal]:
        return rejoin.propose(name, self._context)

    def repair(self, name: str) -> list[Proposal]:
        # The search for a re-partition has recut plans beside others: they are not searched for twice.
        known = self._found.recuts if "_found" in vars(self) and isinstance(self._found, SearchResult) else ()
        return repair.propose(name, self._context, recuts=known)

    def repartition(self, name: str) -> list[Proposal]:
        return repartition.proposed(name, self._found, self._context)

    def drop_pipelines(self, name: str) -> list[Proposal]:
        return drop_replica.propose(name, self._context)

    def restart(self, name: str) -> list[Proposal]:
        return restart.propose(name, self._context)

    def begin_anew(self, name: str) -> list[Proposal]:
        return repartition.proposed_anew(name, self._found, self._context)

    def oobleck(self, name: str) -> list[Proposal]:
        return oobleck.propose(name, self._context)

    def paper_repartition(self, name: str) -> PaperRepartition[Proposal]:
        return paper.repartition(name, self._context, self._horizon_s)

    @cached_property
    def _found(self) -> SearchResult | InfeasibleError:
        return repartition.search(self._context)
