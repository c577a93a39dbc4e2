"""Histories that are drawn: whatever happens, and in whatever order, what `histories.check` says holds."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chameleon_ft.config import Recovery
from chameleon_ft.control.events import Considered, DecisionFailed, EndRequested, FaultsInjected, Interrupted
from chameleon_ft.control.state.incident import Fault
from chameleon_ft.control.state.state import Phase
from chameleon_ft.control.wire.messages import (
    CheckpointSaved,
    Crashed,
    Finished,
    HostHello,
    PeerFailed,
    Position,
    Preallocated,
    ProcessState,
    Quiesced,
    Ready,
    SlowIO,
    Started,
)
from chameleon_ft.errors import ControlError
from tests.control.histories import AGENT, LAYERS, History, new_state

WORKERS = st.integers(0, 4)
RARELY = st.integers(0, 19).map(lambda number: number == 13)
"""Of what ends a run, or histories would be short."""
OFTEN = st.sampled_from([True, True, True, False])


class Runs(RuleBasedStateMachine):
    """A run of four workers, to which anything happens at any time."""

    @initialize(respawn=OFTEN, gathering=RARELY, holds=OFTEN)
    def begin(self, respawn: bool, gathering: bool, holds: bool) -> None:
        recovery = Recovery(respawn=respawn, respawn_delay_s=0.1, max_respawns=5)
        self.history = History(new_state(steps=30, recovery=recovery))
        if gathering:
            self.history.say(AGENT, HostHello(host="a host", slots=4))
        else:
            self.history.train(steps=2)
        self.history.holds = holds

    def attempt(self, action: Callable[[], object]) -> None:
        """Do what a peer may not be allowed to do; the state stays as it is then."""
        before = self.history.state
        try:
            action()
        except ControlError:
            assert self.history.state is before

    def connected(self, worker: int) -> bool:
        members = self.history.state.members
        return worker in members and members[worker].connection is not None

    # --- members ---

    @rule(worker=WORKERS)
    def join(self, worker: int) -> None:
        if worker in self.history.state.members:
            self.attempt(lambda: self.history.join(worker))

    @rule(worker=WORKERS)
    def be_ready(self, worker: int) -> None:
        if self.connected(worker):
            self.history.tell(worker, Ready())

    @rule(worker=WORKERS, code=st.sampled_from([0, 1, -9]))
    def exit(self, worker: int, code: int) -> None:
        if worker in self.history.state.members:
            self.attempt(lambda: self.history.reap(worker, code))

    @rule(worker=WORKERS, silent=st.booleans())
    def disconnect(self, worker: int, silent: bool) -> None:
        if self.connected(worker):
            self.history.depart(self.history.connection(worker), "heartbeat" if silent else "connection")

    @precondition(lambda self: self.history.state.phase is not Phase.OVER)
    @rule(worker=WORKERS)
    def lose_a_worker_in_training(self, worker: int) -> None:
        if worker in self.history.live():
            self.history.depart(self.history.connection(worker))
            self.exit(worker, -9)
            self.all_quiesce()

    @precondition(lambda self: self.history.state.phase is Phase.DECIDING)
    @rule(worker=WORKERS)
    def lose_a_survivor_while_it_is_decided(self, worker: int) -> None:
        if worker in self.history.live():
            self.history.depart(self.history.connection(worker))

    @precondition(lambda self: self.history.state.scale_up.newcomers)
    @rule()
    def lose_a_newcomer(self) -> None:
        self.history.depart(self.history.connection(min(self.history.state.scale_up.newcomers)))

    @precondition(lambda self: self.history.state.phase is Phase.TRAINING)
    @rule(worker=WORKERS)
    def come_back(self, worker: int) -> None:
        if worker in self.history.state.members and not self.connected(worker):
            self.history.wait(0.5)
            self.join(worker)
            self.be_ready(worker)
            self.history.wait(0.7)

    @precondition(lambda self: self.history.state.phase is Phase.TRAINING)
    @rule(worker=WORKERS)
    def be_lost_and_come_back(self, worker: int) -> None:
        self.lose_a_worker_in_training(worker)
        while self.history.questions:
            self.history.answer(self.history.questions.pop(0))
        if self.history.state.phase is Phase.REGROUPING:
            self.history.start()
            self.come_back(worker)

    @rule(worker=WORKERS, error=st.sampled_from(["an error", "another"]))
    def crash(self, worker: int, error: str) -> None:
        if self.connected(worker):
            self.history.tell(worker, Crashed(error=error))

    @rule(slots=st.integers(1, 2))
    def host_joins(self, slots: int) -> None:
        self.attempt(lambda: self.history.say(AGENT + 1, HostHello(host="late", slots=slots)))

    @rule(agent=st.sampled_from([AGENT, AGENT + 1]), rarely=RARELY)
    def host_leaves(self, agent: int, rarely: bool) -> None:
        if rarely:
            self.history.depart(agent)

    # --- generations ---

    @rule(workers=st.sets(WORKERS, min_size=1), placed=st.integers(0, 3))
    def quiesce(self, workers: set[int], placed: int) -> None:
        for worker in workers & set(self.history.live()):
            self.history.quiesce(worker, placed=placed)

    @rule()
    def all_quiesce(self) -> None:
        if self.history.state.phase is Phase.STOPPING:
            self.history.quiesce()

    @rule(worker=WORKERS, generation=st.integers(1, 9))
    def quiesce_late(self, worker: int, generation: int) -> None:
        if self.connected(worker):
            committed = self.history.state.committed
            message = Quiesced(
                generation=generation, committed=committed, reduced=False, last_vote=None, placed=0, layers=()
            )
            self.history.tell(worker, message)

    @precondition(lambda self: self.history.state.phase is Phase.REGROUPING)
    @rule()
    def start(self) -> None:
        self.history.start()

    @rule(worker=WORKERS, generation=st.integers(1, 9))
    def start_late(self, worker: int, generation: int) -> None:
        if self.connected(worker):
            self.history.tell(worker, Started(generation=generation))

    @precondition(lambda self: self.history.state.phase is Phase.TRAINING)
    @rule()
    def commit(self) -> None:
        self.history.commit(pause=self.history.state.scale_up.is_pausing)

    @rule(worker=WORKERS, number=st.integers(0, 30), late=st.integers(0, 2), pause=st.booleans())
    def commit_anything(self, worker: int, number: int, late: int, pause: bool) -> None:
        if self.connected(worker):
            generation = self.history.state.generation - late
            self.history.commit_by(worker, number, pause=pause, generation=generation)

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
    @rule(is_change=st.booleans(), worker=WORKERS, fails=st.booleans())
    def consider(self, is_change: bool, worker: int, fails: bool) -> None:
        if fails:
            question = self.history.considerations.pop(0).scale_up.question
            self.history.happen(Considered(at=self.history.at, question=question, incoming={}, error="an error"))
        else:
            self.history.consider(is_change=is_change, incoming={worker: ((0, 8),)})

    @rule(worker=WORKERS)
    def preallocate(self, worker: int) -> None:
        if self.connected(worker):
            self.history.tell(worker, Preallocated(layers=((0, 8),)))

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
            state = ProcessState(probe=probe, worker=worker, incarnation=incarnation, stopped=stopped)
            self.attempt(lambda: self.history.say(AGENT, state))

    @rule(worker=WORKERS, step=st.integers(0, 2), layers=st.sets(st.integers(0, LAYERS - 1)), failed=st.booleans())
    def checkpoint(self, worker: int, step: int, layers: set[int], failed: bool) -> None:
        if self.connected(worker):
            generation, error = self.history.state.generation, "OSError" if failed else None
            part = CheckpointSaved(generation=generation, step=step, layers=tuple(layers), error=error)
            self.history.tell(worker, part)
            self.history.tell(worker, SlowIO(generation=generation, doing="writing", since_s=10.0))

    @rule(worker=WORKERS, kind=st.sampled_from(["kill", "disconnect"]))
    def fault(self, worker: int, kind: str) -> None:
        faults = (*self.history.state.faults, Fault(worker, kind, self.history.at.unix_s))  # type: ignore[arg-type]
        self.history.happen(FaultsInjected(at=self.history.at, faults=faults))

    @rule(rarely=RARELY)
    def interrupt(self, rarely: bool) -> None:
        if rarely:
            self.history.happen(Interrupted(at=self.history.at))

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
TestRuns.settings = settings(stateful_step_count=40, deadline=None)
