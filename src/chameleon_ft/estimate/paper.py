"""The closed forms of the Chameleon paper (arXiv 2508.21613), to be laid beside our own estimates.

They are reported, not quoted: taken from public notes of a reproduction (DESIGN section 12). Messages are free in them,
workers equal, and operations without overhead. `rerouted_step_s` is known to disagree with a replay: too low for one
failure, too high for most that are spread over stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from chameleon_ft.errors import PlanError

__all__ = [
    "pipeline_step_s",
    "rerouted_step_s",
    "samples_per_second",
    "stage_bytes",
    "symmetric_step_s",
    "unequal_step_s",
]


def symmetric_step_s(*, stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Equal pipelines: (N_pp + N_m - 1) (t_f + t_b), for `micro_batches` (N_m) in each."""
    return (stages + micro_batches - 1) * (forward_s + backward_s)


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
    orders = [_one_f_one_b(depth - stage - 1, micro_batches) for stage in range(depth)]
    done: dict[tuple[bool, int, int], float] = {}
    free_s = [0.0] * depth
    position = [0] * depth
    remaining = sum(map(len, orders))
    while remaining:
        for stage in range(depth):
            while position[stage] < len(orders[stage]):
                forward, micro_batch = orders[stage][position[stage]]
                needs = _predecessor(forward, stage, micro_batch, depth)
                if needs is not None and needs not in done:
                    break
                start_s = max(free_s[stage], 0.0 if needs is None else done[needs])
                free_s[stage] = start_s + (forward_s if forward else backward_s)[stage]
                done[forward, stage, micro_batch] = free_s[stage]
                position[stage] += 1
                remaining -= 1
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


def stage_bytes(*, stage: int, stages: int, layers: int, state_bytes: float, activation_bytes: float) -> float:
    """Bytes of stage i, from 0: L_i (m_p + m_g + m_opt) + (N_pp - i) L_i m_act.

    `state_bytes` is m_p + m_g + m_opt and `activation_bytes` m_act, both of one of the stage's `layers` (L_i).
    """
    return layers * (state_bytes + (stages - stage) * activation_bytes)


def samples_per_second(*, samples: int, step_s: float, transition_s: float, until_failure_s: float) -> float:
    """What the choice maximises: (B / t_step) (D - t_transition) / D; t_transition of rerouting is taken to be zero.

    `samples` (B) are those of a step, `until_failure_s` (D) the time until the next failure. Never negative.
    """
    return samples / step_s * max(0.0, until_failure_s - transition_s) / until_failure_s


def _one_f_one_b(warm_up: int, micro_batches: int) -> list[tuple[bool, int]]:
    """(whether it is a forward, micro-batch) in the order of 1F1B after so many forwards."""
    first = min(warm_up, micro_batches)
    order = [(True, m) for m in range(first)]
    for m in range(micro_batches):
        if first + m < micro_batches:
            order.append((True, first + m))
        order.append((False, m))
    return order


def _predecessor(forward: bool, stage: int, micro_batch: int, depth: int) -> tuple[bool, int, int] | None:
    if forward:
        return (True, stage - 1, micro_batch) if stage else None
    return (False, stage + 1, micro_batch) if stage < depth - 1 else (True, stage, micro_batch)
