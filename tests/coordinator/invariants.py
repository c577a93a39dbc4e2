"""Conditions that hold after any event that the state machine handles."""

from __future__ import annotations

from collections.abc import Iterable

from chameleon_ft.coordinator.commands import (
    Command,
    CompleteCheckpoint,
    DistrustCheckpoints,
    Drop,
    Finish,
    Launch,
    NoteEvaluation,
    Record,
    Send,
    Task,
    Welcome,
)
from chameleon_ft.coordinator.events import Event, Received, Ticked
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.coordinator.state_machine import step
from chameleon_ft.events.records import StepRecord
from chameleon_ft.protocol.messages import Begin, Discard, Exit, Probe, Refused, Stop, Switch


def is_routine(event: Event, commands: Iterable[Command]) -> bool:
    """Return whether time went on and nothing but probes was sent, which happens many times a second."""
    probes = (isinstance(command, Send) and isinstance(command.message, Probe) for command in commands)
    return isinstance(event, Ticked) and all(probes)


def check(before: State, event: Event, after: State, commands: Iterable[Command]) -> None:
    """Check everything that holds after any event.

    That the state can be stored and continued is checked by doing so.
    """
    commands = tuple(commands)
    if not is_routine(event, commands):
        stored = State.from_json(before.to_json())
        assert stored == before
        assert step(stored, event) == (after, commands), "a state that was loaded goes on as the one that was stored"
    is_return = isinstance(event, Received) and getattr(event.message, "resumes", None) is not None
    _check_numbers(before, after, commands, is_return=is_return)
    _check_commands(before, after, commands, is_return=is_return)
    _check_members(after)
    _check_progress(after)
    _check_health(before, after, commands)
    _check_evaluations(after, commands)


def _check_evaluations(after: State, commands: tuple[Command, ...]) -> None:
    pending, newest = after.evaluations.pending, max(after.evaluations.results, default=None)
    assert pending is None or newest is None or newest <= pending, "of a state that is trained again, nothing is known"
    for command in commands:
        match command:
            case Launch(spec=spec):
                assert spec.evaluate == (pending is not None)
                assert pending in (None, spec.first_step), "an evaluation that was interrupted is of the same state"
            case CompleteCheckpoint(step=step, evaluation=evaluation) if evaluation:
                assert evaluation == after.evaluations.of(step)
            case NoteEvaluation(step=step, values=values):
                assert (step, pending) == (newest, None)
                assert values["loss"] == 0.5


def _check_numbers(before: State, after: State, commands: tuple[Command, ...], *, is_return: bool) -> None:
    assert before.generation <= after.generation
    assert before.question <= after.question
    assert before.newest <= after.newest
    assert after.generation <= after.newest
    left, upcoming = before.switches.next, after.switches.next
    for command in commands:
        match command:
            case Launch(spec=spec):
                assert after.active == spec, "one generation is in force"
                assert after.active_generation == after.generation
                assert after.phase is Phase.REGROUPING
                assert upcoming is None
            case Task.PREPARE_GENERATION:
                assert upcoming is not None
                assert upcoming.number == after.newest > before.newest, "no number is used twice"
            case Task.BEGIN_GENERATION:
                assert left is not None
                assert left.is_switching, "no worker switches before all are prepared"
                assert after.generation == after.active_generation == left.number
                assert after.committed == before.committed + 1
            case Send(message=Switch(generation=number)):
                assert upcoming is not None
                assert (upcoming.number, upcoming.unprepared) == (number, frozenset()), "all have prepared it"
                assert before.generation == after.generation < number
            case Send(message=Begin(generation=number, first_step=first)):
                assert (number, first) == (after.generation, after.committed)
            case Send(message=Discard(generation=number)) if is_return:
                assert number > after.generation
            case Send(message=Discard(generation=number)):
                assert left is not None
                assert number == left.number
                assert not left.is_switching, "there is no way back but a loss"
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
    kill_connection = {each.kill_connection for each in after.members}
    dropped = {command.connection for command in commands if isinstance(command, Drop)}
    assert dropped - kill_connection == newly_fenced - drained - refused - kill_connection
    for worker in before.members:
        if worker.agent in drained:
            assert after.members[worker.id].draining, "its agent exits"
            assert after.members[worker.id].lost
        if worker.connection in drained:
            assert after.members[worker.id].draining
            assert after.active is not None
            assert worker.id not in after.active.plan.workers, "it is out of the plan"
            upcoming = after.switches.next
            assert upcoming is None or worker.id not in upcoming.spec.participants
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
        assert worker.incarnation == incarnations.get(worker.id, worker.incarnation - 1) + 1
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
            assert state.active.at(state.committed) is state.active, "its plan is that of the present step's batch"
            assert state.switches.following or state.active.migration is None, "a migration leads to a plan"
            if (upcoming := state.switches.next) is not None:
                assert upcoming.number > state.generation
                assert set(upcoming.spec.participants) <= live, "a generation that lacks a worker is given up"
                final = state.switches.following[-1]
                is_open = not upcoming.is_switching and state.active.migration is None
                assert not (is_open and state.members.draining() & set(final.plan.workers)), "they are to leave"
            needed = state.active.participants if state.phase is Phase.REGROUPING else state.active.plan.workers
            assert set(needed) <= live | state.finished, "no generation goes on without a worker that it needs"
            assert not state.incident.losses or state.phase is Phase.REGROUPING or state.finished


def _check_health(before: State, after: State, commands: tuple[Command, ...]) -> None:
    health, decided = after.health, [command.spec for command in commands if isinstance(command, Launch)]
    assert health.agreed <= after.committed
    steps = {report.step for reports in health.reports.values() for report in reports}
    assert steps == health.reporting.keys(), "it is known who reports a bad step"
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
