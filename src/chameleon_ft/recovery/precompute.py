"""Decisions made before anything is lost, so that the decision after a loss is a look-up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.decision import Decision, decide
from chameleon_ft.recovery.equivalence import HostLossClass, LossClass, loss_classes
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.recovery.scoring import Course
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import Message, Transfer, placement_in_roles, plan_in_roles

__all__ = ["PreparedDecisions", "decide_on_class", "exchanged", "prepare_decisions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDecisions:
    """A decision for the loss of each single worker of a plan.

    Attributes:
        decisions: worker -> what is decided when it is lost.
        classes: the workers whose losses come to the same.
    """

    decisions: Mapping[int, Decision]
    classes: tuple[LossClass, ...]

    def look_up(self, lost: Collection[int]) -> Decision | None:
        """What was decided for just this loss; None if nothing was prepared for it."""
        return self.decisions.get(next(iter(lost))) if len(lost) == 1 else None


def prepare_decisions(situation: Situation, policy: str, failures: FailureModel) -> PreparedDecisions:
    """Decide on every single loss from the current plan; see `decide` for the arguments and errors.

    One decision is made for each class of workers whose losses come to the same; the others are the same with workers
    exchanged. They are for the horizon and the stall that are expected now: prepare anew after every change, and when
    either has become a different one.

    Args:
        situation: the situation now, with nobody lost; its `repeat_s` is what a loss is expected to make vain.
        policy: name of one of `POLICIES`.
        failures: what is known of failures now; the loss is counted on top of it.

    Raises:
        PlanError: a worker of the plan is lost already.
    """
    classes = loss_classes(situation)
    decisions: dict[int, Decision] = {}
    for each in classes:
        if (decision := decide_on_class(each, situation, policy, failures)) is not None:
            decisions |= {worker: exchanged(decision, exchange) for worker, exchange in each.exchanges.items()}
    return PreparedDecisions(decisions=FrozenMap(dict(sorted(decisions.items()))), classes=classes)


def decide_on_class(
    losses: LossClass | HostLossClass, situation: Situation, policy: str, failures: FailureModel
) -> Decision | None:
    """The decision for the loss of the representative; None if nobody is left. For those who prepare piece by piece."""
    costs = situation.costs
    left = CostModel(costs.workload, costs.cluster.without(losses.lost))
    if not left.cluster.workers:
        return None
    of_hosts = int(isinstance(losses, HostLossClass))
    return decide(replace(situation, costs=left), policy, failures.observed(failures=1, host_failures=of_hosts))


def exchanged(decision: Decision, exchange: Mapping[int, int]) -> Decision:
    """The same decision with workers exchanged: what is decided when another one of the class is lost."""
    if decision.course is None or all(worker == other for worker, other in exchange.items()):
        return decision
    return replace(decision, course=_course_of(decision.course, exchange))


def _course_of(course: Course, exchange: Mapping[int, int]) -> Course:
    return Course(
        plan=plan_in_roles(course.plan, exchange),
        ceiling=FrozenMap({exchange[worker]: limit for worker, limit in course.ceiling.items()}),
        program=course.program.exchanged(exchange),
        transfer=None if course.transfer is None else _transfer(course.transfer, exchange),
    )


def _transfer(transfer: Transfer, exchange: Mapping[int, int]) -> Transfer:
    return Transfer(
        placement=placement_in_roles(transfer.placement, exchange),
        roles={exchange[place]: exchange[worker] for place, worker in transfer.roles.items()},
        rounds=tuple(
            tuple(
                Message(exchange[each.source], exchange[each.destination], each.layers, each.num_bytes)
                for each in messages
            )
            for messages in transfer.rounds
        ),
        least_largest_send_bytes=transfer.least_largest_send_bytes,
    )
