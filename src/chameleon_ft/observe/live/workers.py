"""The state of each worker of a run, from its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

WorkerState: TypeAlias = Literal["live", "slow", "draining", "spare", "joining", "lost", "left"]

WORKER_STATES: Final[Mapping[WorkerState, str]] = {
    "live": "trains",
    "slow": "trains, slower than the others",
    "draining": "trains until a plan without it is in force",
    "spare": "is ready, and the plan does not use it",
    "joining": "is starting, or loading layers",
    "lost": "has failed",
    "left": "has left on request",
}
"""Description of each state."""


@dataclass(slots=True)
class WorkerBoard:
    """The workers as the events so far leave them.

    Attributes:
        hosts: host of each worker, as far as events name it.
        speeds: speed of each slow worker, relative to the others.
        link_speeds: likewise of each slow link, by its two workers.
    """

    hosts: dict[int, str] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    link_speeds: dict[tuple[int, int], float] = field(default_factory=dict)
    _detected: set[int] = field(default_factory=set)  # lost workers whose recovery is not recorded yet
    _states: dict[int, WorkerState] = field(default_factory=dict)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Take in an event."""
        match name:
            case "started":
                self.speeds.clear()
                self.link_speeds.clear()
                self._detected.clear()
                self._states = {worker: "live" for pipeline in fields["pipelines"] for worker in pipeline}
            case "host_joined":
                self._set("joining", *fields["workers"])
            case "respawn":
                self._set("joining", fields["worker"])
            case "joined":
                self._set("live", fields["worker"])  # a spare, until a plan uses it
                self.hosts[fields["worker"]] = fields["host"]
            case "lost":
                self._lost(fields)
                self._detected.add(fields["worker"])
            case "failure" if fields["worker"] in self._detected:
                self._detected.discard(fields["worker"])  # it may be starting again by now
            case "failure":
                self._lost(fields)
            case "join_failed" | "blocklisted":
                self._set("lost", fields["worker"])
            case "draining":
                self._set("draining", *fields["workers"])
            case "drain_failed":
                self._set("live", *fields["workers"])
            case "drained" | "left":
                self._set("left", fields["worker"])
            case "slow":
                self.speeds[fields["worker"]] = fields["speed"]
            case "recovered":
                self.speeds.pop(fields["worker"], None)
            case "slow_link":
                self.link_speeds[_pair(fields)] = fields["speed"]
            case "recovered_link":
                self.link_speeds.pop(_pair(fields), None)

    def by_state(self, in_plan: frozenset[int] | None = None) -> dict[WorkerState, tuple[int, ...]]:
        """Return the workers in each state, ascending.

        Args:
            in_plan: workers that the plan in force uses; None: not known, so that there seem to be no spares.
        """
        found: defaultdict[WorkerState, list[int]] = defaultdict(list)
        for worker in sorted(self._states):
            state = self._states[worker]
            if state == "live" and in_plan is not None and worker not in in_plan:
                state = "spare"
            elif state == "live" and worker in self.speeds:
                state = "slow"
            found[state].append(worker)
        return {state: tuple(found[state]) for state in WORKER_STATES if found[state]}

    def _lost(self, fields: Mapping[str, Any]) -> None:
        self._set("lost", fields["worker"])
        if host := fields.get("host"):
            self.hosts[fields["worker"]] = host

    def _set(self, state: WorkerState, *workers: int) -> None:
        for worker in workers:
            self._states[worker] = state
            if state in ("lost", "left", "joining"):
                self.speeds.pop(worker, None)


def _pair(fields: Mapping[str, Any]) -> tuple[int, int]:
    first, second = sorted(fields["workers"])
    return first, second
