"""The decision: of all that policies propose, what trains the most samples until the next failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import StallModel
from chameleon_ft.recovery._course import Candidate, Course, fresh, goes_on, weighed
from chameleon_ft.recovery.failure_rate import FailureRate
from chameleon_ft.recovery.policies import policy_named
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation

__all__ = ["STAY", "Candidate", "Course", "Decision", "best_of", "decide"]

STAY: Final = "stay"
"""Name of the candidate to go on as before, which there is as long as nobody is lost."""

# Samples that differ by less are equal: sums were rounded in another order.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was weighed, and what is done.

    Attributes:
        horizon_s: seconds until the next failure that were expected (D).
        phases: what the stall was taken to be, transfers left out.
        candidates: all that was weighed, in the order of the proposals.
        chosen: the one of them that is carried out; None if none is feasible.
        course: how to carry it out; None likewise.
    """

    horizon_s: float
    phases: StallModel
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    course: Course | None

    def to_json(self) -> dict[str, object]:
        """The fields of the event `decision`, but for the seconds that it took, which is for whoever has a clock."""
        return {
            "chosen": None if self.chosen is None else self.chosen.policy,
            "horizon_s": self.horizon_s,
            "candidates": [
                {
                    "policy": each.policy,
                    "step_s": each.step_s,
                    "stall_s": each.stall_s,
                    "transfer_s": each.transfer_s,
                    "bytes": each.moved_bytes,
                    "last_holders": each.last_holders,
                    "last_hosts": each.last_hosts,
                    "return_s": each.return_s,
                    "samples": each.samples,
                    "feasible": each.feasible,
                    "reason": each.reason,
                }
                for each in self.candidates
            ],
        }


def decide(
    situation: Situation, policy: str, rate: FailureRate, *, decide_s: Callable[[], float] | None = None
) -> Decision:
    """Weigh what the policy proposes, and choose what trains the most samples until the next failure.

    samples(D) = B max(0, D - stall - r) / step time, which is Eq. 8 of arXiv 2508.21613 times D, but for r: the time
    of a return to a checkpoint, times the probability that the next failure makes one necessary. That is the share of
    the workers, or of the hosts if it takes a whole one, which are the only ones to hold some layer. Where there is no
    checkpoint such a loss ends the run, so a plan with such workers is chosen only if there is no other; and of those
    without them one with such hosts only if no host is expected to fail, or the others train nothing. Of equals, that
    which moves the fewest bytes; of equals still, what was proposed first. What does not fit the memory, in a step or
    while layers move, or has layers that nobody holds, is listed with the reason and never chosen. Deterministic.

    As long as nobody is lost, to go on as before is weighed first, whatever the policy proposes: it costs no stall, and
    can be done.

    Args:
        situation: what was running, and who is live.
        policy: name of one of `POLICIES`.
        rate: how soon the next failure is to be expected; the losses that led here are counted already.
        decide_s: asked when all is weighed what that phase of the stall takes, now that most of it is over; for a
            decision that everyone waits for. None: as the situation has it.

    Raises:
        ConfigError: no policy has this name.
        PlanError: no worker is live, or the workload has another number of layers than the plan.
    """
    propose = policy_named(policy)
    if not situation.live:
        raise PlanError("no worker is live; start at least one")
    horizon_s = rate.horizon_s(len(situation.live))
    proposals = list(propose(situation, horizon_s))
    if not situation.lost:
        stay = Proposal(name=STAY, plan=situation.plan, ceiling=situation.ceiling)
        proposals = [stay, *(each for each in proposals if not goes_on(each, situation))]
    both = [weighed(proposal, situation, rate) for proposal in proposals]
    now = situation
    if decide_s is not None:
        now = replace(situation, phases=replace(situation.phases, decide_s=decide_s()))
    candidates = tuple(fresh(candidate, before=situation, now=now, rate=rate) for candidate, _ in both)
    index = best_of(candidates, situation, rate)
    return Decision(
        horizon_s=horizon_s,
        phases=now.phases,
        candidates=candidates,
        chosen=None if index is None else candidates[index],
        course=None if index is None or (way := both[index][1]) is None else way.course(),
    )


def best_of(candidates: Sequence[Candidate], situation: Situation, rate: FailureRate) -> int | None:
    """The index of the one that is chosen; None if none is feasible."""
    feasible = [index for index, candidate in enumerate(candidates) if candidate.feasible]
    if not feasible:
        return None
    if not situation.has_checkpoints:
        feasible = [index for index in feasible if not candidates[index].last_holders] or feasible
        if rate.host_share:
            feasible = [i for i in feasible if candidates[i].samples and not candidates[i].last_hosts] or feasible
    most = max(candidates[index].samples for index in feasible)
    equals = [index for index in feasible if candidates[index].samples >= most * (1 - _ROUNDING)]
    return min(equals, key=lambda index: (candidates[index].moved_bytes or 0, index))
