"""The rule that ranks what can be done: expected steps until the next incident, less what that incident costs."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.recovery.failure_model import FailureModel, Gap
from chameleon_ft.recovery.loss_risk import LossRisk

__all__ = ["Prospect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The outlook of a decision, whatever is decided.

    Attributes:
        failures: what is known of failures.
        gap: distribution of the seconds until the next incident (G).
        restart_s: seconds that are lost if that incident takes all holders of some layer.
        reference_step_s: seconds of a step at which lost time counts, the same for all that can be done.
        exposed: probability that it does if it comes during the stall, while workers hold what they hold now.
        has_checkpoints: whether there is a checkpoint to go back to; the run ends otherwise.
    """

    failures: FailureModel
    gap: Gap
    restart_s: float
    reference_step_s: float
    exposed: float
    has_checkpoints: bool

    @classmethod
    def of(
        cls,
        failures: FailureModel,
        *,
        workers: int,
        after_incident: bool,
        held: LossRisk | None,
        restart_s: float,
        reference_step_s: float,
        has_checkpoints: bool,
    ) -> Prospect:
        """Return what lies ahead of so many live workers.

        Args:
            failures: what is known of failures; those just now are counted.
            workers: how many are live.
            after_incident: whether some have been lost just now.
            held: who holds what now; None if some layer has no holder, so that there is nothing to lose.
            restart_s: seconds that a return to a checkpoint costs after the next incident.
            reference_step_s: seconds of a step of workers that are never idle.
            has_checkpoints: whether there is one. If not, all that the run has trained so far is lost as well.
        """
        return cls(
            failures=failures,
            gap=failures.gap(workers, after_incident=after_incident),
            restart_s=restart_s + (0.0 if has_checkpoints else failures.worker_s / workers),
            reference_step_s=reference_step_s,
            exposed=0.0 if held is None else failures.fatal_probability(held),
            has_checkpoints=has_checkpoints,
        )

    def fatal_share(self, stall_s: float, fatal: float) -> float:
        """Return the probability that the next incident takes all holders of some layer.

        Args:
            stall_s: seconds until the new plan is reached.
            fatal: that probability once it is reached.
        """
        during = self.gap.within(stall_s)
        return fatal + during * (self.exposed - fatal)

    def steps(self, *, step_s: float, stall_s: float, fatal_share: float) -> float:
        """Return the expected number of steps until the next incident, less those that it is expected to cost.

            E[max(0, G - stall)] / step time - (probability of a return) (seconds of a return) / (reference step time)

        The first part is Eq. 8 of arXiv 2508.21613, samples(D) = B max(0, D - stall) / step time, with the expected
        value over G in place of its value at the mean: an incident during the stall makes the transition vain, and its
        transfers are repeated. What a return costs is work that was done, and is done again, under other plans than the
        one that is scored, so it counts at the same step time for all: a slow plan must not make a return cheaper.

        Args:
            step_s: seconds of a step.
            stall_s: seconds until it is reached, work of the interrupted step that is done again included.
            fatal_share: see there.
        """
        return self.gap.left_after(stall_s) / step_s - fatal_share * self.restart_s / self.reference_step_s
