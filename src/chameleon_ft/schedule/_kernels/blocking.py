"""Running a program with channels that hold one message."""

from __future__ import annotations

import numpy as np

from chameleon_ft.schedule._kernels.jit import kernel
from chameleon_ft.schedule._records import Booleans, Integers


@kernel
def run_blocking(
    starts: Integers, sources: Integers, targets: Integers, senders: Integers, receivers: Integers
) -> tuple[Integers, Booleans]:
    """Run all workers until each has ended or is blocked, if a send into a full channel blocks.

    Args:
        starts: the first operation of each worker, and in the end the number of operations; int64 [workers + 1].
        sources, targets: by operation, the channel that it receives from and sends into, or -1; int64 [operations].
        senders, receivers: by channel, the workers at its ends; int64 [channels].

    Returns:
        By worker, the operation that it is blocked at or its end, and whether it has run that but not sent the result.
    """
    count = len(starts) - 1
    position = starts[:-1].copy()
    sending = np.zeros(count, np.bool_)
    full = np.zeros(len(senders), np.bool_)
    waiting = np.arange(count)
    is_waiting = np.ones(count, np.bool_)
    number = count
    while number:
        number -= 1
        worker = waiting[number]
        is_waiting[worker] = False
        while position[worker] < starts[worker + 1]:
            source, target = sources[position[worker]], targets[position[worker]]
            woken = -1
            if not sending[worker]:
                if source >= 0:
                    if not full[source]:
                        break
                    full[source] = False
                    woken = senders[source]
                sending[worker] = True
            elif target < 0 or not full[target]:
                if target >= 0:
                    full[target] = True
                    woken = receivers[target]
                sending[worker] = False
                position[worker] += 1
            else:
                break
            if woken >= 0 and woken != worker and not is_waiting[woken]:
                waiting[number] = woken
                is_waiting[woken] = True
                number += 1
    return position, sending
