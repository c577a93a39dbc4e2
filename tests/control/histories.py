"""Histories of a run, replayed through the state machine alone: no socket, no clock, no process, no file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic_core import to_json

from chameleon_ft.config import Checkpoint, Recovery, Timeouts
from chameleon_ft.control.commands import (
    Command,
    DistrustCheckpoints,
    Drop,
    Finish,
    Launch,
    MeasureOperations,
    Record,
    Send,
    Task,
    Welcome,
)
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.decisions.transition import PlannedTransition
from chameleon_ft.control.events import (
    Considered,
    Decided,
    Disconnected,
    Event,
    Launched,
    Moment,
    OperationsMeasured,
    PrepareFailed,
    Received,
    Silent,
    Ticked,
    TookOver,
)
from chameleon_ft.control.patches import PatchWriter, patched, read_parts
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.control.state.state import Phase, Settings, State
from chameleon_ft.control.state_machine import TICK_S, step
from chameleon_ft.control.wire.messages import (
    Begin,
    Committed,
    Discard,
    Exit,
    Finished,
    Hello,
    HostHello,
    Message,
    Prepared,
    Quiesced,
    Ready,
    Refused,
    Started,
    Stop,
    Switch,
    Switched,
    WorkerExited,
)
from chameleon_ft.control.wire.parts import OperationTimes, RankProcess, Vote
from chameleon_ft.observe import FailureRecord, OtherRecord, StepRecord
from chameleon_ft.plan import LayerRange, Placement, data_pipeline_plan
from chameleon_ft.transfer import Message as Transferred
from chameleon_ft.transfer import Transfer

AGENT = 1000  # connection of the first agent
LAYERS = 4

Kind = TypeVar("Kind")


def new_state(**changes: Any) -> State:
    """The state before a run of four workers and ten steps."""
    fields: dict[str, Any] = {
        "workers": 4,
        "steps": 10,
        "num_layers": LAYERS,
        "checkpoint": Checkpoint(),
        "recovery": Recovery(),
        "timeouts": Timeouts(),
        "workers_per_host": None,
        "logs": "logs",
        "checkpoints": "checkpoints",
    }
    return State.before(Settings(**{**fields, **changes}))


def a_plan(workers: Collection[int], *, first_step: int, moves_to: int | None = None) -> RecoveryPlan:
    """One pipeline of a stage over the first worker, and as many more as there are workers; it may move a layer."""
    plan = data_pipeline_plan(
        layer_costs=[1.0] * LAYERS, dp=len(workers), pp=1, micro_batches=len(workers), workers=sorted(workers)
    )
    transition = None
    if moves_to is not None:
        source = min(worker for worker in plan.workers if worker != moves_to)
        message = Transferred(source, moves_to, LayerRange(0, 1), 64)
        transfer = Transfer(placement=plan.placement, roles={}, rounds=((message,),))
        transition = PlannedTransition(
            transfer=transfer, participants=tuple(sorted({*plan.workers, moves_to})), keep={}
        )
    return RecoveryPlan(
        plan=plan,
        first_step=first_step,
        load="keep",
        roll_forward=None,
        policy="a policy",
        action="an action",
        transition=transition,
    )


def in_waves(
    final: RecoveryPlan, now: RecoveryPlan | ActivePlan, waves: int, *, to: int | None = None
) -> tuple[RecoveryPlan, ...]:
    """The plans that lead to `final`, with the routes of `now`: layers move to new workers, the same share each time.

    If there are none, they move to worker `to`.

    Plans under which they move take turns with plans of the same workers under which none moves.
    """
    source = min(worker for worker in now.plan.workers if worker != to)
    new = [worker for worker in final.plan.workers if worker not in now.plan.workers]
    plans: list[RecoveryPlan] = []
    for wave in range(waves):
        stop = LAYERS * (wave + 1) // waves
        ranges = {**now.plan.placement.ranges, **{worker: (LayerRange(0, stop),) for worker in new}}
        plan = replace(now.plan, placement=Placement(LAYERS, ranges))
        arriving = LayerRange(LAYERS * wave // waves, stop)
        receivers = new or ([] if to is None else [to])
        rounds = tuple((Transferred(source, worker, arriving, 64),) for worker in receivers)
        transfer = Transfer(placement=plan.placement, roles={}, rounds=rounds)
        reached = replace(final, plan=plan, policy="migration")
        plans += [replace(reached, migration=transfer), reached]
    return (*plans[:-1], final)


def vote(step: int, **fields: bool) -> Vote:
    sums = {"grad_square_sum": 4.0, "loss_sum": 12.0 * (step + 1), "terms": 12, "samples": 12}
    return Vote.model_validate({**sums, "finish": False, **fields})


class JournaledState:
    """A state as a journal has it, from the differences between all states so far."""

    def __init__(self) -> None:
        self._writer = PatchWriter()
        self._last: State | None = None
        self._parts: dict[int, Any] = {}
        self._value: Any = None
        self.sizes: list[int] = []
        """Bytes of each difference."""

    def become(self, state: State) -> None:
        """Write and read the difference to the last state, and check that it leads to this one."""
        patch = self._writer.patch(state, self._last) or {}
        line = to_json({"state": patch, "parts": self._writer.new_parts()}, fallback=dict, inf_nan_mode="constants")
        written = json.loads(line)
        read_parts(written["parts"], self._parts)
        self._value = patched(self._value, written["state"], self._parts)
        assert State.from_json(json.dumps(self._value)) == state
        self._last = state
        self.sizes.append(len(line))


def process_of(worker: int, incarnation: int = 1) -> RankProcess:
    """The process of a worker's incarnation on its host."""
    return RankProcess(pid=100 * worker + incarnation, started=7, local_index=worker)


