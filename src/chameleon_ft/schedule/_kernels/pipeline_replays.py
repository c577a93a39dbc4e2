"""The replay of one pipeline whose stages are all on workers of their own: what `replays` does for any orders."""

from __future__ import annotations

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Floats, Integers, Records


@lean_kernel
def replay(
    stages: Records, codes: Integers, micro_batches: int, place: Integers, free_s: Floats, ends_s: Floats
) -> None:
    """Fill in when every operation ends, by code, if each worker runs its own in this order, which must be possible.

    Args:
        stages: `STAGE`, with seconds.
        codes: what each worker runs, one worker after the other.
        micro_batches: their number.
        place, free_s: room by stage.
        ends_s: by code, to be filled in.
    """
    depth = len(stages)
    ends_s[:] = -1.0
    place[:] = 0
    free_s[:] = 0.0
    left = len(codes)
    while left:
        # Activations go down, gradients go up: each way takes along what has come to wait on the other.
        for stage in range(depth):
            left -= _go_on(stages, codes, micro_batches, stage, place, free_s, ends_s)
        for stage in range(depth - 2, -1, -1):
            left -= _go_on(stages, codes, micro_batches, stage, place, free_s, ends_s)


@lean_part
def _go_on(
    stages: Records, codes: Integers, micro_batches: int, stage: int, place: Integers, free_s: Floats, ends_s: Floats
) -> int:
    """Run what a worker has everything for; returns how many operations that was."""
    depth = len(stages)
    own, hops, per_stage = stages[stage], micro_batches * depth, len(codes) // depth
    now, done = free_s[stage], place[stage]
    while done < per_stage:
        code = codes[stage * per_stage + done]
        needed, delay_s, duration_s = -1, 0.0, own.weight_s
        if code < hops:
            duration_s = own.forward_s
            if stage > 0:
                needed, delay_s = code - 1, own.up_s
        elif code < 2 * hops:
            duration_s = own.backward_s
            if stage < depth - 1:
                needed, delay_s = code + 1, own.down_s
            else:
                needed = code - hops
        if needed >= 0:
            if ends_s[needed] < 0:
                break
            now = max(now, ends_s[needed] + delay_s)
        now += duration_s
        ends_s[code] = now
        done += 1
    count: int = done - place[stage]
    free_s[stage], place[stage] = now, done
    return count
