"""Coordinators whose calls interleave at every access to the place, as hypothesis draws it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.coordinator.lease import Claim, Lease
from chameleon_ft.coordinator.lease.base import RegisterLease
from chameleon_ft.coordinator.lease.files import FileLease
from tests.coordinator.lease.places import claim_of

Call = tuple[Literal["claim", "renew", "newest"], int]
CALLS = st.lists(st.tuples(st.sampled_from(["claim", "renew", "newest"]), st.integers(1, 4)), max_size=4)


@dataclass
class Memory:
    """A value with a version."""

    claim: Claim | None = None
    version: int = 0


class MemoryLease(RegisterLease[int]):
    """A lease in the memory of the test."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def _read(self) -> tuple[Claim | None, int]:
        return self._memory.claim, self._memory.version

    def _swap(self, claim: Claim, version: int) -> bool:
        if version != self._memory.version:
            return False
        self._memory.claim, self._memory.version = claim, version + 1
        return True


@contextmanager
def memory() -> Iterator[Callable[[], Lease]]:
    shared = Memory()
    yield lambda: MemoryLease(shared)


@contextmanager
def files() -> Iterator[Callable[[], Lease]]:
    with TemporaryDirectory() as directory:
        yield lambda: FileLease(Path(directory))


@dataclass(frozen=True)
class Answered:
    """A call with its answer, and the turns in which it began and ended."""

    name: str
    contender: int
    term: int
    began: int
    ended: int
    answer: Any

    @property
    def is_won(self) -> bool:
        return self.answer is True

    @property
    def newest_term(self) -> int:
        """Term that was the newest according to the answer, at least."""
        if self.name == "newest":
            return 0 if self.answer is None else int(self.answer.term)
        return self.term if self.is_won else 0


@dataclass
class History:
    """Contenders that run one at a time, from one access to the place to the next."""

    num_turns: int = 0
    answered: list[Answered] = field(default_factory=list)

    def run(self, contenders: Sequence[Contender], order: Sequence[int]) -> None:
        """Give turns in this order, then round robin until all contenders are done."""
        rest = list(order)
        while alive := [contender for contender in contenders if not contender.is_done]:
            number = rest.pop(0) if rest else self.num_turns
            self.num_turns += 1
            alive[number % len(alive)].take_turn()


class Contender:
    """A coordinator in a thread, which waits for its turn before each access."""

    def __init__(self, lease: Lease, number: int, calls: Sequence[Call], history: History) -> None:
        self.is_done = False
        self.error: BaseException | None = None
        self._lease, self._number, self._calls, self._history = lease, number, calls, history
        self._turn, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        for name in ("_read", "_swap", "_last_term", "_sync"):
            if hasattr(lease, name):
                setattr(lease, name, self._waiting(getattr(lease, name)))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take_turn(self) -> None:
        """Run until the next access, or the end."""
        self._turn.release()
        assert self._yielded.acquire(timeout=60)

    def _run(self) -> None:
        assert self._turn.acquire(timeout=60)
        try:
            for name, term in self._calls:
                began = self._history.num_turns
                answer = asyncio.run(self._call(name, claim_of(term, self._number)))
                ended = self._history.num_turns
                self._history.answered.append(Answered(name, self._number, term, began, ended, answer))
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.error = error
        self.is_done = True
        self._yielded.release()

    async def _call(self, name: str, claim: Claim) -> Any:
        match name:
            case "claim":
                return await self._lease.claim(claim)
            case "renew":
                return await self._lease.renew(claim)
            case _:
                return await self._lease.newest()

    def _waiting(self, access: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            self._yielded.release()
            assert self._turn.acquire(timeout=60)
            return access(*args)

        return waiting


@pytest.mark.parametrize("place", [memory, files])
@given(calls=st.lists(CALLS, min_size=2, max_size=4), order=st.lists(st.integers(0, 11), max_size=40))
def test_terms_are_claimed_once_and_never_go_back(place: Any, calls: list[list[Call]], order: list[int]) -> None:
    history = History()
    with place() as lease:
        contenders = [Contender(lease(), number, each, history) for number, each in enumerate(calls)]
        history.run(contenders, order)
        last = asyncio.run(lease().newest())
    for contender in contenders:
        if contender.error:
            raise contender.error
    # To renew a claim that does not exist is to make it.
    won = {(each.term, each.contender) for each in history.answered if each.is_won}
    assert len({term for term, _ in won}) == len(won)
    assert (last.term if last else 0) == max((term for term, _ in won), default=0)
    for each in history.answered:
        if each.answer is False:
            assert last
            assert last.term >= each.term
        before = [other for other in history.answered if other.ended < each.began]
        known = max((other.newest_term for other in before), default=0)
        assert not each.is_won or each.term >= known
        assert each.name != "newest" or each.newest_term >= known
