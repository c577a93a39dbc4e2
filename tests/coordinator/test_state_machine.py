"""Histories that are drawn: whatever happens, and in whatever order, what `invariants.check` says holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from chameleon_ft.coordinator.events import Considered, DecisionFailed, EndRequested, FaultsInjected, Interrupted
from chameleon_ft.coordinator.state.incidents import Fault
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.protocol.messages import (
    BadStep,
    CheckpointSaved,
    CheckpointUnreadable,
    Drain,
    Finished,
    PeerFailed,
    Position,
    Prepared,
    ProcessState,
    SlowIO,
    StateDiffers,
)
from chameleon_ft.protocol.parts import Member
from tests.coordinator.drawn_members import OFTEN, RARELY, WORKERS, MemberRuns
from tests.coordinator.histories import AGENT
from tests.coordinator.plans import LAYERS
from tests.examples import examples


class Runs(MemberRuns):
    """A run of four workers, to which anything happens at any time."""

    # --- switches ---

    @precondition(lambda self: self.history.state.switches.next is not None)
    @rule(workers=st.sets(WORKERS), error=RARELY, cannot_migrate=st.booleans())
    def prepare(self, workers: set[int], error: bool, cannot_migrate: bool) -> None:
        for worker in sorted(workers & set(self.history.live())):
            if self.history.state.switches.next is not None:
                why = "an error" if error else None
                self.history.prepare(worker, error=why, cannot_migrate=error and cannot_migrate)

    @precondition(lambda self: self.history.state.switches.next is not None)
    @rule(starts=OFTEN)
    def all_prepare_and_switch(self, starts: bool) -> None:
        self.history.prepare()
        self.commit(finish=False)
        if starts and self.history.state.phase is Phase.REGROUPING:
            self.history.start()

    @rule(worker=WORKERS, generation=st.integers(1, 9), error=st.none() | st.just("an error"))
    def prepare_late(self, worker: int, generation: int, error: str | None) -> None:
        upcoming = self.history.state.switches.next
        if self.connected(worker) and (upcoming is None or upcoming.number != generation):
            self.history.tell(worker, Prepared(generation=generation, error=error))

    @precondition(lambda self: self.history.state.switches.next is not None)
    @rule(data=st.data())
    def lose_a_participant(self, data: st.DataObject) -> None:
        assert self.history.state.switches.next is not None
        worker = data.draw(st.sampled_from(self.history.state.switches.next.spec.participants))
        self.history.depart(self.history.connection(worker))

    @rule(workers=st.sets(WORKERS, max_size=2), host=st.sampled_from([None, None, "a host", "late", "elsewhere"]))
    def drain(self, workers: set[int], host: str | None) -> None:
        self.history.say(2000, Drain(workers=tuple(workers), host=host))

    @rule(agent=st.sampled_from([AGENT, AGENT + 1]))
    def agent_is_drained(self, agent: int) -> None:
        if self.history.now_at(agent) in self.history.state.members.agents:
            self.history.say(agent, Drain())

    @rule(worker=WORKERS)
    def worker_asks_to_leave(self, worker: int) -> None:
        if self.connected(worker):
            self.history.tell(worker, Drain())

    @precondition(lambda self: self.history.state.phase is Phase.TRAINING)
    @rule(worker=WORKERS)
    def drain_and_switch(self, worker: int) -> None:
        self.drain({worker}, None)
        self.history.wait(0.1)
        if self.history.considerations:
            self.consider(answer="plan", waves=2, moves=False)
        for _ in range(2):
            if self.history.state.switches.next is not None and self.history.state.phase is Phase.TRAINING:
                self.all_prepare_and_switch(starts=True)
        if self.history.state.phase is Phase.TRAINING:
            self.commit(finish=False)
            self.history.wait(0.05)

    @rule(worker=WORKERS, early=st.integers(0, 1))
    def finish(self, worker: int, early: int) -> None:
        if self.connected(worker):
            state = self.history.state
            self.history.tell(worker, Finished(generation=state.generation - early))

    @rule(worker=WORKERS, peer=st.none() | WORKERS, late=st.integers(0, 1))
    def message_fails(self, worker: int, peer: int | None, late: int) -> None:
        if self.connected(worker):
            generation = self.history.state.generation - late
            self.history.tell(worker, PeerFailed(generation=generation, peer=peer, error="reset"))

    # --- coordinators ---

    @precondition(lambda self: self.history.state.phase is not Phase.OVER)
    @rule(absent=st.sets(WORKERS, max_size=1), ahead=st.integers(0, 1), order=st.randoms(use_true_random=False))
    def coordinator_is_replaced(self, absent: set[int], ahead: int, order: Random) -> None:
        history = self.history
        history.take_over()
        agents = [agent for agent in (AGENT, AGENT + 1) if history.now_at(agent) in history.state.members.agents]
        peers: list[Callable[[], object]] = [partial(history.return_agent, agent) for agent in agents]
        peers += [
            partial(history.return_worker, worker, known=history.state.newest + ahead)
            for worker in range(5)
            if self.connected(worker) and worker not in absent
        ]
        order.shuffle(peers)
        for come_back in peers:
            come_back()
        if history.state.reconnection.awaited:
            assert history.state.reconnection.awaited == {
                history.now_at(history.connection(worker)) for worker in absent
            }
            history.wait(6.0)
        assert not history.state.reconnection.awaited

    # --- wrong states and bad steps ---

    @precondition(lambda self: self.history.state.phase is not Phase.OVER)
    @rule(worker=WORKERS, checksums=st.dictionaries(WORKERS, st.integers(1, 2), min_size=2), late=RARELY, rarely=RARELY)
    def state_differs(self, worker: int, checksums: dict[int, int], late: bool, rarely: bool) -> None:
        if self.connected(worker) and (rarely or len(set(checksums.values())) == 1):
            state = self.history.state
            layers = ((1, tuple(sorted(checksums.items()))),) if rarely else ()
            generation = state.active_generation - late
            self.history.tell(worker, StateDiffers(generation=generation, step=state.committed, checksums=layers))

    @rule(workers=st.sets(WORKERS, min_size=1), late=RARELY, ahead=RARELY, again=st.booleans())
    def step_is_bad(self, workers: set[int], late: bool, ahead: bool, again: bool) -> None:
        """Have some workers report it; it is committed, or another one is the next, by other rules."""
        state = self.history.state
        for worker in sorted(workers):
            if self.connected(worker):
                report = BadStep(
                    generation=state.active_generation - late,
                    step=state.committed + ahead,
                    why="the loss is nan",
                    is_bad_again=again,
                    has_changed=not again,
                    origins=((0, 0, 1, "data"),) if again else (),
                )
                self.history.tell(worker, report)

    @precondition(lambda self: self.history.state.phase is Phase.TRAINING)
    @rule(again=st.booleans(), leave=st.booleans(), lost=st.none() | WORKERS, order=st.randoms(use_true_random=False))
    def all_report_a_bad_step(self, again: bool, leave: bool, lost: int | None, order: Random) -> None:
        """Have all do so, of which one may be lost meanwhile, and the coordinator be replaced."""
        members = list(self.history.members())
        order.shuffle(members)
        for number, worker in enumerate(members):
            if number == 1 and lost in self.history.live():
                self.history.depart(self.history.connection(lost))
            if number == 2 and leave and self.history.state.phase is not Phase.OVER:
                self.coordinator_is_replaced(absent=set(), ahead=0, order=order)
            self.step_is_bad({worker}, late=False, ahead=False, again=again)

    # --- decisions ---

    @precondition(lambda self: self.history.questions)
    @rule(data=st.data(), moves_to=st.none() | WORKERS)
    def answer(self, data: st.DataObject, moves_to: int | None) -> None:
        questions = self.history.questions
        self.history.moves_to = moves_to
        self.history.answer(questions.pop(data.draw(st.integers(0, len(questions) - 1))))

    @precondition(lambda self: self.history.questions)
    @rule(rarely=RARELY)
    def decision_fails(self, rarely: bool) -> None:
        if not rarely:
            return
        question = self.history.questions.pop(0).question
        self.history.happen(DecisionFailed(at=self.history.at, question=question, reason="a reason"))

    @precondition(lambda self: self.history.considerations)
    @rule(
        answer=st.sampled_from(["plan", "plan", "plan", "none", "error"]), waves=st.integers(0, 3), moves=st.booleans()
    )
    def consider(self, answer: str, waves: int, moves: bool) -> None:
        asked = self.history.considerations[0]
        if answer == "error":
            question = self.history.considerations.pop(0).scale_up.question
            self.history.happen(Considered(at=self.history.at, question=question, error="an error"))
        elif answer == "none":
            self.history.consider()
        else:
            staying = asked.members.staying()
            moves_to = staying[-1] if moves and len(staying) > 1 else None
            self.history.consider(*staying, waves=waves, moves_to=moves_to)

    # --- time, probes, disks, the user ---

    @precondition(lambda self: self.history.state.phase not in (Phase.GATHERING, Phase.OVER))
    @rule(ticks=st.sampled_from([1, 3, 20]))
    def time_passes(self, ticks: int) -> None:
        self.history.wait(0.05 * ticks)

    @rule(seconds=st.sampled_from([1.0, 70.0, 700.0]))
    def coordinator_is_held_up(self, seconds: float) -> None:
        self.history.now += seconds

    @rule(worker=WORKERS, stopped=st.booleans(), since_s=st.sampled_from([0.0, 1e4]))
    def probe_is_answered(self, worker: int, stopped: bool, since_s: float) -> None:
        if self.connected(worker):
            probe = self.history.state.detectors.watchdog.probe
            position = Position(probe=probe, doing="F1", waiting=stopped, since_s=since_s)
            self.history.tell(worker, position)
            incarnation = self.history.state.members[worker].incarnation
            state = ProcessState(probe=probe, member=Member(worker, incarnation), stopped=stopped)
            self.attempt(lambda: self.history.say(AGENT, state))

    @rule(worker=WORKERS, step=st.integers(0, 2), layers=st.sets(st.integers(0, LAYERS - 1)), failed=st.booleans())
    def checkpoint(self, worker: int, step: int, layers: set[int], failed: bool) -> None:
        if self.connected(worker):
            generation, error = self.history.state.generation, "OSError" if failed else None
            part = CheckpointSaved(generation=generation, step=step, layers=tuple(layers), error=error)
            self.history.tell(worker, part)
            self.history.tell(worker, SlowIO(generation=generation, doing="writing", since_s=10.0))

    @rule(worker=WORKERS, step=st.integers(0, 2), is_damaged=st.booleans())
    def checkpoint_cannot_be_read(self, worker: int, step: int, is_damaged: bool) -> None:
        if self.connected(worker):
            generation = self.history.state.generation
            message = CheckpointUnreadable(generation=generation, step=step, error="why", is_damaged=is_damaged)
            self.history.tell(worker, message)

    @rule(worker=WORKERS, kind=st.sampled_from(["kill", "disconnect"]))
    def fault(self, worker: int, kind: str) -> None:
        faults = (*self.history.state.faults, Fault(worker, kind, self.history.at.unix_s))  # type: ignore[arg-type]
        self.history.happen(FaultsInjected(at=self.history.at, faults=faults))

    @rule(rarely=RARELY, signal=st.sampled_from(["", "SIGTERM", "SIGHUP"]))
    def interrupt(self, rarely: bool, signal: str) -> None:
        if rarely:
            self.history.happen(Interrupted(at=self.history.at, signal=signal))

    @rule(rarely=RARELY)
    def end(self, rarely: bool) -> None:
        if rarely:
            self.history.happen(EndRequested(at=self.history.at, status="failed", reason="a reason"))

    # --- what is waited for ---

    @invariant()
    def a_question_is_open_while_it_is_decided(self) -> None:
        if not hasattr(self, "history"):
            return
        if self.history.state.phase is Phase.DECIDING:
            asked = [question.question for question in self.history.questions]
            assert self.history.state.question in asked


TestRuns = Runs.TestCase
TestRuns.settings = settings(stateful_step_count=40, deadline=None, max_examples=examples(60))
