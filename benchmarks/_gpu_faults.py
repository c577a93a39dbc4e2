"""The parts of `benchmarks.gpu` with other faults than a lost rank, and with checkpoints."""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks import _chameleon, _faulty_job
from benchmarks._chameleon import event_lines
from benchmarks._common import Bar
from benchmarks._gpu_parts import Result, Subject
from benchmarks._gpu_train import DEVIATION, WORKERS, command, deviation_bar, live, run_config, verify
from benchmarks._neighbours import progress
from chameleon_ft.config import Checkpoint, Failure, Health, Parallel, Recovery, Timelines, Timeouts
from chameleon_ft.storage.files import RunDirectory

_EVERY: Final = 4
_FLIPS: Final = (6, 13)
"""Steps in which a bit flips: the holders agree once more in between."""
_SLOW_FROM, _SPEED = 14, 0.25  # on a shared device it computes faster while it is idle in between
_NOTICED_WITHIN: Final = 10
_LOST_IN_STEP: Final = 5
_JOIN_STEPS: Final = 5  # times those of other runs, because a new process has to load torch's kernels
_MORE_STEPS: Final = 3
_OTHER_DEVICE: Final = 1e-4
"""Largest relative deviation of a loss between devices, in float32."""
FAULTY_JOB: Final = f"{Path(_faulty_job.__file__)}:job"
_FAULTS: Final = len(_faulty_job.STEPS)