class History:
    """A state, what led to it, and what was commanded; every event is checked, see `check`.

    Decisions are answered at once, by plans in which all live workers train, unless `holds` is set. If workers are to
    load a checkpoint, it is that of the step after which they last agreed.
    """

    def __init__(self, state: State | None = None) -> None:
        self.state = new_state() if state is None else state
        self.journaled = JournaledState()
        self.now = 100.0
        self.commands: list[Command] = []
        self.questions: list[State] = []
        """States in which a decision was asked for; likewise for newcomers, and for launches."""
        self.considerations: list[State] = []
        self.launches: list[State] = []
        self.holds = False
        self.moves_to: int | None = None
        """A worker that the next plan moves a layer to."""
        self.speeds: dict[int, float] = {}
        """Of slow workers, relative to the others."""
        self.link_speeds: dict[tuple[int, int], float] = {}
        """Likewise of slow links. If there are any, all links are measured."""
        self.began: list[int] = []
        """Generations that were begun, by an order or by a switch."""
        self.moved: dict[int, int] = {}
        """Connection -> the one that has replaced it, since coordinators were replaced."""

    # --- what happens ------------------------------------------------------------------------------------------------

    @property
    def at(self) -> Moment:
        return Moment(unix_s=1e9 + self.now, monotonic_s=self.now)

    def happen(self, event: Event) -> tuple[Command, ...]:
        """Let an event happen, and answer what it asks for."""
        before = self.state
        after, commands = step(before, event)
        check(before, event, after, commands)
        if commands or not isinstance(event, Ticked):  # ticks are many
            self.journaled.become(after)
        self.state = after
        self.commands += commands
        for command in commands:
            match command:
                case Task.DECIDE:
                    self.questions.append(after)
                case Task.CONSIDER_SCALE_UP:
                    self.considerations.append(after)
                case MeasureOperations(worker=worker, step=number):
                    ratio = 1 / self.speeds.get(worker, 1.0)
                    generation = after.generation
                    links = {}
                    if self.link_speeds:
                        pairs = ((other, worker) for other in self.members() if other < worker)
                        links = {pair: (1 / self.link_speeds.get(pair, 1.0), 0) for pair in pairs}
                    self.happen(
                        OperationsMeasured(
                            at=self.at,
                            worker=worker,
                            generation=generation,
                            step=number,
                            ratio=ratio,
                            group=None,
                            links=links,
                        )
                    )
                case Task.BEGIN_GENERATION:
                    assert after.generation > max(self.began), "no number is used twice"
                    self.began.append(after.generation)
                case Launch():
                    assert after.generation > max(self.began, default=0), "no number is used twice"
                    self.began.append(after.generation)
                    self.launches.append(after)
                    self.happen(Launched(at=self.at, generation=after.generation))
        while self.questions and not self.holds:
            self.answer(self.questions.pop(0))
        return commands

    def answer(self, asked: State) -> None:
        """Answer a question, by a plan of all workers that were live when it was asked."""
        live = asked.members.live()
        if asked.active is None:
            plan = a_plan(live, first_step=0)
        else:
            first_step = max((report.committed for report in asked.quiesced.values()), default=0)
            moves_to = self.moves_to if self.moves_to in live and len(live) > 1 else None
            plan = a_plan(live, first_step=max(first_step, asked.committed), moves_to=moves_to)
            if asked.checkpoints.is_reread:
                plan = replace(a_plan(live, first_step=asked.health.agreed), load=asked.health.agreed)
        self.happen(Decided(at=self.at, question=asked.question, plan=plan))

    def say(self, connection: int, message: Message) -> tuple[Command, ...]:
        return self.happen(Received(at=self.at, connection=self.now_at(connection), message=message))

    def depart(self, connection: int) -> tuple[Command, ...]:
        return self.happen(Disconnected(at=self.at, connection=self.now_at(connection)))

    def silence(self, connection: int, since_s: float = 2.5) -> tuple[Command, ...]:
        return self.happen(Silent(at=self.at, connection=self.now_at(connection), since_s=since_s))

    def now_at(self, connection: int) -> int:
        """The connection that has replaced this one."""
        return self.moved.get(connection, connection)

    def take_over(self) -> None:
        """Replace the coordinator; its questions are lost, and all peers are to come back."""
        self.state = State.from_json(self.state.to_json())
        self.questions.clear()
        self.considerations.clear()
        self.happen(TookOver(at=self.at, term=self.state.term + 1))

    def return_worker(self, worker: int, *, known: int = 0, switch_to: int = 0) -> tuple[Command, ...]:
        """Have a worker come back from its lost connection."""
        member = self.state.members[worker]
        incarnation = member.incarnation
        hello = Hello(worker=worker, host="10.0.0.1", incarnation=incarnation, known=known, switch_to=switch_to)
        return self._return(self.connection(worker), hello)

    def return_agent(self, agent: int = AGENT, *, ranks: Collection[tuple[int, int]] | None = None) -> None:
        """Have an agent come back that runs these ranks, or all that are its own."""
        own = [(each.id, each.incarnation) for each in self.state.members if each.agent == self.now_at(agent)]
        self._return(agent, HostHello(host="a host", slots=4, ranks=tuple(own if ranks is None else ranks)))

    def _return(self, connection: int, hello: Hello | HostHello) -> tuple[Command, ...]:
        before = self.now_at(connection)
        self.moved[connection] = before + 10_000
        return self.say(connection, hello.model_copy(update={"resumes": before}))

    def wait(self, seconds: float) -> list[Command]:
        """Let time go on, tick by tick; return what is commanded meanwhile."""
        commands: list[Command] = []
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            commands += self.happen(Ticked(at=self.at))
        return commands

    # --- what members do ---------------------------------------------------------------------------------------------

    def connection(self, worker: int) -> int:
        """The control connection of a worker's newest incarnation, whether it is there or not."""
        incarnation = self.state.members[worker].incarnation if worker in self.state.members else 1
        return 20 * worker + incarnation

    def tell(self, worker: int, message: Message) -> tuple[Command, ...]:
        """Have a worker say something."""
        return self.say(self.connection(worker), message)

    def join(self, worker: int) -> None:
        incarnation = self.state.members[worker].incarnation
        process = process_of(worker, incarnation)
        self.tell(worker, Hello(worker=worker, host="10.0.0.1", incarnation=incarnation, process=process))

    def gather(self) -> None:
        self.gather_some(self.state.settings.workers)

    def gather_some(self, workers: int) -> None:
        self.say(AGENT, HostHello(host="a host", slots=self.state.settings.workers))
        for worker in range(workers):
            self.join(worker)

    def start(self) -> None:
        """Have the first worker of the generation begin."""
        first = self.members()[0]
        if self.state.active is not None and self.state.active.transition is not None:
            self.tell(first, Switched(generation=self.state.generation, moved_bytes=64, transfer_s=0.1))
        self.tell(first, Started(generation=self.state.generation))

    def commit(self, **vote: bool) -> None:
        """Have the workers of the generation apply a step; after it, they may switch, or begin a checkpoint."""
        number, generation = self.state.committed, self.state.generation
        for worker in self.members():
            self.commit_by(worker, number, generation=generation, **vote)

    def commit_by(self, worker: int, number: int, *, generation: int | None = None, **fields: bool) -> None:
        self.tell(
            worker,
            Committed(
                generation=self.state.generation if generation is None else generation,
                step=number,
                vote=vote(number, **fields),
                grad_norm=0.5,
                lr=0.1,
                step_s=0.1,
                times=OperationTimes(forward_s=0.01, backward_s=0.01, longest_s=0.01),
            ),
        )

    def prepare(self, *workers: int, error: str | None = None, cannot_migrate: bool = False) -> None:
        """Have workers, or all that have not yet, prepare the next generation."""
        assert self.state.next is not None
        number = self.state.next.number
        for worker in workers or sorted(self.state.next.unprepared):
            self.tell(worker, Prepared(generation=number, error=error, cannot_migrate=cannot_migrate))

    def switch(self) -> None:
        """Have all prepare the next generation, and switch to it."""
        self.prepare()
        self.commit(switch=True)
        self.start()

    def quiesce(self, *workers: int, placed: int = 0, layers: Collection[int] = range(LAYERS)) -> None:
        """Have workers, or all live ones, quiesce."""
        for worker in workers or self.live():
            self.tell(
                worker,
                Quiesced(
                    generation=self.state.generation,
                    committed=self.state.committed,
                    reduced=False,
                    last_vote=None,
                    placed=placed,
                    layers=tuple(layers),
                ),
            )

    def reap(self, worker: int, exit_code: int = -9) -> tuple[Command, ...]:
        incarnation = self.state.members[worker].incarnation
        return self.say(AGENT, WorkerExited(worker=worker, incarnation=incarnation, exit_code=exit_code))

    def finish(self) -> None:
        for worker in self.members():
            self.tell(worker, Finished(generation=self.state.generation))

    def train(self, steps: int = 3) -> None:
        """Gather and take some steps."""
        self.gather()
        self.start()
        for _ in range(steps):
            self.commit()

    def come_back(self, worker: int) -> None:
        """Have a worker join that was started again."""
        self.join(worker)
        self.tell(worker, Ready())

    def consider(self, *workers: int, waves: int = 0, moves_to: int | None = None) -> None:
        """Answer a question beside training: by a plan of some workers, and what leads to it, or by none."""
        asked = self.considerations.pop(0)
        plans: tuple[RecoveryPlan, ...] = ()
        if workers:
            assert asked.active is not None
            if waves and (moves_to is not None or not set(workers) <= set(asked.active.plan.workers)):
                plans = in_waves(a_plan(workers, first_step=0), asked.active, waves, to=moves_to)
            else:
                plans = (a_plan(workers, first_step=0, moves_to=moves_to),)
        staying = asked.members.staying()
        question = asked.scale_up.question
        self.happen(Considered(at=self.at, question=question, staying=staying, plans=plans, reason="no reason"))

    def orders_fail(self) -> None:
        """Have the orders of the next generation fail."""
        assert self.state.next is not None
        self.happen(PrepareFailed(at=self.at, generation=self.state.next.number, reason="no link"))

    # --- what came of it ---------------------------------------------------------------------------------------------

    def live(self) -> tuple[int, ...]:
        return self.state.members.live()

    def members(self) -> tuple[int, ...]:
        """Workers of the newest generation that are live."""
        assert self.state.active is not None
        return tuple(worker for worker in self.state.active.plan.workers if worker in self.live())

    @property
    def launched(self) -> tuple[int, ...]:
        """Workers that the newest launched generation trains."""
        active = self.launches[-1].active
        assert active is not None
        return active.plan.workers

    def sent(self, kind: type[Kind], to: int | None = None) -> list[Kind]:
        """Messages of a kind that were sent, in all or on one connection."""
        return [
            command.message
            for command in self.commands
            if isinstance(command, Send)
            and isinstance(command.message, kind)
            and (to is None or command.connection == to)
        ]

    def records(self, kind: type[Kind]) -> list[Kind]:
        found = [command.record for command in self.commands if isinstance(command, Record)]
        return [record for record in found if isinstance(record, kind)]

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [record.fields for record in self.records(OtherRecord) if record.event == name]

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        return [(record.worker, record.noticed_by, record.cause) for record in self.records(FailureRecord)]


