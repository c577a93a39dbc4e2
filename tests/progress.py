"""The progress of an interrupted step on each worker, by the replay of its program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.schedule import OperationKind, TimedOperation, Timeline

_SENDS_KEPT = 4


def progress_at(plan: Plan, timeline: Timeline, at_s: float, *, lost: Collection[int]) -> dict[int, StepProgress]:
    """Return what each survivor holds of a step that is interrupted after `at_s` seconds."""
    return {worker: _held(timeline.of(worker), at_s) for worker in plan.workers if worker not in lost}


def _held(operations: Collection[TimedOperation], at_s: float) -> StepProgress:
    saved: set[tuple[int, LayerRange]] = set()
    deferred, contributed = set(saved), set(saved)
    counted: set[int] = set()
    activations: set[tuple[int, int]] = set()
    # By receiver; None for those that a worker hands over to itself, which keeps all of them.
    gradients: dict[int | None, list[tuple[int, int]]] = defaultdict(list)
    for timed in operations:
        if timed.end_s > at_s:
            continue
        operation = timed.operation
        number, layers = operation.micro_batch, operation.layers
        if operation.kind is OperationKind.FORWARD:
            saved.add((number, layers))
            if operation.last:
                counted.add(number)
            else:
                activations.add((number, layers.stop - 1))
        elif operation.kind is OperationKind.WEIGHT_GRAD:
            deferred.remove((number, layers))
            contributed.add((number, layers))
        else:
            saved.remove((number, layers))
            activations.discard((number, layers.stop - 1))
            (contributed if operation.kind is OperationKind.BACKWARD else deferred).add((number, layers))
            if not operation.first:
                gradients[operation.send_to].append((number, layers.start))
    return StepProgress(
        contributed=frozenset(contributed),
        saved=frozenset(saved),
        deferred=frozenset(deferred),
        counted=frozenset(counted),
        activations=frozenset(activations),
        gradients=frozenset(
            each for receiver, own in gradients.items() for each in own[-_SENDS_KEPT if receiver is not None else 0 :]
        ),
    )
