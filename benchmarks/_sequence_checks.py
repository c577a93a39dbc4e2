"""Properties that hold of a run whatever fails in it, checked in its records."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from benchmarks._chameleon import event_lines
from benchmarks._sequence_diagnoses import diagnosed
from benchmarks._sequence_loop import Repeated
from benchmarks._sequence_strikes import Struck
from chameleon_ft.config import TrainConfig
from chameleon_ft.events.records import Evaluation, FailureRecord, StepRecord
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.verify.verification import TOLERANCES, Verification, repeat_run

EVALUATION_TOLERANCES: Final = {"fp32": 1e-6, "bf16": 2e-3}
"""Largest relative deviation of an evaluation from that of the plain loop, by precision."""

_GRAD_NORM_FACTOR: Final = 10  # tolerance of a gradient norm, over that of a loss
_NEEDS_MORE_THAN_HOLDERS: Final = ("restart", "drop-replica")  # a checkpoint, or a whole pipeline
_SPOILED_FOR_GOOD: Final = ("differs between", "in a row were bad")
_LOST_NEWCOMER: Final = re.compile(r"worker \d+ is lost")
_HEALED_S: Final = 15.0  # after the end of a cut, for a newcomer that could not connect before
_WRITTEN_S: Final = 2.0  # after a disk was full, for what was to be written meanwhile
_BACK_S: Final = 30.0  # in which a lost worker is back
_ABSENCES: Final = ("stalled", "took_over", "reclaimed")  # of a coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The result of a run.

    Attributes:
        ended: "finished", or "stopped" if it had to end with an error.
        problems: violated properties; empty for a run that passes.
        worst_loss: largest relative deviation of a step's loss from that of the plain loop.
        worst_grad_norm: largest relative deviation of the norm of a step's gradient.
        worst_evaluation: largest relative deviation of a loss or a metric of an evaluation.
        evaluations: how many there were.
        struck_evaluations: how many strikes came during one.
        fired: the failures that happened.
        policies: policies that were carried out, in order.
        transitions: changes of placement that were completed while no worker trained.
        migrations: plans that were reached by moving layers during training.
        drained: workers that have left as they were told.
        repeated_steps: steps repeated after a return to a checkpoint.
        disagreements: how often holders of a layer had different states.
        bad_steps: how many steps were computed again because of their loss or gradient.
        diagnosed: each fault that was done, and what `diagnose` calls it.
    """

    ended: str
    problems: tuple[str, ...]
    worst_loss: float
    worst_grad_norm: float
    fired: tuple[dict[str, Any], ...]
    policies: tuple[str, ...]
    transitions: int
    migrations: int
    drained: int
    repeated_steps: int
    disagreements: int
    bad_steps: int
    diagnosed: tuple[tuple[str, str], ...] = ()
    worst_evaluation: float = 0.0
    evaluations: int = 0
    struck_evaluations: int = 0

    def __str__(self) -> str:
        fired = ", ".join(f"{fault['kind']} {fault['worker']} in {fault['phase']}" for fault in self.fired) or "none"
        said = [
            self.ended,
            f"failed: {fired}",
            f"done: {', '.join(self.policies) or 'nothing'}",
            f"{self.transitions} transitions",
            f"{self.migrations} migrations",
            f"{self.drained} drained",
            f"{self.repeated_steps} steps repeated",
            f"{self.disagreements} disagreements",
            f"{self.bad_steps} bad steps",
            f"{self.evaluations} evaluations within {self.worst_evaluation:.1e}",
            f"loss within {self.worst_loss:.1e}",
        ]
        return "\n".join(["; ".join(said), *(f"  PROBLEM {problem}" for problem in self.problems)])