# --- what holds at all times -----------------------------------------------------------------------------------------


def check(before: State, event: Event, after: State, commands: Iterable[Command]) -> None:
    """Check everything that holds after any event.

    That the state can be stored and continued is checked by doing so.
    """
    commands = tuple(commands)
    if commands or not isinstance(event, Ticked):  # ticks are many
        stored = State.from_json(before.to_json())
        assert stored == before
        assert step(stored, event) == (after, commands), "a state that was loaded goes on as the one that was stored"
    is_return = isinstance(event, Received) and getattr(event.message, "resumes", None) is not None
    _check_numbers(before, after, commands, is_return=is_return)
    _check_commands(before, after, commands, is_return=is_return)
    _check_members(after)
    _check_progress(after)
    _check_health(before, after, commands)


def _check_numbers(before: State, after: State, commands: tuple[Command, ...], *, is_return: bool) -> None:
    assert before.generation <= after.generation
    assert before.question <= after.question
    assert before.newest <= after.newest
    assert after.generation <= after.newest
    for command in commands:
        match command:
            case Launch(plan=plan):
                assert after.active == plan.active(), "one generation is in force"
                assert after.active_generation == after.generation
                assert after.phase is Phase.REGROUPING
                assert after.next is None
            case Task.PREPARE_GENERATION:
                assert after.next is not None
                assert after.next.number == after.newest > before.newest, "no number is used twice"
            case Task.BEGIN_GENERATION:
                assert before.next is not None
                assert before.next.is_switching, "no worker switches before all are prepared"
                assert after.generation == after.active_generation == before.next.number
                assert after.committed == before.committed + 1
            case Send(message=Switch(generation=number)):
                assert after.next is not None
                assert (after.next.number, after.next.unprepared) == (number, frozenset()), "all have prepared it"
                assert before.generation == after.generation < number
            case Send(message=Begin(generation=number, first_step=first)):
                assert (number, first) == (after.generation, after.committed)
            case Send(message=Discard(generation=number)) if is_return:
                assert number > after.generation
            case Send(message=Discard(generation=number)):
                assert before.next is not None
                assert number == before.next.number
                assert not before.next.is_switching, "there is no way back but a loss"
            case Task.DECIDE:  # carried out with the state after the event, whatever else the event led to
                assert after.phase in (Phase.GATHERING, Phase.DECIDING)
                assert after.members.live()
                assert after.active is None or after.quiesced.keys() >= set(after.members.live())
            case Task.CONSIDER_SCALE_UP:
                assert after.phase is Phase.TRAINING
                assert after.scale_up.considering == after.generation
            case Task.PREPARE_DECISIONS:
                assert after.active is not None
            case Record(record=StepRecord(step=number)):
                assert number == before.committed, "steps are recorded once, in order"


