"""The worker whose memory is counted without its peers."""

from __future__ import annotations

from benchmarks._worker_memory import Alone
from chameleon_ft.config import Batch
from chameleon_ft.plan import LayerRange, Placement
from tests.worker.toy import toy_job


def test_a_holder_without_operations_holds_the_state_of_the_optimizer() -> None:
    """Other holders give it the sums of their gradients."""
    layers = LayerRange(0, 2)
    idle = Alone(
        job=toy_job(2),
        batch=Batch(micro_batches=2, micro_batch_size=2),
        boundaries=(),
        placement=Placement(2, {0: (layers,), 1: (layers,)}),
        worker=1,
        operations=(),
    )
    held = idle.train()
    for layer in layers:
        assert any(key.startswith("optimizer/") for key in held.state_of(layer))
