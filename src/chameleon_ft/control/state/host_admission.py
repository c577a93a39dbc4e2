"""Hosts on their way into the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.wire.messages import HostHello
from chameleon_ft.control.wire.parts import HostReport
from chameleon_ft.plan.frozen_map import FrozenMap, updated, without


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAdmission:
    """Agents that have connected and are not members yet, by connection, and the reports on hosts that are.

    Attributes:
        examining: agents that examine their hosts.
        waiting: agents that join once earlier agents of their hosts, which are awaited, are back or lost.
        reports: host that was examined and admitted -> what its agent has found there.
    """

    examining: Mapping[int, HostHello] = FrozenMap({})
    waiting: Mapping[int, HostHello] = FrozenMap({})
    reports: Mapping[str, HostReport] = FrozenMap({})

    def __post_init__(self) -> None:
        for name in ("examining", "waiting", "reports"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    @property
    def connections(self) -> tuple[int, ...]:
        """The connections of all agents that are not members yet."""
        return *self.waiting, *self.examining

    def examined_by(self, agent: int, hello: HostHello) -> Self:
        """Note that an agent examines its host; an earlier connection of the same agent does not count any more."""
        return replace(self, examining={**_without_agent(self.examining, hello), agent: hello})

    def awaited_by(self, agent: int, hello: HostHello) -> Self:
        """Note that an agent waits for another one of its host; an earlier connection of it does not count any more."""
        return replace(self, waiting={**_without_agent(self.waiting, hello), agent: hello})

    def with_report(self, host: str, report: HostReport) -> Self:
        """Keep the report on a host that is admitted."""
        return replace(self, reports=updated(self.reports, {host: report}))

    def without(self, agent: int) -> Self:
        """Remove an agent that joins, is refused, or whose connection has ended."""
        return replace(self, examining=without(self.examining, agent), waiting=without(self.waiting, agent))


def _without_agent(agents: Mapping[int, HostHello], hello: HostHello) -> dict[int, HostHello]:
    """Return the agents but the one that says hello, if it has a name."""
    return {connection: other for connection, other in agents.items() if not hello.id or other.id != hello.id}
