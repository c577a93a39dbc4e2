"""The planner of Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125), to be compared with `find_plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import Stops
from chameleon_ft.search._chosen import Room, fastest_of
from chameleon_ft.search._least_mix import LeastMix
from chameleon_ft.search.baseline import BaselinePlan

__all__ = ["PipelineTemplate", "oobleck_plan", "pipeline_templates"]

# N_b / S, for which templates are made.
_PER_STAGE = 4
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTemplate:
    """How so many nodes make a pipeline.

    Attributes:
        stops: where its stages stop, one for each node.
        slowest: number of the slowest stage (k*), from 0; the first of equals.
        slowest_s: seconds of its forward and backward.
        pass_s: T1, seconds of one micro-batch through all stages and back.
        tail_s: T3, the same from the slowest stage on.
    """

    stops: Stops
    slowest: int
    slowest_s: float
    pass_s: float
    tail_s: float

    @property
    def nodes(self) -> int:
        """Stages, one for each node."""
        return len(self.stops)

    def iteration_s(self, micro_batches: int) -> float:
        """T1 + T2 + T3, with T2 = (N_b - S + k* - 1) t_k*; linear in the micro-batches (N_b)."""
        return self.pass_s + (micro_batches - self.nodes + self.slowest - 1) * self.slowest_s + self.tail_s


def oobleck_plan(
    costs: CostModel,
    *,
    fault_tolerance: int = 0,
    split_backward: bool = False,
    current: Placement | None = None,
) -> BaselinePlan | None:
    """The pipelines that Oobleck makes of all workers of the cluster; None if none fit or none use up the workers.

    Oobleck's, by section of its paper: templates for n_0, n_0 + 1, ... N - f n_0 nodes, n_0 the fewest that hold the
    model (4.1.1); the stages of each so that T1 + T2 + T3 is least for N_b = 4 S (4.1.2); of all combinations of at
    least f + 1 templates that use up the nodes the one of highest throughput (4.2.1); and shares of the micro-batches
    that make all pipelines end at the same time (4.2.2). T2 counts N_b - S + k* - 1 passes of the slowest stage, which
    is right for equal stages; the first code of its authors has 2 S + k* + 1.

    Ours, or simplified: a worker is a node of one accelerator, and so a stage. Stages are cut so that the estimate is
    least of all cuts, where dividing and conquering keeps one cut for each part. The paper's shares make the variance
    of B_i T_i least; here the slowest pipeline ends earliest by the same estimate with B_i for N_b, which is what the
    authors' later code does, and each pipeline has its own share. What 1F1B would not fit by our own count of memory is
    left out; where workers are unequal, the smallest memory counts and their speeds do not. An operation's overhead is
    part of its time, messages and gradient sync are free. No pipeline goes without micro-batches. Combinations are not
    listed one by one: a knapsack finds the best. Of mixes of equal time, two with the fewest and two with the most
    pipelines are replayed, and the fastest is taken. Workers get stages in the two ways of `find_plan`, programs are by
    `best_program`, with split backward if asked for.

    Args:
        costs: what is to be computed, and who is left.
        fault_tolerance: f, losses that leave a copy of every layer; there are at least f + 1 pipelines.
        split_backward: what the chosen plan runs; it does not change the choice, but for memory.
        current: which layers the live workers hold now, for the bytes to move.

    Raises:
        PlanError: no worker is left.
        ConfigError: negative `fault_tolerance`.
    """
    workers, micro_batches = len(costs.cluster.workers), costs.workload.micro_batches
    if not workers:
        raise PlanError("no worker is left to plan for; start at least one")
    room = Room(costs, split_backward=split_backward)
    templates = pipeline_templates(costs, fault_tolerance=fault_tolerance, split_backward=split_backward)

    def time_s(nodes: int, share: int) -> float:
        template = templates[nodes]
        return template.iteration_s(share) if _fits(template, share, room) else math.inf

    mixes = LeastMix(
        list(templates),
        workers=workers,
        micro_batches=micro_batches,
        time_s=time_s,
        least_share=lambda _: 1,
        least_pipelines=fault_tolerance + 1,
    ).mixes()
    if not mixes:
        return None
    found = fastest_of(
        "oobleck",
        [[(templates[nodes].stops, share) for nodes, share in mix.pipelines] for mix in mixes],
        costs,
        split_backward=split_backward,
        current=current,
    )
    return BaselinePlan(found=found, estimate_s=mixes[0].time_s)


def pipeline_templates(
    costs: CostModel, *, fault_tolerance: int = 0, split_backward: bool = False
) -> dict[int, PipelineTemplate]:
    """Templates by number of nodes, ascending: all that fit 4 S micro-batches, or the step's if those are fewer.

    See `oobleck_plan`; raises ConfigError for negative `fault_tolerance`.
    """
    if fault_tolerance < 0:
        raise ConfigError(f"fault_tolerance must be zero or more; got {fault_tolerance}")
    cutter = _Cutter(costs, Room(costs, split_backward=split_backward))
    most = min(len(costs.cluster.workers), len(costs.workload.layers))
    found: dict[int, PipelineTemplate] = {}
    for nodes in range(1, most + 1):
        if found and nodes > len(costs.cluster.workers) - fault_tolerance * next(iter(found)):
            break
        template = cutter.template(nodes)
        if template is not None:
            found[nodes] = template
    return found


def _fits(template: PipelineTemplate, micro_batches: int, room: Room) -> bool:
    starts = (0, *template.stops[:-1])
    return all(
        room.fits(start, stop, to_end=template.nodes - position, micro_batches=micro_batches)
        for position, (start, stop) in enumerate(zip(starts, template.stops, strict=True))
    )


class _Cutter:
    """The stages of least T1 + T2 + T3.

    T1 is the same for all cuts. So all depends on the slowest stage: which layers it has, and how many stages are
    ahead of it. Others may be any that are no slower.
    """

    def __init__(self, costs: CostModel, room: Room) -> None:
        layers = costs.workload.layers
        self._num_layers = len(layers)
        self._micro_batches = costs.workload.micro_batches
        self._room = room
        self._overhead_s = 2 * costs.workload.operation_overhead_s
        self._until_s = list(accumulate((layer.forward_s + layer.backward_s for layer in layers), initial=0.0))
        stages = ((start, stop) for start in range(len(layers)) for stop in range(start + 1, len(layers) + 1))
        self._by_time = sorted((self._stage_s(*stage), *stage) for stage in stages)

    def template(self, nodes: int) -> PipelineTemplate | None:
        """The best cut for so many nodes; None if none fits."""
        best: PipelineTemplate | None = None
        best_s = math.inf
        whole_s = self._until_s[-1] + nodes * self._overhead_s
        for slowest_s, start, stop in self._by_time:
            if nodes * slowest_s < whole_s * (1 - _ROUNDING):
                continue
            # With k* = 0, and nothing after the slowest.
            if whole_s + (_PER_STAGE - 1) * nodes * slowest_s >= best_s:
                break
            for position in range(max(0, nodes - self._num_layers + stop - 1), min(start, nodes - 1) + 1):
                if self._estimate_s(nodes, position, start, slowest_s) >= best_s * (1 - _ROUNDING):
                    continue
                stops = self._around(nodes, position, start, stop)
                if stops is not None:
                    best = self._of(stops)
                    best_s = best.iteration_s(_PER_STAGE * nodes)
        return best

    def _estimate_s(self, nodes: int, slowest: int, start: int, slowest_s: float) -> float:
        whole_s = self._until_s[-1] + nodes * self._overhead_s
        tail_s = self._until_s[-1] - self._until_s[start] + (nodes - slowest) * self._overhead_s
        return whole_s + ((_PER_STAGE - 1) * nodes + slowest - 1) * slowest_s + tail_s

    def _of(self, stops: Stops) -> PipelineTemplate:
        times_s = [self._stage_s(start, stop) for start, stop in pairwise((0, *stops))]
        # The estimate depends on which of equals it is: no matter of rounding.
        slowest = next(stage for stage, own_s in enumerate(times_s) if own_s >= max(times_s) * (1 - _ROUNDING))
        return PipelineTemplate(
            stops=stops,
            slowest=slowest,
            slowest_s=times_s[slowest],
            pass_s=math.fsum(times_s),
            tail_s=math.fsum(times_s[slowest:]),
        )

    def _around(self, nodes: int, position: int, start: int, stop: int) -> Stops | None:
        """A cut with this stage at this position and none slower; None if there is none that fits."""
        if not self._fits(nodes, position, start, stop):
            return None
        most_s = self._stage_s(start, stop) * (1 + _ROUNDING)
        ahead = self._cut(nodes, range(position), 0, start, most_s)
        after = None if ahead is None else self._cut(nodes, range(position + 1, nodes), stop, self._num_layers, most_s)
        return None if ahead is None or after is None else (*ahead, stop, *after)

    def _cut(self, nodes: int, positions: range, first: int, last: int, most_s: float) -> Stops | None:
        """Stages at these positions for layers `first` to `last`, each as large as can be, or smaller where memory
        makes that a dead end."""
        dead: set[tuple[int, int]] = set()

        def cut(position: int, start: int) -> Stops | None:
            left = positions.stop - position
            if not left:
                return () if start == last else None
            if (position, start) in dead:
                return None
            if self._until_s[last] - self._until_s[start] + left * self._overhead_s <= left * most_s:
                for stop in range(last - left + 1, start, -1):
                    if self._stage_s(start, stop) <= most_s and self._fits(nodes, position, start, stop):
                        rest = cut(position + 1, stop)
                        if rest is not None:
                            return (stop, *rest)
            dead.add((position, start))
            return None

        return cut(positions.start, first)

    def _fits(self, nodes: int, position: int, start: int, stop: int) -> bool:
        share = min(_PER_STAGE * nodes, self._micro_batches)
        return self._room.fits(start, stop, to_end=nodes - position, micro_batches=share)

    def _stage_s(self, start: int, stop: int) -> float:
        return self._until_s[stop] - self._until_s[start] + self._overhead_s
