"""Places in which coordinators claim leadership, as the tests of the lease use them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from chameleon_ft.control.lease import Claim, Lease
from chameleon_ft.control.lease.files import FileLease


class Place(Protocol):
    """One place, which several coordinators reach."""

    def lease(self) -> Lease:
        """Return the lease as one more coordinator sees it."""

    def break_down(self) -> None:
        """Make the place refuse all access from now on."""

    def forget(self) -> None:
        """Remove all claims."""


class Files:
    """A directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "terms"

    def lease(self) -> Lease:
        return FileLease(self.directory)

    def break_down(self) -> None:
        # Tests may run as root, whom permissions do not stop.
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.write_text("no directory any more", encoding="utf-8")

    def forget(self) -> None:
        shutil.rmtree(self.directory)


def claim_of(term: int, contender: int = 0) -> Claim:
    """Return the claim of a contender."""
    return Claim(term=term, address=f"10.0.0.{contender + 1}:29400", host=f"host-{contender}", pid=100 + contender)


def without_renewals(claim: Claim | None) -> Claim | None:
    """Return a claim as it was made."""
    return claim and replace(claim, renewals=0)
