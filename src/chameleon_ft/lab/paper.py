"""The Chameleon paper (arXiv 2508.21613), to compare with: its closed forms, its search, and its choice after a loss.

The closed forms are as reported by public notes of a reproduction, with free messages, equal workers and operations
without overhead. `rerouted_step_s` disagrees with a replay: it is too low for one failure, and too high for most
failures that are spread over stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from chameleon_ft.cost.transition import received_layers
from chameleon_ft.errors import PlanError
from chameleon_ft.lab.min_mix import LeastMix
from chameleon_ft.lab.planned_layouts import BaselinePlan, CutPoints, Layout, OneFOneBMemory, fastest_layout, memory_of
from chameleon_ft.plan import LayerRange, Placement, Plan
from chameleon_ft.quantities import SUM_ROUNDING
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal, remap_workers
from chameleon_ft.recovery.proposals import ProposalsOnWorkers
from chameleon_ft.schedule import CostModel, OperationKind
from chameleon_ft.search import FoundPlan
from chameleon_ft.transfer import transfer_s, transfer_to


def pipeline_step_s(*, forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """One pipeline of unequal stages: dynamic programming over the operations of 1F1B, start = max(end of
    predecessors).

    A stage s of P warms up with min(P - s - 1, N_m) forwards, then runs one forward and one backward in turn. Times are
    those of each stage.

    Raises:
        PlanError: no stages, or lists of different lengths.
    """
    depth = len(forward_s)
    if depth < 1 or len(backward_s) != depth:
        raise PlanError(f"every stage needs a forward and a backward time; got {depth} and {len(backward_s)}")
    # In wave k, stage i of P runs the forward of micro-batch k + P - 1 - i, whose input the stage before has made in
    # wave k - 1, and then the backward of micro-batch k.
    free_s = [0.0] * depth
    # Time at which the output of the stage before arrives, by stage.
    input_s = [0.0] * (depth + 1)
    for wave in range(1 - depth, micro_batches):
        for stage in range(min(depth, wave + depth) - 1, max(0, wave + depth - micro_batches) - 1, -1):
            free_s[stage] = input_s[stage + 1] = max(free_s[stage], input_s[stage]) + forward_s[stage]
        if wave >= 0:
            done_s = 0.0
            for stage in reversed(range(depth)):
                done_s = free_s[stage] = max(free_s[stage], done_s) + backward_s[stage]
    return max(free_s)


def unequal_step_s(
    pipelines: Sequence[tuple[Sequence[float], Sequence[float], int]],
) -> float:
    """Unequal pipelines: the slowest by `pipeline_step_s`; of each, forward and backward times and micro-batches."""
    return max(
        pipeline_step_s(forward_s=forward_s, backward_s=backward_s, micro_batches=micro_batches)
        for forward_s, backward_s, micro_batches in pipelines
    )


def rerouted_step_s(
    *, stages: int, micro_batches: int, pipelines: int, failures: Sequence[int], forward_s: float, backward_s: float
) -> float:
    """Equal pipelines after rerouting: (N_pp + N_m - 1 + sum_i N_m F_i / (N_dp - F_i)) (t_f + t_b).

    Args:
        stages: stages of a pipeline (N_pp).
        micro_batches: micro-batches of each pipeline (N_m).
        pipelines: pipelines before any failure (N_dp).
        failures: lost workers of each stage (F_i).
        forward_s, backward_s: of a stage, for one micro-batch.

    Raises:
        PlanError: a stage without a live worker, which rerouting cannot serve, or another number of stages in
            `failures`.
    """
    if len(failures) != stages:
        raise PlanError(f"failures must say how many workers each of the {stages} stages has lost; got {len(failures)}")
    for stage, lost in enumerate(failures):
        if not 0 <= lost < pipelines:
            raise PlanError(
                f"stage {stage} has lost {lost} of its {pipelines} workers; rerouting needs one that is left"
            )
    detours = math.fsum(micro_batches * lost / (pipelines - lost) for lost in failures)
    return (stages + micro_batches - 1 + detours) * (forward_s + backward_s)


def samples_per_second(*, samples: int, step_s: float, transition_s: float, until_failure_s: float) -> float:
    """The objective of the paper's choice: (B / t_step) (D - t_transition) / D, where rerouting has no t_transition.

    `samples` (B) are those of a step, `until_failure_s` (D) the time until the next failure. Never negative.
    """
    return samples / step_s * max(0.0, until_failure_s - transition_s) / until_failure_s


def paper_plan(
    costs: CostModel, *, split_backward: bool = False, current: Placement | None = None
) -> BaselinePlan | None:
    """Return the pipelines that the paper's search chooses for all workers; None if it finds none that fit.

    The paper's, as it is reported: for each number of pipelines, every partition of the workers
    into depths; micro-batches by the floor of the proportional share, then every placement of the remainder; layers
    equally, then every placement of the remainder; what L_i (m_p + m_g + m_opt) + (N_pp - i) L_i m_act does not let
    fit is dropped; the least time by dynamic programming over 1F1B (`unequal_step_s`) is chosen. Workers
    are equal in it, messages and gradient sync free.

    Ours: a remainder may be placed on one stage or pipeline as a whole, too. Layers may be unequal: what they need is
    added up, and an operation's overhead is part of its time. No pipeline goes without micro-batches, and what 1F1B
    would not fit by our own count of memory is dropped as well. Where workers are unequal, the smallest memory counts.
    Of mixes of equal time, two with the fewest and two with the most pipelines are replayed. Several placements on
    hosts are tried, and the fastest plan is taken. Programs are 1F1B, or by `best_program` with split backward. Depths
    are bounded by the layers. Neither partitions nor placements are listed one by one: equal depths have equal times,
    so a knapsack finds the best partition, and lower bounds rule out most placements of layers. The time is that of
    trying all.

    Args:
        costs: costs of the workload on the live workers.
        split_backward: True if the plan runs our programs with split backward, and not 1F1B; it does not change the
            choice.
        current: which layers the live workers hold now, for the bytes to move.

    Raises:
        PlanError: no worker is left.
    """
    workers, micro_batches = len(costs.cluster.workers), costs.workload.micro_batches
    if not workers:
        raise PlanError("no worker is left to plan for; start at least one")
    cuts = _equal_cuts(memory_of(costs, recompute=False))
    mixes = LeastMix(
        depths=range(1, min(workers, len(costs.workload.layers)) + 1),
        workers=workers,
        micro_batches=micro_batches,
        time_s=lambda depth, share: cuts.best(depth, share)[0],
        min_share=lambda depth: micro_batches * depth // workers,
    ).mixes()
    layouts = (
        Layout(tuple((cuts.best(*each)[1], each[1]) for each in mix.pipelines), False, mix.time_s) for mix in mixes
    )
    return fastest_layout("paper", layouts, costs, split_backward=split_backward, current=current)


class _EqualCuts:
    """Equal stages, but for the remainder, which is placed so that the paper's estimate is least."""

    def __init__(self, memory: OneFOneBMemory) -> None:
        workload, layers = memory.workload, memory.workload.layers
        self._num_layers = len(layers)
        self._overhead_s = workload.operation_overhead_s
        self._memory = memory
        self._forward = list(accumulate((layer.forward_s for layer in layers), initial=0.0))
        self._backward = list(accumulate((layer.backward_s for layer in layers), initial=0.0))
        self.best = cache(self._best)

    def _best(self, depth: int, micro_batches: int) -> tuple[float, CutPoints]:
        """Return the seconds and cut points of the best placement of the layers; infinite if none fits.

        Branch and bound over the stages, the most promising next stage first.
        """
        share, spare = divmod(self._num_layers, depth)
        best: tuple[float, CutPoints] = (math.inf, ())

        def nexts(position: int, start: int) -> list[tuple[float, int]]:
            """Return lower bounds with each possible stop of the stage, the least first."""
            left = spare - (start - position * share)
            stops = range(start + share, start + share + left + 1)
            return sorted((max(bound_s(position, start, stop), rest_s(position + 1, stop)), stop) for stop in stops)

        @cache
        def bound_s(position: int, start: int, stop: int) -> float:
            return self._bound_s(depth, micro_batches, position, start, stop)

        @cache
        def rest_s(position: int, start: int) -> float:
            """Return a lower bound of any placement from here on."""
            if position == depth:
                return 0.0 if start == self._num_layers else math.inf
            return nexts(position, start)[0][0]

        def visit(taken: CutPoints, start: int) -> None:
            nonlocal best
            if len(taken) == depth:
                stages = [self._stage_s(*stage) for stage in pairwise((0, *taken))]
                forward_s, backward_s = zip(*stages, strict=True)
                own_s = pipeline_step_s(forward_s=forward_s, backward_s=backward_s, micro_batches=micro_batches)
                best = min(best, (own_s, taken))
                return
            for min_s, stop in nexts(len(taken), start):
                if min_s < best[0] * (1 - SUM_ROUNDING):
                    visit((*taken, stop), stop)

        visit((), 0)
        return best

    def _bound_s(self, depth: int, micro_batches: int, position: int, start: int, stop: int) -> float:
        """Return the seconds that a pipeline with this stage takes at least; infinite where the stage does not fit.

        Before a stage runs anything, its forward and its backward have to pass all stages ahead; and its first backward
        waits for the pipeline's others, while it runs no more than its warm-up and one forward.
        """
        # By the paper's formula, with what unequal layers need added up, and by our own count.
        to_end, memory = depth - position, self._memory
        if not (
            memory.fits_without_messages(start, stop, in_flight=to_end)
            and memory.fits(start, stop, to_end=to_end, micro_batches=micro_batches)
        ):
            return math.inf
        forward_s, backward_s = self._stage_s(start, stop)
        ahead_s = self._forward[start] + self._backward[start] + 2 * position * self._overhead_s
        whole_s = self._forward[-1] + self._backward[-1] + 2 * depth * self._overhead_s
        after = micro_batches - min(to_end, micro_batches)
        return max(
            ahead_s + micro_batches * (forward_s + backward_s),
            whole_s + (micro_batches - 1) * backward_s + after * forward_s,
        )

    def _stage_s(self, start: int, stop: int) -> tuple[float, float]:
        forward_s = self._overhead_s + self._forward[stop] - self._forward[start]
        return forward_s, self._overhead_s + self._backward[stop] - self._backward[start]


