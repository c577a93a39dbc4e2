"""`chameleon kubernetes`: write the manifests of a run on Kubernetes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from chameleon_ft.cli.arguments import parse_start
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.kubernetes import KubernetesRun, to_yaml
from chameleon_ft.launch.slurm import Machines, with_reachable_host
from chameleon_ft.session.configuration import RunRequest


@dataclass(frozen=True, kw_only=True)
class KubernetesArguments:
    """Write the manifests of a run on Kubernetes: a JobSet with a coordinator, another one that stands by, and agents.

    Nothing is sent to a cluster: pipe the manifests to `kubectl apply -f -`. The cluster needs the JobSet
    controller, and a volume that many pods may write. Paths in the configuration are those in the containers. See
    docs/kubernetes.md.
    """

    config: Annotated[Path | None, "[CONFIG]"] = None
    """TOML file with the configuration; flags override it."""
    image: str | None = None
    """Image with Chameleon, such as one built from the Dockerfile of its source. Required."""
    claim: str | None = None
    """Persistent volume claim that all pods mount (ReadWriteMany), for the run directory. Required."""
    workers_per_node: int | None = None
    """Workers of each agent, one for each accelerator. Required."""
    nodes: int | None = None
    """Agents; by default as many as the workers of the run need. Workers beyond those join as newcomers."""
    name: str | None = None
    """Name of the JobSet; by default that of the configuration file."""
    mount: Annotated[str, "PATH"] = "/shared"
    """Directory of the volume in the containers."""
    token_secret: Annotated[str | None, "NAME"] = None
    """Secret of yours, whose key `token` is the join token; by default the name of the JobSet with -token."""
    resource: Annotated[str | None, "NAME"] = None
    """Extended resource of an accelerator; for device = "cuda" by default nvidia.com/gpu."""
    grace_s: int = 600
    """Seconds that a pod has to drain its workers, or to write a checkpoint, before it is killed."""
    monitoring: bool = False
    """Also write a pod that serves the page of the run, a Service, and a ServiceMonitor for the Prometheus operator."""
    file: Annotated[Path | None, "FILE"] = None
    """File to write; by default the manifests are printed."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(KubernetesArguments, arguments, command="kubernetes")
    run = _run(given, flags)
    text = to_yaml(run.manifests())
    if given.file is None:
        print(text, end="")
    else:
        if given.config is not None and given.file.exists() and given.file.samefile(given.config):
            raise ConfigError(f"--file {given.file}: is the configuration; give another file")
        try:
            given.file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--file {given.file}: cannot be written: {error.strerror}") from None
    secret = f"kubectl create secret generic {run.token_secret} --from-literal=token=$(openssl rand -hex 16)"
    print(f"the pods need a secret, made once by: {secret}", file=sys.stderr)
    return 0


def _run(given: KubernetesArguments, flags: dict[str, Any]) -> KubernetesRun:
    """Return the run. Raises ConfigError."""
    request = RunRequest(file=given.config, changes=flags)
    config = with_reachable_host(request.given_config(), chooser="Kubernetes")
    if given.image is None or given.claim is None or given.workers_per_node is None:
        required = {"--image": given.image, "--claim": given.claim, "--workers-per-node": given.workers_per_node}
        missing = ", ".join(flag for flag, value in required.items() if value is None)
        raise ConfigError(f"{missing}: must be given; `chameleon kubernetes --help` explains them")
    name = request.usual_name.lower().replace("_", "-") if given.name is None else given.name
    if "lease" not in config.control.model_fields_set:
        config = config.model_copy(update={"control": config.control.model_copy(update={"lease": "kubernetes"})})
    output_dir = config.output_dir or Path(given.mount) / "runs" / name
    return KubernetesRun(
        name=name,
        config=config.model_copy(update={"output_dir": output_dir}),
        machines=Machines.for_run(config, nodes=given.nodes, workers_per_node=given.workers_per_node),
        image=given.image,
        claim=given.claim,
        mount=given.mount,
        token_secret=f"{name}-token" if given.token_secret is None else given.token_secret,
        resource="nvidia.com/gpu" if config.device == "cuda" and given.resource is None else given.resource,
        grace_s=given.grace_s,
        has_page=given.monitoring,
    )
