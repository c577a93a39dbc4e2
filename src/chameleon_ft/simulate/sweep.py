"""Simulations over a range of failure rates, cluster sizes, memories, bandwidths or batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.simulate.accounting.results import Results
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import SIMULATED_POLICIES, simulate
from chameleon_ft.simulate.traces.trace import Trace
from chameleon_ft.workload import Workload

SWEPT: Final = ("rate", "workers", "memory", "bandwidth", "micro-batches")
"""Quantities that can be varied: `rate`, which divides every time of the trace; `workers`, the number taken from the
cluster; `memory` of a worker in 10^9 bytes; `bandwidth`, a factor on all links; `micro-batches` of a step."""

MOST_VARIED: Final = 1e9
"""The largest value of each, and the inverse of the least."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The subject of a simulation: the events, the workload and the workers."""

    trace: Trace
    workload: Workload
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a sweep with its results; `misfit` is the reason if nothing can be trained."""

    value: float
    results: Results | None
    misfit: str = ""


@dataclass(frozen=True, slots=True)
class Lead:
    """The policy that trains most in a range of values, both ends included."""

    policy: str
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points of one of the `SWEPT` quantities, by ascending value."""

    name: str
    points: tuple[Point, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The simulated policies, in the requested order."""
        return next((tuple(point.results.policies) for point in self.points if point.results is not None), ())

    def leads(self, policies: Sequence[str]) -> tuple[Lead, ...]:
        """Return the policy that trains most in each range of values; the first among equals."""
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
        """Return the results by value, for `--json`."""
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


def varied(scene: Scene, name: str, value: float) -> Scene:
    """Return the scene with one of the `SWEPT` quantities changed.

    Raises:
        ConfigError: the name or the value cannot be used.
    """
    if name not in SWEPT:
        raise ConfigError(f"{name!r} cannot be varied; take one of {', '.join(SWEPT)}")
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value:g}: take numbers above 0")
    if not 1 / MOST_VARIED <= value <= MOST_VARIED:
        raise ConfigError(f"{name}={value:g}: take numbers from {1 / MOST_VARIED:g} to {MOST_VARIED:g}")
    if name in ("workers", "micro-batches") and value != int(value):
        raise ConfigError(f"{name}={value:g}: take whole numbers")
    trace, cluster = scene.trace, scene.cluster
    match name:
        case "rate":
            return replace(scene, trace=trace.compressed(value))
        case "workers":
            workers, per_host = int(value), trace.workers_per_host
            if workers > trace.workers or workers % per_host:
                raise ConfigError(
                    f"workers={workers}: take multiples of the {per_host} workers of a host, {trace.workers} at most"
                )
            kept = tuple(worker for worker in cluster.workers if worker.id < workers)
            fewer = trace.on_hosts(workers // per_host, workers_per_host=per_host)
            return replace(scene, trace=fewer, cluster=replace(cluster, workers=kept))
        case "memory":
            resized = tuple(replace(worker, memory_bytes=round(value * 10**9)) for worker in cluster.workers)
            return replace(scene, cluster=replace(cluster, workers=resized))
        case "bandwidth":

            def faster(link: Link) -> Link:
                return replace(link, bytes_per_s=link.bytes_per_s * value)

            links = faster(cluster.intra_host), faster(cluster.inter_host)
            return replace(scene, cluster=Cluster(cluster.workers, *links))
    return replace(scene, workload=replace(scene.workload, micro_batches=int(value)))


def sweep(
    scene: Scene,
    name: str,
    values: Sequence[float],
    policies: Sequence[str] = SIMULATED_POLICIES,
    *,
    parameters: Parameters = Parameters(),
    progress: Callable[[float, str, float], None] | None = None,
) -> Sweep:
    """Return the results of each policy on the scene at each value.

    Args:
        scene: the subject to vary.
        name: the quantity; see `SWEPT`.
        values: in any order, each once.
        policies: see `simulate`.
        parameters: assumptions.
        progress: called with the value, the name of the policy and the completed share of the trace.

    Raises:
        ConfigError: a value cannot be used, or as in `simulate`.
    """
    if not values or len(set(values)) < len(values):
        raise ConfigError(f"a sweep over {name} needs values, each of them once")
    points = []
    for value, at in [(value, varied(scene, name, value)) for value in sorted(values)]:
        report = None if progress is None else partial(progress, value)
        try:
            results = simulate(at.trace, at.workload, at.cluster, policies, parameters=parameters, progress=report)
        except PlanError as error:
            points.append(Point(value, None, str(error)))
        else:
            points.append(Point(value, results))
    return Sweep(name, tuple(points))
