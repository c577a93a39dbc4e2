"""A server that treats Lease objects as the API server of Kubernetes does: versions, conflicts, validation, access."""

from __future__ import annotations

import copy
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

_PATH: Final = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/(?P<namespace>[-a-z0-9]+)/leases(/(?P<name>.+))?")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MICRO_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


class ApiServer:
    """The objects, and the service account of the only client.

    Attributes:
        objects: (namespace, name) -> Lease object.
        environment: of a coordinator in a pod of this cluster.
    """

    def __init__(self, directory: Path, port: int) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.account = directory
        self.environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(port),
            "CHAMELEON_SERVICE_ACCOUNT": str(directory),
        }
        self.token = ""
        self.verbs = {"get", "create", "update"}
        self._version = 1000
        self._lock = threading.Lock()
        self.rotate_token("first")

    def rotate_token(self, token: str) -> None:
        """Replace the token in the pod; the one before is not valid any more."""
        self.token = token
        (self.account / "token").write_text(token, encoding="utf-8")

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Mapping[str, Any]]:
        """Return status and object."""
        if token != f"Bearer {self.token}":
            return _failure(401, "Unauthorized")
        place = _PATH.fullmatch(path)
        if place is None:
            return _failure(404, "the server could not find the requested resource")
        verb = {"GET": "get", "POST": "create", "PUT": "update"}[method]
        if verb not in self.verbs:
            return _failure(403, f'leases.coordination.k8s.io is forbidden: User cannot {verb} resource "leases"')
        namespace, name = place["namespace"], place["name"]
        with self._lock:
            if method == "GET":
                found = self.objects.get((namespace, name))
                return (200, copy.deepcopy(found)) if found else _failure(404, f'leases "{name}" not found')
            return self._written(body, namespace=namespace, name=name)

    def _written(self, body: Any, *, namespace: str, name: str | None) -> tuple[int, Mapping[str, Any]]:
        metadata = body["metadata"]
        key = (namespace, metadata.get("name", ""))
        if (problem := _problem(body)) is not None:
            return _failure(422, f'Lease.coordination.k8s.io "{key[1]}" is invalid: {problem}')
        if name is None:
            if metadata.get("resourceVersion"):
                return _failure(500, "resourceVersion should not be set on objects to be created")
            if key in self.objects:
                return _failure(409, f'leases.coordination.k8s.io "{key[1]}" already exists')
        else:
            if name != key[1]:
                return _failure(400, "the name of the object does not match the name on the URL")
            if (current := self.objects.get(key)) is None:
                return _failure(404, f'leases.coordination.k8s.io "{name}" not found')
            if not metadata.get("resourceVersion"):
                return _failure(422, "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update")
            if metadata["resourceVersion"] != current["metadata"]["resourceVersion"]:
                return _failure(409, f'Operation cannot be fulfilled on leases "{name}": the object has been modified')
        self._version += 1
        written = copy.deepcopy(body)
        written["metadata"] |= {"namespace": namespace, "resourceVersion": str(self._version)}
        self.objects[key] = written
        return (201 if name is None else 200), copy.deepcopy(written)


@contextmanager
def api_server(directory: Path) -> Iterator[ApiServer]:
    """Serve on the loopback, with TLS, while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = served.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    directory.mkdir()
    certificate, key = make_certificate(directory)
    (directory / "ca.crt").write_bytes(certificate.read_bytes())
    (directory / "namespace").write_text("training", encoding="utf-8")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        served = ApiServer(directory, server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join(30)


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that is its own authority. Returns its file and that of its key."""
    certificate, key = directory / "server.pem", directory / "server-key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    return certificate, key


def _problem(lease: Mapping[str, Any]) -> str | None:
    spec, name = lease.get("spec") or {}, lease["metadata"].get("name", "")
    if (lease.get("apiVersion"), lease.get("kind")) != ("coordination.k8s.io/v1", "Lease"):
        return "apiVersion, kind"
    if not _NAME.fullmatch(name) or len(name) > 253:
        return "metadata.name: must be a lower case RFC 1123 subdomain"
    annotations = lease["metadata"].get("annotations") or {}
    if not all(isinstance(value, str) for value in annotations.values()):
        return "metadata.annotations: must be strings"
    if type(spec.get("leaseDurationSeconds", 1)) is not int or spec.get("leaseDurationSeconds", 1) <= 0:
        return "spec.leaseDurationSeconds: must be greater than 0"
    if type(spec.get("leaseTransitions", 0)) is not int or spec.get("leaseTransitions", 0) < 0:
        return "spec.leaseTransitions: must be greater than or equal to 0"
    if not all(_MICRO_TIME.fullmatch(spec[time]) for time in ("acquireTime", "renewTime") if time in spec):
        return "spec: times must be of the format MicroTime"
    return None


def _failure(status: int, message: str) -> tuple[int, Mapping[str, Any]]:
    return status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
