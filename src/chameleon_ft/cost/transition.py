"""The cost of a transition from one plan to another: the stall, and the work that is done twice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from statistics import fmean, linear_regression
from typing import Self

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.plan import Placement
from chameleon_ft.plan.shards import owned_share
from chameleon_ft.workload import LayerCost, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StallModel:
    """Seconds of each phase between a failure and the first operation of the step that is run again.

    A run's records of failures have measured ones; the stall of a change without a failure has no detection.

    Attributes:
        detect_s: until the coordinator has detected the failure.
        stop_s: until the last survivor has stopped.
        decide_s: until the plan is chosen.
        regroup_s: until new communicators are formed, without transfers.

    Raises:
        ConfigError: a phase that is negative or not finite.
    """

    detect_s: float
    stop_s: float
    decide_s: float
    regroup_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_seconds(each.name, getattr(self, each.name))

    @property
    def total_s(self) -> float:
        """All phases, one after the other."""
        return math.fsum((self.detect_s, self.stop_s, self.decide_s, self.regroup_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionModel:
    """Seconds until new communicators between devices can be used; a worker trains meanwhile.

    All are formed at the same time. Then each carries one element, one after the other.

    Attributes:
        creation_s: until they are formed.
        first_use_s: of the element of each.

    Raises:
        ConfigError: a time that is negative or not finite.
    """

    creation_s: float
    first_use_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_seconds(each.name, getattr(self, each.name))

    @classmethod
    def fitted(cls, measured: Iterable[tuple[int, float]]) -> Self | None:
        """Return the model of measured (new communicators, seconds), by least squares; None without a new one."""
        pairs = [(number, seconds) for number, seconds in measured if number]
        if not pairs:
            return None
        numbers, seconds = zip(*pairs, strict=True)
        first_use_s = max(0.0, linear_regression(numbers, seconds).slope) if len(set(numbers)) > 1 else 0.0
        creation_s = max(0.0, fmean(seconds) - first_use_s * fmean(numbers))
        return cls(creation_s=creation_s, first_use_s=first_use_s)

    def connect_s(self, formed: int) -> float:
        """Return the seconds until so many new communicators of a worker can be used."""
        return self.creation_s + formed * self.first_use_s if formed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionEstimate:
    """The cost of a change of plans.

    Attributes:
        phases: phases of the stall, whatever moves.
        transfer_s: until the last message has arrived (`chameleon_ft.transfer.transfer_s`); zero for rerouting.
        repeat_s: the time between the start of the interrupted step and the failure, whose work is repeated. Half a
            step if it is unknown, zero if the step is not run again.

    Raises:
        ConfigError: a time that is negative or not finite.
    """

    phases: StallModel
    transfer_s: float
    repeat_s: float

    def __post_init__(self) -> None:
        _check_seconds("transfer_s", self.transfer_s)
        _check_seconds("repeat_s", self.repeat_s)

    @property
    def stall_s(self) -> float:
        """Seconds from the failure to the first operation that is run again."""
        return self.phases.total_s + self.transfer_s

    @property
    def lost_s(self) -> float:
        """Seconds of lost work: the stall, and the repeated part of the step."""
        return self.stall_s + self.repeat_s


def state_bytes(layer: LayerCost) -> int:
    """Return the bytes that move with a layer: its parameters and optimizer state, but no gradients."""
    return layer.param_bytes + layer.optimizer_bytes - layer.unmoved_bytes


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be zero or a positive number of seconds; got {value}")


def received_layers(workload: Workload, placement: Placement) -> tuple[LayerCost, ...]:
    """Return the layers with the bytes that a new holder under `placement` receives of each.

    These are what moves with the layer, and the holder's share of the optimizer's state if holders share that.
    """
    if workload.owners is None:
        return workload.layers
    found = []
    for number, (layer, divided) in enumerate(zip(workload.moving_layers, workload.divided_bytes, strict=True)):
        share = owned_share(divided, len(placement.holders(number)), workload.owners)
        found.append(replace(layer, optimizer_bytes=layer.optimizer_bytes + share))
    return tuple(found)
