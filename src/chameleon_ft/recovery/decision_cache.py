"""A cache of decisions that are made before a loss, so that the decision after it is a look-up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.decision import Decision, decide
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.recovery.scoring import Course
from chameleon_ft.recovery.symmetry import HostLossClass, LossClass, loss_classes
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import Message, Transfer, remap_placement, remap_plan

__all__ = ["DecisionCache", "build_decision_cache", "decide_on_class", "remap_decision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCache:
    """A decision for the loss of each single worker of a plan.

    Attributes:
        decisions: worker -> decision on its loss.
        classes: the workers whose losses are equivalent.
    """

    decisions: Mapping[int, Decision]
    classes: tuple[LossClass, ...]

    def look_up(self, lost: Collection[int]) -> Decision | None:
        """Return the decision on exactly this loss; None if there is none."""
        return self.decisions.get(next(iter(lost))) if len(lost) == 1 else None


def build_decision_cache(context: DecisionContext, policy: str, failures: FailureModel) -> DecisionCache:
    """Decide on every single loss from the current plan; see `decide` for the arguments and errors.

    One decision is made for each class of workers whose losses are equivalent, and remapped for the other workers of
    the class. Decisions assume the present horizon and stall: build the cache again after every change of the plan, and
    when either of the two has changed.

    Args:
        context: the present context, without a lost worker; its `repeat_s` is the expected repeated work of a loss.
        policy: name of one of `POLICIES`.
        failures: what is known of failures now; the loss is counted on top of it.

    Raises:
        PlanError: a worker of the plan is lost already.
    """
    classes = loss_classes(context)
    decisions: dict[int, Decision] = {}
    for each in classes:
        if (decision := decide_on_class(each, context, policy, failures)) is not None:
            decisions |= {worker: remap_decision(decision, symmetry) for worker, symmetry in each.symmetries.items()}
    return DecisionCache(decisions=FrozenMap(dict(sorted(decisions.items()))), classes=classes)


def decide_on_class(
    losses: LossClass | HostLossClass, context: DecisionContext, policy: str, failures: FailureModel
) -> Decision | None:
    """Return the decision on the loss of the representative; None if no worker is left."""
    costs = context.costs
    left = CostModel(costs.workload, costs.cluster.without(losses.lost))
    if not left.cluster.workers:
        return None
    of_hosts = int(isinstance(losses, HostLossClass))
    return decide(replace(context, costs=left), policy, failures.observed(failures=1, host_failures=of_hosts))


def remap_decision(decision: Decision, symmetry: Mapping[int, int]) -> Decision:
    """Return the decision on the loss of another member of the class, by mapping the workers of this one."""
    if decision.course is None or all(worker == other for worker, other in symmetry.items()):
        return decision
    return replace(decision, course=_course_of(decision.course, symmetry))


def _course_of(course: Course, symmetry: Mapping[int, int]) -> Course:
    return Course(
        plan=remap_plan(course.plan, symmetry),
        in_flight_limits=FrozenMap({symmetry[worker]: limit for worker, limit in course.in_flight_limits.items()}),
        program=course.program.remap_workers(symmetry),
        transfer=None if course.transfer is None else _transfer(course.transfer, symmetry),
    )


def _transfer(transfer: Transfer, symmetry: Mapping[int, int]) -> Transfer:
    return Transfer(
        placement=remap_placement(transfer.placement, symmetry),
        roles={symmetry[place]: symmetry[worker] for place, worker in transfer.roles.items()},
        rounds=tuple(
            tuple(
                Message(symmetry[each.source], symmetry[each.destination], each.layers, each.num_bytes)
                for each in messages
            )
            for messages in transfer.rounds
        ),
        least_largest_send_bytes=transfer.least_largest_send_bytes,
    )
