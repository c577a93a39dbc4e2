"""The planner of Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125), to be compared with `find_plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from chameleon_ft.cluster import Link
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.lab.min_mix import LeastMix, Mix, shared_out
from chameleon_ft.lab.planned_layouts import BaselinePlan, CutPoints, Layout, OneFOneBMemory, fastest_layout, memory_of
from chameleon_ft.plan import Placement
from chameleon_ft.plan.layouts import disjoint_pipelines
from chameleon_ft.quantities import SUM_ROUNDING, counted
from chameleon_ft.recovery.proposal import Proposal, remap_workers
from chameleon_ft.recovery.proposals import ProposalsOnWorkers
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan

# N_b / S, for which templates are made.
_PER_STAGE = 4


def oobleck_plan(
    costs: CostModel,
    *,
    fault_tolerance: int = 0,
    split_backward: bool = False,
    live_nodes: Sequence[int] | None = None,
    with_room: bool = False,
    current: Placement | None = None,
) -> BaselinePlan | None:
    """Return the pipelines that Oobleck makes of all workers; None if none fit or none use up the workers.

    From Oobleck's paper, by section: templates for n_0, n_0 + 1, ... N - f n_0 nodes, where n_0 is the fewest that hold
    the model (4.1.1); for each, the stages that minimize T1 + T2 + T3 for N_b = 4 S (4.1.2); among all combinations of
    at least f + 1 templates that use up the nodes, the one of highest throughput (4.2.1); and shares of the
    micro-batches that make all pipelines end at the same time (4.2.2).

    From the released code (github.com/SymbioticLab/Oobleck; branch `develop` is that of the paper,
    `colossalai-backend` a later one):

    - T2 = (N_b - S + k* - 1) t_k* with N_b = 4 S is `PipelineExecutionResult::new` of `rust/execution_result.rs` in
      `colossalai-backend`; `DCExecutionResult` of `oobleck/csrc/planning/execution_result.h` in `develop` has
      (2 S + k* + 1) t_k*. Neither adds an all-reduce between nodes to the time of a template; `develop` adds the one
      inside a node of several GPUs to each stage.
    - The all-reduce between nodes is added to the time of a combination, for the first layer only and by the number of
      pipelines: `HeterogeneousPipelinesExecutionPlan.iteration_time` of `oobleck/planning/instantiator.py` in
      `develop`. Later layers are assumed to overlap with the backward. Here it follows the ring formula of
      `Link.ring_all_reduce_s` on the link between hosts, or inside the host if there is only one.
    - `_distribute_batch` (`develop`) minimizes the variance of B_i T_i / S_i over templates; `distribute_batch` of
      `oobleck/engine/pipeline_instantiator.py` (`colossalai-backend`) minimizes its maximum. Both give all
      pipelines of a template the same share. Here the slowest pipeline ends earliest by T1 + T2 + T3 with B_i for N_b,
      which is proportional to B_i T_i / S_i where B_i = 4 S, and each pipeline has its own share.
    - Activations are recomputed in all layers but embedding and loss, always: `is_checkpointable` and
      `checkpoint_wrapper` in `oobleck/execution/layer.py` (`develop`). `colossalai-backend` leaves it to the model. So
      both are tried, each with its own templates, and the faster plan counts.
    - Programs are 1F1B with fused backward: `OobleckPipelineSchedule` of `oobleck/execution/pipeline.py` extends
      DeepSpeed's `TrainSchedule`. Gradients are reduced after the last backward (`_train_step` of
      `oobleck/execution/engine.py`); here they are reduced as early as they are made.
    - The code has no f: templates go from n_0 to N nodes, and n_0 only counts total memory. Here every stage has to
      fit under 1F1B.

    Ours, or simplified: a worker is a node of one accelerator, and so a stage. The cut has the least estimate of all
    cuts, whereas Oobleck's divide and conquer keeps one cut for each part. If workers are unequal, the smallest memory
    counts and speeds are ignored. An operation's overhead is part of its time; messages are free. Every pipeline gets
    micro-batches. A knapsack finds the best combination. Among mixes of equal time, two with the fewest and two with
    the most pipelines are replayed. Several placements of the pipelines on hosts are tried, and the fastest plan is
    taken.

    Args:
        costs: costs of the workload on the live workers.
        fault_tolerance: f, the losses that every layer survives; there are at least f + 1 pipelines.
        split_backward: True if the plan runs our programs with split backward (`best_program`) instead of Oobleck's
            1F1B. The choice of templates does not depend on it.
        live_nodes: remaining nodes of each running pipeline; None to choose the best combination. The released
            code chooses a combination only once. After a loss it keeps the pipelines and replaces the
            templates of those that have lost nodes (see `reconfigured_pipelines`), then shares micro-batches anew.
        with_room: True if n_0 leaves nodes room to be reconfigured after losses, see `pipeline_templates`. The released
            code assumes 6 times the bytes of the parameters.
        current: layers that the live workers hold now, for the bytes to move.

    Raises:
        PlanError: no worker is left.
        ConfigError: negative `fault_tolerance`, or more `live_nodes` than the cluster has workers.
    """
    if not costs.cluster.workers:
        raise PlanError("no worker is left to plan for; start at least one")
    cluster = costs.cluster
    if live_nodes is not None and sum(live_nodes) > len(cluster.workers):
        raise ConfigError(
            f"live_nodes has {counted(sum(live_nodes), 'node')} ({', '.join(map(str, live_nodes))}), but the cluster "
            f"only {counted(len(cluster.workers), 'worker')}; give the nodes that are left of each pipeline"
        )
    link = cluster.inter_host if len(cluster.host_sizes) > 1 else cluster.intra_host

    def layouts() -> Iterator[Layout]:
        """Yield the best choices by Oobleck's estimate, with and without recomputation."""
        for recompute in (True, False):
            templates = pipeline_templates(
                costs, fault_tolerance=fault_tolerance, recompute=recompute, with_room=with_room
            )
            depths = None
            if live_nodes is not None:
                depths = tuple(map(len, reconfigured_pipelines(map(range, live_nodes), min(templates, default=0))))
            for mix in _mixes(
                memory_of(costs, recompute=recompute),
                link,
                tuple(templates.items()),
                workers=len(cluster.workers),
                min_pipelines=fault_tolerance + 1,
                depths=depths,
            ):
                pipelines = tuple((templates[nodes].cut_points, share) for nodes, share in mix.pipelines)
                yield Layout(pipelines, recompute, mix.time_s)

    return fastest_layout("oobleck", layouts(), costs, split_backward=split_backward, current=current)


