"""The lease as a Lease object of Kubernetes (coordination.k8s.io/v1).

The three requests are made by hand, because the client library (37.0, November 2026) needs python-dateutil 3, which
botocore of the extra `stores` excludes.
"""

from __future__ import annotations

import hashlib
import math
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from chameleon_ft.coordinator.lease.base import Answer, Claim, RegisterLease, Server
from chameleon_ft.errors import ConfigError, LeaseError

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANNOTATION: Final = "chameleon-ft/claim"

_Object: TypeAlias = Mapping[str, Any]


class KubernetesLease(RegisterLease[_Object | None]):
    """A Lease object, whose version is the object itself, with its `resourceVersion`.

    The claim is an annotation. The specification repeats it for `kubectl get leases`: the term is `leaseTransitions`,
    the process `holderIdentity`. Its times are those of this host's clock, and no coordinator reads them.

    Args:
        server: the API server.
        account: directory with the token of the service account, which Kubernetes replaces from time to time.
        namespace: the namespace of the object.
        name: the name of the object.
        lease_s: seconds for which a renewal holds.
    """

    def __init__(self, server: Server, *, account: Path, namespace: str, name: str, lease_s: float) -> None:
        self._server = server
        self._account = account
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._lease_s = lease_s

    @classmethod
    def at(cls, address: str, *, run: Path, lease_s: float, environment: Mapping[str, str]) -> Self:
        """Return the lease of a run at kubernetes[://NAMESPACE]. Raises ConfigError.

        Args:
            run: the directory of the run, which makes up the name of the object.
            environment: has KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, as in every pod, and may have
                CHAMELEON_SERVICE_ACCOUNT, a directory with the files of a service account.
        """
        account = Path(environment.get("CHAMELEON_SERVICE_ACCOUNT") or _ACCOUNT)
        try:
            host, port = environment["KUBERNETES_SERVICE_HOST"], int(environment["KUBERNETES_SERVICE_PORT"])
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
            _, _, namespace = address.partition("://")
            namespace = namespace or (account / "namespace").read_text(encoding="utf-8").strip()
        except (KeyError, ValueError, OSError) as error:
            why = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"control.lease = {address!r}: {why}; run the coordinator in a pod with a service account, or set "
                "KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT and CHAMELEON_SERVICE_ACCOUNT, a directory with "
                "token, ca.crt and namespace"
            ) from None
        server = Server(host=host, port=port, tls=tls, timeout_s=lease_s / 3)
        # The name has what a name may have of the directory of the run, and a hash of its path.
        readable = re.sub(r"[^a-z0-9]+", "-", run.name.lower())[:40].strip("-")
        digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
        name = "-".join(part for part in ("chameleon", readable, digest) if part)
        return cls(server, account=account, namespace=namespace, name=name, lease_s=lease_s)

    def _read(self) -> tuple[Claim | None, _Object | None]:
        answer = self._request("GET", f"{self._leases}/{self._name}")
        if answer.status == 404:
            return None, None
        found = self._accepted(answer)
        text = (found["metadata"].get("annotations") or {}).get(_ANNOTATION)
        try:
            # An administrator may have made the object beforehand.
            return None if text is None else Claim.from_json(text), found
        except LeaseError as error:
            raise LeaseError(
                f"{self}: annotation {_ANNOTATION}: {error}; delete the object if no coordinator of the run is alive"
            ) from None

    def _swap(self, claim: Claim, version: _Object | None) -> bool:
        if version is None:
            body = self._with_claim({"metadata": {"name": self._name}}, claim)
            answer = self._request("POST", self._leases, body)
        else:
            answer = self._request("PUT", f"{self._leases}/{self._name}", self._with_claim(version, claim))
        # 409: there is another version, or the object exists by now; 404: it does no longer.
        if answer.status == 409 or (answer.status == 404 and version is not None):
            return False
        self._accepted(answer)
        return True

    def _with_claim(self, found: _Object, claim: Claim) -> _Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = found.get("spec") or {}
        is_new = spec.get("leaseTransitions") != claim.term
        metadata = found["metadata"]
        return {
            **found,
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                **metadata,
                "annotations": {**(metadata.get("annotations") or {}), _ANNOTATION: claim.to_json()},
            },
            "spec": {
                **spec,
                "holderIdentity": f"{claim.host}_{claim.pid}",
                "leaseDurationSeconds": math.ceil(self._lease_s),
                "leaseTransitions": claim.term,
                "acquireTime": now if is_new else spec.get("acquireTime", now),
                "renewTime": now,
            },
        }

    def _request(self, method: str, path: str, body: _Object | None = None) -> Answer:
        try:
            token = (self._account / "token").read_text(encoding="utf-8").strip()
            return self._server.request(method, path, body, headers={"Authorization": f"Bearer {token}"})
        except OSError as error:
            raise LeaseError(
                f"{self}: the API server at {self._server} cannot be used: {error.strerror or error}; check that it "
                f"can be reached, and that {self._account} has the token and the certificate of a service account"
            ) from None

    def _accepted(self, answer: Answer) -> _Object:
        if answer.status not in (200, 201):
            raise LeaseError(
                f"{self}: refused with status {answer.status}: {answer.body.get('message')}; the service account "
                "needs a Role with the verbs get, create and update for leases (docs/cluster.md)"
            )
        return answer.body

    def __str__(self) -> str:
        return f"control.lease, {self._leases.partition('namespaces/')[2]}/{self._name} of Kubernetes"
