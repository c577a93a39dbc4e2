"""The layout after a fall back to a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.recovery import largest_symmetric_layout
from chameleon_ft.recovery.layout import replicated_layout
from tests.golden import refused


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 24), st.integers(1, 8), st.booleans())
def test_no_layout_uses_more_workers_or_is_nearer_to_the_depth_wanted(
    live: int, layers: int, micro_batches: int, preferred_pp: int, split: bool
) -> None:
    workers = [10 + 3 * worker for worker in range(live)]

    plan = largest_symmetric_layout(
        live=workers,
        layer_costs=[1.0] * layers,
        micro_batches=micro_batches,
        preferred_pp=preferred_pp,
        split_backward=split,
    )

    pp = len(plan.routes[0].hops)
    dp = len(plan.workers) // pp
    assert set(plan.workers) <= set(workers)
    assert plan.micro_batches == micro_batches
    assert plan.split_backward == split
    assert micro_batches % dp == 0
    possible = [
        (d, p) for d in range(1, live + 1) for p in range(1, layers + 1) if micro_batches % d == 0 and d * p <= live
    ]
    most = max(d * p for d, p in possible)
    assert dp * pp == most
    assert abs(pp - preferred_pp) == min(abs(p - preferred_pp) for d, p in possible if d * p == most)


@pytest.mark.parametrize(
    ("live", "layer_costs", "micro_batches"),
    [([], [1.0], 1), ([0], [], 1), ([0], [1.0], 0)],
)
def test_nothing_comes_of_nothing(live: list[int], layer_costs: list[float], micro_batches: int) -> None:
    with refused(PlanError):
        largest_symmetric_layout(live=live, layer_costs=layer_costs, micro_batches=micro_batches, preferred_pp=1)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 24), st.integers(1, 8), st.booleans())
def test_every_layer_has_as_many_holders_as_asked_for(
    live: int, layers: int, micro_batches: int, copies: int, split: bool
) -> None:
    workers = [10 + 3 * worker for worker in range(live)]
    arguments = {"workers": workers, "layer_costs": [1.0] * layers, "micro_batches": micro_batches}
    if copies > min(live, micro_batches):
        with pytest.raises(PlanError, match="need as many workers"):
            replicated_layout(**arguments, copies=copies)  # type: ignore[arg-type]
        return
    plan = replicated_layout(**arguments, copies=copies, split_backward=split)  # type: ignore[arg-type]
    assert plan.micro_batches == micro_batches
    assert len(plan.workers) == min(live, copies * layers)
    assert all(len(plan.placement.holders(layer)) == copies for layer in range(layers))
    pipelines = {route.hops for route in plan.routes}
    assert len(pipelines) == copies, "each has a share"
    depths = [len(hops) for hops in pipelines]
    assert max(depths) - min(depths) <= 1
