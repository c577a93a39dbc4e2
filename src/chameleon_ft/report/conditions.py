"""Problems of a run other than the loss of a worker, such as slow workers, bad steps and late records.

Every event that reports a problem is a condition, so that `chameleon diagnose` leaves none out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from chameleon_ft.quantities import counted, duration, in_ranges, listed

Event: TypeAlias = Mapping[str, Any]
Described: TypeAlias = tuple[str, str, str]
"""Subject, why and action of a condition."""

ROUTINE: Final = frozenset(
    {
        *("started", "plan", "prepared", "decision", "outcome", "transition", "migration", "checkpoint", "snapshot"),
        "finished",
        *(
            "respawn",
            "host_joined",
            "joined",
            "join",
            "draining",
            "drained",
            "host_drained",
            "left",
            "interrupt",
            "termination",
        ),
        *("lost", "failure", "hang", "failure_cost"),  # of incidents, see `diagnosis`
        *("recovered", "recovered_link", "stay", "records_written", "plan_restored"),  # ends of conditions, and answers
    }
)
"""Events that report no condition."""

_ENDED_BY: Final[Mapping[str, tuple[str, str]]] = {
    "slow": ("recovered", "worker"),
    "slow_link": ("recovered_link", "workers"),
    "records_late": ("records_written", ""),
    "checkpoint_late": ("checkpoint", "step"),
    "host_lost": ("host_joined", "host"),
}
"""Kind -> the event that ends it, and the field in which both are equal."""

_BAD_STEP: Final = {
    "skip": "its samples were left out",
    "rollback": "all returned to the newest snapshot or checkpoint, and its samples were left out",
    "stop": "the run ended, with a checkpoint of the state before it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition, from its detection on.

    Attributes:
        kind: name of the event that reports it.
        subject: the worker, the host, the coordinator, the step, or the file.
        since: when it was noticed, in Unix seconds.
        lasted_s: seconds until its end; None if it has not ended, or happened at once.
        why: what was observed.
        action: what was done.
    """

    kind: str
    subject: str
    since: float
    lasted_s: float | None
    why: str
    action: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def conditions(events: Sequence[Event]) -> tuple[Condition, ...]:
    """Find the conditions in the events of a run, in their order."""
    found = []
    for index, event in enumerate(events):
        before, later = events[:index], events[index + 1 :]
        if event["event"] not in ROUTINE and not _belongs_to_another(event, before, later):
            found.append(_condition(event, later))
    return tuple(found)


def _belongs_to_another(event: Event, before: Sequence[Event], later: Sequence[Event]) -> bool:
    """Return whether an event is told by an incident, or by another event of the condition."""
    match event["event"]:
        case "waiting":  # it is reported again when it has become twice as long
            same = (each for each in _of("waiting", later) if each["worker"] == event["worker"])
            after = next(same, None)
            return after is not None and after["doing"] == event["doing"] and after["since_s"] == 2 * event["since_s"]
        case "refused":
            return any(_is_same(event, each, "address", "reason") for each in _of("refused", before))
        case "checkpoint_failed":  # by other workers
            return any(_is_same(event, each, "step") for each in _of("checkpoint_failed", before))
        case "state_differs":
            return not event["undecided"]  # the workers that are wrong are lost
        case "messages_failed":
            return any(each["generation"] == _next_generation(event, later) for each in _of("failure", later))
    return False


def _condition(event: Event, later: Sequence[Event]) -> Condition:
    kind = event["event"]
    name, key = _ENDED_BY.get(kind, ("", ""))
    end = next((each for each in _of(name, later) if not key or _is_same(event, each, key)), None)
    meanwhile = later if end is None else later[: later.index(end)]
    describe = _DESCRIBE.get(kind, _other)
    subject, why, action = describe(event, meanwhile, end)
    lasted_s = None if end is None else end["time"] - event["time"]
    return Condition(kind=kind, subject=subject, since=event["time"], lasted_s=lasted_s, why=why, action=action)


# --- each kind -------------------------------------------------------------------------------------------------------


