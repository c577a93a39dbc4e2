"""Coordinators that claim terms, are stopped and continued, and stand by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chameleon_ft.coordinator.leadership import Leadership, Tenure, Watch, wait_for_silence
from chameleon_ft.coordinator.lease import Claim
from chameleon_ft.errors import DeposedError, LeaseError
from tests.examples import examples

LEASE_S = 10.0


def claim_of(coordinator: int, term: int) -> Claim:
    return Claim(term=term, address=f"10.0.0.{coordinator}:1", host="h", pid=coordinator + 1)


@dataclass
class Place:
    """A lease in memory, which may be out of reach."""

    claims: dict[int, Claim] = field(default_factory=dict)
    is_out_of_reach: bool = False

    def take(self, claim: Claim) -> bool:
        if any(term > claim.term for term in self.claims):
            return False
        return claim.is_same_leader(self.claims.setdefault(claim.term, claim))

    def count(self, claim: Claim) -> bool:
        now = self.claims.get(claim.term)
        if now is None or not claim.is_same_leader(now):
            return False
        self.claims[claim.term] = replace(now, renewals=now.renewals + 1)
        return max(self.claims) == claim.term

    async def release(self, claim: Claim) -> None:
        self.claims[claim.term] = replace(self.claims[claim.term], is_released=True)

    def last(self) -> Claim | None:
        return self.claims[max(self.claims)] if self.claims else None

    async def newest(self) -> Claim | None:
        self._reach()
        return self.last()

    async def claim(self, claim: Claim) -> bool:
        self._reach()
        return self.take(claim)

    async def renew(self, claim: Claim) -> bool:
        self._reach()
        return self.count(claim)

    def _reach(self) -> None:
        if self.is_out_of_reach:
            raise LeaseError("out of reach")


@dataclass
class Candidate:
    """A coordinator between two instructions, where it may stay for as long as the machine likes."""

    number: int
    watch: Watch
    tenure: Tenure | None = None
    next: Callable[[], Any] | None = None
    """Its next instruction: the rest of a look, a claim or a renewal."""


class Terms(RuleBasedStateMachine):
    """Three coordinators whose every instruction may come late, by one clock that all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.place = Place()
        first = claim_of(0, 1)
        self.place.take(first)
        self.candidates = [Candidate(number, Watch(LEASE_S, first, 0.0)) for number in range(3)]
        self.candidates[0].tenure = Tenure(1, LEASE_S, 0.0)
        self.highest_acted = 0

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, 2), instructions=st.integers(1, 4))
    def run(self, number: int, instructions: int) -> None:
        """Let a coordinator carry out its next instructions."""
        for _ in range(instructions):
            self._run(self.candidates[number])
            self.at_most_one_leads()

    def _run(self, candidate: Candidate) -> None:
        if candidate.next is not None:
            following, candidate.next = candidate.next, None
            following()
        elif candidate.tenure is None:
            self._look(candidate)
        elif candidate.tenure.holds(self.now):
            self._renew(candidate)
        else:
            self._claim(candidate, candidate.tenure.term + 1)

    def _look(self, candidate: Candidate) -> None:
        began_s = self.now

        def look() -> None:
            found = self.place.last()

            def judge() -> None:
                candidate.watch = candidate.watch.observed(found, self.now)
                if candidate.watch.is_silent(began_s):
                    self._claim(candidate, 1 if found is None else found.term + 1)

            candidate.next = judge

        candidate.next = look

    def _claim(self, candidate: Candidate, term: int) -> None:
        began_s = self.now

        def take() -> None:
            is_taken = self.place.take(claim_of(candidate.number, term))

            def lead() -> None:
                candidate.tenure = Tenure(term, LEASE_S, began_s) if is_taken else None

            candidate.next = lead

        candidate.next = take

    def _renew(self, candidate: Candidate) -> None:
        began_s, tenure = self.now, candidate.tenure
        assert tenure is not None

        def count() -> None:
            is_kept = self.place.count(claim_of(candidate.number, tenure.term))

            def prolong() -> None:
                candidate.tenure = tenure.renewed(began_s, self.now) if is_kept else None

            candidate.next = prolong

        candidate.next = count

    @invariant()
    def at_most_one_leads(self) -> None:
        leading = [each for each in self.candidates if each.tenure is not None and each.tenure.holds(self.now)]
        assert len(leading) <= 1
        for each in leading:
            assert each.tenure is not None
            assert each.tenure.term >= self.highest_acted, "terms only grow"
            self.highest_acted = each.tenure.term


Terms.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestTerms = Terms.TestCase


