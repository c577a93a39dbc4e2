"""Policies on thousands of workers: plans by class of pipelines, weighed by the rule of `recovery.decide`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from chameleon_ft.simulate.fleet import Fleet, arranged
from chameleon_ft.simulate.in_force import PlanInForce
from chameleon_ft.simulate.planner import Chosen, Option, Outlook
from chameleon_ft.simulate.policies import CLASS_POLICIES
from chameleon_ft.simulate.policies.symmetric import overhead
from chameleon_ft.simulate.world import World

__all__ = ["ClassPlanner"]

_LEAST_HOST = 4


class ClassPlanner(PlanInForce[Fleet]):
    """One policy. `shallow` begins with pipelines that are not deeper than a host has workers, or than four."""

    def __init__(self, policy: str, world: World, *, shallow: bool = False) -> None:
        super().__init__()
        self._propose = CLASS_POLICIES[policy]
        self._world = world
        self._policy = policy
        self._shallow = shallow

    def start(self, speeds: Mapping[int, float]) -> Chosen | None:
        """Begin with the fastest pipelines, of one depth under a policy of equal pipelines."""
        fleet = self._first(speeds)
        if fleet is None:
            return None
        step_s = self._world.step_s(fleet, speeds)
        if step_s is None:
            return None
        if self._policy == "redundant":
            step_s *= 1 + overhead(self._world, fleet, step_s)
        return self._in_force(Option(kind="start", plan=fleet, step_s=step_s, stall_s=0.0))

    def _lose(self, lost: frozenset[int]) -> None:
        if self._reached is not None:
            self._reached = self._reached.without(lost)

    def _used(self, plan: Fleet) -> frozenset[int]:
        return plan.used

    def _options(self, reached: Fleet, outlook: Outlook) -> Sequence[Option]:
        return self._propose(self._world, reached, outlook) if outlook.speeds else []

    def _first(self, speeds: Mapping[int, float]) -> Fleet | None:
        if self._world.start is not None and self._world.start.used <= speeds.keys():
            return self._world.start
        if self._policy in ("restart", "redundant"):
            return self._world.equal_fleet(Fleet(()), speeds)
        if not self._shallow:
            return self._world.fastest_fleet(Fleet(()), speeds)
        depth = max(_LEAST_HOST, self._world.pipelines.per_host)
        mix = self._world.mixes.equal_within(len(speeds), depth)
        return None if mix is None else arranged({own.cut: n for own, n in mix.counts.items()}, sorted(speeds))

    def _from_checkpoint(self, outlook: Outlook) -> list[Option]:
        """The pipelines of whoever is there, from the last checkpoint, when a layer has lost its last holder.

        They are the fastest under a policy that re-partitions, and equal ones under all others.
        """
        if self._policy != "restart" and not self._world.parameters.has_checkpoints:
            return []
        fastest = self._policy in ("chameleon", "repartition")
        fleet = (self._world.fastest_fleet if fastest else self._world.equal_fleet)(Fleet(()), outlook.speeds)
        step_s = None if fleet is None else self._world.step_s(fleet, outlook.speeds)
        if fleet is None or step_s is None:
            return []
        option = self._world.from_checkpoint("checkpoint", fleet, step_s, outlook)
        # There is nothing left that could be saved first.
        return [
            replace(option, stall_s=self._world.parameters.restart_s, again_s=outlook.rollback_s, saves_first=False)
        ]
