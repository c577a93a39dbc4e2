"""The seconds of the rest of an interrupted step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from chameleon_ft.estimate.gradient_sync import SyncEstimate, sync_after
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.schedule import CostModel, OperationKind, ScheduledRest
from chameleon_ft.schedule.program import KINDS

__all__ = ["RestEstimate", "estimate_rest"]

_MAKERS: Final = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestEstimate:
    """Predicted seconds of the rest of a step.

    Attributes:
        sync: when gradients are reduced.
    """

    sync: SyncEstimate

    @property
    def rest_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced; vote and update come on top."""
        return self.sync.program_s + self.sync.exposed_s


def estimate_rest(rest: RestOfStep, scheduled: ScheduledRest, costs: CostModel) -> RestEstimate:
    """Predict the rest of a step; workers that are not in the cluster are lost.

    Gradients whose sum some workers hold already are reduced all the same, because that hands the sum to the others.

    Raises:
        NoHolderError: a layer has no holder left.
        PlanError: the workload has another number of layers than the plan.
    """
    live = {worker.id for worker in costs.cluster.workers}
    records, starts = scheduled.program.records, scheduled.program.starts
    makes_gradients = np.isin(records["kind"], [KINDS.index(kind) for kind in _MAKERS])
    workers = np.repeat(np.array(scheduled.program.workers, np.int64), np.diff(starts))
    columns = (workers, records["start"], records["stop"], scheduled.ends_s)
    complete_s: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for worker, start, stop, end_s in zip(*(own[makes_gradients].tolist() for own in columns), strict=True):
        complete_s[worker][start, stop] = end_s
    placement = rest.plan.placement.without(set(rest.plan.workers) - live)
    return RestEstimate(sync=sync_after(placement, complete_s, scheduled.program_s, costs))
