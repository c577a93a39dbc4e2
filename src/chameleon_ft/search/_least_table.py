"""The bounds on pipelines of workers of one kind by depth and micro-batches, as arrays that kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from chameleon_ft.search._bounds import PipelineBounds


class LeastTable:
    """What `bounds.least_s` says, window by window as it is asked for; `arrays` is what there is."""

    def __init__(self, bounds: PipelineBounds, depths: int, width: int) -> None:
        # Here, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.search._depth_kernel import Least

        self._bounds = bounds
        self._width = width
        windows = -(-bounds.pipelines.micro_batches // width)
        # Zeros take no memory before they are written; most of these never are.
        self.arrays = Least(
            time_s=np.zeros((depths, windows * width)),
            known=np.zeros((depths, windows), np.bool_),
            guess=np.zeros(depths, np.int64),
        )

    def fill(self, depth: int, window: int) -> None:
        """Fill in a window of pipelines of `depth` stages and one more, and of those for which that is known too."""
        first = window * self._width
        chain = self._bounds.chain(0, depth + 1, (), window)
        self.arrays.time_s[: chain.known, first : first + self._width] = chain.ended_s[1 : chain.known + 1, :, 0]
        self.arrays.known[: chain.known, window] = True