# Shared by all plans for a workload: a policy asks again after each loss.
_equal_cuts = lru_cache(maxsize=4)(_EqualCuts)


class PaperPlanner:
    """The planner and the policy of the paper, as the registry has them."""

    @staticmethod
    def plan(costs: CostModel, *, current: Placement | None) -> FoundPlan | None:
        chosen = paper_plan(costs, current=current)
        return None if chosen is None else chosen.found

    @staticmethod
    def propose(name: str, proposer: ProposalsOnWorkers) -> list[Proposal]:
        """Propose what the paper chooses: the plan of `paper_plan` or rerouting.

        Backward is split in the former if it was and if that fits. The time of the transition is that of our transfer.
        """
        context = proposer.context
        splits = dict.fromkeys((context.plan.split_backward, False))
        plans = (paper_plan(context.costs, split_backward=split, current=context.held) for split in splits)
        found = next((plan for plan in plans if plan is not None), None)
        step_s, transition_s = math.inf, 0.0
        if found is None:
            reason = "no pipelines of equal cuts fit the memory of all live workers"
            moved = [Proposal(name=f"{name}-repartition", reason=reason)]
        else:
            moved = remap_workers(f"{name}-repartition", [found.found], context)
            if (plan := moved[0].plan) is not None:
                layers, senders = received_layers(context.costs.workload, plan.placement), context.senders
                transfer = transfer_to(context.held, plan.placement, live=senders.hosts, layers=layers)
                step_s, transition_s = found.estimate_s, transfer_s(transfer.rounds, senders)
        reroutes = prefers_rerouting(
            samples=context.costs.workload.samples,
            step_s=step_s,
            transition_s=transition_s,
            rerouted_s=rerouted_s(context),
            horizon_s=proposer.horizon_s,
        )
        return proposer.reroute(f"{name}-reroute") if reroutes else moved


