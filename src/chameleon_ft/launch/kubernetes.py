"""The manifests of a run on Kubernetes: a JobSet, and what it needs beside it.

Names of objects, images and resources are checked, because Kubernetes would reject them only when it creates the pods.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from chameleon_ft.config import DEVICES, RunConfig, config_to_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.slurm import Machines

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_MAX_CHARACTERS: Final = 253
_RESOURCE: Final = re.compile(rf"({_SUBDOMAIN})/[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")

_HOST: Final = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?)*)"
_REGISTRY: Final = rf"(?:{_HOST}|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?"
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"(?:{_REGISTRY}/)?{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][-A-Za-z0-9_.]{{0,127}})?"
    r"(?:@[A-Za-z][-A-Za-z0-9_+.]*:[0-9A-Fa-f]{32,})?"
)
"""The grammar of the distribution project for references."""


def require_object_name(flag: str, name: str) -> None:
    """Raise ConfigError if no object, such as a secret, can have that name."""
    if len(name) > _MAX_CHARACTERS or not re.fullmatch(_SUBDOMAIN, name):
        raise ConfigError(
            f"{flag} {name}: should be the name of an object of Kubernetes, of lower-case letters, digits, hyphens and "
            "dots, which begins and ends with a letter or digit"
        )


def require_image(image: str) -> None:
    """Raise ConfigError if no image can have that name."""
    if not _IMAGE.fullmatch(image):
        raise ConfigError(
            f"--image {image}: should be the name of an image, in lower case and without spaces, such as "
            "registry.example/chameleon:1"
        )


def require_resource_name(name: str) -> None:
    """Raise ConfigError if this is no name of an extended resource, which begins with the domain of a vendor."""
    found = _RESOURCE.fullmatch(name)
    if found is None or len(found[1]) > _MAX_CHARACTERS or f".{found[1]}".endswith(".kubernetes.io"):
        raise ConfigError(f"--resource {name}: should be the name of an extended resource, such as nvidia.com/gpu")


def require_mount(mount: str, *, taken: tuple[str, ...]) -> None:
    """Raise ConfigError if the shared volume cannot be mounted there, because of what is mounted at `taken`, too."""
    path = PurePosixPath(mount)
    if not path.is_absolute() or ":" in mount or ".." in path.parts:
        raise ConfigError(f"--mount {mount}: should be an absolute path without .. and colons")
    if clash := next((each for each in map(PurePosixPath, taken) if each.is_relative_to(path)), None):
        raise ConfigError(f"--mount {mount}: hides {clash} of the pods; take another directory, such as /shared")
    if clash := next((each for each in map(PurePosixPath, taken) if path.is_relative_to(each)), None):
        raise ConfigError(f"--mount {mount}: is within {clash} of the pods; take another directory, such as /shared")


Json: TypeAlias = "str | int | bool | Sequence[Json] | Mapping[str, Json]"

_CONFIG_DIRECTORY: Final = "/etc/chameleon"
_CONFIG_NAME: Final = "run.toml"
_MEMORY_DIRECTORY: Final = "/dev/shm"
_POD_IP: Final = "$(POD_IP)"
# Processes of a run that is to be resumed end with this code, as do agents whose pod is deleted.
_RESUME: Final = 75
_LEADS_ELSEWHERE: Final = 69
_PAGE_PORT: Final = 8790
_RETRIES: Final = 100
"""Failures of a pod after which it is not replaced; evictions and exit code 75 do not count."""
_NO_TEXT_IN_GO: Final = re.compile(r"[yYnN]|[-+.]?[0-9].*")
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """A run on Kubernetes.

    Attributes:
        name: The JobSet has this name, with which all other names begin.
        config: The configuration, with paths that hold in the containers; `output_dir` is on the shared volume.
        image: The image of all containers; `chameleon` is in its PATH.
        claim: name of a persistent volume claim that many pods may write (ReadWriteMany).
        mount: directory of that volume in the containers.
        token_secret: name of a secret with the key `token`.
        resource: extended resource of which each worker has one, such as nvidia.com/gpu; on the CPU it may be None.
        grace_s: seconds that a pod has to drain its workers, or to write a checkpoint, before it is killed.
        has_page: A pod serves the page of the run and its metrics, which the Prometheus operator collects.
    """

    name: str
    config: RunConfig
    machines: Machines
    image: str
    claim: str
    mount: str
    token_secret: str
    resource: str | None = None
    grace_s: int = 600
    has_page: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name}: should be lower-case letters, digits and hyphens, begin with a letter, and have "
                "40 characters at most, because names of pods are made of it"
            )
        require_image(self.image)
        require_object_name("--claim", self.claim)
        require_object_name("--token-secret", self.token_secret)
        require_mount(self.mount, taken=(_CONFIG_DIRECTORY, _MEMORY_DIRECTORY))
        if self.resource is not None:
            require_resource_name(self.resource)
        run = PurePosixPath(self.config.output_dir or "")
        if PurePosixPath(self.mount) not in run.parents or ".." in run.parts:
            raise ConfigError(
                f"--output-dir {run}: should be below the shared volume, --mount {self.mount}; leave it out for "
                f"{self.mount}/runs/{self.name}"
            )
        if self.grace_s < 1:
            raise ConfigError(f"--grace-s {self.grace_s}: should be 1 or more")
        if DEVICES[self.config.device].is_accelerator and self.resource is None:
            raise ConfigError(
                f'--resource is missing: name the extended resource of device = "{self.config.device}", such as '
                "nvidia.com/gpu"
            )

    def manifests(self) -> list[Mapping[str, Json]]:
        """Return the objects, in an order in which they can be created."""
        return [
            self._object("v1", "ServiceAccount"),
            {
                **self._object("rbac.authorization.k8s.io/v1", "Role"),
                "rules": [
                    {
                        "apiGroups": ["coordination.k8s.io"],
                        "resources": ["leases"],
                        "verbs": ["get", "create", "update"],
                    }
                ],
            },
            {
                **self._object("rbac.authorization.k8s.io/v1", "RoleBinding"),
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": self.name},
                "subjects": [{"kind": "ServiceAccount", "name": self.name}],
            },
            {**self._object("v1", "ConfigMap"), "data": {_CONFIG_NAME: config_to_toml(self.config)}},
            self._disruption_budget("coordinator", min_available=1),
            self._disruption_budget("agent", min_available=self.machines.nodes - 1),
            self._job_set(),
            *(self._page() if self.has_page else ()),
        ]

    def _object(
        self, api_version: str, kind: str, *, suffix: str = "", component: str | None = None
    ) -> dict[str, Json]:
        metadata: Json = {"name": f"{self.name}{suffix}", "labels": self._labels(component)}
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata}

    def _labels(self, component: str | None = None) -> dict[str, Json]:
        labels: dict[str, Json] = {"app.kubernetes.io/name": "chameleon", "app.kubernetes.io/instance": self.name}
        if component is not None:
            labels["app.kubernetes.io/component"] = component
        return labels

    def _disruption_budget(self, component: str, *, min_available: int) -> Mapping[str, Json]:
        # Of pods of a Job, a budget counts only `minAvailable`, and only as a number.
        return {
            **self._object("policy/v1", "PodDisruptionBudget", suffix=f"-{component}"),
            "spec": {"minAvailable": min_available, "selector": {"matchLabels": self._labels(component)}},
        }

    def _job_set(self) -> Mapping[str, Json]:
        return {
            **self._object("jobset.x-k8s.io/v1alpha2", "JobSet"),
            "spec": {
                # A lost pod is replaced by its Job, and the others continue. Only the end of the run ends the JobSet.
                "failurePolicy": {"maxRestarts": 0},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["coordinator"]},
                "replicatedJobs": [
                    {"name": "coordinator", "replicas": 1, "template": {"spec": self._coordinator_job()}},
                    {"name": "standby", "replicas": 1, "template": {"spec": self._standby_job()}},
                    {"name": "agents", "replicas": 1, "template": {"spec": self._agents_job()}},
                ],
            },
        }

    def _page(self) -> list[Mapping[str, Json]]:
        """Return a Deployment that serves the page, the Service of it, and the ServiceMonitor of its metrics."""
        command = ["chameleon", "page", _literal(self._run), "--listen", f"{_POD_IP}:{_PAGE_PORT}"]
        container: dict[str, Json] = {
            **self._container("page", command),
            "ports": [{"name": "page", "containerPort": _PAGE_PORT}],
            "readinessProbe": {"httpGet": {"path": "/metrics", "port": "page"}},
        }
        template = self._pod("page", container, apart=False, restart_policy="Always")
        selector: Json = {"matchLabels": self._labels("page")}
        return [
            {
                **self._object("apps/v1", "Deployment", suffix="-page", component="page"),
                "spec": {"replicas": 1, "selector": selector, "template": template},
            },
            {
                **self._object("v1", "Service", suffix="-page", component="page"),
                "spec": {
                    "selector": self._labels("page"),
                    "ports": [{"name": "page", "port": _PAGE_PORT, "targetPort": "page"}],
                },
            },
            {
                **self._object("monitoring.coreos.com/v1", "ServiceMonitor", suffix="-page", component="page"),
                "spec": {"selector": selector, "endpoints": [{"port": "page", "path": "/metrics", "interval": "15s"}]},
            },
        ]

    def _coordinator_job(self) -> Mapping[str, Json]:
        command = ["chameleon", "coordinator", f"{_CONFIG_DIRECTORY}/{_CONFIG_NAME}"]
        command += ["--output-dir", _literal(self._run), "--control.host", _POD_IP, "--resume", "auto", "--or-standby"]
        ends: Json = {
            "action": "FailJob",
            "onExitCodes": {"containerName": "coordinator", "operator": "In", "values": [1, 2]},
        }
        codes: Json = [_LEADS_ELSEWHERE, _RESUME]
        return {
            "backoffLimit": _RETRIES,
            "podFailurePolicy": {"rules": [_IGNORE_DISRUPTION, ends, _ignore("coordinator", "In", codes)]},
            "template": self._pod("coordinator", self._container("coordinator", command), apart=True),
        }

    def _standby_job(self) -> Mapping[str, Json]:
        command = ["chameleon", "coordinator", "--standby", _literal(self._run), "--host", _POD_IP]
        return {
            "backoffLimit": _RETRIES,
            # The coordinator's Job tells how the run ends.
            "podFailurePolicy": {"rules": [_IGNORE_DISRUPTION, _ignore("standby", "NotIn", [0])]},
            "template": self._pod("coordinator", self._container("standby", command), apart=True),
        }

    def _agents_job(self) -> Mapping[str, Json]:
        workers = self.machines.workers_per_node
        command = ["chameleon", "agent", "--run", _literal(self._run), "--workers", str(workers), "--host", _POD_IP]
        command += ["--drained-exit-code", str(_RESUME)]
        drain = f'exec chameleon drain {shlex.quote(self._run)} --host "$POD_IP" --wait'
        container = {
            **self._container("agent", command),
            # While it runs, the pod is no longer ready but trains; SIGTERM, which follows, finds no worker left.
            "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", drain]}}},
            "resources": self._resources(),
        }
        return {
            "completionMode": "Indexed",
            "completions": self.machines.nodes,
            "parallelism": self.machines.nodes,
            "backoffLimitPerIndex": _RETRIES,
            "podFailurePolicy": {"rules": [_IGNORE_DISRUPTION, _ignore("agent", "In", [_RESUME])]},
            "template": self._pod("agent", container, apart=False),
        }

    @property
    def _run(self) -> str:
        return str(self.config.output_dir)

    def _resources(self) -> Mapping[str, Json]:
        workers, found = self.machines.workers_per_node, dict[str, Json]()
        if not DEVICES[self.config.device].is_accelerator:
            found["requests"] = {"cpu": str(workers * self.config.threads)}
        if self.resource is not None:
            found["limits"] = {self.resource: workers}
        return found

    def _container(self, name: str, command: Sequence[str]) -> dict[str, Json]:
        token: Json = {"secretKeyRef": {"name": self.token_secret, "key": "token"}}
        return {
            "name": name,
            "image": self.image,
            "command": list(command),
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "CHAMELEON_TOKEN", "valueFrom": token},
            ],
            "volumeMounts": [
                {"name": "shared", "mountPath": self.mount},
                {"name": "config", "mountPath": _CONFIG_DIRECTORY, "readOnly": True},
                {"name": "shm", "mountPath": _MEMORY_DIRECTORY},
            ],
        }

    def _pod(
        self, component: str, container: Json, *, apart: bool, restart_policy: str = "Never"
    ) -> Mapping[str, Json]:
        """Return the template of a pod; one that stays `apart` shares its node with no other pod of the component."""
        spec: dict[str, Json] = {
            "restartPolicy": restart_policy,
            "serviceAccountName": self.name,
            "terminationGracePeriodSeconds": self.grace_s,
            "containers": [container],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}},
                {"name": "config", "configMap": {"name": self.name}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
        if apart:
            term: Json = {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": self._labels(component)},
            }
            spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        return {"metadata": {"labels": self._labels(component)}, "spec": spec}


_IGNORE_DISRUPTION: Final[Json] = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


def _literal(word: str) -> str:
    """Return a word of a command in which Kubernetes replaces no variable."""
    return word.replace("$", "$$")


def _ignore(container: str, operator: str, codes: Json) -> Json:
    exit_codes: Json = {"containerName": container, "operator": operator, "values": codes}
    return {"action": "Ignore", "onExitCodes": exit_codes}


def to_yaml(manifests: Sequence[Mapping[str, Json]]) -> str:
    """Return manifests as one YAML stream. Raises ConfigError if PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "manifests are written by PyYAML: install it by `pip install chameleon-ft[kubernetes]`"
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines as such, and in quotes what a parser in Go takes for a number or a boolean."""

    def write_text(dumper: Dumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else '"' if _NO_TEXT_IN_GO.fullmatch(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    Dumper.ignore_aliases = lambda *_: True
    text: str = yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, width=120, explicit_start=True)
    return text
