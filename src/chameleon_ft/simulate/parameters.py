"""What the simulator has to assume: each figure a parameter, with where it is from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from chameleon_ft.errors import ConfigError
from chameleon_ft.estimate import StallModel
from chameleon_ft.recovery import FailureModel

__all__ = ["Parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Costs of failures and of what is done about them, for all policies alike where nothing else is said.

    Attributes:
        detect_s: seconds until a loss is known; the runtime's median on eight workers, docs/benchmarks.md.
        stop_s: until the last survivor has left its operation; likewise.
        decide_s: until the plan is chosen; a guess for decisions that were prepared.
        search_s: the same where none was: several workers are lost at once, or within a stall, or before the losses of
            all had been prepared, each kind of which takes as long. That of 32 workers on two cores; see
            docs/simulator-internals.md. By class all decisions count as prepared.
        regroup_s: until new communicators stand; a guess for some thousand ranks. Eight on one machine take 0.015 s.
        weigh_s: seconds from when workers are back until it is decided what to do with them, while training goes on.
        step_overhead_s: seconds that a step takes beyond its estimate: vote and update, and what the host adds.
        worker_mtbf_s: seconds between two failures of a worker, known beforehand: `[recovery]` has 5,000 hours.
        prior_failures: how many failures this counts like: `[recovery]` has 1.
        host_share: share of failures that take all workers of a host, known beforehand: `[recovery]` has a quarter.
        restart_s: seconds from a failure until a job that is started again runs, reading the checkpoint included and
            steps that are repeated left out: the 5 minutes of `[recovery] restart_cost_s`.
        checkpoint_write_s: seconds that training stands still for a checkpoint: a copy to the host's memory, and the
            rest goes on in the background, as in CheckFreq (Mohan et al., FAST 2021). How long is a guess.
        checkpoint_interval_s: seconds of steps between two checkpoints at most; see `recovery.Checkpoints`. Infinite:
            there are none but for `restart`, and a policy that needs one ends.
        redundant_forward: how much of a stage's forward its neighbour computes again, under `redundant`: all of it in
            Bamboo (Thorpe et al., NSDI 2023), which hides it in the bubbles. What does not fit into them makes the
            step longer here, and nothing else: a loss costs the phases above, and the layout for those that are left is
            the fastest of equal pipelines. So it is an upper bound of what Bamboo can do.
        exact_up_to: workers up to which decisions are those of `recovery.decide` itself; above, of pipelines by class.

    Raises:
        ConfigError: a figure that is negative or not finite, or zero where it must not be.
    """

    detect_s: float = 0.045
    stop_s: float = 0.034
    decide_s: float = 0.05
    search_s: float = 1.0
    regroup_s: float = 1.0
    weigh_s: float = 0.0
    step_overhead_s: float = 0.0
    worker_mtbf_s: float = 5_000 * 3_600.0
    prior_failures: float = 1.0
    host_share: float = 0.25
    restart_s: float = 300.0
    checkpoint_write_s: float = 1.0
    checkpoint_interval_s: float = 3_600.0
    redundant_forward: float = 1.0
    exact_up_to: int = 32

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            finite = math.isfinite(value) or (each.name == "checkpoint_interval_s" and value == math.inf)
            if not (finite and value >= 0):
                raise ConfigError(f"{each.name} must be zero or a positive number; got {value}")
        if self.host_share > 1:
            raise ConfigError(f"host_share must be between 0 and 1; got {self.host_share}")
        for name in ("worker_mtbf_s", "prior_failures", "checkpoint_interval_s"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must be a positive number; got 0")

    @property
    def has_checkpoints(self) -> bool:
        """Whether there are any to go back to."""
        return math.isfinite(self.checkpoint_interval_s)

    @property
    def rate(self) -> FailureModel:
        """How soon the first failure is to be expected."""
        return FailureModel(
            worker_mtbf_s=self.worker_mtbf_s, prior_failures=self.prior_failures, prior_host_share=self.host_share
        )

    @property
    def after_loss(self) -> StallModel:
        """The phases of a stall after a loss whose decision was prepared."""
        return StallModel(detect_s=self.detect_s, stop_s=self.stop_s, decide_s=self.decide_s, regroup_s=self.regroup_s)

    @property
    def after_surprise(self) -> StallModel:
        """The phases of a stall after a loss whose decision was not."""
        return replace(self.after_loss, decide_s=self.search_s)

    @property
    def after_change(self) -> StallModel:
        """The phases of a stall where nobody is lost: it is known, and the step is finished first."""
        return StallModel(detect_s=0.0, stop_s=0.0, decide_s=self.decide_s, regroup_s=self.regroup_s)