@pytest.mark.parametrize("seed", range(5))
def test_at_most_one_leads_in_long_histories(seed: int) -> None:
    random, terms = Random(seed), Terms()
    for _ in range(4000):
        if random.random() < 0.3:
            terms.wait(random.choice([0.5, 1.0, 4.0, 9.0]))
        else:
            terms.run(random.randrange(3), random.choice([1, 1, 2, 3, 6]))
    assert max(terms.place.claims) > 50, "others have claimed terms"


# --- one coordinator, with its own clock -----------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def kept(scene: Callable[[Place, Clock, Leadership, list[str]], Any]) -> list[str]:
    """Let a coordinator keep its term during a scene; return what it was told."""
    told: list[str] = []

    async def whole() -> None:
        place, clock = Place(), Clock()
        leadership = await Leadership.claimed(place, 1, address="10.0.0.1:1", lease_s=LEASE_S, clock=clock)
        assert leadership is not None
        keeping = asyncio.create_task(
            leadership.keep(regained=lambda: told.append("regained"), lapsed=lambda: told.append("lapsed"))
        )
        await scene(place, clock, leadership, told)
        ended = keeping.exception() if keeping.done() else None
        if ended is not None:
            assert isinstance(ended, DeposedError)
            told.append(str(ended))
        keeping.cancel()

    async def sleep(_: float, original: Any = asyncio.sleep) -> None:
        await original(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chameleon_ft.coordinator.leadership.asyncio.sleep", sleep)
        asyncio.run(whole())
    return told


async def turns() -> None:
    for _ in range(50):
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)


def test_a_coordinator_that_was_stopped_claims_the_next_term() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        await turns()
        assert leadership.holds()
        clock.now += LEASE_S + 1
        assert not leadership.holds()
        await turns()
        assert leadership.holds()
        assert leadership.term == 2

    assert kept(scene) == ["lapsed", "regained"]


def test_a_coordinator_that_releases_its_term_does_not_claim_another() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        await leadership.release()
        assert not leadership.holds()
        clock.now += LEASE_S + 1
        await turns()
        assert max(place.claims) == 1
        assert await wait_for_silence(place, lease_s=LEASE_S) == place.last()

    assert kept(scene) == []


def test_a_coordinator_that_was_stopped_ends_if_another_one_leads() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        clock.now += LEASE_S + 1
        assert place.take(claim_of(7, 2))
        await turns()
        assert not leadership.holds()
        assert leadership.term == 1

    assert kept(scene) == [
        "lapsed",
        "the coordinator at 10.0.0.7:1 in term 2 leads the run; this one, of term 1, ends and leaves the run to it",
    ]


def test_a_coordinator_that_cannot_renew_does_not_lead_until_it_can() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        place.is_out_of_reach = True
        await turns()
        assert leadership.holds()
        clock.now += LEASE_S
        await turns()
        assert not leadership.holds()
        assert told == ["lapsed"]
        place.is_out_of_reach = False
        await turns()
        assert leadership.holds()

    assert kept(scene) == ["lapsed", "regained"]


def test_a_coordinator_that_is_cut_off_for_too_long_takes_its_peers_for_lost() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        clock.now += 3.0
        assert leadership.suspend_if_cut_off(2.5, patience_s=60.0)
        await turns()
        clock.now += 56.0
        await turns()
        assert not leadership.holds()
        clock.now += 2.0
        await turns()
        assert leadership.holds()
        assert not leadership.suspend_if_cut_off(61.0, patience_s=60.0), "it has waited"
        leadership.heard()
        clock.now += 3.0
        assert leadership.suspend_if_cut_off(2.5, patience_s=60.0)
        leadership.heard()
        await turns()

    assert kept(scene) == ["lapsed", "regained"] * 2


def test_a_coordinator_that_is_cut_off_leaves_the_run_to_a_standby() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        leadership.heard()
        clock.now += 2.0
        assert not leadership.suspend_if_cut_off(2.5, patience_s=60.0), "some peer has been heard since"
        assert leadership.holds()
        clock.now += 1.0
        assert leadership.suspend_if_cut_off(2.5, patience_s=60.0)
        assert not leadership.holds()
        await turns()
        before = place.last()
        await turns()
        assert place.last() == before, "it renews nothing"
        assert place.take(claim_of(7, 2))
        await turns()

    (lapsed, deposed) = kept(scene)
    assert lapsed == "lapsed"
    assert deposed.startswith("the coordinator at 10.0.0.7:1 in term 2 leads the run")


def test_a_coordinator_that_was_cut_off_leads_again_if_no_other_does() -> None:
    async def scene(place: Place, clock: Clock, leadership: Leadership, told: list[str]) -> None:
        clock.now += 3.0
        assert leadership.suspend_if_cut_off(2.5, patience_s=60.0)
        await turns()
        assert not leadership.holds()
        leadership.heard()
        await turns()
        assert leadership.holds()
        assert leadership.term == 2

    assert kept(scene) == ["lapsed", "regained"]
