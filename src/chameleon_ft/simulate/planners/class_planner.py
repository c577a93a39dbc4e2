"""Policies on thousands of workers: layouts by class of pipelines, scored by the rule of `recovery.decide`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import Placement
from chameleon_ft.recovery import LossRisk
from chameleon_ft.recovery.proposals import Proposer
from chameleon_ft.registry import CLASS_PLANNERS
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, LayoutPipeline, Move, arranged, move_to
from chameleon_ft.simulate.by_class.pipeline_classes import PipelineClass
from chameleon_ft.simulate.by_class.world import World
from chameleon_ft.simulate.planners.planner import Option, Planner, SimulatorState


class ClassPlanner(Planner[ClusterLayout]):
    """A policy by class."""

    def _starts(self, speeds: Mapping[int, float]) -> list[Option[ClusterLayout]]:
        return self._started(self._world.starts(self._policy, speeds, self._start_number), speeds)

    def _restarts(self, state: SimulatorState) -> list[Option[ClusterLayout]]:
        return self._started(self._world.restarts(self._policy, state.speeds, self._start_number), state.speeds)

    def _started(self, layouts: Sequence[ClusterLayout], speeds: Mapping[int, float]) -> list[Option[ClusterLayout]]:
        return [
            Option(policy="start", plan=layout, step_s=step_s)
            for layout in layouts
            if (step_s := self._world.step_s(layout, speeds)) is not None
        ]

    def _without(self, plan: ClusterLayout, lost: frozenset[int]) -> ClusterLayout:
        return plan.without(lost)

    def _placement(self, plan: ClusterLayout) -> Placement:
        held = {worker: (layers,) for worker, layers in plan.held.items()}
        return Placement(self._world.pipelines.num_layers, held)

    def _in_place(self, reached: ClusterLayout, state: SimulatorState) -> Option[ClusterLayout] | None:
        step_s = self._world.step_s(reached, state.speeds)
        name = "reroute" if self._lost else "as-it-is"
        return None if step_s is None else Option(policy=name, plan=reached, step_s=step_s)

    def _risk(self, plan: ClusterLayout, state: SimulatorState) -> LossRisk | None:
        return self._world.risk(plan, state.live)

    def _rings(self, plan: ClusterLayout) -> Sequence[NDArray[np.int64]]:
        rings = self._world.rings(plan)
        assert rings is not None
        return rings

    def _options(self, reached: ClusterLayout, state: SimulatorState) -> list[Option[ClusterLayout]]:
        proposer = ProposalsByClass(
            self._world,
            reached,
            state,
            is_intact=not self._lost,
            migrates=self.salvages and not state.lost,
        )
        return [*proposer.keep(), *self._policy.propose(proposer)]


class ProposalsByClass(Proposer[Option[ClusterLayout]]):
    """Proposes options for a layout, with gaps in place of lost workers.

    Args:
        world: costs, and the fastest layouts.
        layout: what the workers hold.
        state: The known facts.
        is_intact: True if no worker of the layout has been lost since it was reached.
        migrates: True if layers move while the layout trains.
    """

    def __init__(
        self, world: World, layout: ClusterLayout, state: SimulatorState, *, is_intact: bool, migrates: bool
    ) -> None:
        self.world = world
        self.layout = layout
        self.state = state
        self.is_intact = is_intact
        self._migrates = migrates

    def keep(self) -> list[Option[ClusterLayout]]:
        """The layout as it is, if no worker is lost: as in `recovery.decide`, whatever the policy proposes."""
        return self.options("as-it-is", self.layout) if self.is_intact else []

    def reroute(self, name: str) -> list[Option[ClusterLayout]]:
        return self.options(name, self.layout)

    def reroute_decoupled(self, name: str) -> list[Option[ClusterLayout]]:
        # Backward is split or fused in all layouts of a simulation by class.
        return []

    def rejoin(self, name: str) -> list[Option[ClusterLayout]]:
        """Fill the gaps with idle workers, first those of pipelines that lack the fewest."""
        idle = iter(self._outside(self.layout))
        pipelines = list(self.layout.pipelines)
        filled = False
        for index in sorted(range(len(pipelines)), key=lambda index: pipelines[index].workers.count(None)):
            workers = tuple(next(idle, None) if each is None else each for each in pipelines[index].workers)
            filled |= workers != pipelines[index].workers
            pipelines[index] = LayoutPipeline(pipelines[index].cut, workers)
        return self.options(name, ClusterLayout(tuple(pipelines))) if filled else []

    def repair(self, name: str) -> list[Option[ClusterLayout]]:
        """Keep whole pipelines; form pipelines of about equal depth from the rest of broken ones and idle workers.

        Pipelines that are shorter than others are cut anew as well if there are idle workers for them.
        """
        world = self.world
        whole = [pipeline for pipeline in self.layout.pipelines if pipeline.whole]
        if not whole:
            return []
        depth = max(pipeline.cut.depth for pipeline in whole)
        idle = len(self._outside(self.layout))
        broken = sum(len(pipeline.live) for pipeline in self.layout.pipelines if not pipeline.whole)
        while idle > -broken % depth and len(whole) > 1:
            shortest = min(whole, key=lambda pipeline: pipeline.cut.depth)
            if shortest.cut.depth == depth:
                break
            whole.remove(shortest)
            broken += shortest.cut.depth
        kept = ClusterLayout(tuple(whole))
        left = self._outside(kept)
        if not left:
            return self.options(name, kept)
        cuts = Counter(pipeline.cut for pipeline in whole)
        number = max(1, round(len(left) / (sum(pipeline.cut.depth for pipeline in whole) / len(whole))))
        for each in range(number):
            size = min(len(left) // number + (each < len(left) % number), world.pipelines.num_layers)
            share = max(1, world.times.micro_batches * size // len(self.state.speeds))
            fitting = world.pipelines.fitting(PipelineClass(world.pipelines.even_cut(size)), share)
            # The remaining workers may be too few to hold the model.
            if fitting is not None:
                cuts[fitting.cut] += 1
        return self.options(name, arranged(cuts, sorted({*kept.used, *left}), kept))

    def repartition(self, name: str) -> list[Option[ClusterLayout]]:
        return self.options(name, *self.world.replicated_layouts(self.layout, self.state.speeds))

    def drop_pipelines(self, name: str) -> list[Option[ClusterLayout]]:
        whole = [pipeline for pipeline in self.layout.pipelines if pipeline.whole]
        if not whole:
            return []
        cut = whole[0].cut
        idle = self._outside(ClusterLayout(tuple(whole)))
        formed = [LayoutPipeline(cut, group) for group in zip(*[iter(idle)] * cut.depth, strict=False)]
        return self.options(name, ClusterLayout((*whole, *formed)))

    def restart(self, name: str) -> list[Option[ClusterLayout]]:
        """Equal pipelines; if no worker is lost, a checkpoint is written first, and starting again has to pay."""
        layout = self.world.equal_layout(ClusterLayout(()), self.state.speeds)
        return self._from_checkpoint(name, [] if layout is None else [layout])

    def begin_anew(self, name: str) -> list[Option[ClusterLayout]]:
        """If no worker is lost, a checkpoint is written first. If some layer has no holder, there is no choice."""
        has_holders = self.layout.places.holders(self.world.pipelines.num_layers).all()
        if not self.world.parameters.has_checkpoints or not has_holders:
            return []
        return self._from_checkpoint(name, self.world.replicated_layouts(ClusterLayout(()), self.state.speeds))

    def planned_by(self, planner: str) -> list[Option[ClusterLayout]]:
        options: list[Option[ClusterLayout]] = CLASS_PLANNERS[planner](planner, self)
        return options

    def _outside(self, layout: ClusterLayout) -> list[int]:
        """Return the live workers that are not part of a layout, ascending."""
        return sorted(self.state.speeds.keys() - layout.used)

    @property
    def phases(self) -> StallModel:
        """The phases of a stall now. Decisions on the losses of single workers and of single hosts are prepared."""
        state, parameters = self.state, self.world.parameters
        if not state.lost:
            return parameters.after_switch if self._migrates else parameters.after_change
        numbers = self.world.host_numbers
        several = len({numbers[worker] for worker in state.lost}) > 1
        is_prepared = not (state.interrupted or several or state.running_s < parameters.search_s)
        return parameters.after_loss if is_prepared else parameters.after_surprise

    def options(self, name: str, *layouts: ClusterLayout) -> list[Option[ClusterLayout]]:
        """Return the options of the layouts that can be run and reached; to keep an intact layout takes no stall."""
        world, state = self.world, self.state
        same = set(self.layout.pipelines)
        options: list[Option[ClusterLayout]] = []
        for each in layouts:
            layout = self.layout if set(each.pipelines) == same else each
            if (step_s := world.step_s(layout, state.speeds)) is None:
                continue
            if self.is_intact and layout == self.layout:
                options.append(Option(policy=name, plan=layout, step_s=step_s))
            elif (move := Move() if world.redundant else move_to(layout, self.layout, world.pipelines)) is not None:
                behind = self._migrates and self._fits_beside_training(move)
                options.append(
                    Option(
                        policy=name,
                        plan=layout,
                        step_s=step_s,
                        still_s=self.phases.total_s + (0.0 if behind else move.transfer_s),
                        migration_s=move.transfer_s * world.parameters.migration_factor if behind else 0.0,
                        migration_step_s=self._step_s,
                        needs_switch=behind and not self.layout.used.issuperset(layout.used),
                        repeat_s=state.repeat_s,
                        moved_bytes=move.moved_bytes,
                    )
                )
        return options

    @cached_property
    def _step_s(self) -> float:
        """Seconds of a step of the layout as it is."""
        step_s = self.world.step_s(self.layout, self.state.speeds)
        return math.inf if step_s is None else step_s

    def _fits_beside_training(self, move: Move) -> bool:
        """Whether workers have room for the layers that they receive, with gradients, beside a step of the layout."""
        memory_bytes = self.world.pipelines.memory_bytes
        if memory_bytes is None:
            return True
        trains = self.world.peak_bytes(self.layout, self.state.speeds) if move.max_bytes else 0.0
        return max(trains + move.max_bytes, move.max_idle_bytes) <= memory_bytes

    def _from_checkpoint(self, name: str, layouts: Sequence[ClusterLayout]) -> list[Option[ClusterLayout]]:
        """Return options from the last checkpoint or, if no worker is lost, from one that is written first."""
        parameters = self.world.parameters
        return [
            Option(
                policy=name,
                plan=layout,
                step_s=step_s,
                still_s=parameters.restart_cost_s + (parameters.checkpoint_write_s if self.is_intact else 0.0),
                repeat_s=0.0 if self.is_intact else self.state.checkpoints.unsaved_s,
                from_checkpoint=True,
                saves_first=self.is_intact,
            )
            for layout in layouts
            if (step_s := self.world.step_s(layout, self.state.speeds)) is not None
        ]