def _slow(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    why = f"it computes at {event['speed']:.2f} of the speed of others since step {event['since_step']}"
    return f"worker {event['worker']}", why + _step_times(event), _answer_to_slowness(later)


def _slow_link(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    why = (
        f"micro-batches take {1 / event['speed']:.2f} times as long as on other links since step {event['since_step']}"
    )
    return f"the link of {listed('worker', event['workers'])}", why + _step_times(event), _answer_to_slowness(later)


def _step_times(event: Event) -> str:
    if event["step_s"] is None or event["before_step_s"] is None:
        return ""
    return f"; a step takes {duration(event['step_s'])} instead of {duration(event['before_step_s'])}"


def _answer_to_slowness(later: Sequence[Event]) -> str:
    """Return what the run did about a slow worker or link, from the events until it recovered."""
    for index, event in enumerate(later):
        if event["event"] == "stay":
            return "the plan stays as it is, because no other is better"
        if event["event"] == "decision" and event.get("trigger") == "slow":
            joins = [each for each in later[index:] if each["event"] == "join"]
            if joins:
                return f"{joins[0]['policy']}: {joins[0]['action']}"
    return "none"


def _took_over(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    action = f"another one continued in step {event['step']} and generation {event['generation']}"
    return "the coordinator", "the one before was lost, or left the run to it", action


def _stalled(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    return "the coordinator", f"it did not run for {duration(event['stall_s'])}", "no worker was given up for that"


def _reclaimed(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    why = f"it led no more, because {event.get('reason') or 'its term had run out'}"
    return "the coordinator", why, f"it leads in term {event['term']}, and no worker was given up for that"


def _waiting(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    why = f"it has been {event['doing']} for {duration(event['since_s'])} or longer"
    limit_s = event.get("limit_s")
    limit = "there is no limit to that" if limit_s is None else f"it counts as hung after {duration(limit_s)}"
    return f"worker {event['worker']}", why, f"none; {limit}"


def _records_late(event: Event, _: Sequence[Event], end: Event | None) -> Described:
    action = "training continued; the records waited in memory"
    if end is not None:
        lost = f", but for {end['dropped']} lines that are lost" if end["dropped"] else ""
        action += f" and are written{lost}"
    return event["file"], event["reason"], action


def _state_differs(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    layers = {int(layer): workers for layer, workers in event["undecided"].items()}
    workers = sorted({worker for each in layers.values() for worker in each})
    why = f"{listed('worker', workers)} have different states of it after {event['step']} updates, without a majority"
    action = _unless_ended(f"all returned to a snapshot or checkpoint of step {event['agreed']} or before", later)
    return f"{'layer' if len(layers) == 1 else 'layers'} {in_ranges(sorted(layers))}", why, action


def _bad_step(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    if not event["is_bad_again"]:
        who = f"the contribution of {listed('worker', event['changed'])} differed"
        why = f"{event['why']}, but not when it was computed again: {who if event['changed'] else 'no worker is known'}"
        return f"step {event['step']}", why, "the second result counts; the hardware is at fault"
    why = f"{event['why']}, also when it was computed again"
    for place in event["origins"][:1]:
        why += f", first in the {place['where']} of micro-batch {place['micro_batch']} on worker {place['worker']}"
    action = _BAD_STEP.get(event["action"], "none")
    return f"step {event['step']}", why, _unless_ended(action, later) if event["action"] == "rollback" else action


def _join_failed(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    again = next((each for each in _of("respawn", later) if _is_same(event, each, "worker")), None)
    action = "none" if again is None else f"it was started again, as incarnation {again['incarnation']}"
    return f"worker {event['worker']}", f"it was lost before it took part: {event['cause']}", action


def _blocklisted(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    why = f"it was lost {counted(event['deaths'], 'time')} in a row"
    return f"worker {event['worker']}", why, "it is not taken again (recovery.max_respawns)"


def _decision_failed(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    links = [f"the link of {listed('worker', workers)}" for workers in event.get("slow_links", ())]
    subject = ", ".join([listed("worker", event["workers"])] * bool(event["workers"]) + links)
    return f"the decision on {subject}", event["error"], "the plan stays as it is, and new workers stay spares"


def _discarded(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    return f"generation {event['generation']}", event["error"], "training continued without it; it is tried again later"


def _drain_failed(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    return listed("worker", event["workers"]), f"no plan was found without them: {event['reason']}", "they stay"


def _host_lost(event: Event, _: Sequence[Event], end: Event | None) -> Described:
    action = f"{listed('worker', event['workers'])} keep running without it" if event["workers"] else "none"
    if end is not None and (adopted := end.get("adopted")):
        action = f"another agent adopted {listed('worker', adopted)}"
    return event["host"], "its agent is gone", action


def _host_refused(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    return event["host"], event["reason"], "its agent was not admitted, and started no worker"


def _not_ended(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    subject = f"worker {event['worker']} on {event['host']}"
    return subject, "it was given up, and neither it nor an agent answers", "none; its process may still run"


def _checkpoint(
    why: str, action: str, *, kind: str = "checkpoint"
) -> Callable[[Event, Sequence[Event], Event | None], Described]:
    """Return the description of an event about a checkpoint or snapshot; `why`: if the event has no error."""

    def describe(event: Event, _: Sequence[Event], __: Event | None) -> Described:
        return f"the {kind} of step {event['step']}", event.get("error") or why, action

    return describe


def _checkpoint_unreadable(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    return f"the checkpoint of step {event['step']}", event["error"], _unless_ended("an older one was read", later)


def _optimizer_undivided(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    why = f"{event['optimizer']} is not known to update each element of a parameter by itself"
    return "the optimizer", why, "every holder of a layer keeps all of its state"


def _job_changed(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    return "the job", "; ".join(event["changes"]), f"training continued from step {event['step']} with it"


def _refused(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    times = 1 + sum(_is_same(event, each, "address", "reason") for each in _of("refused", later))
    return event["address"], event["reason"], f"the connection was rejected ({counted(times, 'time')} in the records)"


def _messages_failed(event: Event, later: Sequence[Event], _: Event | None) -> Described:
    reports = [f"of worker {each['reporter']}{_with(each['peer'])}: {each['error']}" for each in event["reports"]]
    after = _next_generation(event, later)
    action = "none" if after is None else f"no worker was lost; the step was completed in generation {after}"
    return "messages", "; ".join(reports), action


def _with(peer: int | None) -> str:
    return "" if peer is None else f" with worker {peer}"


def _other(event: Event, _: Sequence[Event], __: Event | None) -> Described:
    """Describe an event of a kind that this file does not know, as it describes itself."""
    worker = event.get("worker")
    subject = "the run" if worker is None else f"worker {worker}"
    fields = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event", "worker"))
    return subject, str(event.get("message") or event.get("error") or event.get("reason") or fields), "none"


_DESCRIBE: Final[Mapping[str, Callable[[Event, Sequence[Event], Event | None], Described]]] = {
    "slow": _slow,
    "slow_link": _slow_link,
    "took_over": _took_over,
    "stalled": _stalled,
    "reclaimed": _reclaimed,
    "waiting": _waiting,
    "records_late": _records_late,
    "state_differs": _state_differs,
    "bad_step": _bad_step,
    "empty_step": lambda event, _, __: (f"step {event['step']}", "no sample has a loss term", "it was skipped"),
    "join_failed": _join_failed,
    "blocklisted": _blocklisted,
    "decision_failed": _decision_failed,
    "discarded": _discarded,
    "drain_failed": _drain_failed,
    "host_lost": _host_lost,
    "host_refused": _host_refused,
    "not_ended": _not_ended,
    "checkpoint_late": _checkpoint("it was not written when the next one was due", "the next one waited for it"),
    "checkpoint_failed": _checkpoint("", "what was written of it is removed; the one before stays the newest"),
    "checkpoint_unreadable": _checkpoint_unreadable,
    "checkpoint_incomplete": _checkpoint("it is not complete", "an older one was read"),
    "snapshot_unreadable": _checkpoint("", "all workers began with another state", kind="snapshot"),
    "checkpoints_left_out": _checkpoint("it was still being written when others were due", "they were left out"),
    "job_changed": _job_changed,
    "snapshots_off": lambda event, _, __: (
        "snapshots",
        event["reason"],
        "none are taken; after the loss of all holders of a layer, a checkpoint is read",
    ),
    "optimizer_undivided": _optimizer_undivided,
    "hint": lambda event, _, __: ("the job", event["message"], "none"),
    "refused": _refused,
    "messages_failed": _messages_failed,
}


def _of(kind: str, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _unless_ended(action: str, later: Sequence[Event]) -> str:
    """Return what was done, or that the run ended before a generation was planned that does it."""
    ends = (each["event"] for each in later if each["event"] in ("plan", "finished"))
    return {"plan": action, "finished": "the run ended"}.get(next(ends, ""), "none")


def _is_same(one: Event, other: Event, *fields: str) -> bool:
    return all(one.get(field) == other.get(field) for field in fields)


def _next_generation(event: Event, later: Sequence[Event]) -> int | None:
    """Return the generation that was put in force after that of an event."""
    return next((each["generation"] for each in _of("plan", later) if each["generation"] > event["generation"]), None)
