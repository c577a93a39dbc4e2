"""The best schedule of one pipeline, from its times alone: a search compares thousands before it makes a program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chameleon_ft.schedule._network import pipeline_network
from chameleon_ft.schedule._records import Floats, Integers
from chameleon_ft.schedule.heuristics import ROUNDING, Problem
from chameleon_ft.schedule.local_search import best_schedule
from chameleon_ft.schedule.pipeline_times import PipelineTimes

__all__ = ["PipelineSchedule", "pipeline_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSchedule:
    """The order of operations on each stage of a pipeline, and the times that result.

    Codes are those of `Network`: the hop of micro-batch m at stage s has the slot m * stages + s.

    Attributes:
        times, split_backward, micro_batches, ceiling: what is scheduled, as for `pipeline_schedule`.
        limits: what each stage was allowed to have in flight, to keep and to defer; int64 [3, stages].
        codes: of all operations, stage by stage, each stage's in its order; int64 [operations].
        ends_s: end of each operation by its code; float64 [operations].
        step_s: the latest of these.
    """

    times: PipelineTimes
    split_backward: bool
    micro_batches: int
    ceiling: Integers
    limits: Integers
    codes: Integers
    ends_s: Floats
    step_s: float

    @property
    def orders(self) -> list[Integers]:
        """Codes of operations by stage, in order."""
        return list(self.codes.reshape(self.times.depth, -1))

    @property
    def last_s(self) -> tuple[float, ...]:
        """By stage, the end of its last operation."""
        last = self.codes.reshape(self.times.depth, -1)[:, -1]
        return tuple(self.ends_s[last].tolist())

    def replayed(self, times: PipelineTimes) -> PipelineSchedule:
        """These orders under other times of as many stages, such as those of other links."""
        from chameleon_ft.schedule._kernels.replay import longest_path

        network = pipeline_network(times, self.micro_batches, split_backward=self.split_backward)
        ends_s = longest_path(network.operations, self.codes, network.first)[1]
        return replace(self, times=times, ends_s=ends_s, step_s=float(ends_s.max()))


def pipeline_schedule(
    times: PipelineTimes,
    micro_batches: int,
    *,
    split_backward: bool,
    ceiling: Integers,
    effort: float,
    slack: float = ROUNDING,
) -> PipelineSchedule:
    """The schedule that `best_program` takes for a pipeline with a worker for each stage, alone or beside others.

    Args:
        times: of each stage.
        micro_batches: their number.
        split_backward: whether backward is split.
        ceiling: by stage, how many micro-batches it may have in flight, keep and defer; int64 [3, stages].
        effort: as for `best_program`. With 0 a few list schedules are made, the best of which is seldom a hundredth
            longer than what much effort finds.
        slack: a step time that is longer than the lower bound by this share is good enough.
    """
    depth = times.depth
    problem = Problem(
        network=pipeline_network(times, micro_batches, split_backward=split_backward),
        default=np.stack([np.arange(depth, 0, -1), *np.full((2, depth), depth)]),
        ceiling=np.ascontiguousarray(ceiling, np.int64),
        depth=depth,
        shared=False,
    )
    found = best_schedule(problem, effort=effort, slack=slack)
    return PipelineSchedule(
        times=times,
        split_backward=split_backward,
        micro_batches=micro_batches,
        ceiling=ceiling,
        limits=found.limits,
        codes=found.codes,
        ends_s=found.ends_s,
        step_s=found.step_s,
    )
