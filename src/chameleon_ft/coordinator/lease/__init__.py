"""Which coordinator leads: one interface, and one file for each place in which terms are claimed."""

from __future__ import annotations

import os

from chameleon_ft.config import RunConfig
from chameleon_ft.coordinator.lease.base import Claim, Lease
from chameleon_ft.coordinator.lease.etcd import EtcdLease
from chameleon_ft.coordinator.lease.files import FileLease
from chameleon_ft.coordinator.lease.kubernetes import KubernetesLease
from chameleon_ft.storage.files import RunDirectory

__all__ = ["Claim", "Lease", "lease_of"]


def lease_of(config: RunConfig, run: RunDirectory) -> Lease:
    """Return the lease of a run, as `control.lease` says.

    Raises:
        ConfigError: the environment of this process lacks what the place needs.
    """
    address, lease_s = config.control.lease, config.control.lease_s
    # The directory may be reached by several paths.
    path = run.path.resolve()
    match address.partition("://")[0]:
        case "files":
            return FileLease(run.terms)
        case "kubernetes":
            return KubernetesLease.at(address, run=path, lease_s=lease_s, environment=os.environ)
        case _:
            return EtcdLease.at(address, run=path, lease_s=lease_s, environment=os.environ)