def prefers_rerouting(*, samples: int, step_s: float, transition_s: float, rerouted_s: float, horizon_s: float) -> bool:
    """Return whether rerouting trains at least as much as a re-partition by (B / t_step) (D - t_transition) / D.

    Args:
        samples: The samples of a step (B).
        step_s: seconds of a step after the re-partition; infinite if there is none.
        transition_s: seconds of its transition; rerouting takes none.
        rerouted_s: seconds of a step after rerouting; infinite if that is not possible.
        horizon_s: expected seconds until the next incident (D).
    """
    repartitioned_per_s, rerouted_per_s = (
        samples_per_second(samples=samples, step_s=each_s, transition_s=stall_s, until_failure_s=horizon_s)
        for each_s, stall_s in ((step_s, transition_s), (rerouted_s, 0.0))
    )
    return 0 < rerouted_per_s >= repartitioned_per_s


def rerouted_s(context: DecisionContext) -> float:
    """Return the paper's estimate of a step after rerouting, in seconds; infinite if layers have no live holder.

    For equal pipelines, that is (N_pp + N_m - 1 + sum_i N_m F_i / (N_dp - F_i)) (t_f + t_b), with the times of the
    slowest stage. If the plan has been rerouted before, N_dp is the most holders that a stage has. For unequal
    pipelines nothing is reported; the detours, each with the times of its stage, are added to the time of unequal
    pipelines. If such a plan has been rerouted before, there is no estimate, and the time is infinite.
    """
    if context.placement.unheld_layers:
        return math.inf
    stages = _equal_stages(context.plan)
    return _of_unequal_s(context) if stages is None else _of_equal_s(stages, context)


