"""Which policy trains most? Every policy through the same failures, on 32 emulated workers.

A run is watched for a window of `--duration-s`, and workers are killed at given times, not in given steps, so a faster
policy does not meet more failures. Times and workers are drawn from `--seed`, equally for all policies. Throughput is
the samples of committed steps over the window; a step that is partly inside counts in part, an interrupted one not at
all. Each run knows the true rate of failures.

  of failure-free   average throughput by that of the steps before the first loss, the median over all policies
  of surviving      that by the share of workers that were live, averaged over the window
  after recovery    throughput of the last plan, by that of the steps before the first loss
  chameleon by it   average throughput of `chameleon` by that of the policy in the row
  moved             state that workers have received, in stalls and during training

A run returns to a checkpoint at once, because no process has to be started. The real cost, `--restart-s`, is charged by
setting its clock forward. It includes repeated work, which therefore counts as trained. The cost of writing checkpoints
is not charged.

Samples per second and seconds in the tables are those of the emulated devices, without `--time-scale`. The suite takes
hours and can be run in parts: runs whose results are in --out are not repeated, and --report-only reports the results
that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks._common import ROOT, Report, add_most_others, report_arguments
from benchmarks._neighbours import Neighbours, progress
from benchmarks._policies_observed import Observed
from benchmarks._policies_report import COLUMNS, Found, bars, draw, markdown, results, rows
from benchmarks._policies_run import observe
from benchmarks._policies_scenarios import PP, SCENARIOS, Scenario, pipelines, schedule
from chameleon_ft.cluster import Link
from chameleon_ft.config import (
    STAND_IN_JOB,
    Batch,
    Checkpoint,
    Emulation,
    Parallel,
    PolicyName,
    Recovery,
    RunConfig,
    Snapshots,
    Timelines,
)
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.storage.profiles import profile_of_run, read_profile, write_profile

_POLICIES: Final[tuple[PolicyName, ...]] = ("chameleon", "recycle", "oobleck", "paper", "drop-replica", "restart")
_SURE: Final = 10.0  # failures: the prior rate is the true one
_ALWAYS: Final = 1_000_000  # more steps, and restarts of a worker, than there are
_CHECKPOINTS_EVERY: Final = 2
_SETTINGS: Final = ("workers", "share", "optimizer_redundancy", "duration_s", "time_scale", "restart_s", "seed")


def main() -> int:
    given = _arguments()
    if given.list:
        return _list(given)
    folder: Path = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _same_settings(given, folder)
    neighbours = Neighbours(most=given.max_others)
    if not given.report_only:
        for name in given.scenarios:
            for policy in given.policies:
                _make(given, folder / name, SCENARIOS[name], policy, neighbours)
    found = _found(folder)
    if not found:
        raise SystemExit(f"{folder}: there are no results yet")
    neighbours.shares = [run.others_share for each in found for run in each.runs.values()]
    draw(found, folder, given.time_scale)
    if given.markdown is not None:
        given.markdown.write_text(markdown(found), encoding="utf-8")
    report = Report(
        benchmark="policies",
        columns=COLUMNS,
        rows=rows(found, given.time_scale),
        bars=bars(found),
        results={"settings": _settings(given), **results(found, given.time_scale)},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def _list(given: argparse.Namespace) -> int:
    for name in given.scenarios:
        print(f"{name}: {SCENARIOS[name].about}")
        for loss in schedule(SCENARIOS[name], workers=given.workers, duration_s=given.duration_s, seed=given.seed):
            print(f"  {loss.at_s:7.1f} s  {', '.join(map(str, loss.workers))}")
    return 0


def configured(
    scenario: Scenario, policy: PolicyName, *, given: argparse.Namespace, profile: Path, plan: Path
) -> RunConfig:
    """Return the configuration of a run.

    Args:
        profile: file to write with the profile of the scenario's cluster.
        plan: file to write with the initial plan.
    """
    recovery: dict[str, Any] = {
        "policy": policy,
        "prior_weight": _SURE,
        "host_failure_fraction": 0.0,
        "restart_cost_s": given.restart_s * given.time_scale,
    }
    if (mtbf_s := scenario.worker_mtbf_s(workers=given.workers, duration_s=given.duration_s)) is not None:
        recovery["worker_mtbf_hours"] = mtbf_s / 3600
    if scenario.returns:
        back_after_s = scenario.back_after_s(given.duration_s)
        recovery |= {"respawn": True, "respawn_delay_s": back_after_s, "max_respawns": _ALWAYS}
    _write_profile(scenario, given.profile, profile)
    config = RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=profile,
        workers=given.workers,
        steps=_ALWAYS,
        seed=given.seed,
        parallel=Parallel(
            dp=given.workers // PP,
            pp=PP,
            split_backward=scenario.split_backward,
            optimizer_redundancy=given.optimizer_redundancy,
        ),
        batch=Batch(micro_batches=given.workers // PP * given.share, micro_batch_size=1),
        checkpoint=Checkpoint(every=_CHECKPOINTS_EVERY if policy == "restart" else 0),
        snapshots=Snapshots(every=0),
        recovery=Recovery.model_validate(recovery),
        emulation=Emulation(time_scale=given.time_scale),
        timelines=Timelines(every=1),
    )
    _write_plan(scenario, config, plan)
    return config.model_copy(update={"plan": plan})


def _make(
    given: argparse.Namespace, folder: Path, scenario: Scenario, policy: PolicyName, neighbours: Neighbours
) -> None:
    """Run a policy through a scenario, unless its result exists."""
    result = folder / f"{policy}.json"
    if result.exists() and not given.fresh:
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = configured(scenario, policy, given=given, profile=folder / "profile.json", plan=folder / "start-plan.json")
    losses = schedule(scenario, workers=given.workers, duration_s=given.duration_s, seed=given.seed)

    def measure(path: Path) -> Observed:
        return observe(
            config,
            run=path,
            losses=losses,
            duration_s=given.duration_s,
            restart_s=given.restart_s * given.time_scale,
            timeout_s=given.timeout,
        )

    progress(f"{scenario.name}, {policy}")
    observed = neighbours.undisturbed(measure, _free(folder, policy))
    dataclasses.replace(observed, others_share=neighbours.shares[-1]).write(result)


def _free(folder: Path, name: str) -> Path:
    """Return a new run directory, beside those of interrupted or repeated runs."""
    number = sum(1 for path in folder.glob(f"{name}*") if path.is_dir())
    return folder / (f"{name}-{number + 1}" if number else name)


def _found(folder: Path) -> list[Found]:
    """Return all results in a folder, in the order of scenarios and policies."""
    found = []
    for scenario in SCENARIOS.values():
        files = {policy: folder / scenario.name / f"{policy}.json" for policy in get_args(PolicyName)}
        order = sorted(files, key=lambda policy: (*_POLICIES, policy).index(policy))
        runs = {policy: Observed.read(files[policy]) for policy in order if files[policy].exists()}
        if runs:
            found.append(Found(scenario, runs))
    return found


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    return {**{name: getattr(given, name) for name in _SETTINGS}, "profile": given.profile.stem}


def _same_settings(given: argparse.Namespace, folder: Path) -> None:
    """Record the settings of a folder's results; exit if they differ from the recorded ones."""
    file = folder / "settings.json"
    settings = _settings(given)
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if given.report_only:
        for name in _SETTINGS:
            setattr(given, name, before[name])
    elif before != settings:
        other = {name: before.get(name) for name in settings if before.get(name) != settings[name]}
        raise SystemExit(f"--out {folder}: its results were made with {other}; give the same, or another folder")


