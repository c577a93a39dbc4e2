"""Problems of a run other than the loss of a worker, such as slow workers, bad steps and late records.

Every event that reports a problem is a condition, so that `chameleon diagnose` leaves none out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias, TypeVar

from chameleon_ft.events import decisions, kinds, records
from chameleon_ft.events.base import Event
from chameleon_ft.quantities import counted, duration, in_ranges, listed

Described: TypeAlias = tuple[str, str, str]
"""Subject, why and action of a condition."""

_T = TypeVar("_T", bound=Event)

ROUTINE: Final[tuple[type[Event], ...]] = (
    *(records.Started, decisions.PlanInForce, decisions.Prepared, decisions.DecisionEvent, records.OutcomeRecord),
    *(decisions.Transition, decisions.Migration, kinds.CheckpointComplete, kinds.SnapshotComplete, kinds.Finished),
    *(kinds.Evaluating, records.Evaluation),
    *(kinds.Respawn, kinds.HostJoined, kinds.Joined, records.JoinRecord, kinds.Draining, kinds.Drained),
    *(kinds.HostDrained, kinds.Left, kinds.Interrupt, kinds.Termination, kinds.DevicesConnected),
    # The parts of incidents.
    *(kinds.Lost, records.FailureRecord, kinds.Hang, records.FailureCostRecord),
    # The ends of conditions, and answers to them.
    *(kinds.Recovered, kinds.RecoveredLink, decisions.Stay, kinds.RecordsWritten, kinds.PlanRestored),
)
"""Events that report no condition."""

_ANSWERS: Final = (
    *(decisions.Stay, decisions.DecisionEvent, records.JoinRecord, decisions.PlanInForce, kinds.Finished),
    *(kinds.Respawn, records.FailureRecord),
)
"""Events by which the description of an earlier condition tells what was done."""

_TITLES: Final[Mapping[type[Event], str]] = {
    kinds.Slow: "Slow",
    kinds.TookOver: "Replaced",
    kinds.Stalled: "Held up",
    kinds.Reclaimed: "Did not lead",
    kinds.RecordsLate: "Records were late",
    kinds.Waiting: "Slow disk",
    kinds.StateDiffers: "Silent corruption",
    kinds.JoinFailed: "Lost before it took part",
    kinds.Blocklisted: "Given up",
    decisions.Discarded: "Not prepared",
    kinds.HostLost: "Lost agent",
    kinds.NotEnded: "Not ended",
    kinds.CheckpointLate: "Slow checkpoint",
    kinds.CheckpointFailed: "Not written",
    kinds.CheckpointUnreadable: "Not read",
    kinds.CheckpointIncomplete: "Not complete",
    kinds.CheckpointsLeftOut: "Slow checkpoint",
    kinds.JobChanged: "Another job",
}
"""Titles of conditions that are not named like their event."""

_BAD_STEP: Final = {
    "skip": "its samples were left out",
    "rollback": "all returned to the newest snapshot or checkpoint, and its samples were left out",
    "stop": "the run ended, with a checkpoint of the state before it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition, from its detection on.

    Attributes:
        kind: Name of the event that reports it.
        title: A heading.
        subject: The worker, the host, the coordinator, the step, or the file.
        since: When it was noticed, in Unix seconds.
        lasted_s: Seconds until its end; None if it has not ended, or happened at once.
        why: The observation.
        action: The answer of the run.
    """

    kind: str
    title: str
    subject: str
    since: float
    lasted_s: float | None
    why: str
    action: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Case:
    """A condition as the events so far leave it.

    Attributes:
        first: The number of answers before it.
        stop: Their number at its end.
        times: How often it was reported.
    """

    event: Event
    first: int
    end: Event | None = None
    stop: int | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class _Later:
    """The answers after a condition and before its end, the end itself, and how often the condition was reported."""

    answers: Sequence[Event]
    end: Event | None
    times: int

    def of(self, kind: type[_T]) -> Iterator[_T]:
        """Yield the answers of a type."""
        return (each for each in self.answers if isinstance(each, kind))

    def generation_after(self, generation: int) -> int | None:
        """Return the generation that was put in force after another."""
        return next((g.generation for g in self.of(decisions.PlanInForce) if g.generation > generation), None)

    def unless_ended(self, action: str) -> str:
        """Return what was done, or that the run ended before a generation was planned that does it."""
        ends = (each for each in self.answers if isinstance(each, decisions.PlanInForce | kinds.Finished))
        first = next(ends, None)
        return "none" if first is None else "the run ended" if isinstance(first, kinds.Finished) else action


