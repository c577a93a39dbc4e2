"""Steps of small layouts: as plans on their workers, by the estimates of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import PartsEstimate, estimate_parts
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, LayoutPipeline, plan_of_layout
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, first_fitting, limit_levels
from chameleon_ft.simulate.by_class.step_times import StepTimes

__all__ = ["ReplayedSteps", "fitting_estimate"]

# By pipeline: its cut, and host and speed of each worker; None for a gap.
_Key: TypeAlias = tuple[tuple[Cut, tuple[tuple[int, float] | None, ...]], ...]


def fitting_estimate(plan: Plan, costs: CostModel) -> tuple[Mapping[int, InFlightLimit], PartsEstimate] | None:
    """(limits, estimate) with the most in flight of all `limit_levels` that fit; None if none does."""
    found = limit_levels(plan)

    @cache
    def estimate(level: int) -> PartsEstimate:
        return estimate_parts(plan, best_parts(plan, costs, in_flight_limits=found[level]), costs)

    level = first_fitting(len(found), lambda each: not estimate(each).over_capacity(costs))
    return None if level is None else (found[level], estimate(level))


class ReplayedSteps:
    """Seconds of steps by layout and hosts; layouts that differ in numbers of workers only are looked at once."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._hosts = times.pipelines.costs.cluster.hosts
        self._known: dict[_Key, float | None] = {}

    def step_s(self, layout: ClusterLayout, speeds: Mapping[int, float]) -> float | None:
        """Seconds of a step, detours around gaps included; None if it does not fit, or a layer has no holder."""
        hosts: dict[str, int] = {}
        key = tuple(
            (pipeline.cut, tuple(self._place(worker, speeds, hosts) for worker in pipeline.workers))
            for pipeline in layout.pipelines
        )
        if key not in self._known:
            self._known[key] = self._estimated_s(key)
        return self._known[key]

    def _place(
        self, worker: int | None, speeds: Mapping[int, float], hosts: dict[str, int]
    ) -> tuple[int, float] | None:
        """(host, numbered in the order in which hosts are met; speed)."""
        return None if worker is None else (hosts.setdefault(self._hosts[worker], len(hosts)), speeds[worker])

    def _estimated_s(self, key: _Key) -> float | None:
        pipelines: list[LayoutPipeline] = []
        workers: list[Worker] = []
        lost: list[int] = []
        number = 0
        for cut, places in key:
            pipelines.append(LayoutPipeline(cut, tuple(range(number, number + len(places)))))
            for worker, place in enumerate(places, start=number):
                if place is None:
                    lost.append(worker)
                else:
                    workers.append(Worker(worker, f"host{place[0]}", place[1], self._times.pipelines.memory_bytes))
            number += len(places)
        plan = plan_of_layout(ClusterLayout(tuple(pipelines)), self._times)
        if plan is None or not set(plan.workers).intersection(worker.id for worker in workers):
            return None
        model = self._times.pipelines.costs
        costs = CostModel(model.workload, Cluster(tuple(workers), model.cluster.intra_host, model.cluster.inter_host))
        try:
            plan = reroute(plan, lost, costs) if lost else plan
        except NoHolderError:
            return None
        found = fitting_estimate(plan, costs)
        return None if found is None else found[1].step_s
