"""How fast is a transition? Layers that move, beside torch.distributed alone with the same messages.

Three parts; --parts picks some.

  pair     a worker comes back, and receives the whole state from the other one: one message
  several  one worker of eight is lost, and the model is divided again: messages of several pairs at once
  regroup  32 emulated workers lose one, then two at once, then one: the time until the survivors train again

For the first two, each repeat takes in turn: the link as `chameleon profile` measures it (messages of 16 MB at most,
into memory used before); a run; and the messages of that run between fresh processes without code of this project,
tensor by tensor, once into memory used before and once into new memory, like layers that stay. A rate is the bytes of
the worker that sends or receives most, over the total time. Moved bytes are compared with the best assignment of
workers to places, by scipy and the plans before and after.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, new_folder, report_arguments, run_child
from benchmarks._neighbours import Neighbours, progress
from benchmarks._plain_messages import Messages, read_times
from benchmarks._transitions import Moved, moved_in, run_until
from chameleon_ft.config import (
    STAND_IN_JOB,
    Batch,
    Checkpoint,
    Failure,
    LlamaConfig,
    Parallel,
    PolicyName,
    Recovery,
    RunConfig,
    Snapshots,
    TrainConfig,
)
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.worker.profiling.links import measure_local_links, message_sizes

_PARTS: Final = ("pair", "several", "regroup")
_ALWAYS: Final = 1_000_000  # steps: a run is ended after its last transition
_LINK_REPEATS: Final = 20
_MIN_SHARE: Final = 0.8
_REUSED: Final = "of torch.distributed, memory used before"  # for comparison: layers that stay need their own memory
_LONGEST_REGROUP_S: Final = 1.0
_REGROUP_POLICIES: Final[tuple[PolicyName, ...]] = ("reroute", "repartition")
_REGROUP_KILLS: Final = ((2, (5,)), (4, (14, 27)), (6, (9,)))
"""(step, workers that are killed in it)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeat:
    """A transition, and the rates of the link beside it."""

    moved: Moved
    busiest_bytes: int
    link_bytes_per_s: float
    plain_reused_s: float
    plain_new_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.busiest_bytes / self.moved.transfer_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_s": self.bytes_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The result of a part: rows of the table, bars, raw data."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    neighbours = Neighbours(most=given.max_others)
    parts: dict[str, Callable[[], _Part]] = {
        "pair": partial(_moving, "pair", pair_config(given.dim), "join", given, folder, neighbours),
        "several": partial(_moving, "several", several_config(given.dim), "transition", given, folder, neighbours),
        "regroup": partial(_regrouping, given, folder, neighbours),
    }
    found = {name: parts[name]() for name in given.parts}
    report = Report(
        benchmark="transition",
        columns=("median (least to largest)", "runs", ""),
        rows=tuple(row for part in found.values() for row in part.rows),
        bars=tuple(bar for part in found.values() for bar in part.bars),
        results={name: part.results for name, part in found.items()},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def pair_config(dim: int) -> TrainConfig:
    """Measure two workers that hold the whole model; the second one is killed, restarted and given the state."""
    return TrainConfig(
        workers=2,
        steps=_ALWAYS,
        parallel=Parallel(dp=2, pp=1, optimizer_redundancy="all"),
        batch=Batch(micro_batches=2, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        model=_llama(dim, num_layers=4),
        recovery=Recovery(policy="repartition", respawn=True, respawn_delay_s=0.0),
        failures=(Failure(step=2, worker=1),),
    )


def several_config(dim: int) -> TrainConfig:
    """Measure four pipelines of two stages, one of whose workers is killed."""
    return TrainConfig(
        workers=8,
        steps=_ALWAYS,
        parallel=Parallel(dp=4, pp=2, optimizer_redundancy="all"),
        batch=Batch(micro_batches=8, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        model=_llama(dim, num_layers=6),
        recovery=Recovery(policy="repartition"),
        failures=(Failure(step=2, worker=1),),
    )


def regroup_config(policy: PolicyName, profile: Path) -> RunConfig:
    """Measure eight pipelines of four stages on emulated devices."""
    return RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=profile,
        workers=32,
        steps=_ALWAYS,
        parallel=Parallel(dp=8, pp=4, optimizer_redundancy="all"),
        batch=Batch(micro_batches=64, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        recovery=Recovery(policy=policy),
        failures=tuple(
            Failure(step=step, worker=worker, phase="backward")
            for step, workers in _REGROUP_KILLS
            for worker in workers
        ),
    )


def _llama(dim: int, *, num_layers: int) -> LlamaConfig:
    """Return a model of few tokens and many parameters."""
    return LlamaConfig(dim=dim, num_layers=num_layers, num_heads=8, num_kv_heads=8, ffn_dim=11 * dim // 4, seq_len=16)


def _moving(
    name: str, config: TrainConfig, event: str, given: argparse.Namespace, folder: Path, neighbours: Neighbours
) -> _Part:
    repeats = []
    for number in range(given.repeats):
        progress(f"{name}, {number + 1} of {given.repeats}")
        measure = partial(_repeat, config, event, given)
        repeats.append(neighbours.undisturbed(measure, folder / f"{name}-{number}"))
    return _moved_part(name, repeats)


def _repeat(config: TrainConfig, event: str, given: argparse.Namespace, path: Path) -> _Repeat:
    link = measure_local_links(config, message_bytes=message_sizes(()), repeats=_LINK_REPEATS).link
    run = run_until(config, run=path, event=event, count=1, timeout_s=given.timeout)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    moved = moved_in(run)[-1]
    plain = {reuse: _plain(moved, path, reuse=reuse, given=given) for reuse in (True, False)}
    return _Repeat(
        moved=moved,
        busiest_bytes=_messages(moved, reuse=True, repeats=1).busiest_bytes,
        link_bytes_per_s=link.bytes_per_s,
        plain_reused_s=plain[True].median,
        plain_new_s=plain[False].median,
    )


def _messages(moved: Moved, *, reuse: bool, repeats: int) -> Messages:
    ranks = 1 + max(end for messages in moved.rounds for *ends, _ in messages for end in ends)
    return Messages(ranks=ranks, rounds=moved.rounds, repeats=repeats, reuse=reuse)


def _plain(moved: Moved, path: Path, *, reuse: bool, given: argparse.Namespace) -> Spread:
    name = f"{path.name}-plain-{'reused' if reuse else 'new'}"
    messages, times = path.with_name(f"{name}.json"), path.with_name(f"{name}-times.json")
    _messages(moved, reuse=reuse, repeats=given.plain_repeats).write(messages)
    command = [sys.executable, "-m", "benchmarks._plain_messages", str(messages), str(times)]
    run_child(command, log=path.with_name(f"{name}.log"), timeout_s=given.timeout)
    return Spread(read_times(times))


def _moved_part(name: str, repeats: list[_Repeat]) -> _Part:
    first = repeats[0].moved
    pairs = max(len(messages) for messages in first.rounds)
    shares = {
        "of torch.distributed, new memory": [each.plain_new_s / each.moved.transfer_s for each in repeats],
        _REUSED: [each.plain_reused_s / each.moved.transfer_s for each in repeats],
    }
    if pairs == 1:
        shares["of the link in a profile"] = [each.bytes_per_s / each.link_bytes_per_s for each in repeats]
    rates = {
        "transition, MB/s": [each.bytes_per_s for each in repeats],
        "torch.distributed, new memory, MB/s": [each.busiest_bytes / each.plain_new_s for each in repeats],
        "torch.distributed, memory used before, MB/s": [each.busiest_bytes / each.plain_reused_s for each in repeats],
        "link of a profile, MB/s": [each.link_bytes_per_s for each in repeats],
    }
    what = f"{first.moved_bytes / 1e6:,.0f} MB, rounds: {len(first.rounds)}, pairs at once: {pairs}"
    rows: list[tuple[str, ...]] = [(f"{name}: {what}", str(len(repeats)), "")]
    rows += [
        (f"  {row}", "", Spread(tuple(each / 1e6 for each in each_rate)).shown(0)) for row, each_rate in rates.items()
    ]
    rows += [(f"  transition, share {row}", "", Spread(tuple(each)).shown(2)) for row, each in shares.items()]
    max_beyond = max(abs(each.moved.moved_bytes - each.moved.min_bytes) for each in repeats)
    bars = [
        Bar(name=f"{name}: median share {row}", value=Spread(tuple(each)).median, limit=_MIN_SHARE, at_least=True)
        for row, each in shares.items()
        if row != _REUSED
    ]
    bars.append(Bar(name=f"{name}: bytes moved beyond the best assignment", value=max_beyond, limit=0))
    return _Part(rows=rows, bars=bars, results={"repeats": [each.to_json() for each in repeats]})


def _regrouping(given: argparse.Namespace, folder: Path, neighbours: Neighbours) -> _Part:
    part = _Part()
    for policy in _REGROUP_POLICIES:
        outages: list[dict[str, Any]] = []
        for number in range(given.repeats):
            progress(f"regroup, {policy}, {number + 1} of {given.repeats}")
            measure = partial(_outages, regroup_config(policy, given.profile), given)
            outages += neighbours.undisturbed(measure, folder / f"regroup-{policy}-{number}")
        regroup = Spread(tuple(each["regroup_s"] for each in outages))
        part.rows.append((f"regroup, s: 32 workers, {policy}", str(len(outages)), regroup.shown()))
        part.bars.append(
            Bar(name=f"regroup: longest, {policy}, s", value=max(regroup.values), limit=_LONGEST_REGROUP_S)
        )
        part.results[policy] = outages
    return part


def _outages(config: RunConfig, given: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    run = run_until(config, run=path, event="failure", count=len(_REGROUP_KILLS), timeout_s=given.timeout)
    return outages_of(run)


def outages_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return one record for each incident of a run; losses at once are one."""
    by_generation = {record.generation: record for record in run.failures()}
    return [record.to_json() for record in by_generation.values()]


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="transition")
    add_most_others(parser)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each part, and of each policy in `regroup`")
    parser.add_argument("--plain-repeats", type=int, default=3, help="times that torch.distributed sends the messages")
    parser.add_argument("--dim", type=int, default=1024, help="width of the model that moves; a multiple of 16")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument(
        "--profile", type=Path, default=ROOT / "profiles" / "llama2-7b-h100-80g.json", help="of the emulated devices"
    )
    given = parser.parse_args()
    if given.dim < 16 or given.dim % 16:
        parser.error(f"--dim {given.dim}: must be a multiple of 16, for eight heads of an even width")
    if given.repeats < 1 or given.plain_repeats < 1:
        parser.error("--repeats and --plain-repeats: must be 1 or more")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
