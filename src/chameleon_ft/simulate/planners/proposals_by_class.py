"""All kinds of plans as layouts whose pipelines are counted by class."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from chameleon_ft.recovery import prefers_rerouting
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, LayoutPipeline, arranged
from chameleon_ft.simulate.by_class.pipeline_classes import PipelineClass
from chameleon_ft.simulate.by_class.world import World
from chameleon_ft.simulate.planners.options import Option, SimulatorState
from chameleon_ft.simulate.planners.published import estimated_mix, oobleck_mixes, paper_mixes, reconfigured, rerouted_s

__all__ = ["ProposalsByClass"]


class ProposalsByClass:
    """Proposes options for a layout, with gaps where workers are lost: a method for each `recovery.policies.Kind`.

    Args:
        model: costs of layouts and of changes.
        layout: what the workers hold.
        state: of the simulation.
        is_intact: whether no worker of the layout has been lost since it was reached.
    """

    def __init__(self, model: World, layout: ClusterLayout, state: SimulatorState, *, is_intact: bool) -> None:
        self.model = model
        self.layout = layout
        self.state = state
        self.is_intact = is_intact

    def keep(self) -> list[Option]:
        """The layout as it is, if no worker is lost: as in `recovery.decide`, whatever the policy proposes.

        All other methods are those of `Kind`.
        """
        return self._options("as-it-is", [self.layout]) if self.is_intact else []

    def reroute(self, name: str) -> list[Option]:
        return self._options(name, [self.layout])

    def reroute_decoupled(self, name: str) -> list[Option]:
        # Backward is split or fused in all layouts of a simulation by class.
        return []

    def rejoin(self, name: str) -> list[Option]:
        idle = _idle(self.layout, self.state)
        return self._options(name, [_filled(self.layout, idle)] if idle and self.layout.has_gaps else [])

    def repair(self, name: str) -> list[Option]:
        repaired = _repaired(self.model, self.layout, self.state)
        return self._options(name, [] if repaired is None else [repaired])

    def repartition(self, name: str) -> list[Option]:
        return self._options(name, self.model.replicated_layouts(self.layout, self.state.speeds))

    def drop_pipelines(self, name: str) -> list[Option]:
        whole = [pipeline for pipeline in self.layout.pipelines if pipeline.whole]
        if not whole:
            return []
        cut = whole[0].cut
        idle = _idle(ClusterLayout(tuple(whole)), self.state)
        made = [LayoutPipeline(cut, group) for group in zip(*[iter(idle)] * cut.depth, strict=False)]
        return self._options(name, [ClusterLayout((*whole, *made))])

    def restart(self, name: str) -> list[Option]:
        """Equal pipelines; if no worker is lost, a checkpoint is written first, and starting again has to pay."""
        layout = self.model.equal_layout(ClusterLayout(()), self.state.speeds)
        return self._from_checkpoint(name, [] if layout is None else [layout])

    def begin_anew(self, name: str) -> list[Option]:
        """If no worker is lost, a checkpoint is written first. If some layer has no holder, there is no choice."""
        held = {layer for layers in set(self.layout.held().values()) for layer in layers}
        if not self.model.parameters.has_checkpoints or len(held) < self.model.pipelines.num_layers:
            return []
        return self._from_checkpoint(name, self.model.replicated_layouts(ClusterLayout(()), self.state.speeds))

    def _from_checkpoint(self, name: str, layouts: Sequence[ClusterLayout]) -> list[Option]:
        return [
            self.model.from_checkpoint(name, layout, step_s, self.state, saves_first=self.is_intact)
            for layout in layouts
            if (step_s := self.model.step_s(layout, self.state.speeds)) is not None
        ]

    def oobleck(self, name: str) -> list[Option]:
        """As in runs: the best combination, and the templates of the pipelines' new sizes; recomputing, and not."""
        layouts: list[ClusterLayout] = []
        for recompute in (True, False):
            mixes = self.model.noted(f"oobleck {recompute}", partial(oobleck_mixes, recompute=recompute))
            found = estimated_mix(mixes, self.layout, self.state.speeds)
            layouts += [] if found is None else self.model.placements(found[0])
            smaller = reconfigured(mixes, self.layout)
            layouts += [] if smaller is None else [smaller]
        return self._options(name, layouts)

    def paper(self, name: str) -> list[Option]:
        found = estimated_mix(self.model.noted("paper", paper_mixes), self.layout, self.state.speeds)
        options = self._options(f"{name}-repartition", [] if found is None else self.model.placements(found[0]))
        step_s, transition_s = math.inf, 0.0
        if found is not None and options:
            step_s, transition_s = found[1], max(0.0, options[0].stall_s - self.model.phases(self.state).total_s)
        reroutes = prefers_rerouting(
            samples=self.model.costs.workload.samples,
            step_s=step_s,
            transition_s=transition_s,
            rerouted_s=rerouted_s(self.model, self.layout),
            horizon_s=self.state.horizon_s,
        )
        return self.reroute(f"{name}-reroute") if reroutes else options

    def _options(self, name: str, layouts: Sequence[ClusterLayout]) -> list[Option]:
        same = set(self.layout.pipelines)
        kept = (self.layout if set(each.pipelines) == same else each for each in layouts)
        options = (self.model.option(name, each, self.layout, self.state, intact=self.is_intact) for each in kept)
        return [option for option in options if option is not None]


