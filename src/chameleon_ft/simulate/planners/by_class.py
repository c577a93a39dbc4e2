"""Policies on thousands of workers: layouts by class of pipelines, scored by the rule of `recovery.decide`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from chameleon_ft.recovery import LossRisk, Policy
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, layout_risk
from chameleon_ft.simulate.by_class.world import World
from chameleon_ft.simulate.planners.base import ActivePlan
from chameleon_ft.simulate.planners.options import Option, SimulatorState
from chameleon_ft.simulate.planners.proposals_by_class import ProposalsByClass

__all__ = ["ClassPlanner"]


class ClassPlanner(ActivePlan[ClusterLayout]):
    """A policy by class. `start_number`: which of several start layouts it begins with."""

    def __init__(self, policy: Policy, model: World, *, start_number: int = 0) -> None:
        has_checkpoints = model.parameters.has_checkpoints or policy.restarts
        super().__init__(model.costs, model.parameters, has_checkpoints=has_checkpoints)
        self._policy = policy
        self._model = model
        self._start_number = start_number

    def _starts(self, speeds: Mapping[int, float]) -> list[Option]:
        return self._options_of("start", self._model.starts(self._policy, speeds, self._start_number), speeds)

    def _lose(self, lost: frozenset[int]) -> None:
        if self._reached is not None:
            super()._lose(lost & self._reached.used)
            self._reached = self._reached.without(lost)

    def _used(self, plan: ClusterLayout) -> frozenset[int]:
        return plan.used

    def _risk(self, plan: ClusterLayout, live: Collection[int]) -> LossRisk | None:
        hosts = self._costs.cluster.hosts
        return layout_risk(plan, {worker: hosts[worker] for worker in live}, self._model.pipelines.num_layers)

    def _options(self, reached: ClusterLayout, state: SimulatorState) -> Sequence[Option]:
        proposer = ProposalsByClass(self._model, reached, state, is_intact=not self._lost)
        return [*proposer.keep(), *self._policy.propose(proposer)]

    def _restarts(self, state: SimulatorState) -> list[Option]:
        layouts = self._model.restarts(self._policy, state.speeds, self._start_number)
        return self._options_of("checkpoint", layouts, state.speeds)

    def _options_of(self, kind: str, layouts: Sequence[ClusterLayout], speeds: Mapping[int, float]) -> list[Option]:
        return [
            Option(kind=kind, plan=layout, step_s=step_s, stall_s=0.0)
            for layout in layouts
            if (step_s := self._model.step_s(layout, speeds)) is not None
        ]
