"""Leadership of a run: the clocks of the lease, of the coordinator that leads and of those that stand by.

Leadership is a term, see `lease`. What keeps two coordinators from leading at the same time:

- A leader acts only while `Tenure.holds`: by its own clock, its newest renewal began less than the lease ago.
- Another coordinator claims the next term only once the number of renewals has not changed for the lease by the clock
  of that coordinator, which began to count after the renewal had. Or it knows that the process has ended, or has
  released its term, after which that one does nothing.
- A leader whose tenure has run out, for example because its process was stopped, does nothing until it has claimed the
  next term itself, and ends if another coordinator has.

That takes monotonic clocks that run equally fast and also while the process is stopped. If they do not, as in a virtual
machine that is paused, or for an operation under way at the moment at which a process is stopped, peers still obey the
highest term only, and `FileQueue` says what becomes of files.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.coordinator.lease import Claim, Lease
from chameleon_ft.errors import DeposedError, LeaseError

POLLS: Final = 20
"""How often a coordinator that stands by looks at the lease within its duration."""

# A wait is longer than asked for by this time only if the process did not run.
_STALL_S: Final = 1.0
# Attempts to renew within the lease.
_RENEWALS: Final = 3


@dataclass(frozen=True, slots=True)
class Tenure:
    """The time in which a coordinator leads, in seconds of its monotonic clock.

    Attributes:
        since_s: when its newest renewal, or its claim, began.
    """

    term: int
    lease_s: float
    since_s: float

    def holds(self, now_s: float) -> bool:
        """Return whether no other coordinator can have claimed another term."""
        return now_s < self.since_s + self.lease_s

    def renewed(self, began_s: float, ended_s: float) -> Self:
        """Return the tenure after a renewal that succeeded.

        One that is over too late prolongs nothing: a coordinator that stands by may have looked before it.
        """
        return replace(self, since_s=began_s) if self.holds(ended_s) else self


@dataclass(frozen=True, slots=True)
class Watch:
    """The observations of a coordinator that stands by, in seconds of its monotonic clock.

    Attributes:
        claim: the newest one seen; None before the first term.
        since_s: when the look ended that first saw that claim with its number of renewals.
    """

    lease_s: float
    claim: Claim | None
    since_s: float

    def observed(self, claim: Claim | None, ended_s: float) -> Self:
        """Return the watch after another look."""
        return self if claim == self.claim else replace(self, claim=claim, since_s=ended_s)

    def is_silent(self, began_s: float) -> bool:
        """Return whether the leader has shown no sign of life for the lease, by the last look, which began then."""
        return began_s >= self.since_s + self.lease_s


class Leadership:
    """A term that this process has claimed and renews.

    All methods but `holds` are called in the thread of the event loop.

    Attributes:
        claim: the claim of the present term.
        is_suspended: True while it waits for a sign of life of another host.
        lapse: why the tenure has run out; empty if this process did not run.
    """

    def __init__(
        self, lease: Lease, claim: Claim, lease_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.claim = claim
        self._lease = lease
        self._clock = clock
        self._tenure = Tenure(claim.term, lease_s, clock())
        self._is_over = False
        # When a peer on another host gave its last sign of life.
        self._heard_s = clock()
        self.is_suspended = False
        self._suspended_until_s = math.inf
        # Whether it has waited in vain for a sign of life.
        self._has_waited = False
        self.lapse = ""

    @classmethod
    async def claimed(
        cls, lease: Lease, term: int, *, address: str, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Self | None:
        """Claim a term; None if another coordinator has claimed it or a higher one. Raises LeaseError."""
        leadership = cls(lease, Claim.of_this_process(term=term, address=address), lease_s, clock=clock)
        return leadership if await lease.claim(leadership.claim) else None

    @property
    def term(self) -> int:
        """The number of the present term."""
        return self.claim.term

    def holds(self) -> bool:
        """Return whether this coordinator leads now."""
        return not self._is_over and not self.is_suspended and self._tenure.holds(self._clock())

    def heard(self) -> None:
        """Note a sign of life of a peer on another host, with which this host is not cut off."""
        self._heard_s = self._clock()
        self.is_suspended = self._has_waited = False

    def suspend_if_cut_off(self, since_s: float, *, patience_s: float) -> bool:
        """Stop leading, or leave the run to another coordinator, if no peer on another host was heard for `since_s`.

        Then not the peers are lost, but this host is cut off. Once one is heard again, or none has been for
        `patience_s`, this coordinator tries to claim the next term. Returns whether it is suspended.
        """
        if self._clock() - self._heard_s >= since_s and not self._has_waited:
            self.is_suspended, self._tenure = True, replace(self._tenure, since_s=-math.inf)
            self._suspended_until_s = self._heard_s + patience_s
            self.lapse = "no worker or agent of another host was heard"
        return self.is_suspended

    def end(self) -> None:
        """Stop leading, because another coordinator leads."""
        self._is_over = True

    async def release(self) -> None:
        """Stop leading, so that another coordinator can claim the next term at once, or else after the lease."""
        self.end()
        with contextlib.suppress(LeaseError, TimeoutError):
            async with asyncio.timeout(self._tenure.lease_s):
                await self._lease.release(self.claim)

    async def keep(self, regained: Callable[[], None], lapsed: Callable[[], None]) -> None:
        """Renew the term until another coordinator leads, or it is released.

        Args:
            regained: called after the tenure had run out, and this coordinator has claimed the next term.
            lapsed: called when the tenure has run out.

        Raises:
            DeposedError: another coordinator leads.
        """
        while not self._is_over:
            if not self.holds():
                lapsed()
                await self._regain()
                regained()
                self.lapse = ""
            await asyncio.sleep(min(self._tenure.lease_s / _RENEWALS, max(0.0, self._left_s())))
            if not self.holds():
                continue
            began_s = self._clock()
            # Not with a timeout: on a disk that hangs, each attempt that was given up would leave a thread behind.
            renewing = asyncio.create_task(self._lease.renew(self.claim))
            try:
                await asyncio.wait({renewing}, timeout=self._left_s())
                if not renewing.done():
                    # Otherwise this process did not run.
                    if self._left_s() > -_STALL_S:
                        self.lapse = "the place of its lease did not answer"
                    lapsed()
                if not await renewing:
                    await self._deposed()
                self._tenure = self._tenure.renewed(began_s, self._clock())
            except LeaseError as error:
                self.lapse = str(error)
            else:
                self.lapse = self.lapse if not self.holds() else ""
            finally:
                renewing.cancel()

    def _left_s(self) -> float:
        return self._tenure.since_s + self._tenure.lease_s - self._clock()

    async def _regain(self) -> None:
        """Claim the next term, as soon as the place of the lease answers and peers are heard."""
        claim = replace(self.claim, term=self.term + 1, renewals=0)
        while True:
            began_s, is_lost = self._clock(), False
            with contextlib.suppress(LeaseError):
                if self.is_suspended and began_s >= self._suspended_until_s:
                    self.is_suspended, self._has_waited = False, True
                if self.is_suspended:
                    newest = await self._lease.newest()
                    is_lost = newest is not None and newest.term > self.term
                elif await self._lease.claim(claim):
                    self.claim, self._tenure = claim, Tenure(claim.term, self._tenure.lease_s, began_s)
                    return
                else:
                    is_lost = True
            if is_lost:
                await self._deposed()
            await asyncio.sleep(self._tenure.lease_s / POLLS)

    async def _deposed(self) -> None:
        """Raise DeposedError, which names the coordinator that leads if that is known."""
        self.end()
        leader = None
        with contextlib.suppress(LeaseError, TimeoutError):
            async with asyncio.timeout(1.0):
                leader = await self._lease.newest()
        raise DeposedError(self.term, None if leader is None else f"{leader.address} in term {leader.term}")


async def wait_for_silence(
    lease: Lease, *, lease_s: float, lives: Callable[[Claim], None] = lambda _: None
) -> Claim | None:
    """Wait until the leader of a run is gone, and return its claim; None if no term was claimed.

    It is gone if it has shown no sign of life for `lease_s`, was a process of this host that has ended, or has released
    its term.

    Args:
        lives: called with the claim of a leader at each sign of life.
    """
    found = await lease.newest()
    began_s = time.monotonic()
    watch = Watch(lease_s, found, began_s)
    while (claim := watch.claim) is not None and not claim.is_left() and not watch.is_silent(began_s):
        await asyncio.sleep(lease_s / POLLS)
        looked_s = time.monotonic()
        # A look that fails says nothing about the leader.
        with contextlib.suppress(LeaseError):
            seen = await lease.newest()
            if seen is not None and seen != watch.claim:
                lives(seen)
            watch = watch.observed(seen, time.monotonic())
            began_s = looked_s
    return watch.claim