class OobleckPlanner:
    """The planner and the policy of Oobleck, as the registry has them."""

    @staticmethod
    def plan(costs: CostModel, *, current: Placement | None) -> FoundPlan | None:
        chosen = oobleck_plan(costs, current=current)
        return None if chosen is None else chosen.found

    @staticmethod
    def propose(name: str, proposer: ProposalsOnWorkers) -> list[Proposal]:
        """Propose the best combination of templates, and the running pipelines with templates of their new sizes.

        The latter is what the released code does after a loss, and moves less; see `oobleck_plan`. Programs are
        Oobleck's own (1F1B) if backward is fused in the plan; if it is split, they are ours, or Oobleck's if only these
        fit. Oobleck does not say which worker takes which place, so the assignment moves the least.
        """
        context = proposer.context
        live = set(context.live)
        nodes = [sum(worker in live for worker in pipeline) for pipeline in disjoint_pipelines(context.plan)]
        sizes = (None, nodes) if context.lost and sum(nodes) == len(live) else (None,)
        found: list[FoundPlan] = []
        for live_nodes in sizes:
            for split in dict.fromkeys((context.plan.split_backward, False)):
                chosen = oobleck_plan(
                    context.costs, split_backward=split, live_nodes=live_nodes, with_room=True, current=context.held
                )
                if chosen is not None:
                    found.append(chosen.found)
                    break
        if not found:
            return [Proposal(name=name, reason="no combination of templates fits the memory and uses all live workers")]
        return remap_workers(name, found, context)


def reconfigured_pipelines(pipelines: Iterable[Sequence[int]], fewest: int) -> list[list[int]]:
    """Return the workers of each pipeline after losses, as Oobleck reconfigures them; none if there are too few.

    A pipeline that has lost workers takes the template of its new size. One with fewer than `fewest` (n_0) borrows from
    the largest pipeline, and if none can spare any, it is merged with the next smallest: `on_reconfigure` and
    `_merge_pipelines` of `oobleck/execution/engine.py` in branch `develop`.

    Args:
        pipelines: live workers of each pipeline, possibly none.
        fewest: workers of the smallest template.
    """
    left = sorted((list(pipeline) for pipeline in pipelines if pipeline), key=len)
    while left and len(left[0]) < fewest:
        if len(left[-1]) > fewest:
            left[0].append(left[-1].pop())
        elif len(left) > 1:
            left[:2] = [left[0] + left[1]]
        else:
            return []
        left.sort(key=len)
    return left