def _check_commands(before: State, after: State, commands: tuple[Command, ...], *, is_return: bool) -> None:
    connected = {*after.members.agents, *_connections(after)}
    newly_fenced = after.members.fenced - before.members.fenced
    for command in commands:
        if isinstance(command, Send | Welcome):
            assert command.connection not in before.members.fenced, f"{command} goes to a lost worker"
        if isinstance(command, Send) and isinstance(command.message, Stop):
            assert command.connection in connected | newly_fenced
            assert is_return or before.generation < command.message.generation
            assert command.message.generation <= after.generation
    drained = {
        command.connection
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, Exit) and command.message.is_drained
    }
    refused = {each.connection for each in commands if isinstance(each, Send) and isinstance(each.message, Refused)}
    told_to_end = {each.told_to_end for each in after.members}
    dropped = {command.connection for command in commands if isinstance(command, Drop)}
    assert dropped - told_to_end == newly_fenced - drained - refused - told_to_end
    for worker in before.members:
        if worker.agent in drained:
            assert after.members[worker.id].draining, "its agent exits"
            assert after.members[worker.id].lost
        if worker.connection in drained:
            assert after.members[worker.id].draining
            assert after.active is not None
            assert worker.id not in after.active.plan.workers, "it is out of the plan"
            assert after.next is None or worker.id not in after.next.plan.participants
            if worker.takes_part:
                assert after.committed > after.active.first_step, "a step is committed without it"
    finishes = [command for command in commands if isinstance(command, Finish)]
    assert len(finishes) == (before.phase is not Phase.OVER and after.phase is Phase.OVER)
    if before.phase is Phase.OVER:
        assert not commands


