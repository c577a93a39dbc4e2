"""Runs whose placement changes, and the transitions in their records."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from benchmarks._chameleon import event_lines
from benchmarks._common import child, write_config
from chameleon_ft.config import RunConfig
from chameleon_ft.job.reference import load_job
from chameleon_ft.plan import Placement
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.transfer import transfer_to
from chameleon_ft.workload import LayerCost

_POLL_S: Final = 0.1
_END_WITHIN_S: Final = 20.0
_COUNTER_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A completed transition.

    Attributes:
        rounds: the messages, as (source, destination, bytes of each of its tensors).
        moved_bytes: bytes received, as counted by the workers.
        min_bytes: minimum over all assignments of workers to places.
        transfer_s: by the record of the run.
        regroup_s: by the record of the run.
    """

    rounds: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]
    moved_bytes: int
    min_bytes: int
    transfer_s: float
    regroup_s: float


def run_until(config: RunConfig, *, run: Path, event: str, count: int, timeout_s: float) -> RunDirectory:
    """Run `config` in the directory `run` until `count` generations have an event of this name, and the last a step.

    Exits if that takes longer than `timeout_s`.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    file, log = write_config(config, run.with_suffix(".toml")), run.with_suffix(".log")
    deadline = time.monotonic() + timeout_s
    with child(
        [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run)], log=log
    ) as process:
        while not _trained_after(run, event, count):
            if process.poll() is not None:
                raise SystemExit(f"{run}: the run ended before there were {count} events {event!r}; see {log}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{run}: no {count} events {event!r} within {timeout_s:g} s (--timeout); see {log}")
            time.sleep(_POLL_S)
        for _ in range(2):  # the second one ends it at once
            process.send_signal(signal.SIGINT)
            time.sleep(_POLL_S)
        with contextlib.suppress(Exception):
            process.wait(_END_WITHIN_S)
    return RunDirectory.open(run)


def moved_in(run: RunDirectory) -> list[Moved]:
    """Return the transitions of a run in which layers moved, in order. The moved state is that of AdamW."""
    plans = read_generation_plans(run.plans)
    tensors = layer_tensors(run.config())
    events = event_lines(run)
    records = {event["generation"]: event for event in events if event["event"] in ("failure", "join")}
    found = []
    for place, event in enumerate(events):
        if event["event"] == "transition" and (record := records.get(event["generation"])) is not None:
            before, after = plans[max(each for each in plans if each < event["generation"])], plans[event["generation"]]
            live = {worker.id for worker in after.costs.cluster.workers} - _lost(events, place)
            found.append(_moved(before, after, event, record, tensors, sorted(live)))
    return found


def layer_tensors(config: RunConfig) -> list[tuple[int, ...]]:
    """Return the bytes of each tensor of each layer's state: parameters, and two moments and a counter for each."""
    found = []
    with torch.device("meta"):
        for factory in load_job(config.job, config).layers:
            module = factory()
            sizes = [value.nbytes for value in module.state_dict().values()]
            trained = [parameter.nbytes for parameter in module.parameters() if parameter.requires_grad]
            found.append((*sizes, *(size for each in trained for size in (each, each, _COUNTER_BYTES))))
    return found


def min_bytes(old: Placement, new: Placement, *, live: Sequence[int], layer_bytes: Sequence[int]) -> int:
    """Return the fewest bytes that live workers have to receive, over all assignments of workers to places."""
    wanted = [set(new.layers_of(place)) for place in new.workers]
    missing = [
        [sum(layer_bytes[layer] for layer in own - set(old.layers_of(worker))) for own in wanted] for worker in live
    ]
    costs = np.array(missing, dtype=np.int64)
    return int(costs[linear_sum_assignment(costs)].sum())


def _lost(events: Sequence[Mapping[str, Any]], transition: int) -> set[int]:
    """Return the workers lost in this transition and not joined again; losses are recorded after it."""
    lost: set[int] = set()
    for place, event in enumerate(events):
        if event["event"] == "failure" and event["generation"] <= events[transition]["generation"]:
            lost.add(event["worker"])
        elif event["event"] == "joined" and place < transition:
            lost.discard(event["worker"])
    return lost


def _moved(
    before: GenerationSpec,
    after: GenerationSpec,
    event: Mapping[str, Any],
    record: Mapping[str, Any],
    tensors: Sequence[tuple[int, ...]],
    live: Sequence[int],
) -> Moved:
    old, new = before.plan.placement, after.plan.placement
    old = old.without([worker for worker in old.workers if worker not in live])
    sizes = [sum(each) for each in tensors]
    costs = [LayerCost(str(number), 0.0, 0.0, 0.0, param_bytes=size) for number, size in enumerate(sizes)]
    transfer = transfer_to(old, new, live=live, layers=costs)
    return Moved(
        rounds=tuple(
            tuple(
                (each.source, each.destination, tuple(size for layer in each.layers for size in tensors[layer]))
                for each in messages
            )
            for messages in transfer.rounds
        ),
        moved_bytes=event["moved_bytes"],
        min_bytes=min_bytes(old, new, live=live, layer_bytes=sizes),
        transfer_s=event["transfer_s"],
        regroup_s=record["regroup_s"],
    )


def _trained_after(run: Path, name: str, count: int) -> bool:
    """Return whether there are `count` events of a name, and a committed step in the generation of the last one."""
    directory = RunDirectory(run)
    if not directory.events_file.exists() or not directory.metrics_file.exists():
        return False
    generations = sorted({event["generation"] for event in event_lines(directory) if event["event"] == name})
    return len(generations) >= count and any(step.generation >= generations[count - 1] for step in directory.steps())
