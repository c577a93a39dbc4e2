"""The rule that ranks plans: expected steps until the next incident, less the expected cost of that incident."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chameleon_ft.recovery.checkpoints import Checkpoints, Snapshots, expected_unsaved_s
from chameleon_ft.recovery.failure_model import FailureModel, Gap
from chameleon_ft.recovery.loss_risk import LossRisk


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected outcome of a plan until the next incident.

    Attributes:
        fatal_share: probability that the incident makes a return to a checkpoint, or to a snapshot, necessary.
        return_s: expected seconds of that return, repeated work included.
        shared_s: expected seconds by which the step that the incident interrupts takes longer, because peers do the
            work of the lost worker.
        steps: expected steps, less those that both cost.
    """

    fatal_share: float
    return_s: float
    shared_s: float
    steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Everything that the score of a plan depends on except for the plan.

    Attributes:
        failures: the failure model.
        gap: distribution of the seconds until the next incident (G).
        restart_cost_s: seconds of a return to a checkpoint without the steps since that checkpoint.
        checkpoints: how often they are written.
        reference_step_s: seconds of a step at which lost time is charged, whatever the plan.
        exposed: probability that the incident takes all holders of some layer if it comes during the stall, while the
            present placement is in force.
        has_checkpoints: whether there is a checkpoint to return to; if not, the run ends.
        salvages: whether a step that a loss interrupts is completed.
        snapshots: that take the place of checkpoints as long as some workers are left; None if there are none.
    """

    failures: FailureModel
    gap: Gap
    restart_cost_s: float
    checkpoints: Checkpoints
    reference_step_s: float
    exposed: float
    has_checkpoints: bool
    salvages: bool = False
    snapshots: Snapshots | None = None

    @classmethod
    def of(
        cls,
        failures: FailureModel,
        *,
        workers: int,
        after_incident: bool,
        held: LossRisk | None,
        restart_cost_s: float,
        checkpoints: Checkpoints,
        reference_step_s: float,
        has_checkpoints: bool,
        salvages: bool = False,
        snapshots: Snapshots | None = None,
    ) -> Prospect:
        """Return the prospect of a number of live workers.

        Args:
            failures: the failure model; the latest failures are counted.
            workers: number of live workers.
            after_incident: whether some have just been lost.
            held: which workers and hosts hold the layers now; None if some layer has no holder, so that there is
                nothing to lose.
            restart_cost_s: seconds of a return to a checkpoint without the steps since that checkpoint.
            checkpoints: how often they are written, if at all.
            reference_step_s: seconds of a step of workers that are never idle.
            has_checkpoints: whether there is one. If not, a return loses all that the run has trained so far.
            salvages: whether a step that a loss interrupts is completed.
            snapshots: that are taken, if any.
        """
        return cls(
            failures=failures,
            gap=failures.gap(workers, after_incident=after_incident),
            restart_cost_s=restart_cost_s + (0.0 if has_checkpoints else failures.worker_s / workers),
            checkpoints=checkpoints if has_checkpoints else Checkpoints(),
            reference_step_s=reference_step_s,
            exposed=0.0 if held is None else failures.fatal_probability(held),
            has_checkpoints=has_checkpoints,
            salvages=salvages,
            snapshots=snapshots,
        )

    def of_plan(
        self,
        *,
        step_s: float,
        stall_s: float,
        fatal: float,
        from_checkpoint: bool,
        has_snapshots: bool = True,
        total_loss: float = 0.0,
        share_per_peer: float = 0.0,
        migration_s: float = 0.0,
        migration_step_s: float = math.inf,
    ) -> Expected:
        """Return the expected outcome of a plan, with the expected number of steps

            E[integral from 0 to G of dt / (step time)] / (1 + w / I) - (lost seconds) / (reference step time),

        where no step is trained in the stall, and those of the migration take `migration_step_s` each. With L(t) =
        E[max(0, G - t)], the integral is (L(stall) - L(reached)) / migration step + L(reached) / step. Without a
        migration this is Eq. 8 of arXiv 2508.21613, samples(D) = B max(0, D - stall) / step time, with the expected
        value over G in place of its value at the mean: an incident before the plan is reached wastes the transition,
        and its transfers are repeated. w / I is the time that checkpoints and snapshots take, each w seconds after I
        seconds of steps. Lost seconds are charged at the same step time for all plans, because otherwise a slow plan
        would make them cheap. They are those of a return and, if interrupted steps are completed, those by which such a
        step takes longer because peers do the work of the lost worker: once the plan is reached, step time times
        `share_per_peer`.

        A plan that is read from a checkpoint has no unsaved work, but an incident before it is reached means another
        return.

        Args:
            step_s: seconds of a step.
            stall_s: seconds until training resumes, repeated work of the interrupted step included.
            fatal: probability that the next incident takes all holders of some layer once the plan is reached.
            from_checkpoint: whether its state is read from a checkpoint.
            has_snapshots: whether snapshots are taken once it is reached, if there are any.
            total_loss: probability that the incident takes all workers. The restart after it is the same for all plans
                and left out, unlike the repeated steps.
            share_per_peer: see `HolderSets.share_per_peer`.
            migration_s: seconds after the stall in which layers move while another plan trains.
            migration_step_s: seconds of a step of that plan.
        """
        mean_gap_s = self.gap.left_after(0.0)
        reached_s = stall_s + migration_s
        during = self.gap.within(reached_s)
        before, after = during * (1.0 if from_checkpoint else self.exposed), (1 - during) * fatal

        def repeated(saved: Checkpoints, returns: float, before: float, after: float) -> tuple[float, float]:
            """Return the expected seconds of repeated steps, and seconds of saving for each second of steps."""
            interval_s = saved.interval_s(step_s=step_s, return_gap_s=mean_gap_s / returns if returns else math.inf)
            unsaved_s = 0.0 if from_checkpoint else saved.unsaved_s
            repeat_s = before * unsaved_s + after * expected_unsaved_s(unsaved_s, interval_s, mean_gap_s)
            return repeat_s, (saved.write_s or 0.0) / interval_s

        last = during * total_loss, (1 - during) * total_loss
        if self.snapshots is None:
            repeat_s, share = repeated(self.checkpoints, fatal + total_loss, before + last[0], after + last[1])
            return_s = (before + after) * self.restart_cost_s + repeat_s
        else:
            # Under a plan without snapshots, the way back leads to a checkpoint.
            near, far = (after, 0.0) if has_snapshots else (0.0, after)
            far_share = total_loss + (0.0 if has_snapshots else fatal)
            repeat_s, share = repeated(self.checkpoints, far_share, last[0], last[1] + far)
            near_s, own_share = repeated(self.snapshots.taken, fatal, before, near)
            return_s = (before + near) * self.snapshots.return_s + far * self.restart_cost_s + repeat_s + near_s
            share += own_share if has_snapshots else 0.0
        shared_s = (1 - during) * share_per_peer * step_s if self.salvages else 0.0
        left_s = self.gap.left_after(reached_s)
        steps = left_s / step_s
        if migration_s:
            steps += (self.gap.left_after(stall_s) - left_s) / migration_step_s
        return Expected(
            fatal_share=before + after,
            return_s=return_s,
            shared_s=shared_s,
            steps=steps / (1 + share) - (return_s + shared_s) / self.reference_step_s,
        )
