"""The lease as files in the run directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from chameleon_ft.coordinator.lease.base import Claim
from chameleon_ft.errors import LeaseError
from chameleon_ft.protocol.background_tasks import in_thread


class FileLease:
    """A file for each term, as in terms/000001.json, which appears with its whole content and never changes it.

    A file is written under another name and linked to its own one. That is atomic on local file systems and on NFS,
    where the exclusive creation of a file need not be (see open(2), O_EXCL). A renewal sets the modification time of
    the file to a later second, so that a full disk does not take the leadership away; this time is no measure of
    anything. Readers open the file first, because an NFS client asks the server for the times of a file that it opens.
    A claim is released by a file beside it, as terms/000001.released.

    An NFS client may list a directory as it was up to a minute ago. A reader then sees an old term for so long, but
    cannot claim one that is taken.

    Args:
        directory: the directory of the files of one run; made with the first claim.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # This term is known to be taken, also if a listing does not show it yet.
        self._highest = 0

    async def newest(self) -> Claim | None:
        """Return the claim of the highest term, or None if no term was claimed."""
        return await in_thread(self._newest)

    async def claim(self, claim: Claim) -> bool:
        """Claim a term, atomically. Returns False if another process has claimed it, or a higher one."""
        return await in_thread(lambda: self._claim(claim))

    async def renew(self, claim: Claim) -> bool:
        """Let the number of renewals of a claim grow. Returns False if its term is another's, or a higher one exists.

        A claim that was removed is made again.
        """
        return await in_thread(lambda: self._renew(claim))

    async def release(self, claim: Claim) -> None:
        """Note that the coordinator of a claim has left the run to another one."""
        await in_thread(lambda: self._release(claim))

    def _newest(self) -> Claim | None:
        with self._told():
            term = self._last_term()
            return self._read(term) if term else None

    def _claim(self, claim: Claim) -> bool:
        with self._told():
            self._directory.mkdir(exist_ok=True)
            path = self._path(claim.term)
            draft = self._directory / f".{path.name}.{secrets.token_hex(8)}"
            try:
                with draft.open("x", encoding="utf-8") as file:
                    file.write(claim.to_json() + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                # An NFS server may report that the name exists because the answer to the first attempt was lost. Then
                # the file has the content of this claim.
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(draft)
            finally:
                draft.unlink(missing_ok=True)
            self._sync()
            self._highest = max(self._highest, claim.term)
            return claim.is_same_leader(self._read(claim.term)) and self._last_term() == claim.term

    def _renew(self, claim: Claim) -> bool:
        with self._told():
            try:
                current = self._read(claim.term)
            except FileNotFoundError:
                return self._claim(claim)
            if not claim.is_same_leader(current):
                return False
            # Whole seconds, because some file systems keep no fractions.
            renewed_s = max(int(time.time()), current.renewals + 1)
            os.utime(self._path(claim.term), (renewed_s, renewed_s))
            return self._last_term() == claim.term

    def _release(self, claim: Claim) -> None:
        with self._told():
            self._release_of(claim.term).touch()

    def _read(self, term: int) -> Claim:
        path = self._path(term)
        with path.open(encoding="utf-8", errors="replace") as file:
            renewals = int(os.fstat(file.fileno()).st_mtime)
            content = file.read()
        try:
            return replace(Claim.from_json(content), renewals=renewals, is_released=self._release_of(term).exists())
        except LeaseError as error:
            raise LeaseError(f"{path}: {error}; remove the file if no coordinator of the run is alive") from None

    def _last_term(self) -> int:
        names = [path.name.removesuffix(".json") for path in self._directory.glob("*.json")]
        self._highest = max([self._highest, *(int(name) for name in names if name.isdecimal())])
        return self._highest

    def _path(self, term: int) -> Path:
        return self._directory / f"{term:06}.json"

    def _release_of(self, term: int) -> Path:
        return self._path(term).with_suffix(".released")

    def _sync(self) -> None:
        """Have the names of the directory on the disk."""
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn errors of the operating system into LeaseError."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                # Files were removed.
                self._highest = 0
            raise LeaseError(
                f"{self._directory}: the files that say which coordinator leads cannot be used: "
                f"{error.strerror or error}; the directory needs space, hard links, and the same user in all "
                'coordinators of the run, or take control.lease = "etcd://HOST:PORT" or "kubernetes"'
            ) from None
