"""Files with which a cluster's scheduler starts a run: a batch script of Slurm, manifests of Kubernetes."""

from __future__ import annotations

from chameleon_ft.deploy.kubernetes import KubernetesRun, to_yaml
from chameleon_ft.deploy.machines import Machines, with_reachable_host
from chameleon_ft.deploy.slurm import WRITTEN_BY, BatchScript

__all__ = ["WRITTEN_BY", "BatchScript", "KubernetesRun", "Machines", "to_yaml", "with_reachable_host"]
