"""Histories of a run, replayed through the state machine alone: no socket, no clock, no process, no file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, Final, TypeVar

from chameleon_ft.config import Checkpoint, Recovery, Timeouts
from chameleon_ft.coordinator.commands import Command, Launch, MeasureOperations, Record, Send, Task
from chameleon_ft.coordinator.events import (
    Considered,
    Decided,
    Disconnected,
    Event,
    Moment,
    OperationsMeasured,
    Received,
    Silent,
    Ticked,
    TookOver,
)
from chameleon_ft.coordinator.state.settings import Settings
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.coordinator.state_machine import TICK_S, step
from chameleon_ft.events import base
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.messages import (
    Committed,
    Finished,
    Hello,
    HostHello,
    Message,
    Prepared,
    Quiesced,
    Ready,
    Started,
    Switched,
    WorkerExited,
)
from chameleon_ft.protocol.parts import Member, OperationTimes, RankProcess
from chameleon_ft.recovery.generation import GenerationSpec
from tests.coordinator.invariants import check
from tests.coordinator.journaled import Replayed
from tests.coordinator.plans import LAYERS, a_plan, growing, in_waves

AGENT = 1000  # connection of the first agent
DECISION: Final[Mapping[str, object]] = {
    "search_s": 0.1,
    "prepared": False,
    "trigger": "review",
    "step": 0,
    "lost": [],
    "live": 4,
    "plan": "of a test",
    "rate": {"failures": 0, "worker_s": 0.0, "prior_failures": 1.0, "worker_mtbf_s": 1e6},
    "stall": {"repeat_s": 0.0, "detect_s": 0.0, "stop_s": 0.0, "decide_s": 0.0, "regroup_s": 0.0},
    "corrections": {"operations": 1.0, "step": 1.0, "transfer": 1.0, "slow": {}},
    "chosen": None,
    "horizon_s": 1.0,
    "candidates": [],
}
"""The fields of the record of a decision."""
_SELDOM_S = 2 * TICK_S  # the most that does not count as held up

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


def vote(step: int, **fields: bool) -> Vote:
    sums: dict[str, Any] = {"grad_square_sum": 4.0, "loss_sum": 12.0 * (step + 1), "terms": 12, "samples": 12}
    return Vote(**{**sums, "finish": False, **fields})


def process_of(worker: int, incarnation: int = 1) -> RankProcess:
    """The process of a worker's incarnation on its host."""
    return RankProcess(pid=100 * worker + incarnation, started=7, local_index=worker)


