"""A lease in a place that keeps one value and replaces it by compare-and-swap.

JSON requests to the servers that keep leases.
"""

from __future__ import annotations

import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, Generic, TypeVar

from chameleon_ft.coordinator.lease.base import Claim
from chameleon_ft.errors import LeaseError
from chameleon_ft.protocol.background_tasks import in_thread

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