class Conditions:
    """Collects the conditions from the events of a run in their order."""

    def __init__(self) -> None:
        self._cases: list[_Case] = []
        self._open: list[_Case] = []
        self._answers: list[Event] = []

    def add(self, event: Event) -> None:
        """Take in an event."""
        for case in [case for case in self._open if _ends(case.event, event)]:
            case.end, case.stop = event, len(self._answers)
            self._open.remove(case)
        if isinstance(event, _ANSWERS):
            self._answers.append(event)
        if isinstance(event, ROUTINE) or self._belongs_to_another(event):
            return
        case = _Case(event, len(self._answers))
        self._cases.append(case)
        if isinstance(event, _ENDING):
            self._open.append(case)

    def _belongs_to_another(self, event: Event) -> bool:
        """Return whether an event is told by an incident, or by another event of the condition."""
        match event:
            # It is reported again when it has become twice as long.
            case kinds.Waiting():
                for case in reversed(self._cases):
                    if isinstance(case.event, kinds.Waiting) and case.event.worker == event.worker:
                        if case.event.doing == event.doing and event.since_s == 2 * case.event.since_s:
                            self._cases.remove(case)
                        break
            case kinds.Refused(address=address, reason=reason):
                for case in self._cases:
                    match case.event:
                        case kinds.Refused(address=other, reason=why) if (other, why) == (address, reason):
                            case.times += 1
                            return True
            # Several workers may report it.
            case kinds.CheckpointFailed(step=step):
                return any(isinstance(c.event, kinds.CheckpointFailed) and c.event.step == step for c in self._cases)
            # If a majority is right, the others are lost.
            case kinds.StateDiffers(undecided=undecided):
                return not undecided
        return False

    def found(self) -> tuple[Condition, ...]:
        """Return the conditions in their order."""
        return tuple(condition for case in self._cases if (condition := self._condition(case)) is not None)

    def _condition(self, case: _Case) -> Condition | None:
        event, later = case.event, _Later(self._answers[case.first : case.stop], case.end, case.times)
        if isinstance(event, kinds.MessagesFailed):
            after = later.generation_after(event.generation)
            # An incident tells it.
            if any(each.generation == after for each in later.of(records.FailureRecord)):
                return None
        subject, why, action = describe(event, later) or _as_it_says(event)
        return Condition(
            kind=event.name,
            title=_TITLES.get(type(event), event.name.replace("_", " ").capitalize()),
            subject=subject,
            since=event.time,
            lasted_s=None if case.end is None else case.end.time - event.time,
            why=why,
            action=action,
        )


_ENDING: Final = (kinds.Slow, kinds.SlowLink, kinds.RecordsLate, kinds.CheckpointLate, kinds.HostLost)
"""Conditions that another event ends."""


def _ends(begun: Event, event: Event) -> bool:
    """Return whether an event ends an earlier condition."""
    match begun, event:
        case kinds.Slow(worker=one), kinds.Recovered(worker=other):
            return one == other
        case kinds.SlowLink(workers=link), kinds.RecoveredLink(workers=other_link):
            return link == other_link
        case kinds.CheckpointLate(step=one), kinds.CheckpointComplete(step=other):
            return one == other
        case kinds.HostLost(host=host), kinds.HostJoined(host=other_host):
            return host == other_host
        case kinds.RecordsLate(), kinds.RecordsWritten():
            return True
    return False


# --- each type -------------------------------------------------------------------------------------------------------


def describe(event: Event, later: _Later) -> Described | None:
    """Describe a condition; None if the event's own message says all there is to say."""
    return _of_the_run(event, later) or _of_workers(event, later) or _of_checkpoints(event, later)


