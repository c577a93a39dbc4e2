"""How often checkpoints are written, and how much work is repeated after a return to one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from chameleon_ft.cost.snapshots import SnapshotRule
from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery.failure_model import FailureModel, LossRisk

LONGEST_BETWEEN_SNAPSHOTS_S: Final = 30 * 86_400.0
"""Most seconds of steps between two snapshots, if the run chooses the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written.

    Attributes:
        unsaved_s: seconds of steps since the last one.
        longest_s: most seconds of steps between two; zero for one after every step.
        write_s: seconds that training stops for one, if they are written at the interval that loses least; None if they
            are written every `longest_s` seconds.

    Raises:
        ConfigError: a time that is negative.
    """

    unsaved_s: float = 0.0
    longest_s: float = 0.0
    write_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.unsaved_s >= 0 and self.longest_s >= 0 and (self.write_s is None or self.write_s >= 0)):
            raise ConfigError(f"times of checkpoints must be zero or positive numbers of seconds; got {self}")

    def interval_s(self, *, step_s: float, return_gap_s: float) -> float:
        """Return the seconds of steps between two checkpoints that lose least, within the bounds.

        Args:
            step_s: seconds of a step.
            return_gap_s: mean seconds between two returns to a checkpoint; infinite if there are none.
        """
        if self.write_s is None or return_gap_s == math.inf:
            return max(step_s, self.longest_s)
        return max(step_s, min(self.longest_s, daly_interval_s(self.write_s, return_gap_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Snapshots in the memory of workers, to which all go back if an incident takes all holders of some layer.

    Attributes:
        taken: how often, as for checkpoints.
        return_s: seconds of the way back, without the steps since the last one.
        rule: under which plans they are taken.

    Raises:
        ConfigError: a time that is negative or not finite.
    """

    taken: Checkpoints
    return_s: float
    rule: SnapshotRule = field(default_factory=SnapshotRule)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.return_s) and self.return_s >= 0):
            raise ConfigError(f"the way back to a snapshot takes zero or more seconds; got {self.return_s}")

    def to_json(self) -> dict[str, object]:
        """Return the fields of a decision's record."""
        longest_s = self.taken.longest_s if self.taken.write_s is None else None
        return {"unsaved_s": self.taken.unsaved_s, "longest_s": longest_s, "return_s": self.return_s}


def daly_interval_s(write_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two checkpoints that lose least.

    Daly, Future Generation Computer Systems 22, 2006, Eq. 37: sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + (d / 2 M) / 9) - d
    for d = `write_s` below 2 M = 2 `mtbf_s`, else M. Raises ConfigError if a time is negative or failures have no time
    between them.
    """
    if not (write_s >= 0 and mtbf_s > 0):
        raise ConfigError(
            f"a checkpoint takes zero or more seconds and failures have some between them; got {write_s} and {mtbf_s}"
        )
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def expected_unsaved_s(unsaved_s: float, interval_s: float, mean_gap_s: float) -> float:
    """Return the expected seconds of work since the last checkpoint at the moment of the next incident.

    The wait G is exponential, and a checkpoint is written after every `interval_s` seconds of work:

        E[(u + G) mod I] = u + D - I exp(-(I - u) / D) / (1 - exp(-I / D)).

    Args:
        unsaved_s: seconds of work since the last checkpoint now (u).
        interval_s: seconds of work between two checkpoints (I).
        mean_gap_s: mean seconds until the next incident (D).
    """
    now_s = min(unsaved_s, interval_s)
    written = math.exp(-(interval_s - now_s) / mean_gap_s) / -math.expm1(-interval_s / mean_gap_s)
    # If checkpoints are much more frequent than incidents, this is the rounded difference of two large numbers.
    return min(interval_s, max(0.0, now_s + mean_gap_s - interval_s * written))


def return_gap_s(failures: FailureModel, risk: LossRisk | None, workers: int) -> float:
    """Return the mean seconds between two returns to a checkpoint of a run with so many live workers.

    A return follows an incident that takes all holders of some layer of `risk`, or all workers, and a failure of the
    coordinator's machine, which counts as one more worker. If `risk` is None, every incident leads to a return.
    """
    fatal = 1.0
    if risk is not None:
        fatal = failures.fatal_probability(risk) + failures.total_loss_probability(risk)
    return 1 / (fatal / failures.horizon_s(workers) + 1 / failures.horizon_s(1))
