"""The lease as a key of etcd, by the JSON gateway of its version 3 API.

See https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/. The environment variables are those of etcdctl. The requests
are made by hand, because no client library that is kept has all of users, TLS and compare-and-swap (November 2026:
aetcd 1.0 has no TLS, etcd3gw 2.7 no users, and the last release of etcd3 is of 2020).
"""

from __future__ import annotations

import ssl
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from chameleon_ft.coordinator.lease.base import Answer, Claim, RegisterLease, Server
from chameleon_ft.errors import ConfigError, LeaseError
from chameleon_ft.protocol.address import split_address

_RANGE: Final = "/v3/kv/range"
_TXN: Final = "/v3/kv/txn"
_AUTHENTICATE: Final = "/v3/auth/authenticate"


class EtcdLease(RegisterLease[int]):
    """A key whose value is the newest claim; its version is `mod_revision`, 0 if the key does not exist.

    A member that cannot be reached, or has lost its quorum, is passed over for the next one.

    Args:
        servers: the members of the cluster, or some of them.
        key: the key of this run.
        user: name and password, for clusters that ask for them; None: none.
    """

    def __init__(self, servers: Sequence[Server], *, key: str, user: tuple[str, str] | None = None) -> None:
        self._servers = tuple(servers)
        # The index of the member to begin with.
        self._first = 0
        self._key = key
        self._user = user
        self._token = ""

    @classmethod
    def at(cls, address: str, *, run: Path, lease_s: float, environment: Mapping[str, str]) -> Self:
        """Return the lease of a run at etcd[s]://HOST:PORT[,HOST:PORT...][/PREFIX]. Raises ConfigError.

        Args:
            run: the directory of the run, which makes up the key after the prefix.
            environment: may have ETCDCTL_USER and ETCDCTL_PASSWORD; with TLS, ETCDCTL_CACERT, ETCDCTL_CERT and
                ETCDCTL_KEY.
        """
        scheme, _, rest = address.partition("://")
        endpoints, _, prefix = rest.partition("/")
        tls = _tls_context(environment) if scheme == "etcds" else None
        places = [split_address(endpoint) for endpoint in endpoints.split(",")]
        # So that a leader comes to the last member before its lease has run out.
        timeout_s = lease_s / (2 * len(places))
        servers = [Server(host=host, port=port, tls=tls, timeout_s=timeout_s) for host, port in places]
        name, _, password = environment.get("ETCDCTL_USER", "").partition(":")
        user = (name, password or environment.get("ETCDCTL_PASSWORD", "")) if name else None
        return cls(servers, key=f"/{prefix.strip('/') or 'chameleon'}{run}", user=user)

    def _read(self) -> tuple[Claim | None, int]:
        found = self._call(_RANGE, {"key": _encoded(self._key)}).get("kvs")
        if not found:
            return None, 0
        try:
            return Claim.from_json(b64decode(found[0].get("value", ""))), int(found[0]["mod_revision"])
        except LeaseError as error:
            raise LeaseError(
                f"{self}: key {self._key}: {error}; delete it by `etcdctl del {self._key}` if no coordinator of the "
                "run is alive"
            ) from None

    def _swap(self, claim: Claim, version: int) -> bool:
        key = _encoded(self._key)
        compare = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        put = {"request_put": {"key": key, "value": _encoded(claim.to_json())}}
        # The gateway leaves out what is false.
        return bool(self._call(_TXN, {"compare": [compare], "success": [put]}).get("succeeded", False))

    def _call(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call a method of the first member that answers, with authorization where it is needed. Raises LeaseError."""
        if self._user and not self._token:
            self._authenticate(self._user)
        answer = self._ask(path, body)
        # Tokens run out.
        if answer.status == 401 and self._user:
            self._authenticate(self._user)
            answer = self._ask(path, body)
        return self._accepted(answer)

    def _authenticate(self, user: tuple[str, str]) -> None:
        self._token = ""
        name, password = user
        answer = self._ask(_AUTHENTICATE, {"name": name, "password": password})
        # A cluster without authentication says so, and needs no token.
        if "authentication is not enabled" not in str(answer.body.get("message")):
            self._token = str(self._accepted(answer).get("token", ""))

    def _ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        headers = {"Authorization": self._token} if self._token else {}
        problems = []
        for index in range(self._first, self._first + len(self._servers)):
            server = self._servers[index % len(self._servers)]
            try:
                answer = server.request("POST", path, body, headers=headers)
                if answer.status < 500:
                    self._first = index % len(self._servers)
                    return answer
                problem = str(answer.body.get("message"))
            except OSError as error:
                problem = error.strerror or str(error)
            problems.append(f"{server}: {problem}")
        raise LeaseError(
            f"{self}: no member can be used ({'; '.join(problems)}); check that they run and can be reached"
        )

    def _accepted(self, answer: Answer) -> Mapping[str, Any]:
        if answer.status != 200:
            raise LeaseError(
                f"{self}: refused with status {answer.status}: {answer.body.get('message')}; set ETCDCTL_USER, as "
                f"NAME:PASSWORD, to a user that may read and write {self._key}"
            )
        return answer.body

    def __str__(self) -> str:
        return f"control.lease, etcd at {', '.join(map(str, self._servers))}"


def _tls_context(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context for the members, with a certificate of this client if the environment names one."""
    authority = environment.get("ETCDCTL_CACERT") or None
    certificate, key = environment.get("ETCDCTL_CERT"), environment.get("ETCDCTL_KEY")
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        # Errors of the format are OSErrors, too.
        raise ConfigError(
            f"control.lease: the certificates in ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY: "
            f"{error.strerror or error}; each must name a readable file in PEM format"
        ) from None
    return context


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()
