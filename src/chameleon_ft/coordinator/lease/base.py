"""Leadership of a run: a term is claimed once, and renewed for as long as its coordinator leads.

Leases are described in C. Gray and D. Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file
cache consistency" (SOSP 1989). No back end compares clocks of different hosts: a coordinator that does not lead watches
whether the number of renewals changes, by its own monotonic clock.

`RegisterLease` is a lease in a place that keeps one value and replaces it by compare-and-swap. `Server` sends JSON
requests to servers that keep leases.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from chameleon_ft.errors import LeaseError
from chameleon_ft.host.processes import has_ended
from chameleon_ft.protocol.background_tasks import in_thread


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


_Version = TypeVar("_Version")
_ATTEMPTS: Final = 20


class RegisterLease(ABC, Generic[_Version]):
    """The newest claim as one value, which each claim and renewal replaces; earlier ones are not kept.

    A back end gives `_read` and `_swap`, which may block.
    """

    async def newest(self) -> Claim | None:
        """Return the claim of the highest term, or None if no term was claimed."""
        claim, _ = await in_thread(self._read)
        return claim

    async def claim(self, claim: Claim) -> bool:
        """Claim a term, atomically. Returns False if another process has claimed it, or a higher one."""
        return await in_thread(lambda: self._claim(claim, is_renewal=False))

    async def renew(self, claim: Claim) -> bool:
        """Let the number of renewals of a claim grow. Returns False if its term is another's, or a higher one exists.

        A claim that was removed is made again.
        """
        return await in_thread(lambda: self._claim(claim, is_renewal=True))

    async def release(self, claim: Claim) -> None:
        """Note that the coordinator of a claim has left the run to another one."""
        await in_thread(lambda: self._claim(replace(claim, is_released=True), is_renewal=True))

    @abstractmethod
    def _read(self) -> tuple[Claim | None, _Version]:
        """Return the value and its version, which is another one after each write. Raises LeaseError."""

    @abstractmethod
    def _swap(self, claim: Claim, version: _Version) -> bool:
        """Replace the value of this version. Returns False if there is another one now. Raises LeaseError."""

    def _claim(self, claim: Claim, *, is_renewal: bool) -> bool:
        for _ in range(_ATTEMPTS):
            current, version = self._read()
            following = replace(claim, renewals=0)
            if current is not None and claim.is_same_leader(current):
                if not is_renewal:
                    return True
                is_released = current.is_released or claim.is_released
                following = replace(current, renewals=current.renewals + 1, is_released=is_released)
            elif current is not None and current.term >= claim.term:
                return False
            if self._swap(following, version):
                return True
        # Each attempt that failed was a renewal or a claim of another process.
        raise LeaseError(
            f"control.lease: term {claim.term} cannot be claimed, because other processes write as often as this one "
            "tries; end all but a few standbys of the run"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server: the status and the JSON object."""

    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server and how it is reached: directly, because a lease must not depend on a proxy.

    Attributes:
        tls: None: no TLS.
        timeout_s: seconds of each wait for the server, of which there are a few in a request.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    timeout_s: float

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request and wait for the answer, whatever its status. Raises OSError."""
        if self.tls is None:
            connection = HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        else:
            connection = HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=self.tls)
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return Answer(response.status, dict(json.loads(response.read())))
        except (HTTPException, ValueError, TypeError) as error:
            raise ConnectionError(f"the answer is not that of such a server: {error!r}") from None
        finally:
            connection.close()