def _idle(layout: ClusterLayout, state: SimulatorState) -> list[int]:
    """Live workers that are not part of a layout."""
    return sorted(worker for worker in state.speeds if worker not in layout.used)


def _filled(layout: ClusterLayout, idle: Sequence[int]) -> ClusterLayout:
    """The layout with idle workers in the gaps; pipelines that lack the fewest come first."""
    waiting = list(idle)
    gaps = sorted(
        (index for index, pipeline in enumerate(layout.pipelines) if not pipeline.whole),
        key=lambda index: (layout.pipelines[index].workers.count(None), index),
    )
    pipelines = list(layout.pipelines)
    for index in gaps:
        workers = tuple(waiting.pop(0) if worker is None and waiting else worker for worker in pipelines[index].workers)
        pipelines[index] = LayoutPipeline(pipelines[index].cut, workers)
    return ClusterLayout(tuple(pipelines))


def _repaired(model: World, layout: ClusterLayout, state: SimulatorState) -> ClusterLayout | None:
    """Keep whole pipelines; form pipelines of about equal depth from the rest of broken ones and from idle workers.

    Pipelines that are shorter than others are cut anew as well if there are idle workers for them. None if no pipeline
    is whole.
    """
    whole = [pipeline for pipeline in layout.pipelines if pipeline.whole]
    if not whole:
        return None
    depth = max(pipeline.cut.depth for pipeline in whole)
    idle = len(_idle(layout, state))
    broken = sum(len(pipeline.live) for pipeline in layout.pipelines if not pipeline.whole)
    while idle > -broken % depth and len(whole) > 1:
        shortest = min(whole, key=lambda pipeline: pipeline.cut.depth)
        if shortest.cut.depth == depth:
            break
        whole.remove(shortest)
        broken += shortest.cut.depth
    left = _idle(ClusterLayout(tuple(whole)), state)
    cuts = [pipeline.cut for pipeline in whole]
    counts = Counter(cuts)
    average = sum(cut.depth for cut in cuts) / len(cuts)
    number = max(1, round(len(left) / average)) if left else 0
    for each in range(number):
        size = min(len(left) // number + (each < len(left) % number), model.pipelines.num_layers)
        share = max(1, model.times.micro_batches * size // len(state.speeds))
        fitting = model.pipelines.fitting(PipelineClass(model.pipelines.even_cut(size)), share)
        # What is left may be too little to hold the model.
        if fitting is not None:
            counts[fitting.cut] += 1
    kept = sorted(worker for pipeline in whole for worker in pipeline.workers if worker is not None)
    return (
        arranged(counts, sorted({*kept, *left}), ClusterLayout(tuple(whole))) if left else ClusterLayout(tuple(whole))
    )
