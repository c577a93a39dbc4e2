"""The seconds of the rest of an interrupted step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from chameleon_ft.estimate.gradient_sync import SyncEstimate, sync_after
from chameleon_ft.plan import Placement
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.schedule import CostModel, OperationKind, ScheduledRest
from chameleon_ft.schedule.program import KINDS

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


def lost_share_s(placement: Placement, lost: Collection[int], costs: CostModel) -> float:
    """Return by how many seconds the rest of a step takes longer because peers do the share of the lost workers.

    The contributions of a lost worker are gone whenever it fails, so its peers do all of its work of the step. If the
    holders of a layer share its work equally, the loss of k of h holders leaves M k / (h (h - k)) micro-batches to each
    of the others, and half of one more, because micro-batches are not divided. The sum of their seconds over the layers
    of a lost worker counts, and the largest one of all lost workers. Idle time of the peers may hide some of it, and a
    pipeline that has to fill again may add to it. Infinite if a layer has no holder left.
    """
    gone, layers = set(lost), costs.workload.layers

    def more_s(layer: int) -> float:
        holders = placement.holders(layer)
        left = sum(worker not in gone for worker in holders)
        if not left:
            return math.inf
        more = costs.workload.micro_batches * (len(holders) - left) / (len(holders) * left) + 0.5
        return more * (layers[layer].forward_s + layers[layer].backward_s)

    ranges = {own for worker in gone for own in placement.ranges_of(worker)}
    by_layer = {layer: more_s(layer) for own in ranges for layer in own}
    return max(
        (math.fsum(by_layer[layer] for layer in placement.layers_of(worker)) for worker in gone),
        default=0.0,
    )