def _as_it_says(event: Event) -> Described:
    """Describe a condition by its event."""
    fields = dict(event.values())
    worker = fields.pop("worker", None)
    subject = "the run" if worker is None else f"worker {worker}"
    told = fields.get("message") or fields.get("error") or fields.get("reason")
    return subject, str(told or ", ".join(f"{name} {value}" for name, value in fields.items())), "none"


def _of_the_run(event: Event, later: _Later) -> Described | None:
    match event:
        case kinds.TookOver(step=step, generation=generation):
            action = f"another one continued in step {step} and generation {generation}"
            return "the coordinator", "the one before was lost, or left the run to it", action
        case kinds.Stalled(stall_s=stall_s):
            return "the coordinator", f"it did not run for {duration(stall_s)}", "no worker was given up for that"
        case kinds.Reclaimed(reason=reason, term=term):
            why = f"it led no more, because {reason or 'its term had run out'}"
            return "the coordinator", why, f"it leads in term {term}, and no worker was given up for that"
        case kinds.RecordsLate(file=file, reason=reason):
            action = "training continued; the records waited in memory"
            if isinstance(later.end, kinds.RecordsWritten):
                lost = f", but for {later.end.dropped} lines that are lost" if later.end.dropped else ""
                action += f" and are written{lost}"
            return file, reason, action
        case kinds.Refused(address=address, reason=reason):
            times = counted(later.times, "time")
            return address, reason, f"the connection was rejected ({times} in the records)"
        case kinds.JobChanged(changes=changes, step=step):
            return "the job", "; ".join(changes), f"training continued from step {step} with it"
        case kinds.OptimizerUndivided(optimizer=optimizer):
            why = f"{optimizer} is not known to update each element of a parameter by itself"
            return "the optimizer", why, "every holder of a layer keeps all of its state"
        case kinds.Hint(message=message):
            return "the job", message, "none"
        case kinds.EmptyStep(step=step):
            return f"step {step}", "no sample has a loss term", "it was skipped"
        case kinds.BadStep():
            return _bad_step(event, later)
        case kinds.SampleLeftOut(step=step, sample=sample, error=error, worker=worker, host=host):
            where = f"worker {worker}{f' on {host}' if host else ''} cannot read it: {error}"
            return f"sample {sample} of step {step}", where, "it was left out"
        case kinds.StateDiffers(undecided=layers, step=step, agreed=agreed):
            workers = sorted({worker for each in layers.values() for worker in each})
            why = f"{listed('worker', workers)} have different states of it after {step} updates, without a majority"
            action = later.unless_ended(f"all returned to a snapshot or checkpoint of step {agreed} or before")
            return f"{'layer' if len(layers) == 1 else 'layers'} {in_ranges(sorted(layers))}", why, action
    return None


def _bad_step(event: kinds.BadStep, later: _Later) -> Described:
    if not event.is_bad_again:
        who = f"the contribution of {listed('worker', event.changed)} differed"
        why = f"{event.why}, but not when it was computed again: {who if event.changed else 'no worker is known'}"
        return f"step {event.step}", why, "the second result counts; the hardware is at fault"
    why = f"{event.why}, also when it was computed again"
    for place in event.origins[:1]:
        why += f", first in the {place.where} of micro-batch {place.micro_batch} on worker {place.worker}"
    action = _BAD_STEP.get(event.action, "none")
    return f"step {event.step}", why, later.unless_ended(action) if event.action == "rollback" else action


