"""Leadership of a run: a term is claimed once, and renewed for as long as its coordinator leads.

Leases are described in C. Gray and D. Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file
cache consistency" (SOSP 1989). No back end compares clocks of different hosts: a coordinator that does not lead watches
whether the number of renewals changes, by its own monotonic clock.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

from chameleon_ft.errors import LeaseError
from chameleon_ft.host.processes import has_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A term and the coordinator that leads in it.

    Attributes:
        term: its number, from 1. A higher term supersedes all lower ones.
        address: host:port of the coordinator.
        host: name of the host of its process, and of the namespace in which `pid` is its number: containers of one
            host may have the same name.
        pid: its process.
        renewals: grows with each renewal, by any amount. Only its changes mean something.
        is_released: True if the coordinator has left the run to another one.
    """

    term: int
    address: str
    host: str
    pid: int
    renewals: int = 0
    is_released: bool = False

    def __post_init__(self) -> None:
        numbers = {"term": (self.term, 1), "pid": (self.pid, 1), "renewals": (self.renewals, 0)}
        for name, (value, least) in numbers.items():
            if type(value) is not int or value < least:
                raise LeaseError(f"claim: {name} = {value!r} must be a whole number from {least} on")
        texts: dict[str, object] = {"address": self.address, "host": self.host}
        for name, text in texts.items():
            if not isinstance(text, str) or not text:
                raise LeaseError(f"claim: {name} = {text!r} must be a text that is not empty")

    @classmethod
    def of_this_process(cls, *, term: int, address: str) -> Self:
        """Return the claim of this process."""
        return cls(term=term, address=address, host=_own_host(), pid=os.getpid())

    def is_same_leader(self, other: Claim | None) -> bool:
        """Return whether both are of one term and one process, whatever the renewals."""
        return other is not None and self._identity() == other._identity()

    def is_left(self) -> bool:
        """Return whether it is released, or its process has ended: on this host, this one would see it otherwise."""
        return self.is_released or (self.host == _own_host() and has_ended(self.pid))

    def to_json(self) -> str:
        """Return the claim as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a claim. Raises LeaseError."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise LeaseError(f"claim {text[:200]!r}: cannot be read: {error}") from None

    def _identity(self) -> tuple[int, str, str, int]:
        return self.term, self.address, self.host, self.pid


class Lease(Protocol):
    """Terms of a run, in a place that all its coordinators reach.

    Every method raises LeaseError if the place cannot be reached or refuses; then it is not known whether a claim or a
    renewal has taken place, and the call may be repeated: a claim that did succeed is confirmed. No method blocks the
    event loop, but an answer may take as long as the place needs. A coordinator that leads therefore counts its lease
    from the moment before the call.
    """

    async def newest(self) -> Claim | None:
        """Return the claim of the highest term, or None if no term was claimed."""

    async def claim(self, claim: Claim) -> bool:
        """Claim a term, atomically. Returns False if another process has claimed it, or a higher one."""

    async def renew(self, claim: Claim) -> bool:
        """Let the number of renewals of a claim grow. Returns False if its term is another's, or a higher one exists.

        A claim that was removed from the place is made again. `claim.renewals` is not used.
        """

    async def release(self, claim: Claim) -> None:
        """Note that the coordinator of a claim has left the run to another one."""


def _own_host() -> str:
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
