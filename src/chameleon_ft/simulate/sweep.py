"""What if: the same policies over a range of failure rates, cluster sizes, memories, bandwidths or batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.simulate.accounting.results import Results
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import SIMULATED_POLICIES, simulate
from chameleon_ft.simulate.traces.trace import Trace
from chameleon_ft.workload import Workload

__all__ = ["SWEPT", "Lead", "Point", "Scene", "Sweep", "sweep", "varied"]

_GB = 10**9


@dataclass(frozen=True, slots=True)
class Scene:
    """What policies are simulated on: what happens, what a step computes, and who there is."""

    trace: Trace
    workload: Workload
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a sweep, and what came of it; `misfit` says why where nothing can be trained."""

    value: float
    results: Results | None
    misfit: str = ""


@dataclass(frozen=True, slots=True)
class Lead:
    """Who of some policies trains most, from one value of a sweep to another, both included."""

    policy: str
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points by rising value.

    Attributes:
        name: what is varied, of `SWEPT`.
        points: one for each value.
    """

    name: str
    points: tuple[Point, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that were simulated, in the order in which they were asked for."""
        return next((tuple(point.results.policies) for point in self.points if point.results is not None), ())

    def leads(self, policies: Sequence[str]) -> tuple[Lead, ...]:
        """Who of `policies` trains most where; the first of those that are level, values without results left out."""
        found: list[Lead] = []
        for point in self.points:
            if point.results is not None:
                by_policy = point.results.policies
                best = max(policies, key=lambda policy: by_policy[policy].samples)
                if found and found[-1].policy == best:
                    found[-1] = replace(found[-1], last=point.value)
                else:
                    found.append(Lead(best, point.value, point.value))
        return tuple(found)

    def to_json(self) -> dict[str, object]:
        """The results by value, for `--json`."""
        return {
            "sweep": self.name,
            "points": [
                {
                    "value": point.value,
                    **({"misfit": point.misfit} if point.results is None else point.results.to_json()),
                }
                for point in self.points
            ],
        }


def _rate(scene: Scene, value: float) -> Scene:
    return replace(scene, trace=scene.trace.compressed(value))


def _workers(scene: Scene, value: float) -> Scene:
    workers, per_host = _whole("workers", value), scene.trace.workers_per_host
    if workers > scene.trace.workers or workers % per_host:
        raise ConfigError(
            f"workers={workers}: take multiples of the {per_host} workers of a host, {scene.trace.workers} at most"
        )
    trace = scene.trace.on_hosts(workers // per_host, workers_per_host=per_host)
    kept = tuple(worker for worker in scene.cluster.workers if worker.id < workers)
    return replace(scene, trace=trace, cluster=_of(scene.cluster, kept))


def _memory(scene: Scene, value: float) -> Scene:
    workers = tuple(replace(worker, memory_bytes=round(value * _GB)) for worker in scene.cluster.workers)
    return replace(scene, cluster=_of(scene.cluster, workers))


def _bandwidth(scene: Scene, value: float) -> Scene:
    old = scene.cluster

    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * value)

    return replace(scene, cluster=Cluster(old.workers, faster(old.intra_host), faster(old.inter_host)))


def _micro_batches(scene: Scene, value: float) -> Scene:
    return replace(scene, workload=replace(scene.workload, micro_batches=_whole("micro-batches", value)))


def _of(cluster: Cluster, workers: tuple[Worker, ...]) -> Cluster:
    return Cluster(workers, cluster.intra_host, cluster.inter_host)


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise ConfigError(f"{name}={value:g}: take whole numbers")
    return int(value)


_VARY: Final[Mapping[str, Callable[[Scene, float], Scene]]] = FrozenMap(
    {
        "rate": _rate,
        "workers": _workers,
        "memory": _memory,
        "bandwidth": _bandwidth,
        "micro-batches": _micro_batches,
    }
)
SWEPT: Final = tuple(_VARY)
"""What can be varied: `rate`, by which every time of the trace is divided; `workers`, the first so many of the cluster;
`memory` of a worker in 10^9 bytes; `bandwidth`, by which that of all links is multiplied; `micro-batches` of a step."""


def varied(scene: Scene, name: str, value: float) -> Scene:
    """The scene with one thing changed; see `SWEPT`.

    Raises ConfigError for a name or a value that cannot be used.
    """
    if name not in SWEPT:
        raise ConfigError(f"{name!r} cannot be varied; take one of {', '.join(SWEPT)}")
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value:g}: take numbers above 0")
    return _VARY[name](scene, value)


def sweep(
    scene: Scene,
    name: str,
    values: Sequence[float],
    policies: Sequence[str] = SIMULATED_POLICIES,
    *,
    parameters: Parameters = Parameters(),  # noqa: B008 - frozen
    progress: Callable[[float, str, float], None] | None = None,
) -> Sweep:
    """What each policy makes of the scene at each value.

    Args:
        scene: what is varied.
        name: what of it; see `SWEPT`.
        values: in any order, each once.
        policies: see `simulate`.
        parameters: what is assumed.
        progress: is called with the value, the name of the policy and the share of the trace it has lived through.

    Raises:
        ConfigError: values that cannot be used, or what `simulate` raises it for.
    """
    if not values or len(set(values)) < len(values):
        raise ConfigError(f"a sweep over {name} needs values, each of them once")
    scenes = [(value, varied(scene, name, value)) for value in sorted(values)]
    points = []
    for value, at in scenes:
        told = None if progress is None else partial(progress, value)
        try:
            results = simulate(at.trace, at.workload, at.cluster, policies, parameters=parameters, progress=told)
        except PlanError as error:
            points.append(Point(value, None, str(error)))
        else:
            points.append(Point(value, results))
    return Sweep(name, tuple(points))
