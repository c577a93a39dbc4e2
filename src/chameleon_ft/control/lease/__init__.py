"""Which coordinator leads: one interface, one file for each place in which terms are claimed."""

from __future__ import annotations

from chameleon_ft.config import RunConfig
from chameleon_ft.control.lease.base import Claim, Lease
from chameleon_ft.control.lease.files import FileLease
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["Claim", "Lease", "lease_of"]


def lease_of(config: RunConfig, run: RunDirectory) -> Lease:
    """Return the lease of a run, as `control.lease` says. Raises ConfigError."""
    if config.control.lease != "files":
        raise ConfigError(f"control.lease = {config.control.lease!r}: is not available yet; take files")
    return FileLease(run.terms)