def _equal_stages(plan: Plan) -> list[LayerRange] | None:
    """Return the stages that all pipelines have; None if they differ."""
    ranges = list(plan.placement.ranges.values())
    stages = sorted({own for held in ranges for own in held})
    one_each = all(len(held) == 1 for held in ranges)
    tiled = all(before.stop == after.start for before, after in pairwise(stages))
    return stages if one_each and tiled else None


def _of_equal_s(stages: list[LayerRange], context: DecisionContext) -> float:
    holders = [len(context.placement.holders(stage.start)) for stage in stages]
    pipelines = max(len(context.plan.placement.holders(stage.start)) for stage in stages)
    forward_s, backward_s = zip(*(_stage_s(stage, context) for stage in stages), strict=True)
    return rerouted_step_s(
        stages=len(stages),
        micro_batches=math.ceil(context.plan.micro_batches / pipelines),
        pipelines=pipelines,
        failures=[pipelines - live for live in holders],
        forward_s=max(forward_s),
        backward_s=max(backward_s),
    )


def _of_unequal_s(context: DecisionContext) -> float:
    pipelines = Counter(route.hops for route in context.plan.routes)
    workers = [hop.worker for hops in pipelines for hop in hops]
    if len(set(workers)) < len(workers):
        return math.inf
    detours_s: list[float] = []
    times: list[tuple[tuple[float, ...], tuple[float, ...], int]] = []
    for hops, share in pipelines.items():
        forward_s, backward_s = zip(*(_stage_s(hop.layers, context) for hop in hops), strict=True)
        times.append((forward_s, backward_s, share))
        for hop, own_s in zip(hops, map(sum, zip(forward_s, backward_s, strict=True)), strict=True):
            if hop.worker in context.lost:
                fewest = min(len(context.placement.holders(layer)) for layer in hop.layers)
                detours_s.append(share * own_s / fewest)
    return unequal_step_s(times) + math.fsum(detours_s)


def _stage_s(layers: LayerRange, context: DecisionContext) -> tuple[float, float]:
    """Return the seconds of F and of B. All workers are equal in the paper, so any live one will do."""
    worker, costs = context.live[0], context.costs
    return (
        costs.compute_s(worker, OperationKind.FORWARD, layers),
        costs.compute_s(worker, OperationKind.BACKWARD, layers),
    )
