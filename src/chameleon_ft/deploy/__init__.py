"""Files with which a cluster's scheduler starts a run: manifests of Kubernetes."""

from __future__ import annotations

from chameleon_ft.deploy.kubernetes import KubernetesRun, to_yaml
from chameleon_ft.deploy.machines import Machines, with_reachable_host

__all__ = ["KubernetesRun", "Machines", "to_yaml", "with_reachable_host"]