def corruption(subject: Subject) -> Result:
    """Flip bits of the state of a rank: they are found at the next comparison, and no loss of the run changes."""
    progress("four ranks, of which one has bits of its state flipped")
    config = run_config(
        subject,
        model=subject.size.fault_model,
        parallel=Parallel(dp=2, pp=2, optimizer_redundancy="all"),
        checkpoint=Checkpoint(every=_EVERY),
        health=Health(check_every=_EVERY),
    )
    flips = [Failure(worker=WORKERS - 1, step=step, kind="corrupt") for step in _FLIPS]
    run = _chameleon.train(config, run=subject.folder / "corruption", failures=flips, timeout_s=subject.timeout_s)
    differed = [event for event in event_lines(run) if event["event"] == "state_differs"]
    missed = sum(not any(step <= each["step"] <= step + _EVERY for each in differed) for step in _FLIPS)
    verified = verify(run, subject)
    return Result(
        columns=("flipped in", "found in", "largest deviation of a loss"),
        rows=(
            (
                f"steps {', '.join(map(str, _FLIPS))}",
                f"steps {', '.join(str(each['step']) for each in differed)}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            ),
        ),
        bars=(
            Bar(name=f"flipped bits that were missed, of {len(_FLIPS)}", value=float(missed), limit=0.0),
            Bar(name="other disagreements", value=float(len(differed) - len(_FLIPS) + missed), limit=0.0),
            Bar(name="lost workers", value=float(len(run.failures())), limit=0.0),
            deviation_bar(verified),
        ),
        data={"verified": verified, "differed": differed},
    )


def slowness(subject: Subject) -> Result:
    """Make a rank slow: it is noticed, and no other one is."""
    progress("four ranks, one of which becomes slow")
    steps = _SLOW_FROM + _NOTICED_WITHIN + 2  # reports of a step may come during the next one
    failure = Failure(worker=1, step=_SLOW_FROM, kind="slow", factor=_SPEED)
    # Ranks that share a device differ by what runs beside them, so each is compared with three others.
    config = run_config(
        subject,
        steps=steps,
        parallel=Parallel(dp=WORKERS, pp=1, optimizer_redundancy="all"),
        timelines=Timelines(every=1),
    )
    run = _chameleon.train(config, run=subject.folder / "slow", failures=[failure], timeout_s=subject.timeout_s)
    found = [event for event in event_lines(run) if event["event"] == "slow"]
    right = [event for event in found if event["worker"] == failure.worker and event["step"] >= _SLOW_FROM]
    return Result(
        columns=("slow", "speed", "reported", "reported speed", "steps until then"),
        rows=tuple(
            (
                f"worker {failure.worker} from step {failure.step}",
                f"{_SPEED}",
                f"worker {event['worker']} from step {event['since_step']}",
                f"{event['speed']:.2f}",
                str(event["step"] - _SLOW_FROM),
            )
            for event in found
        ),
        bars=(
            Bar(name="reports of the slow worker", value=float(len(right)), limit=1.0, at_least=True),
            Bar(name="reports of others", value=float(len(found) - len(right)), limit=0.0),
        ),
        data={"reports": found},
    )


def joins(subject: Subject) -> Result:
    """Kill a rank of those that share the optimizer's state: a new process takes its place, while the others train."""
    progress("four ranks, one of which is killed and comes back")
    config = run_config(
        subject,
        model=subject.size.fault_model,
        parallel=Parallel(dp=WORKERS, pp=1, optimizer_redundancy=2),
        steps=_JOIN_STEPS * subject.size.steps,
        recovery=Recovery(respawn=True, respawn_delay_s=0.0),
    )
    failure = Failure(worker=WORKERS - 1, step=_LOST_IN_STEP, phase="backward")
    path = subject.folder / "joins"
    run = _chameleon.train(config, run=path, failures=[failure], policy="chameleon", timeout_s=subject.timeout_s)
    (lost,), events = run.failures(), event_lines(run)
    lost_at_s = next(event["time"] for event in events if event["event"] == "failure")
    joined = [event for event in events if event["event"] == "join" and lost.worker in event["workers"]]
    verified = verify(run, subject)
    return Result(
        columns=("killed", "trains again from", "bytes moved", "stall at the switch, s", "largest deviation of a loss"),
        rows=tuple(
            (
                f"worker {lost.worker} in step {lost.step}",
                f"step {event['resume_step']}, {event['time'] - lost_at_s:.1f} s later",
                f"{event['moved_bytes']:,}",
                f"{event['stall_s']:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            )
            for event in joined
        ),
        bars=(
            Bar(name="switches to a plan with the new process", value=float(len(joined)), limit=1.0, at_least=True),
            Bar(name="seconds for which workers stopped", value=max([0.0, *(e["stop_s"] for e in joined)]), limit=0.0),
            deviation_bar(verified),
        ),
        data={"verified": verified, "joins": joined},
    )


def takeover(subject: Subject) -> Result:
    """Kill the coordinator: another one takes over, and no worker is lost."""
    progress("four ranks, whose coordinator is killed")
    path = subject.folder / "takeover"
    with live(run_config(subject), path, from_step=_LOST_IN_STEP, timeout_s=subject.timeout_s) as run:
        os.kill(run.read_control().pid, signal.SIGKILL)
    taken = [event for event in event_lines(run) if event["event"] == "took_over"]
    verified = verify(run, subject)
    steps_s = [record.step_s for record in run.steps()[1:]]
    return Result(
        columns=("coordinator", "taken over in", "longest step over the median", "largest deviation of a loss"),
        rows=tuple(
            (
                f"killed after step {_LOST_IN_STEP - 1}",
                f"step {event['step']}",
                f"{max(steps_s) / statistics.median(steps_s):.2f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            )
            for event in taken
        ),
        bars=(
            Bar(name="takeovers", value=float(len(taken)), limit=1.0, at_least=True),
            Bar(name="lost workers", value=float(len(run.failures())), limit=0.0),
            deviation_bar(verified),
        ),
        data={"verified": verified, "steps_s": steps_s},
    )


def errors(subject: Subject) -> Result:
    """Let ranks run out of memory, fail in a kernel, and hang in one: each is lost, and says why."""
    progress("four ranks, of which three meet errors of the device")
    config = run_config(
        subject,
        job=FAULTY_JOB,
        model=subject.size.fault_model,
        parallel=Parallel(dp=WORKERS, pp=1, optimizer_redundancy="all"),
        timeouts=Timeouts(heartbeat_timeout_s=2.0, watchdog_min_s=4.0, watchdog_factor=3.0),
    )
    run = _chameleon.train(config, run=subject.folder / "errors", timeout_s=subject.timeout_s)
    failures = run.failures()
    verified = verify(run, subject)
    return Result(
        columns=("lost", "detected by", "cause", "stall, s"),
        rows=tuple(
            (f"worker {each.worker} in step {each.step}", each.noticed_by, each.cause, f"{each.stall_s:.3f}")
            for each in failures
        ),
        bars=(
            Bar(
                name="steps in which a worker was lost, and should be",
                value=float(len({each.step for each in failures} & set(_faulty_job.STEPS))),
                limit=float(_FAULTS),
                at_least=True,
            ),
            Bar(name="lost workers", value=float(len(failures)), limit=float(_FAULTS)),
            deviation_bar(verified),
        ),
        data={"verified": verified, "causes": [each.cause for each in failures]},
    )


def resumption(subject: Subject) -> Result:
    """Continue from a checkpoint of the device on the device, and on the CPU."""
    progress("four ranks that write a checkpoint")
    first = _chameleon.train(
        run_config(subject, model=subject.size.fault_model, steps=_LOST_IN_STEP),
        run=subject.folder / "checkpoint",
        timeout_s=subject.timeout_s,
    )
    more = str(_LOST_IN_STEP + _MORE_STEPS)
    on_cpu = ["--device", "cpu", "--no-share-devices", "--threads", str(subject.size.threads // 2 or 1)]
    losses: dict[str, list[float]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, flags in ((subject.device, []), ("cpu", on_cpu)):
        progress(f"it is continued on {name}")
        path = subject.folder / f"continued-{len(losses)}-{name}"
        fork = ["train", "--resume", str(first.path), "--fork", "--output-dir", str(path), "--steps", more, *flags]
        command(*fork, timeout_s=subject.timeout_s)
        run = RunDirectory.open(path)
        losses[path.name] = [record.loss for record in run.steps()]
        found[path.name] = verify(run, subject)
    own, other = losses.values()
    between = max(abs(one - two) / abs(one) for one, two in zip(own, other, strict=True))
    return Result(
        columns=("continued on", "steps", "largest deviation from the plain loop there"),
        rows=tuple(
            (name.split("-")[-1], str(each["steps"]), f"{each['max_relative_loss_deviation']:.1e}")
            for name, each in found.items()
        ),
        bars=(
            *(deviation_bar(each, DEVIATION) for each in found.values()),
            Bar(name="largest relative deviation of a loss between both", value=between, limit=_OTHER_DEVICE),
        ),
        data={"verified": found, "losses": losses},
    )
