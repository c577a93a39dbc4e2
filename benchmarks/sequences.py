"""Does training succeed as if nothing had failed, whatever fails? Runs with drawn failures, each checked.

Every run is drawn from a number: layout, policy, batch, and which workers are killed, hang or are cut off, in which
phase of which step, at once or during the recovery from each other. Each is trained by real processes and compared
with a plain loop, step by step. The draw and its result are printed; ``--runs 1 --seed N`` repeats run N.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks._common import Bar, Report, add_backend, new_folder, report_arguments
from benchmarks._neighbours import progress
from benchmarks._sequence_checks import EVALUATION_TOLERANCES, Findings, look_at
from benchmarks._sequence_draws import DrawnRun, Part, draw, with_parts
from benchmarks._sequence_strikes import train_on_hosts, train_under_strikes
from chameleon_ft.config import (
    SLOWNESS,
    Batch,
    Checkpoint,
    Evaluation,
    Health,
    LlamaConfig,
    Parallel,
    RampStage,
    Recovery,
    Snapshots,
    TrainConfig,
)
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.launch.live_run import drain
from chameleon_ft.plan import Plan, RecomputedLayers, data_pipeline_plan
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import View
from chameleon_ft.verify.verification import TOLERANCES
from tests.backends import use_backend
from tests.harness import small_config, train_here
from tests.mounts import small_disk

_DISK_MB = 64  # of a run whose disk is filled
_RIGHT_DIAGNOSES = 0.95


def main() -> int:
    given = _arguments()
    use_backend(given.backend)
    folder = new_folder(given.out)
    seeds = range(given.seed, given.seed + given.runs)
    runs = [draw(seed, joins=given.joins, strikes=given.strikes) for seed in seeds]
    if given.part:
        runs = [with_parts(run, [given.part]) for run in runs]
    trained = partial(_trained, folder)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, spawned, initializer=use_backend, initargs=(given.backend,)) as processes:
        findings = list(processes.map(trained, runs))
    return _report(list(zip(runs, findings, strict=True))).emit(folder, as_json=given.json)


def _trained(folder: Path, drawn: DrawnRun) -> Findings:
    """Train a drawn run; its directory remains if it has problems."""
    torch.set_num_threads(1)  # more threads of the plain loop would compete with the workers
    directory, start = folder / f"seed-{drawn.seed}", time.perf_counter()
    findings = run_drawn(drawn, directory)
    progress(f"{drawn}\n  in {time.perf_counter() - start:.1f} s {findings}")
    if not findings.problems:
        shutil.rmtree(directory)
    return findings


def config_of(drawn: DrawnRun, directory: Path) -> TrainConfig:
    """Return the configuration of a drawn run, with its text in `directory`."""
    own: dict[str, Any] = {}
    if drawn.parts or drawn.evaluation:
        own = {"job": "benchmarks._drawn_llama:job", "job_arguments": {"parts": " ".join(drawn.parts)}}
    if drawn.evaluation:
        own["evaluation"] = Evaluation(every=drawn.evaluation[0], samples=drawn.evaluation[1])
    if "recomputed" in drawn.parts:
        own["plan"] = directory / "plan.json"
        own["plan"].write_text(_recomputing(drawn).to_json())
    respawn = {"respawn": True, "respawn_delay_s": 0.2} if drawn.respawn else {}
    every, mode = drawn.snapshots or (0, "copy")
    return small_config(
        directory,
        workers=drawn.workers,
        steps=drawn.steps,
        seed=drawn.seed,
        precision=drawn.precision,
        parallel=Parallel(
            dp=drawn.dp,
            pp=drawn.pp,
            split_backward=drawn.split_backward,
            optimizer_redundancy="all" if drawn.owners is None else drawn.owners,
        ),
        batch=Batch(
            micro_batches=drawn.micro_batches,
            micro_batch_size=drawn.micro_batch_size,
            ramp=tuple(RampStage(until_step=step, micro_batches=count) for step, count in drawn.ramp),
        ),
        model=LlamaConfig(
            dim=32,
            num_layers=drawn.blocks,
            num_heads=2,
            num_kv_heads=1,
            ffn_dim=64,
            seq_len=16,
            dropout=drawn.dropout,
            tie_embeddings="tied" in drawn.parts,
        ),
        checkpoint=Checkpoint(
            every=drawn.checkpoint_every, keep_best="loss" if "best" in drawn.parts and drawn.evaluation else ""
        ),
        health=Health(detect_slow=any(failure.kind in SLOWNESS for failure in drawn.failures), slow_links="all"),
        snapshots=Snapshots(every=every, mode=mode),
        recovery=Recovery.model_validate({"policy": drawn.policy, **respawn}),
        failures=drawn.failures,
        **own,
    )


def _recomputing(drawn: DrawnRun) -> Plan:
    """Return a plan by which each worker recomputes all its layers, the last ones of some workers selectively."""
    plan = data_pipeline_plan(
        layer_costs=[1.0] * (drawn.blocks + 2),
        dp=drawn.dp,
        pp=drawn.pp,
        micro_batches=drawn.micro_batches,
        split_backward=drawn.split_backward,
    )
    ranges = {worker: plan.placement.ranges_of(worker)[0] for worker in plan.workers}
    recompute = {
        worker: RecomputedLayers(own.start, own.stop, worker % (len(own) + 1)) for worker, own in ranges.items()
    }
    return replace(plan, recompute=recompute)


def run_drawn(drawn: DrawnRun, directory: Path) -> Findings:
    """Train a drawn run in a new directory, and check its records."""
    directory.mkdir()
    if drawn.strikes:
        train = train_on_hosts if drawn.is_on_hosts else train_under_strikes
        with ExitStack() as stack:
            place = directory
            if any(strike.target == "disk" for strike in drawn.strikes):
                place = stack.enter_context(small_disk(directory / "disk", megabytes=_DISK_MB))
            run = RunDirectory(place / "run")
            code, left, struck = train(config_of(drawn, directory), run, directory, drawn.strikes)
            spoiled = min((failure.step for failure in drawn.failures if failure.kind == "corrupt"), default=None)
            findings = look_at(run, exit_code=code, first_spoiled=spoiled, struck=struck)
            if findings.problems and place != directory:
                shutil.copytree(run.path, directory / "run")
        return replace(findings, problems=(*findings.problems, *left))
    view = _DrainingView(RunDirectory(directory / "run"), dict(drawn.drains))
    ended = train_here(config_of(drawn, directory), directory / "run", view=view)
    return look_at(ended.run, exit_code=ended.code)


@dataclass
class _DrainingView(View):
    """Drains workers after given steps; shows nothing. A worker that cannot be drained stays."""

    run: RunDirectory
    drains: dict[int, int]

    def show(self, record: Record) -> None:
        if isinstance(record, StepRecord) and (worker := self.drains.pop(record.step, None)) is not None:
            # In a thread of its own, because the coordinator that answers is in this one.
            threading.Thread(target=self._drain, args=(worker,), daemon=True).start()

    def _drain(self, worker: int) -> None:
        with contextlib.suppress(ControlError, ConfigError):
            drain(self.run, workers=[worker])


def _report(runs: Sequence[tuple[DrawnRun, Findings]]) -> Report:
    drawn = [failure for run, _ in runs for failure in run.failures]
    fired = [fault for _, findings in runs for fault in findings.fired]
    diagnosed = [each for _, findings in runs for each in findings.diagnosed]
    passed = sum(not findings.problems for _, findings in runs)
    worst_losses = {
        precision: max((findings.worst_loss for run, findings in runs if run.precision == precision), default=0.0)
        for precision in TOLERANCES
    }
    return Report(
        benchmark="sequences",
        columns=("", "drawn", "happened"),
        rows=(
            ("failures", str(len(drawn)), str(len(fired))),
            *_counts("phase", [failure.phase for failure in drawn], [fault["phase"] for fault in fired]),
            *_counts("kind", [failure.kind for failure in drawn], [fault["kind"] for fault in fired]),
            *_counts("policy", [run.policy for run, _ in runs], [p for _, found in runs for p in found.policies]),
            *_counts("precision", [run.precision for run, _ in runs], []),
            *_counts("owners of a slice", [run.owners or "all" for run, _ in runs], []),
            *_counts("part", [part for run, _ in runs for part in run.parts], []),
            ("runs with evaluations", str(sum(run.evaluation is not None for run, _ in runs)), ""),
            ("evaluations", "", str(sum(findings.evaluations for _, findings in runs))),
            *_counts("layout", [f"{run.dp} x {run.pp}" for run, _ in runs], []),
            *_counts("failures of a run", [len(run.failures) for run, _ in runs], [len(f.fired) for _, f in runs]),
            *_counts("strike", [f"{s.kind} {s.target}" for run, _ in runs for s in run.strikes], []),
            (
                "strikes during an evaluation",
                str(sum(strike.in_evaluation for run, _ in runs for strike in run.strikes)),
                str(sum(findings.struck_evaluations for _, findings in runs)),
            ),
            *_counts("diagnosis:", [f"{truth} is called {said}" for truth, said in diagnosed], []),
            ("drains", str(sum(len(run.drains) for run, _ in runs)), str(sum(found.drained for _, found in runs))),
            ("migrations", "", str(sum(findings.migrations for _, findings in runs))),
            ("transitions", "", str(sum(findings.transitions for _, findings in runs))),
            ("steps repeated", "", str(sum(findings.repeated_steps for _, findings in runs))),
            ("disagreements of holders", "", str(sum(findings.disagreements for _, findings in runs))),
            ("bad steps", "", str(sum(findings.bad_steps for _, findings in runs))),
            ("runs that finished", "", str(sum(findings.ended == "finished" for _, findings in runs))),
            ("runs that had to stop", "", str(sum(findings.ended == "stopped" for _, findings in runs))),
        ),
        bars=(
            Bar(name="runs that pass every check", value=passed, limit=len(runs), at_least=True),
            Bar(
                name="faults whose diagnosis is right",
                value=sum(truth == said for truth, said in diagnosed) / max(1, len(diagnosed)),
                limit=_RIGHT_DIAGNOSES if diagnosed else 0.0,
                at_least=True,
            ),
            *(
                Bar(name=f"largest relative deviation of a loss in {name}", value=worst, limit=TOLERANCES[name])
                for name, worst in worst_losses.items()
            ),
            Bar(
                name="largest relative deviation of an evaluation in fp32",
                value=max((found.worst_evaluation for run, found in runs if run.precision == "fp32"), default=0.0),
                limit=EVALUATION_TOLERANCES["fp32"],
            ),
        ),
        results={
            "worst_grad_norm": max(findings.worst_grad_norm for _, findings in runs),
            "runs": [{"drawn": str(run), **asdict(findings)} for run, findings in runs],
        },
    )


def _counts(name: str, drawn: Iterable[object], happened: Iterable[object]) -> list[tuple[str, str, str]]:
    before, after = Counter(map(str, drawn)), Counter(map(str, happened))
    return [
        (f"{name} {key}", str(before[key]) if before[key] else "", str(after[key]) if after[key] else "")
        for key in sorted({*before, *after})
    ]


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="sequences")
    parser.add_argument("--runs", type=int, default=50, help="how many runs")
    parser.add_argument("--seed", type=int, default=0, help="what the first is drawn from; then the next numbers")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument(
        "--joins",
        action="store_true",
        help="have lost workers come back, and workers drained, each in half of the runs",
    )
    parser.add_argument(
        "--strikes",
        action="store_true",
        help="kill, stop and terminate coordinators, their background processes, agents, fork servers, launchers and "
        "workers at random moments, fill disks, cut links between hosts or coordinators off (in network namespaces), "
        "slow workers and links down, and spoil gradients and states, too",
    )
    add_backend(parser)
    parser.add_argument("--part", choices=get_args(Part), help="have all runs have this part")
    given = parser.parse_args()
    for name in ("runs", "jobs"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
