"""The holders of each layer of a layout, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout


def layer_rings(layout: ClusterLayout, numbers: NDArray[np.int64], num_layers: int) -> list[NDArray[np.int64]] | None:
    """Return the different sets of workers that hold some layer, as `LossRisk.of_rings` takes them.

    Args:
        layout: gaps are allowed.
        numbers: of the host of each worker.
        num_layers: of the model.

    Returns:
        Arrays of workers; None if some layer has no holder.
    """
    places = layout.places
    order = np.lexsort((places.workers, numbers[places.workers]))
    # Neighbouring layers mostly belong to the same stages.
    codes, stage_of = np.unique((places.starts * (num_layers + 1) + places.stops)[order], return_inverse=True)
    starts, stops = np.divmod(codes, num_layers + 1)
    layers = np.arange(num_layers)[:, np.newaxis]
    holds = (starts <= layers) & (layers < stops)  # (layers, stages)
    if not holds.any(axis=1).all():
        return None
    return [places.workers[order[own[stage_of]]] for own in np.unique(holds, axis=0)]
