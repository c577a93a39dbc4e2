"""The rule that ranks what can be done: expected steps until the next incident, less what that incident costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chameleon_ft.recovery.checkpoints import Checkpoints, expected_unsaved_s
from chameleon_ft.recovery.failure_model import FailureModel, Gap
from chameleon_ft.recovery.loss_risk import LossRisk

__all__ = ["Expected", "Prospect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan is expected to come to until the next incident.

    Attributes:
        fatal_share: probability that the incident makes a return to a checkpoint necessary.
        return_s: expected seconds of that return, work that is done again included.
        steps: expected steps, less those that the return costs.
    """

    fatal_share: float
    return_s: float
    steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The outlook of a decision, whatever is decided.

    Attributes:
        failures: what is known of failures.
        gap: distribution of the seconds until the next incident (G).
        restart_s: seconds that a return to a checkpoint takes, steps since it left out.
        checkpoints: how often they are written.
        reference_step_s: seconds of a step at which lost time counts, the same for all that can be done.
        exposed: probability that the incident takes all holders of some layer if it comes during the stall, while
            workers hold what they hold now.
        has_checkpoints: whether there is a checkpoint to go back to; the run ends otherwise.
    """

    failures: FailureModel
    gap: Gap
    restart_s: float
    checkpoints: Checkpoints
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
        checkpoints: Checkpoints,
        reference_step_s: float,
        has_checkpoints: bool,
    ) -> Prospect:
        """Return what lies ahead of so many live workers.

        Args:
            failures: what is known of failures; those just now are counted.
            workers: how many are live.
            after_incident: whether some have been lost just now.
            held: who holds what now; None if some layer has no holder, so that there is nothing to lose.
            restart_s: seconds that a return to a checkpoint takes, steps since it left out.
            checkpoints: how often they are written, if there are any.
            reference_step_s: seconds of a step of workers that are never idle.
            has_checkpoints: whether there is one. If not, all that the run has trained so far is lost as well.
        """
        return cls(
            failures=failures,
            gap=failures.gap(workers, after_incident=after_incident),
            restart_s=restart_s + (0.0 if has_checkpoints else failures.worker_s / workers),
            checkpoints=checkpoints if has_checkpoints else Checkpoints(),
            reference_step_s=reference_step_s,
            exposed=0.0 if held is None else failures.fatal_probability(held),
            has_checkpoints=has_checkpoints,
        )

    def of_plan(
        self, *, step_s: float, stall_s: float, fatal: float, from_checkpoint: bool, total_loss: float = 0.0
    ) -> Expected:
        """Return what a plan is expected to come to, with the expected number of steps

            E[max(0, G - stall)] / (step time (1 + w / I)) - (seconds of a return) / (reference step time).

        The first part is Eq. 8 of arXiv 2508.21613, samples(D) = B max(0, D - stall) / step time, with the expected
        value over G in place of its value at the mean: an incident during the stall makes the transition vain, and its
        transfers are repeated. w / I is the time that checkpoints take, each w seconds after I seconds of steps. What a
        return costs is work that was done, and is done again, under other plans than the one that is scored, so it
        counts at the same step time for all: a slow plan must not make a return cheaper.

        A plan that is read from a checkpoint has nothing unsaved, but an incident before it is reached means another
        return.

        Args:
            step_s: seconds of a step.
            stall_s: seconds until it is reached, work of the interrupted step that is done again included.
            fatal: probability that the next incident takes all holders of some layer once the plan is reached.
            from_checkpoint: whether its state is read from a checkpoint.
            total_loss: probability that the incident takes all workers. The time of that return is the same whatever is
                chosen, and left out; steps that are done again are not.
        """
        exposed, unsaved_s = (1.0, 0.0) if from_checkpoint else (self.exposed, self.checkpoints.unsaved_s)
        mean_gap_s = self.gap.left_after(0.0)
        returns = fatal + total_loss
        interval_s = self.checkpoints.interval_s(
            step_s=step_s, return_gap_s=mean_gap_s / returns if returns else math.inf
        )
        during = self.gap.within(stall_s)
        before, after = during * exposed, (1 - during) * fatal
        repeat_s = (before + during * total_loss) * unsaved_s
        repeat_s += (after + (1 - during) * total_loss) * expected_unsaved_s(unsaved_s, interval_s, mean_gap_s)
        return_s = (before + after) * self.restart_s + repeat_s
        trains_s = self.gap.left_after(stall_s) / (1 + (self.checkpoints.write_s or 0.0) / interval_s)
        return Expected(
            fatal_share=before + after,
            return_s=return_s,
            steps=trains_s / step_s - return_s / self.reference_step_s,
        )