def look_at(
    run: RunDirectory, *, exit_code: int, first_spoiled: int | None = None, struck: Sequence[Struck] = ()
) -> Findings:
    """Read all records of a run that has ended, repeat it in a plain loop, and compare.

    Args:
        first_spoiled: the first step in which the state of a worker is spoiled. Losses are compared up to this one:
            until it is found, the gradients of that worker are part of all sums.
        struck: strikes that have hit something.
    """
    records, repeated = _Records(run, first_spoiled, struck), Repeated()
    verification = Verification.of(
        repeat_run(run, limit=records.first_spoiled, loop_of=repeated.loop),
        tolerance=TOLERANCES[run.config().precision],
    )
    deviations = dict(_deviations_of_evaluations(records, repeated))
    problems = [
        *_end(records, exit_code),
        *_losses(records, verification),
        *_side_outputs(records, repeated),
        *_evaluations(records, repeated, deviations),
        *_steps(records),
        *_lost_workers(records),
        *(_stayed_away(records) if exit_code == 0 else ()),
        *_decisions(records),
        *_returns(records),
        *_transitions(records),
    ]
    steps = [record.step for record in records.steps]
    return Findings(
        ended="finished" if exit_code == 0 else "stopped",
        problems=tuple(problems),
        worst_loss=verification.max_relative_loss_deviation,
        worst_grad_norm=verification.max_relative_grad_norm_deviation or 0.0,
        worst_evaluation=max(deviations.values(), default=0.0),
        evaluations=len(records.evaluations),
        struck_evaluations=sum(records.evaluated_at(each.began) for each in struck),
        fired=tuple(records.faults),
        policies=tuple(dict.fromkeys(f"{failure.policy}" for failure in records.failures)),
        transitions=len(records.of_kind("transition")),
        migrations=sum(event["migrate_s"] > 0 for event in records.of_kind("join")),
        drained=len(records.of_kind("drained")),
        repeated_steps=len(steps) - len(set(steps)),
        disagreements=len(records.of_kind("state_differs")),
        bad_steps=len(records.of_kind("bad_step")),
        diagnosed=tuple(diagnosed(records.events, records.faults, struck)),
    )


