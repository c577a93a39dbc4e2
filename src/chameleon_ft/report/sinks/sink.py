"""The interface of a sink, the delivery of records to one that may fail, and the numbers of a record by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Protocol

from chameleon_ft.events.kinds import CheckpointComplete
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import (
    Evaluation,
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OutcomeRecord,
    StepRecord,
)
from chameleon_ft.report.story import PHASES


class Sink(Protocol):
    """Takes the records of a run in their order, for another tool; both methods may raise anything."""

    def take(self, record: Record) -> bool:
        """Take a record. Return whether it is one that this sink delivers."""

    def close(self) -> None:
        """Deliver all that waits; nothing follows."""


_logger = logging.getLogger(__name__)


class Delivery:
    """Hands records to a sink that may fail: that is logged once, and once when it works again.

    Args:
        name: The name of the sink in the log.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink = sink
        self._failed = 0

    def deliver(self, record: Record) -> None:
        """Deliver a record; never raises."""
        try:
            is_delivered = self._sink.take(record)
        except Exception as error:  # noqa: BLE001 - of a library, a disk or a network that the run does not depend on
            if not self._failed:
                _logger.warning("%s does not take records: %s: %s", self._name, type(error).__name__, error)
            self._failed += 1
        else:
            if self._failed and is_delivered:
                _logger.warning("%s takes records again; %d were lost", self._name, self._failed)
                self._failed = 0

    def close(self) -> None:
        """End the sink; never raises."""
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001
            _logger.warning("%s could not be ended: %s: %s", self._name, type(error).__name__, error)


def scalars_of(record: Record) -> dict[str, float]:
    """Return the numbers of a record that are finite and known; their names have the form "group/name"."""
    return {name: value for name, value in _scalars(record) if value is not None and math.isfinite(value)}


def _scalars(record: Record) -> Iterator[tuple[str, float | None]]:
    match record:
        case StepRecord():
            yield "train/loss", record.loss
            yield "train/grad_norm", record.grad_norm
            yield "train/learning_rate", record.lr
            if record.auxiliary_loss:
                yield "train/auxiliary_loss", record.auxiliary_loss
            for name, value in record.metrics.items():
                yield f"train/{name}", value
            yield "pace/step_s", record.step_s
            yield "pace/data_wait_s", record.data_wait_s
            yield "pace/tokens_per_s", record.tokens_per_s
            yield "run/workers", record.workers
            yield "run/generation", record.generation
        case Evaluation():
            yield "evaluation/loss", record.loss
            yield "evaluation/perplexity", record.perplexity
            for name, value in record.metrics.items():
                yield f"evaluation/{name}", value
            yield "evaluation/seconds", record.seconds
        case FailureRecord():
            for field, name in PHASES.items():
                yield f"failures/{name}_s", getattr(record, field) or 0.0
            yield "failures/stall_s", record.stall_s
            yield "failures/repeated_s", record.repeated_s or 0.0
        case FailureCostRecord():
            yield "failures/cost_steps", record.failure_cost_steps
        case OutcomeRecord():
            yield "predictions/step_error", record.step_error
            yield "predictions/stall_error", record.stall_error
        case JoinRecord():
            yield "switches/stall_s", record.stall_s
        case CheckpointComplete():
            yield "checkpoints/copy_s", record.copy_s
            yield "checkpoints/write_s", record.write_s