def _of_workers(event: Event, later: _Later) -> Described | None:
    match event:
        case kinds.Slow(worker=worker, speed=speed, since_step=step):
            why = f"it computes at {speed:.2f} of the speed of others since step {step}"
            return f"worker {worker}", why + _step_times(event), _answer_to_slowness(later)
        case kinds.SlowLink(workers=workers, speed=speed, since_step=step):
            why = f"micro-batches take {1 / speed:.2f} times as long as on other links since step {step}"
            return f"the link of {listed('worker', workers)}", why + _step_times(event), _answer_to_slowness(later)
        case kinds.Waiting(worker=worker, doing=doing, since_s=since_s, limit_s=limit_s, host=host):
            limit = "there is no limit to that"
            if limit_s is not None:
                limit = f"it counts as hung after {duration(limit_s)}"
            return (
                f"worker {worker}{f' on {host}' if host else ''}",
                f"it has been {doing} for {duration(since_s)} or longer",
                f"none; {limit}",
            )
        case kinds.LoaderEnded(worker=worker, loader=loader, doing=doing):
            why = f"{loader} has ended{f' while {doing}' if doing else ''}"
            return f"worker {worker}", why, "another one took its place, and its reads were done again"
        case kinds.JoinFailed(worker=worker, cause=cause):
            again = next((each for each in later.of(kinds.Respawn) if each.worker == worker), None)
            action = "none" if again is None else f"it was started again, as incarnation {again.incarnation}"
            return f"worker {worker}", f"it was lost before it took part: {cause}", action
        case kinds.Blocklisted(worker=worker, deaths=deaths):
            why = f"it was lost {counted(deaths, 'time')} in a row"
            return f"worker {worker}", why, "it is not taken again (recovery.max_respawns)"
        case decisions.DecisionFailed(workers=workers, slow_links=slow_links, error=error):
            links = [f"the link of {listed('worker', ends)}" for ends in slow_links]
            subject = ", ".join([listed("worker", workers)] * bool(workers) + links)
            return f"the decision on {subject}", error, "the plan stays as it is, and new workers stay spares"
        case decisions.Discarded(generation=generation, error=error):
            return f"generation {generation}", error, "training continued without it; it is tried again later"
        case kinds.DrainFailed(workers=workers, reason=reason):
            return listed("worker", workers), f"no plan was found without them: {reason}", "they stay"
        case kinds.HostLost(host=host, workers=workers):
            action = f"{listed('worker', workers)} keep running without it" if workers else "none"
            if isinstance(later.end, kinds.HostJoined) and later.end.adopted:
                action = f"another agent adopted {listed('worker', later.end.adopted)}"
            return host, "its agent is gone", action
        case kinds.HostRefused(host=host, reason=reason):
            return host, reason, "its agent was not admitted, and started no worker"
        case kinds.NotEnded(worker=worker, host=host):
            why = "it was given up, and neither it nor an agent answers"
            return f"worker {worker} on {host}", why, "none; its process may still run"
        case kinds.MessagesFailed(generation=generation, reports=reports):
            after = later.generation_after(generation)
            action = "none" if after is None else f"no worker was lost; the step was completed in generation {after}"
            return "messages", "; ".join(map(str, reports)), action
    return None


def _step_times(event: kinds.Slow | kinds.SlowLink) -> str:
    if event.step_s is None or event.before_step_s is None:
        return ""
    return f"; a step takes {duration(event.step_s)} instead of {duration(event.before_step_s)}"


def _answer_to_slowness(later: _Later) -> str:
    """Return what the run did about a slow worker or link, from the events until it recovered."""
    for index, event in enumerate(later.answers):
        match event:
            case decisions.Stay():
                return "the plan stays as it is, because no other is better"
            case decisions.DecisionEvent(trigger="slow"):
                joins = (each for each in later.answers[index:] if isinstance(each, records.JoinRecord))
                if (join := next(joins, None)) is not None:
                    return f"{join.policy}: {join.action}"
    return "none"


def _of_checkpoints(event: Event, later: _Later) -> Described | None:
    match event:
        case kinds.CheckpointLate():
            why, action = "it was not written when the next one was due", "the next one waited for it"
        case kinds.CheckpointFailed(error=why):
            action = "what was written of it is removed; the one before stays the newest"
        case kinds.CheckpointUnreadable(error=why):
            action = later.unless_ended("an older one was read")
        case kinds.CheckpointIncomplete():
            why, action = "it is not complete", "an older one was read"
        case kinds.CheckpointsLeftOut():
            why, action = "it was still being written when others were due", "they were left out"
        case kinds.SnapshotUnreadable(step=step, error=error):
            return f"the snapshot of step {step}", error or "", "all workers began with another state"
        case kinds.SnapshotsOff(reason=reason):
            action = "none are taken; after the loss of all holders of a layer, a checkpoint is read"
            return "snapshots", reason, action
        case _:
            return None
    return f"the checkpoint of step {event.step}", why, action
