"""Drawn histories of wrong states and bad steps, with ranks that do what they are told and nothing else.

Messages of ranks arrive late, workers are lost, and coordinators are replaced after any event: those of its orders that
were not sent are lost with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chameleon_ft.config import Health as HealthConfig
from chameleon_ft.coordinator.commands import Command, DistrustCheckpoints, Launch, Send
from chameleon_ft.coordinator.decisions.cluster_state import ClusterState
from chameleon_ft.coordinator.decisions.recovery_plan import _resume_point
from chameleon_ft.coordinator.events import Decided, DecisionFailed, Event
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.protocol.messages import BadStep, Committed, Message, Quiesced, Started, StateDiffers, Stop
from chameleon_ft.protocol.parts import OperationTimes
from tests.coordinator.histories import History, new_state, vote
from tests.coordinator.plans import LAYERS, a_plan
from tests.examples import examples

WORKERS = st.integers(0, 3)


@dataclass
class Rank:
    """A rank: what it holds, what it does, and the messages that are on their way to the coordinator."""

    committed: int = 0
    placed: int = 0
    content: int = 0  # another one after a bit has flipped
    loaded: int = 0  # generation in which it has loaded its state
    generation: int = 0  # that it trains; 0: it waits
    known: int = 0  # the newest of which it has an order
    condemned: bool = False  # its state may be a wrong one, and it must not train with it
    outbox: deque[Message] = field(default_factory=deque)


class Orders(History):
    """A history whose orders are carried out by `ranks` when they are delivered."""

    def __init__(self, state: State) -> None:
        self.ranks = {worker: Rank() for worker in range(4)}
        self.undelivered: list[tuple[State, Command]] = []
        self.checkpoints: dict[int, int] = {}  # step -> the content
        self.agreed_at_report = 0
        self.flipped = False  # since a state was loaded
        super().__init__(state)
        self.holds = True

    def happen(self, event: Event) -> tuple[Command, ...]:
        commands = super().happen(event)
        self.undelivered += [(self.state, command) for command in commands]
        return commands

    def is_present(self, worker: int) -> bool:
        """Whether a worker is connected with the coordinator that leads now."""
        return worker in self.ranks and self.now_at(self.connection(worker)) not in self.state.reconnection.awaited

    def deliver(self, to: Collection[int] = range(4), *, files: bool = True) -> None:
        """Have these workers get their orders, and the files be written; others never get theirs."""
        undelivered, self.undelivered = self.undelivered, []
        for state, command in undelivered:
            match command:
                case Launch(spec=spec):
                    for worker in to:
                        is_away = state.members[worker].connection in state.reconnection.awaited
                        if worker in spec.participants and worker in self.ranks and not is_away:
                            self._begin(self.ranks[worker], state.generation, spec.load, spec.first_step)
                case Send(connection=connection, message=Stop(generation=number)):
                    for worker in to:
                        if worker in self.ranks and self.now_at(self.connection(worker)) == connection:
                            self._stop(self.ranks[worker], number)
                case DistrustCheckpoints(after=after) if files:
                    self.checkpoints = {step: each for step, each in self.checkpoints.items() if step <= after}

    def _begin(
        self, rank: Rank, generation: int, load: Literal["initial", "keep", "snapshot"] | int, first_step: int
    ) -> None:
        assert load != "snapshot"
        if load != "keep":
            rank.content = 0 if load == "initial" else self.checkpoints[load]
            rank.loaded, rank.committed, rank.condemned = generation, first_step, False
            self.flipped = False
        rank.generation = rank.placed = rank.known = generation

    def _stop(self, rank: Rank, generation: int) -> None:
        rank.generation, rank.known = 0, generation
        report = Quiesced(
            generation=generation,
            committed=rank.committed,
            reduced=False,
            last_vote=vote(rank.committed - 1) if rank.committed else None,
            placed=rank.placed,
            layers=tuple(range(LAYERS)) if rank.placed else (),
        )
        rank.outbox.append(report)

    def training(self) -> dict[int, Rank]:
        """The ranks of the generation in force, if all of its workers train it."""
        active = self.state.active
        if active is None or self.state.phase is Phase.OVER:
            return {}
        ranks = {worker: self.ranks[worker] for worker in active.plan.workers if worker in self.ranks}
        number = self.state.active_generation
        is_complete = len(ranks) == len(active.plan.workers)
        return ranks if is_complete and all(rank.generation == number for rank in ranks.values()) else {}

    def decide(self) -> None:
        """Decide as the coordinator does."""
        asked = self.questions.pop(0)
        complete = sorted(self.checkpoints)
        live = asked.members.live()
        if asked.holds_nothing:
            plan = replace(a_plan(live, first_step=0), load="initial")
        else:
            cluster = ClusterState.of(asked, complete)
            if not cluster.is_unloaded:
                plan = a_plan(live, first_step=_resume_point(cluster)[0])
            elif complete:
                plan = replace(a_plan(live, first_step=complete[-1]), load=complete[-1])
                assert asked.health.disagreement is None or complete[-1] <= self.agreed_at_report
            elif asked.committed == 0 and asked.last_vote is None:
                plan = replace(a_plan(live, first_step=0), load="initial")
            else:
                failed = DecisionFailed(at=self.at, question=asked.question, reason="there is no checkpoint")
                self.happen(failed)
                return
        self.happen(Decided(at=self.at, question=asked.question, spec=plan))


class Health(RuleBasedStateMachine):
    """Four workers, all of which hold all layers."""

    @initialize(on_bad_step=st.sampled_from(["skip", "rollback"]))
    def begin(self, on_bad_step: Literal["skip", "rollback"]) -> None:
        config = HealthConfig(on_bad_step=on_bad_step)
        self.history = Orders(new_state(steps=1000, health=config))
        self.history.gather()

    def catch_up(self) -> None:
        """Have all orders and messages arrive."""
        while self.history.undelivered or any(self.history.ranks[each].outbox for each in self.present()):
            self.history.deliver()
            for worker in self.present():
                self.receive(worker)

    def present(self) -> list[int]:
        return [worker for worker in self.history.ranks if self.history.is_present(worker)]

    @rule(worker=WORKERS)
    def receive(self, worker: int) -> None:
        """Have the next message of a worker arrive."""
        self.history.deliver()
        rank = self.history.ranks.get(worker)
        if rank is not None and rank.outbox and self.history.state.phase is not Phase.OVER:
            self.tell(worker, rank.outbox.popleft())
        elif rank is not None:
            rank.outbox.clear()

    def tell(self, worker: int, message: Message) -> None:
        history, before = self.history, self.history.state.health
        history.tell(worker, message)
        found = history.state.health.disagreement
        if isinstance(message, StateDiffers) and found is not None and before.disagreement is None:
            history.agreed_at_report = before.agreed
            for number, rank in history.ranks.items():
                rank.condemned = number in found.doubted or number in found.odd

    @rule()
    def receive_all(self) -> None:
        self.catch_up()

    @precondition(lambda self: self.history.questions)
    @rule()
    def decide(self) -> None:
        self.history.deliver()
        self.history.decide()

    @precondition(lambda self: self.history.training())
    @rule(checked=st.booleans(), checkpoint=st.booleans())
    def train(self, checked: bool, checkpoint: bool) -> None:
        """Take a step, unless the states that are compared before its update differ."""
        self.history.deliver()
        if not (ranks := self.begin_step()):
            return
        contents = {worker: rank.content for worker, rank in ranks.items()}
        if checked and len(set(contents.values())) > 1:
            found = tuple((layer, tuple(contents.items())) for layer in range(LAYERS))
            for rank in ranks.values():
                message = StateDiffers(generation=rank.generation, step=rank.committed, checksums=found)
                rank.outbox.append(message)
                rank.generation, rank.condemned = 0, True
            return
        self.commit(ranks, checked=checked)
        if checkpoint and len(set(contents.values())) == 1:
            self.history.checkpoints[next(iter(ranks.values())).committed] = min(contents.values())

    def commit(self, ranks: dict[int, Rank], **fields: bool) -> None:
        for rank in ranks.values():
            assert not rank.condemned or len(ranks) == 1, "it trains with a state that differs"
            message = Committed(
                generation=rank.generation,
                step=rank.committed,
                vote=vote(rank.committed, **fields),
                grad_norm=0.5,
                lr=0.1,
                step_s=0.1,
                times=OperationTimes(forward_s=0.01, backward_s=0.01, longest_s=0.01),
            )
            rank.outbox.append(message)
            rank.committed += 1

    def begin_step(self) -> dict[int, Rank]:
        ranks = self.history.training()
        if ranks:
            assert len({rank.loaded for rank in ranks.values()}) == 1, "some have the state that was discarded"
            assert len({rank.committed for rank in ranks.values()}) == 1
            for rank in ranks.values():
                rank.outbox.append(Started(generation=rank.generation))
        return ranks

    @precondition(lambda self: self.history.training())
    @rule(again=st.booleans())
    def be_bad(self, again: bool) -> None:
        """Have a step be bad, and perhaps good when it is computed again."""
        self.history.deliver()
        if not (ranks := self.begin_step()):
            return
        for worker, rank in ranks.items():
            report = BadStep(
                generation=rank.generation,
                step=rank.committed,
                why="the loss is nan",
                is_bad_again=again,
                has_changed=False,
                origins=((worker, 0, 1, "data"),),
            )
            rank.outbox.append(report)
        if again and self.history.state.settings.health.on_bad_step == "rollback":
            for rank in ranks.values():
                rank.generation = 0
        else:
            self.commit(ranks, skipped=again)

    @rule(worker=WORKERS)
    def flip_a_bit(self, worker: int) -> None:
        if worker in self.history.ranks:
            self.history.flipped = True
            rank = self.history.ranks[worker]
            rank.content = 2 * rank.content + worker + 1

    @precondition(lambda self: self.history.state.phase not in (Phase.OVER, Phase.GATHERING))
    @rule(worker=WORKERS, is_rare=st.integers(0, 3))
    def lose(self, worker: int, is_rare: int) -> None:
        if worker in self.history.live() and len(self.history.live()) > 1 and not is_rare:
            self.history.deliver()
            del self.history.ranks[worker]
            self.history.reap(worker)

    @precondition(lambda self: self.history.state.phase is not Phase.OVER)
    @rule(
        reached=st.sets(WORKERS),
        files=st.booleans(),
        order=st.permutations(range(4)),
        goes_on=st.lists(st.booleans(), min_size=4, max_size=4),
    )
    def replace_the_coordinator(self, reached: set[int], files: bool, order: list[int], goes_on: list[bool]) -> None:
        """Replace it after its last event, whose orders have reached some workers.

        They come back one after the other, and those that are back may go on meanwhile.
        """
        self.history.deliver(reached, files=files)
        self.history.take_over()
        self.history.return_agent()
        for worker, catches_up in zip(order, goes_on, strict=True):
            if worker in self.history.live():
                self.history.return_worker(worker, known=self.history.ranks[worker].known)
            if catches_up:
                self.catch_up()
                if self.history.questions and self.history.state.phase is not Phase.OVER:
                    self.history.decide()
        assert not self.history.state.reconnection.awaited or self.history.state.phase is Phase.OVER

    @rule()
    def time_passes(self) -> None:
        if self.history.state.phase is not Phase.GATHERING:
            self.history.deliver()
            self.history.wait(0.05)

    @invariant()
    def lost_workers_are_ranks_no_more(self) -> None:
        if hasattr(self, "history"):
            for worker in set(self.history.ranks) - set(self.history.live()):
                del self.history.ranks[worker]

    @invariant()
    def it_ends_for_a_reason(self) -> None:
        if not hasattr(self, "history") or self.history.state.ended is None:
            return
        status, reason = self.history.state.ended
        assert status == "failed"
        if "again after a return to a checkpoint" in reason:
            assert self.history.flipped, "no state has changed since it was loaded"
        else:
            assert reason == "there is no checkpoint"

    def teardown(self) -> None:
        """Let all go its way: the run trains on, or has ended."""
        if not hasattr(self, "history"):
            return
        history = self.history
        for _ in range(30):
            self.catch_up()
            if history.state.phase is Phase.OVER or history.training():
                break
            if history.questions:
                history.decide()
        else:
            raise AssertionError(f"the run waits for nothing in phase {history.state.phase}")
        if history.training():
            before = history.state.committed
            self.train(checked=False, checkpoint=False)
            self.catch_up()
            assert history.state.committed == before + 1
            assert not history.state.health.reports


TestHealth = Health.TestCase
TestHealth.settings = settings(stateful_step_count=30, deadline=None, max_examples=examples(60))
