"""Policies on thousands of workers: plans by class of pipelines, weighed by the rule of `recovery.decide`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chameleon_ft.simulate.fleet import Fleet, arranged
from chameleon_ft.simulate.planner import Chosen, Option, Outlook, best_option
from chameleon_ft.simulate.policies import CLASS_POLICIES
from chameleon_ft.simulate.policies.symmetric import overhead
from chameleon_ft.simulate.world import World

__all__ = ["ClassPlanner"]

_LEAST_HOST = 4


class ClassPlanner:
    """One policy. `shallow` begins with pipelines that are not deeper than a host has workers, or than four."""

    def __init__(self, policy: str, world: World, *, shallow: bool = False) -> None:
        self._propose = CLASS_POLICIES[policy]
        self._world = world
        self._policy = policy
        self._shallow = shallow
        # The plan that all of its workers are known to hold; None where that is not so for any.
        self._reached: Fleet | None = None
        self._decided: Fleet | None = None

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

    def decide(self, outlook: Outlook) -> Chosen | None:
        """See `Planner`."""
        if not outlook.interrupted:
            self._reached = self._decided
        options: list[Option] = []
        if self._reached is not None:
            self._reached = self._reached.without(outlook.lost)
            if outlook.speeds:
                options = list(self._propose(self._world, self._reached, outlook))
        if not options:
            options = self._from_checkpoint(outlook)
        best = best_option(options, outlook.horizon_s)
        if best is None:
            self._reached = self._decided = None
            return None
        if best.from_checkpoint:
            self._reached = None
        return self._in_force(best)

    def _in_force(self, option: Option) -> Chosen:
        self._decided = option.plan
        return Chosen(option=option, used=option.plan.used)

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
        """Equal pipelines of whoever is there, from the last checkpoint, when a layer has lost its last holder."""
        fleet = self._world.equal_fleet(Fleet(()), outlook.speeds)
        step_s = None if fleet is None else self._world.step_s(fleet, outlook.speeds)
        if fleet is None or step_s is None:
            return []
        option = self._world.from_checkpoint("checkpoint", fleet, step_s, outlook)
        # There is nothing left that could be saved first.
        return [
            replace(option, stall_s=self._world.parameters.restart_s, again_s=outlook.rollback_s, saves_first=False)
        ]