def _write_profile(scenario: Scenario, profile: Path, path: Path) -> None:
    found = read_profile(profile)
    if scenario.inter_host_bytes_per_s is not None and found.inter_host is not None:
        link = Link(found.inter_host.latency_s, scenario.inter_host_bytes_per_s)
        found = dataclasses.replace(found, inter_host=link)
    write_profile(found, path)


def _write_plan(scenario: Scenario, config: RunConfig, path: Path) -> None:
    plan = data_pipeline_plan(
        layer_costs=profile_of_run(config).relative_costs,
        dp=config.parallel.dp,
        pp=config.parallel.pp,
        micro_batches=config.batch.micro_batches,
        workers=pipelines(scenario, config.workers),
        split_backward=scenario.split_backward,
    )
    path.write_text(plan.to_json(), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="policies")
    add_most_others(parser)
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles" / "llama2-7b-h100-80g.json")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=tuple(SCENARIOS), metavar="NAME")
    parser.add_argument("--policies", nargs="+", choices=get_args(PolicyName), default=_POLICIES, metavar="NAME")
    parser.add_argument("--workers", type=int, default=32, metavar="N", help=f"a multiple of {PP}, and at least 8")
    parser.add_argument("--share", type=int, default=16, help="micro-batches of a pipeline at the start")
    parser.add_argument(
        "--optimizer-redundancy",
        type=lambda owners: owners if owners == "all" else int(owners),
        default="all",
        metavar="OWNERS",
        help="workers that keep each slice of the optimizer's state, or all",
    )
    parser.add_argument("--duration-s", type=float, default=150.0, help="seconds of the wall clock in a window")
    parser.add_argument("--time-scale", type=float, default=4.0, help="seconds that a second of the profile takes")
    parser.add_argument("--restart-s", type=float, default=300.0, help="what going back to a checkpoint costs")
    parser.add_argument("--seed", type=int, default=0, help="of the times and workers that are lost")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds until the window begins, at most")
    parser.add_argument("--fresh", action="store_true", help="make again what is in --out already")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for the docs")
    parser.add_argument("--list", action="store_true", help="show the scenarios and the losses of each")
    given = parser.parse_args()
    given.profile = given.profile.resolve()
    if given.workers < 8 or given.workers % PP:
        parser.error(f"--workers {given.workers}: should be a multiple of {PP}, and at least 8")
    if given.report_only and not given.out.is_dir():
        parser.error(f"--out {given.out}: there is no such directory")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