def _connections(state: State) -> set[int]:
    return {worker.connection for worker in state.members if worker.connection is not None}


def _check_members(state: State) -> None:
    connections = [worker.connection for worker in state.members if worker.connection is not None]
    assert len(connections) == len(set(connections)), "every connection has one worker"
    assert not state.members.fenced & set(connections)
    assert all(worker.connection is None for worker in state.members if worker.lost)
    absent = {worker.id for worker in state.members if worker.lost or worker.draining}
    assert not {*state.scale_up.newcomers, *state.scale_up.loaded} & absent
    incarnations: dict[int, int] = {}
    for worker in (*state.members.former, *state.members):
        assert worker.incarnation == incarnations.get(worker.id, 0) + 1
        incarnations[worker.id] = worker.incarnation


def _check_progress(state: State) -> None:
    """The run has ended, or waits for something that has a name."""
    live = set(state.members.live())
    assert (state.phase is Phase.OVER) == (state.ended is not None)
    match state.phase:
        case Phase.STOPPING:
            assert live - state.quiesced.keys(), "some worker has still to quiesce"
            assert {report.generation for report in state.quiesced.values()} <= {state.generation}
        case Phase.DECIDING:
            assert {report.generation for report in state.quiesced.values()} == {state.generation}
            assert live, "there is something to decide"
            assert live <= state.quiesced.keys(), "every survivor waits for the decision"
        case Phase.REGROUPING | Phase.TRAINING:
            assert state.active is not None
            assert state.active_generation == state.generation
            assert state.following or state.active.migration is None, "a migration leads to a plan"
            if state.next is not None:
                assert state.next.number > state.generation
                assert set(state.next.plan.participants) <= live, "a generation that lacks a worker is given up"
                final = state.following[-1]
                is_open = not state.next.is_switching and state.active.migration is None
                assert not (is_open and state.members.draining() & set(final.plan.workers)), "they are to leave"
            needed = state.active.participants if state.phase is Phase.REGROUPING else state.active.plan.workers
            assert set(needed) <= live | state.finished, "no generation goes on without a worker that it needs"
            assert not state.incident.losses or state.phase is Phase.REGROUPING or state.finished


def _check_health(before: State, after: State, commands: tuple[Command, ...]) -> None:
    health, decided = after.health, [command.plan for command in commands if isinstance(command, Launch)]
    assert health.agreed <= after.committed
    assert len({report.step for report in health.reports.values()}) <= 1, "reports of a bad step are of one step"
    if health.disagreement is not None:
        assert after.phase in (Phase.STOPPING, Phase.DECIDING, Phase.OVER), (
            "no worker trains with a state that is wrong"
        )
        assert after.checkpoints.is_reread or not health.disagreement.undecided or after.phase is Phase.OVER
    if before.health.disagreement is None is not health.disagreement:
        assert DistrustCheckpoints(after=before.health.agreed) in commands
    for plan in decided:
        assert plan.load != "keep" or not before.checkpoints.is_reread, "all load a checkpoint"
        assert not health.reports, "a generation begins without reports of an earlier one"
