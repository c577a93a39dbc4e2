"""JSON requests to the servers that keep leases."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any


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
        timeout_s: of each wait for the server, of which there are a few in a request.
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