# Shared by decisions on equally many workers: it makes no difference which ones are lost.
@lru_cache(maxsize=64)
def _mixes(
    memory: OneFOneBMemory,
    link: Link,
    templates: tuple[tuple[int, PipelineTemplate], ...],
    *,
    workers: int,
    min_pipelines: int,
    depths: tuple[int, ...] | None,
) -> list[Mix]:
    """Return the combinations of least estimate, or that of `depths` if templates, micro-batches and memory allow it.

    The estimate is the time of the slowest pipeline plus the all-reduce of the first layer on `link`.
    """
    of_nodes, workload = dict(templates), memory.workload

    @cache
    def time_s(nodes: int, share: int) -> float:
        template = of_nodes[nodes]
        return template.iteration_s(share) if memory.fits_all(template.cut_points, share) else math.inf

    def sync_s(pipelines: int) -> float:
        return link.ring_all_reduce_s(workload.layers[0].gradient_bytes, pipelines)

    if depths is None:
        return LeastMix(
            depths=list(of_nodes),
            workers=workers,
            micro_batches=workload.micro_batches,
            time_s=time_s,
            min_pipelines=min_pipelines,
            sync_s=sync_s,
        ).mixes()
    if not depths or not of_nodes.keys() >= set(depths) or len(depths) > workload.micro_batches:
        return []
    mix = shared_out(depths, workload.micro_batches, time_s, sync_s=sync_s)
    return [mix] if mix.time_s < math.inf else []


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTemplate:
    """A pipeline for a number of nodes.

    Attributes:
        cut_points: the layer after each stage; each node has one stage.
        slowest: number of the slowest stage (k*), from 0; the first of equals.
        slowest_s: seconds of its forward and backward.
        pass_s: T1, seconds of one micro-batch through all stages and back.
        tail_s: T3, the same from the slowest stage on.
    """

    cut_points: CutPoints
    slowest: int
    slowest_s: float
    pass_s: float
    tail_s: float

    def iteration_s(self, micro_batches: int) -> float:
        """Return T1 + T2 + T3, with T2 = (N_b - S + k* - 1) t_k*; linear in the micro-batches (N_b)."""
        repeated = micro_batches - len(self.cut_points) + self.slowest - 1
        return self.pass_s + repeated * self.slowest_s + self.tail_s


def pipeline_templates(
    costs: CostModel, *, fault_tolerance: int = 0, recompute: bool = False, with_room: bool = False
) -> dict[int, PipelineTemplate]:
    """Return templates by number of nodes, ascending, for n_0, n_0 + 1, ... N - f n_0 nodes.

    n_0 is the fewest nodes that hold the model under 1F1B, with 4 S micro-batches or the step's if those are fewer. See
    `oobleck_plan`.

    Such a pipeline may leave no room for arriving layers, so that its nodes cannot switch to another template. With
    `with_room`, n_0 is the fewest nodes that can each receive any stage beside their own, if there is such a number.

    Args:
        costs: costs of the workload on the live workers.
        fault_tolerance: f, the losses that every layer survives.
        recompute: True if all stages recompute activations.
        with_room: True if nodes have room to be reconfigured.

    Raises:
        ConfigError: negative `fault_tolerance`.
    """
    if fault_tolerance < 0:
        raise ConfigError(f"fault_tolerance must be zero or more; got {fault_tolerance}")
    memory = memory_of(costs, recompute=recompute)
    cutter = _cutter(memory)
    most = min(len(costs.cluster.workers), len(costs.workload.layers))
    found: dict[int, PipelineTemplate] = {}
    for nodes in range(1, most + 1):
        if found and nodes > len(costs.cluster.workers) - fault_tolerance * next(iter(found)):
            break
        if (template := cutter.template(nodes)) is not None:
            found[nodes] = template
    if not with_room or (max_bytes := memory.capacity_bytes) is None:
        return found
    # Between two steps a node holds its stage with gradients, and receives the state of another such stage.
    layers = costs.workload.layers
    held = list(accumulate((2 * layer.held_bytes - layer.gradient_bytes for layer in layers), initial=0))

    def has_room(template: PipelineTemplate) -> bool:
        stages = pairwise((0, *template.cut_points))
        return max(held[stop] - held[start] for start, stop in stages) <= max_bytes

    fewest = next((nodes for nodes in found if has_room(found[nodes])), 0)
    return {nodes: template for nodes, template in found.items() if nodes >= fewest}


