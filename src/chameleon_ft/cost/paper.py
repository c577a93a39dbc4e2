"""The closed forms of the Chameleon paper (arXiv 2508.21613), for comparison with our own estimates.

They are as reported by public notes of a reproduction, with free messages, equal workers and operations without
overhead. `rerouted_step_s` disagrees with a replay: it is too low for one failure, and too high for most failures that
are spread over stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from chameleon_ft.errors import PlanError


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
    input_s = [0.0] * (depth + 1)  # when the output of the stage before is there
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