class _Records:
    """The records of a run."""

    def __init__(self, run: RunDirectory, first_spoiled: int | None, struck: Sequence[Struck]) -> None:
        config = run.config()
        assert isinstance(config, TrainConfig)
        self.run = run
        self.config = config
        self.events: Sequence[dict[str, Any]] = event_lines(run)
        self.steps: Sequence[StepRecord] = run.steps()
        self.failures: Sequence[FailureRecord] = run.failures()
        self.evaluations = [event for event in run.events() if isinstance(event, Evaluation)]
        self.plans: dict[int, GenerationSpec] = dict(read_generation_plans(run.plans))
        self.summary: dict[str, Any] = json.loads(run.summary_file.read_text())
        faults = run.faults_file
        lines = faults.read_text().splitlines() if faults.exists() else []
        self.faults: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.first_spoiled = first_spoiled
        self.struck = struck

    def cut_at(self, time: float) -> bool:
        """Return whether a link was cut then, or shortly before."""
        return any(
            each.strike.target == "link" and each.began <= time <= each.ended + _HEALED_S for each in self.struck
        )

    def disk_was_full_at(self, time: float) -> bool:
        """Return whether the disk was full then, or shortly before."""
        return any(
            each.strike.target == "disk" and each.began <= time <= each.ended + _WRITTEN_S for each in self.struck
        )

    def evaluated_at(self, time: float) -> bool:
        """Return whether an evaluation had begun then, and had not ended."""
        before = [event["event"] for event in self.events if event.get("time", 0.0) <= time]
        return "evaluating" in before and "evaluation" not in before[::-1][: before[::-1].index("evaluating")]

    def of_kind(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    @property
    def undecided(self) -> list[dict[str, Any]]:
        """Disagreements of holders without a majority."""
        return [event for event in self.of_kind("state_differs") if event["undecided"]]

    @property
    def interrupted_returns(self) -> list[dict[str, Any]]:
        """Returns to a checkpoint or a snapshot after which no step was trained before the next loss."""
        trained = {step.generation for step in self.steps}
        plans = [event for event in self.of_kind("plan") if event["policy"] in ("checkpoint", "snapshot")]
        return [event for event in plans if event["generation"] not in trained]

    def may_lack_a_holder(self, failure: FailureRecord) -> bool:
        """Return whether a layer had no live holder in a placement that may have been active at this failure."""
        since = max((step.generation for step in self.steps if step.generation < failure.generation), default=1)
        lost = {other.worker for other in self.failures if other.generation <= failure.generation}
        lost.update(event["worker"] for event in self.of_kind("drained"))
        return any(
            plan.plan.placement.without(lost).unheld_layers
            for generation, plan in self.plans.items()
            if since <= generation < failure.generation or (generation == since == failure.generation)
        )


def _end(records: _Records, exit_code: int) -> Iterator[str]:
    """A run completes or gives the reason why it cannot, and that reason is right."""
    summary, config = records.summary, records.config
    committed = {record.step for record in records.steps}
    if exit_code == 0:
        if summary["status"] != "finished" or committed != set(range(config.steps)):
            yield f"it ended well with status {summary['status']} and {len(committed)} of {config.steps} steps"
        return
    last = records.failures[-1] if records.failures else None
    if records.first_spoiled is not None and any(found in summary["reason"] for found in _SPOILED_FOR_GOOD):
        return
    ended = max(event.get("time", 0.0) for event in records.events)
    if "the last checkpoint could not be written" in summary["reason"] and records.disk_was_full_at(ended):
        return
    if exit_code != 1 or summary["status"] != "failed" or last is None or last.policy != "stop":
        yield f"it ended with exit code {exit_code}, status {summary['status']}: {summary['reason']}"
    elif complete_checkpoints(records.run.checkpoints):
        yield f"it ended though there is a complete checkpoint: {summary['reason']}"
    elif config.parallel.owners is not None and "has all of the optimizer's state" in summary["reason"]:
        return  # slices may lose all their owners, though holders of their layers live
    elif "no checkpoint is left" in summary["reason"] and records.interrupted_returns:
        return  # a worker was lost before it had the state that all went back to
    elif not (records.may_lack_a_holder(last) or config.recovery.policy in _NEEDS_MORE_THAN_HOLDERS):
        yield f"it ended though every layer has a live holder: {summary['reason']}"


def _losses(records: _Records, verification: Verification) -> Iterator[str]:
    """Every step equals the plain loop's, also if it was trained a second time."""
    grad_norm_tolerance = _GRAD_NORM_FACTOR * verification.tolerance
    if (
        verification.first_step_outside is not None
        or (verification.max_relative_grad_norm_deviation or 0.0) > grad_norm_tolerance
    ):
        yield f"it is not the plain loop: {verification}"
    by_step: dict[int, list[float]] = {}
    for record in records.steps:
        if not record.is_skipped and (records.first_spoiled is None or record.step < records.first_spoiled):
            by_step.setdefault(record.step, []).append(record.loss)
    for step, losses in by_step.items():
        if max(losses) - min(losses) > TOLERANCES[records.config.precision] * abs(losses[-1]):
            yield f"step {step} was trained again with another loss: {losses}"


def _side_outputs(records: _Records, repeated: Repeated) -> Iterator[str]:
    """Auxiliary losses and metrics of layers are the plain loop's."""
    tolerance = _GRAD_NORM_FACTOR * TOLERANCES[records.config.precision]
    for record in records.steps:
        if (plain := repeated.steps.get(record.step)) is None or record.is_skipped:
            continue
        found = {"auxiliary loss": record.auxiliary_loss, **record.metrics}
        expected = {"auxiliary loss": plain.auxiliary_loss, **plain.metrics}
        if found.keys() != expected.keys() or any(_deviation(found[key], expected[key]) > tolerance for key in found):
            yield f"step {record.step} has {found}, and the plain loop {expected}"


def _deviations_of_evaluations(records: _Records, repeated: Repeated) -> Iterator[tuple[int, float]]:
    """Yield the number of each evaluation, and its largest relative deviation from the plain loop's."""
    for number, evaluation in enumerate(records.evaluations):
        if (plain := repeated.evaluations.get(evaluation.step)) is not None:
            found = {"loss": evaluation.loss, **evaluation.metrics}
            yield number, max(_deviation(found.get(name), value) for name, value in plain.items())


def _evaluations(records: _Records, repeated: Repeated, deviations: Mapping[int, float]) -> Iterator[str]:
    """Each due evaluation has the result of the plain loop, also if it is done again, and no other is done."""
    every, committed = records.config.evaluation.every, {record.step for record in records.steps}
    due = {step for step in committed if every and (step + 1) % every == 0}
    found = {evaluation.step for evaluation in records.evaluations}
    # A run may end before its last evaluation.
    if found - due or (due - found) - ({max(due, default=-1)} if records.summary["status"] != "finished" else set()):
        yield f"evaluated were the steps {sorted(found)}, and due {sorted(due)}"
    for number, deviation in deviations.items():
        if deviation > EVALUATION_TOLERANCES[records.config.precision]:
            evaluation = records.evaluations[number]
            yield (
                f"the evaluation after {evaluation.step} has loss {evaluation.loss} and {dict(evaluation.metrics)}, "
                f"and the plain loop {repeated.evaluations[evaluation.step]}"
            )


def _deviation(value: float | None, plain: float) -> float:
    return math.inf if value is None else abs(value - plain) / abs(plain) if value != plain else 0.0


def _steps(records: _Records) -> Iterator[str]:
    """No step is omitted, and none is repeated except after a return to a checkpoint."""
    config, steps = records.config, records.steps
    for before, after in pairwise(steps):
        first = records.plans[after.generation].first_step
        next_step = before.step + 1 if after.generation == before.generation else min(first, before.step + 1)
        if after.step != next_step:
            yield f"step {after.step} of generation {after.generation} follows {before.step}"
        if (
            after.step <= before.step
            and not any(
                failure.resume_step == after.step and failure.generation == after.generation
                for failure in records.failures
            )
            and not any(before.time <= event["time"] <= after.time for event in records.undecided)
        ):
            yield f"step {after.step} is trained again, and no failure says so"
    batch = config.batch
    expected = [batch.samples_before(record.step + 1) - batch.samples_before(record.step) for record in steps]
    if any(record.samples != own for record, own in zip(steps, expected, strict=True) if not record.is_skipped):
        yield f"the steps should have {expected} samples: {[record.samples for record in steps]}"
    repeated = sum(expected) - sum(dict(zip((record.step for record in steps), expected, strict=True)).values())
    counted = (records.summary["samples_lost"], records.summary["samples_repeated"])
    if counted != (0, repeated):
        yield f"samples lost and repeated are {counted}, and the records say {(0, repeated)}"


def _lost_workers(records: _Records) -> Iterator[str]:
    """Lost workers are those that were made to fail, and no plan uses a worker that is lost or has left."""
    failed = Counter(fault["worker"] for fault in records.faults)
    # A worker that is made to fail cannot say so on a full disk.
    unsaid = {failure.worker for failure in records.config.failures} - set(failed)
    failed.update(
        e["worker"] for e in records.of_kind("lost") if e["worker"] in unsaid and records.disk_was_full_at(e["time"])
    )
    evicted = [failure for failure in records.failures if failure.noticed_by == "checksum"]
    if evicted and records.first_spoiled is None:
        yield f"the state of no worker was spoiled, and lost are {evicted}"
    lost = Counter(failure.worker for failure in records.failures if failure not in evicted)
    # A spare that hangs while it prepares a generation is given up after a while, unless the run ends before.
    noticed_s = max(event.get("time", 0.0) for event in records.events) - records.config.timeouts.rendezvous_s
    hangs = (fault for fault in records.faults if (fault["kind"], fault["phase"]) == ("hang", "preparation"))
    unnoticed = Counter(fault["worker"] for fault in hangs if fault["time"] > noticed_s)
    # While the coordinator may have been out of reach, a worker whose connection is cut may make another one.
    patience_s = records.config.timeouts.heartbeat_timeout_s
    absences = [event["time"] for event in records.events if event["event"] in _ABSENCES]
    kept = Counter(
        fault["worker"]
        for fault in records.faults
        if fault["kind"] == "disconnect" and any(abs(fault["time"] - end) <= patience_s for end in absences)
    )
    left = Counter(event["worker"] for event in records.of_kind("left"))
    # Which end of a link that is cut leaves is up to the run, but all are on one host.
    ends = [e for e in records.of_kind("lost") if e["noticed_by"] == "peer" and records.cut_at(e["time"])]
    lost -= Counter(event["worker"] for event in ends)
    for each in records.struck:
        hosts = {event["host"] for event in ends if each.began <= event["time"] <= each.ended}
        if each.strike.target == "link" and len(hosts) != 1:
            yield f"a link was cut, and workers were lost on {sorted(hosts) or 'no host'}"
    if lost - failed or failed - lost - unnoticed - kept - left:
        causes = [(f.worker, f.cause, f.noticed_by) for f in records.failures]
        yield f"made to fail were workers {sorted(failed)}, and lost are {causes}"
    losses: Counter[int] = Counter()  # less the returns, the first of which may be recorded before the loss
    for event in records.events:
        if event["event"] == "finished":
            losses.clear()  # a resumed run has all workers again
        elif event["event"] in ("failure", "drained"):
            losses[event["worker"]] += 1
        elif event["event"] == "joined":
            losses[event["worker"]] -= 1
        if event["event"] not in ("plan", "failure") or event["policy"] == "stop":
            continue
        gone = sorted(worker for worker, count in losses.items() if count > 0)
        if set(gone).intersection(records.plans[event["generation"]].plan.workers):
            yield f"the plan of generation {event['generation']} has workers that are lost: {gone}"
    for event in (*records.of_kind("refused"), *records.of_kind("messages_failed")):
        # A newcomer whose agent ends before it has connected is not waited for, and may connect then.
        if event["event"] == "messages_failed" and records.cut_at(event["time"]):
            continue
        is_orphan = records.of_kind("host_lost") and _LOST_NEWCOMER.fullmatch(event.get("reason", ""))
        if not is_orphan:
            yield f"a message was not understood, or failed without an explanation: {event}"


def _stayed_away(records: _Records) -> Iterator[str]:
    """Lost workers are back at the end, if they are respawned and there was time for it."""
    if not records.config.recovery.respawn or records.of_kind("host_lost"):
        return
    away: dict[int, float] = {}
    for event in records.events:
        match event["event"]:
            case "lost":
                away[event["worker"]] = event["time"]
            case "joined" | "blocklisted":
                away.pop(event["worker"], None)
            case "finished":
                ended = event["time"]
                late = {worker: ended - since for worker, since in away.items() if ended - since > _BACK_S}
                if late:
                    yield f"lost workers have not come back, after so many seconds: {late}"
                away = {}


def _decisions(records: _Records) -> Iterator[str]:
    """The chosen candidate is feasible, the best of the feasible ones, and carried out."""
    for number, event in enumerate(records.events):
        if event["event"] != "decision":
            continue
        feasible = {each["policy"]: each for each in event["candidates"] if each["feasible"]}
        chosen = event["chosen"]
        if chosen is None:
            if feasible:
                yield f"nothing is chosen, though {sorted(feasible)} are feasible: {event}"
            continue
        if chosen not in feasible:
            yield f"{chosen} is chosen and not feasible: {event}"
        elif (
            feasible[chosen]["samples"]
            < (best := max(each["samples"] for each in feasible.values())) - abs(best) * 1e-9
        ):
            yield f"{chosen} is chosen and not the best: {event}"
        # A plan that stays may still have slices of the optimizer's state get copies again.
        done = ("stay", "redundancy") if chosen == "stay" else (chosen,)
        for later in records.events[number:]:
            if later["event"] == "plan" and later["generation"] == event["generation"] and later["policy"] not in done:
                yield f"{chosen} is chosen and {later['policy']} is done"
    for plan in records.plans.values():
        for step in range(plan.first_step, records.config.steps):
            own, expected = plan.at(step).plan.micro_batches, records.config.batch.micro_batches_at(step)
            if own != expected:
                yield f"the plan of generation {plan.generation} has {own} micro-batches in step {step}, not {expected}"
                break


def _returns(records: _Records) -> Iterator[str]:
    """A run returns to a checkpoint or a snapshot only if it has to, and to a snapshot by few steps."""
    for failure in records.failures:
        committed = [step.step + 1 for step in records.steps if step.generation < failure.generation]
        before = committed[-1] if committed else 0
        is_first = all(other.generation >= failure.generation for other in records.failures)
        repeated = before - failure.resume_step
        # An earlier loss may have cut a snapshot short, and the next one begins after the next step.
        if failure.policy == "snapshot" and is_first and repeated > int(records.config.snapshots.every):
            yield f"it went back from step {before} by more than snapshots.every: {failure}"
    if records.config.recovery.policy in _NEEDS_MORE_THAN_HOLDERS or records.undecided:
        return
    for failure in records.failures:
        lacks_owners = records.config.parallel.owners is not None and "the optimizer's state of" in failure.action
        if failure.policy in ("checkpoint", "snapshot") and not (lacks_owners or records.may_lack_a_holder(failure)):
            yield f"it went back to a {failure.policy} though every layer had a live holder: {failure}"


def _transitions(records: _Records) -> Iterator[str]:
    """The moved state is the planned one: the parameters of every layer and their optimizer state."""
    if records.config.parallel.owners is not None:
        return  # what moves of the optimizer's state depends on the owners
    # The optimizer has no state of an expert that never got a token.
    may_lack = "experts" in str(records.config.job_arguments.get("parts", ""))
    for event in records.of_kind("transition"):
        moved, planned = event["moved_bytes"], event["planned_bytes"]
        if moved > planned or (moved < planned and not may_lack):
            yield f"what moved is not what was planned: {event}"