class History:
    """A state, what led to it, and what was commanded; every event is checked, see `check`.

    Decisions are answered at once, by plans in which all live workers train, unless `holds` is set. If workers are to
    load a checkpoint, it is that of the step after which they last agreed.
    """

    def __init__(self, state: State | None = None, *, grows_at: int | None = None) -> None:
        self.state = new_state() if state is None else state
        self.grows_at = grows_at
        """The step from which on the batch is twice as large; None: it stays."""
        self.replayed = Replayed()
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
        self.link_kind = 1
        """Likewise of slow links, which are of `link_kind`. If there are any, all links are measured."""
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
        self.replayed.happen(event, before, after, commands)
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
                    links: tuple[tuple[int, int, float, int], ...] = ()
                    if self.link_speeds:
                        pairs = ((other, worker) for other in self.members() if other < worker)
                        links = tuple((*pair, 1 / self.link_speeds.get(pair, 1.0), self.link_kind) for pair in pairs)
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
        spec = growing(plan, plan.first_step, at=self.grows_at)
        self.happen(Decided(at=self.at, question=asked.question, spec=spec))

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
        hello = Hello(member=Member(worker, incarnation), host="10.0.0.1", known=known, switch_to=switch_to)
        return self._return(self.connection(worker), hello)

    def return_agent(
        self, agent: int = AGENT, *, ranks: Collection[tuple[int, int]] | None = None, host: str = "a host"
    ) -> None:
        """Have an agent come back that runs these ranks, or all that are its own."""
        own = [(each.id, each.incarnation) for each in self.state.members if each.agent == self.now_at(agent)]
        self._return(agent, HostHello(host=host, slots=4, ranks=tuple(own if ranks is None else ranks)))

    def _return(self, connection: int, hello: Hello | HostHello) -> tuple[Command, ...]:
        before = self.now_at(connection)
        self.moved[connection] = before + 10_000
        return self.say(connection, hello.model_copy(update={"resumes": before}))

    def wait(self, seconds: float) -> list[Command]:
        """Let time go on, with fewer ticks if it is long; return what is commanded meanwhile."""
        seldom = int(max(0.0, seconds - 5.0) / _SELDOM_S)
        often = round((seconds - seldom * _SELDOM_S) / TICK_S)
        commands: list[Command] = []
        for tick_s in chain(repeat(_SELDOM_S, seldom), repeat(TICK_S, often)):
            self.now += tick_s
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
        self.tell(worker, Hello(member=Member(worker, incarnation), host="10.0.0.1", process=process))

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
        assert self.state.switches.next is not None
        number = self.state.switches.next.number
        for worker in workers or sorted(self.state.switches.next.unprepared):
            self.tell(worker, Prepared(generation=number, error=error, cannot_migrate=cannot_migrate))

    def switch(self) -> None:
        """Have all prepare the next generation, and switch to it."""
        self.prepare()
        self.commit(switch=True)
        self.start()

    def quiesce(self, *workers: int, placed: int = 0, layers: Collection[int] = range(LAYERS), spec: str = "") -> None:
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
                    spec=spec,
                ),
            )

    def reap(self, worker: int, exit_code: int = -9) -> tuple[Command, ...]:
        incarnation = self.state.members[worker].incarnation
        return self.say(AGENT, WorkerExited(member=Member(worker, incarnation), exit_code=exit_code))

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
        """Answer a question during training: by a plan of some workers, and what leads to it, or by none."""
        asked = self.considerations.pop(0)
        plans: tuple[GenerationSpec, ...] = ()
        if workers:
            assert asked.active is not None
            if waves and (moves_to is not None or not set(workers) <= set(asked.active.plan.workers)):
                plans = in_waves(a_plan(workers, first_step=0), asked.active, waves, to=moves_to)
            else:
                plans = (a_plan(workers, first_step=0, moves_to=moves_to),)
        plans = tuple(growing(each, asked.committed, at=self.grows_at) for each in plans)
        staying = asked.members.staying()
        question = asked.scale_up.question
        self.happen(
            Considered(
                at=self.at,
                question=question,
                staying=staying,
                plans=plans,
                record=DECISION,
                reason="no reason",
            )
        )

    def fail_to_consider(self) -> None:
        """Answer the newest question during training: the process that was to decide is gone."""
        question = self.considerations.pop().scale_up.question
        self.happen(Considered(at=self.at, question=question, error="its process is gone"))

    def replace_lost(self, *, waves: int = 0) -> None:
        """Lose worker 3, and prepare to switch to a plan with one of another host."""
        self.reap(3)
        self.quiesce()
        self.start()
        self.commit()
        self.say(AGENT + 1, HostHello(host="late", slots=1))
        self.come_back(4)
        self.wait(0.7)
        self.consider(*self.state.members.staying(), waves=waves)
        self.prepare()

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
        sent = (command for command in self.commands if isinstance(command, Send))
        return [each.message for each in sent if isinstance(each.message, kind) and to in (None, each.connection)]

    def records(self, kind: type[Kind]) -> list[Kind]:
        found = [command.record for command in self.commands if isinstance(command, Record)]
        return [record for record in found if isinstance(record, kind)]

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [record.values() for record in self.records(base.Event) if record.name == name]

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        return [(record.worker, record.noticed_by, record.cause) for record in self.records(FailureRecord)]
