"""What it costs to go from one plan to another: the stall, and the work that is done twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost

__all__ = [
    "StallModel",
    "Transfer",
    "TransitionEstimate",
    "estimate_transition",
    "fewest_round_bytes",
    "missing_layers",
    "state_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallModel:
    """Seconds of each phase between a failure and the first operation of the step that is run again.

    Measured ones are in a run's records of failures; the stall of a change without a failure has no detection.

    Attributes:
        detect_s: until the coordinator knows.
        stop_s: until the last survivor has left its operation.
        decide_s: until the plan is chosen.
        regroup_s: until new communicators stand, transfers left out.

    Raises:
        ConfigError: a phase that is negative or not finite.
    """

    detect_s: float
    stop_s: float
    decide_s: float
    regroup_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{each.name} must be zero or a positive number of seconds; got {value}")

    @property
    def total_s(self) -> float:
        """All phases, one after the other."""
        return math.fsum((self.detect_s, self.stop_s, self.decide_s, self.regroup_s))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that one worker sends another. Raises PlanError when both are the same, or the bytes are negative."""

    source: int
    target: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise PlanError(f"worker {self.source} cannot send to itself; what it holds needs no transfer")
        if self.num_bytes < 0:
            raise PlanError(f"a transfer needs zero or more bytes; got {self.num_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionEstimate:
    """What a change of plans costs.

    Attributes:
        regroup_s: all phases of the stall in which no weights move.
        transfer_s: of all rounds of transfers.
        repeat_s: work of the interrupted step, which is done again.
    """

    regroup_s: float
    transfer_s: float
    repeat_s: float

    @property
    def stall_s(self) -> float:
        """Seconds from the failure to the first operation that is run again."""
        return self.regroup_s + self.transfer_s

    @property
    def lost_s(self) -> float:
        """Seconds in which nothing is gained: the stall, and what was computed in vain before it."""
        return self.stall_s + self.repeat_s


def estimate_transition(
    rounds: Sequence[Sequence[Transfer]], costs: CostModel, stall: StallModel, *, into_step_s: float
) -> TransitionEstimate:
    """The cost of a change whose transfers are made in `rounds`, one after the other.

    Args:
        rounds: in each, a worker sends to one other at most and receives from one at most; none for rerouting.
        costs: for its links.
        stall: the phases that are there whatever moves.
        into_step_s: seconds between the start of the interrupted step and the failure; half a step if it is unknown, 0
            if the step is not run again.

    Raises:
        PlanError: a worker sends or receives twice in a round.
        ConfigError: a worker that the cluster does not have, or a negative time.
    """
    if not (math.isfinite(into_step_s) and into_step_s >= 0):
        raise ConfigError(f"into_step_s must be zero or a positive number of seconds; got {into_step_s}")
    return TransitionEstimate(
        regroup_s=stall.total_s,
        transfer_s=math.fsum(_round_s(transfers, costs) for transfers in rounds),
        repeat_s=into_step_s,
    )


def missing_layers(before: Placement, after: Placement) -> dict[int, tuple[int, ...]]:
    """For each worker of `after`, the layers that it holds there and not in `before`, ascending."""
    missing: dict[int, tuple[int, ...]] = {}
    for worker in after.workers:
        had = {layer for layers in before.ranges_of(worker) for layer in layers}
        needed = (layer for layers in after.ranges_of(worker) for layer in layers)
        missing[worker] = tuple(layer for layer in needed if layer not in had)
    return missing


def state_bytes(layer: LayerCost) -> int:
    """Bytes that move with a layer: its parameters and optimizer state. Gradients are made anew."""
    return layer.param_bytes + layer.optimizer_bytes


def fewest_round_bytes(transfers: Sequence[Transfer]) -> int:
    """Bytes that no arrangement in rounds can do without: the most that any worker has to send, or to receive."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for transfer in transfers:
        sent[transfer.source] += transfer.num_bytes
        received[transfer.target] += transfer.num_bytes
    return max((*sent.values(), *received.values()), default=0)


def _round_s(transfers: Sequence[Transfer], costs: CostModel) -> float:
    for end in ("source", "target"):
        workers = [getattr(transfer, end) for transfer in transfers]
        if len(set(workers)) < len(workers):
            raise PlanError(f"a worker is the {end} of two transfers of a round; put them into different rounds")
    return max((costs.message_s(each.source, each.target, each.num_bytes) for each in transfers), default=0.0)