class _Cutter:
    """Cuts of least T1 + T2 + T3, by number of nodes.

    All cuts have equal T1, so only the slowest stage matters: its layers, and how many stages are ahead of it. The
    other stages may be any that are not slower.
    """

    def __init__(self, memory: OneFOneBMemory) -> None:
        workload = memory.workload
        layers = (workload.recomputed() if memory.recompute else workload).layers
        self._num_layers = len(layers)
        self._micro_batches = workload.micro_batches
        self._memory = memory
        self._overhead_s = 2 * workload.operation_overhead_s
        self.template = cache(self._template)
        self._until_s = list(accumulate((layer.total_s for layer in layers), initial=0.0))
        stages = ((start, stop) for start in range(len(layers)) for stop in range(start + 1, len(layers) + 1))
        self._by_time = sorted((self._stage_s(*stage), *stage) for stage in stages)

    def _template(self, nodes: int) -> PipelineTemplate | None:
        """Return the best cut for so many nodes; None if none fits."""
        best: PipelineTemplate | None = None
        best_s = math.inf
        whole_s = self._until_s[-1] + nodes * self._overhead_s
        for slowest_s, start, stop in self._by_time:
            if nodes * slowest_s < whole_s * (1 - SUM_ROUNDING):
                continue
            # The least estimate: k* = 0, and no stage after the slowest.
            if whole_s + (_PER_STAGE - 1) * nodes * slowest_s >= best_s:
                break
            for position in range(max(0, nodes - self._num_layers + stop - 1), min(start, nodes - 1) + 1):
                if self._estimate_s(nodes, position, start, slowest_s) >= best_s * (1 - SUM_ROUNDING):
                    continue
                cut_points = self._around(nodes, position, start, stop)
                if cut_points is not None:
                    best = self._of(cut_points)
                    best_s = best.iteration_s(_PER_STAGE * nodes)
        return best

    def _estimate_s(self, nodes: int, slowest: int, start: int, slowest_s: float) -> float:
        whole_s = self._until_s[-1] + nodes * self._overhead_s
        tail_s = self._until_s[-1] - self._until_s[start] + (nodes - slowest) * self._overhead_s
        return whole_s + ((_PER_STAGE - 1) * nodes + slowest - 1) * slowest_s + tail_s

    def _of(self, cut_points: CutPoints) -> PipelineTemplate:
        times_s = [self._stage_s(start, stop) for start, stop in pairwise((0, *cut_points))]
        # The estimate depends on which of equal stages is chosen, so rounding must not decide.
        slowest = next(stage for stage, own_s in enumerate(times_s) if own_s >= max(times_s) * (1 - SUM_ROUNDING))
        return PipelineTemplate(
            cut_points=cut_points,
            slowest=slowest,
            slowest_s=times_s[slowest],
            pass_s=math.fsum(times_s),
            tail_s=math.fsum(times_s[slowest:]),
        )

    def _around(self, nodes: int, position: int, start: int, stop: int) -> CutPoints | None:
        """Return a cut with this stage at this position and no slower stage; None if none fits."""
        if not self._fits(nodes, position, start, stop):
            return None
        max_s = self._stage_s(start, stop) * (1 + SUM_ROUNDING)
        ahead = self._cut(nodes, range(position), 0, start, max_s)
        after = None if ahead is None else self._cut(nodes, range(position + 1, nodes), stop, self._num_layers, max_s)
        return None if ahead is None or after is None else (*ahead, stop, *after)

    def _cut(self, nodes: int, positions: range, first: int, last: int, max_s: float) -> CutPoints | None:
        """Return stages at these positions for layers `first` to `last`, each as large as memory and the rest allow."""

        @cache
        def cut(position: int, start: int) -> CutPoints | None:
            left = positions.stop - position
            if not left:
                return () if start == last else None
            if self._until_s[last] - self._until_s[start] + left * self._overhead_s <= left * max_s:
                for stop in range(last - left + 1, start, -1):
                    if self._stage_s(start, stop) <= max_s and self._fits(nodes, position, start, stop):
                        rest = cut(position + 1, stop)
                        if rest is not None:
                            return (stop, *rest)
            return None

        return cut(positions.start, first)

    def _fits(self, nodes: int, position: int, start: int, stop: int) -> bool:
        share = min(_PER_STAGE * nodes, self._micro_batches)
        return self._memory.fits(start, stop, to_end=nodes - position, micro_batches=share)

    def _stage_s(self, start: int, stop: int) -> float:
        return self._until_s[stop] - self._until_s[start] + self._overhead_s


_cutter = lru_cache(maxsize=8)(_Cutter)
