"""Rules of drawn histories for what members do within a generation: they join, train, quiesce and are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chameleon_ft.config import Health, Recovery
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Crashed, Drain, Evaluated, HostHello, Quiesced, Ready, Started
from tests.coordinator.histories import AGENT, History, new_state

WORKERS = st.integers(0, 4)
RARELY = st.integers(0, 19).map(lambda number: number == 13)
"""Of what ends a run, or histories would be short."""
OFTEN = st.sampled_from([True, True, True, False])


class MemberRuns(RuleBasedStateMachine):
    """A run of four workers, whose processes come and go and report as they like."""

    @initialize(
        respawn=OFTEN,
        gathering=RARELY,
        holds=OFTEN,
        ahead=st.integers(0, 9),
        drains=st.booleans(),
        bad=st.sampled_from(["skip", "skip", "rollback", "stop"]),
        grows_at=st.none() | st.integers(1, 8),
    )
    def begin(
        self,
        respawn: bool,
        gathering: bool,
        holds: bool,
        ahead: int,
        drains: bool,
        bad: Literal["skip", "rollback", "stop"],
        grows_at: int | None,
    ) -> None:
        recovery = Recovery(respawn=respawn, respawn_delay_s=0.1, max_respawns=5)
        state = new_state(steps=30, recovery=recovery, health=Health(on_bad_step=bad))
        self.history = History(state, grows_at=grows_at)
        if gathering:
            self.history.say(AGENT, HostHello(host="a host", slots=4))
        else:
            self.history.train(steps=2)
            self.be_ahead(ahead, drains=drains)
        self.history.holds = holds

    def be_ahead(self, progress: int, *, drains: bool) -> None:
        """Go so far on the way to a plan, by layers that move in two waves.

        It is for a worker that joins and perhaps for another one that leaves.
        """
        history = self.history
        if progress > 0:
            history.say(AGENT + 1, HostHello(host="late", slots=1))
            history.come_back(4)
            history.say(2000, Drain(workers=(3,) if drains else ()))
            history.wait(0.7)
            history.consider(*history.state.members.staying(), waves=2)
        for switch in range(3):
            if progress > 3 * switch + 1:
                history.prepare()
            if progress > 3 * switch + 2:
                history.commit(switch=True)
            if progress > 3 * switch + 3:
                history.start()
                history.commit()
                history.wait(0.1)

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

    @rule(worker=WORKERS, silent=st.booleans(), since_s=st.sampled_from([2.5, 1e4]))
    def disconnect(self, worker: int, silent: bool, since_s: float) -> None:
        if self.connected(worker):
            connection = self.history.connection(worker)
            if silent:
                self.history.silence(connection, since_s)
            else:
                self.history.depart(connection)

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

    @rule(worker=WORKERS, error=st.sampled_from(["an error", "another"]), is_alive=st.booleans())
    def crash(self, worker: int, error: str, is_alive: bool) -> None:
        if self.connected(worker):
            self.history.tell(worker, Crashed(error=error, is_alive=is_alive))

    @rule(slots=st.integers(1, 2))
    def host_joins(self, slots: int) -> None:
        self.attempt(lambda: self.history.say(AGENT + 1, HostHello(host="late", slots=slots)))

    @rule(agent=st.sampled_from([AGENT, AGENT + 1]), rarely=RARELY)
    def host_leaves(self, agent: int, rarely: bool) -> None:
        if rarely:
            self.history.depart(agent)

    @rule(agent=st.sampled_from([AGENT, AGENT + 1]), absent_s=st.sampled_from([0.0, 0.5, 12.0]))
    def agent_is_cut_off_and_returns(self, agent: int, absent_s: float) -> None:
        members = self.history.state.members
        if (host := members.agents.get(self.history.now_at(agent))) is None:
            return
        own = [(each.id, each.incarnation) for each in members if each.agent == self.history.now_at(agent)]
        self.history.depart(agent)
        self.history.wait(absent_s)
        self.attempt(lambda: self.history.return_agent(agent, ranks=own, host=host))

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
    @rule(finish=RARELY, evaluate=st.booleans())
    def commit(self, finish: bool, evaluate: bool = False) -> None:
        upcoming = self.history.state.switches.next
        checkpoint = self.history.state.checkpoints.schedule.is_requested
        switch = upcoming is not None and upcoming.is_switching
        self.history.commit(switch=switch, finish=finish, checkpoint=checkpoint, evaluate=evaluate)

    @rule(worker=WORKERS, step=st.none() | st.integers(0, 12), late=st.integers(-1, 1))
    def evaluated(self, worker: int, step: int | None, late: int) -> None:
        """Report an evaluation, by default that which is due."""
        if not self.connected(worker):
            return
        state = self.history.state
        step = (state.evaluations.pending or 1) - 1 if step is None else step
        sums = {"loss": 2.0, "terms": 4.0, "samples": 4, "labels": 0.0, "metrics": (("accuracy", 1.0),)}
        fields = {"generation": state.generation - late, "step": step, "seconds": 0.1, "longest_s": 0.01}
        self.history.tell(worker, Evaluated(**sums, **fields))

    @precondition(lambda self: self.history.state.phase is Phase.TRAINING and self.history.state.committed < 12)
    @rule(worker=WORKERS, speed=st.sampled_from([0.5, 0.8, 1.0]))
    def slow_down(self, worker: int, speed: float) -> None:
        """Change the speed of a worker, and train until that has been noticed."""
        self.history.speeds[worker] = speed
        for _ in range(9):
            if self.history.state.phase is Phase.TRAINING:
                self.commit(finish=False)
        self.history.wait(0.1)

    @rule(worker=WORKERS, number=st.integers(0, 30), late=st.integers(-1, 2), switch=st.booleans())
    def commit_anything(self, worker: int, number: int, late: int, switch: bool) -> None:
        if self.connected(worker):
            generation = self.history.state.generation - late
            self.history.commit_by(worker, number, switch=switch, generation=generation)
