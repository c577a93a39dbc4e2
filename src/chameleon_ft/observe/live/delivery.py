"""Delivers the records of a run to views of another process than the coordinator's."""

from __future__ import annotations

import logging

from chameleon_ft.observe.recorder import RecordLine, View
from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OtherRecord,
    OutcomeRecord,
    RunInfo,
    StepRecord,
)
from chameleon_ft.observe.story import record_of

__all__ = ["Delivery", "show"]

_logger = logging.getLogger(__name__)


def show(line: RecordLine, view: View) -> None:
    """Show a line of a run's files in a view, like the `Recorder` that wrote it."""
    name, fields = line
    if name == "metrics":
        view.step(StepRecord.from_json(fields))
        return
    match record_of(fields):
        case FailureRecord() as record:
            view.failure(record)
        case FailureCostRecord() as record:
            view.failure_cost(record)
        case OutcomeRecord() as record:
            view.outcome(record)
        case JoinRecord() as record:
            view.join(record)
        case OtherRecord(event="started"):
            view.started(RunInfo.from_json(fields))
        case OtherRecord(event=event, fields=others):
            view.event(event, others)


class Delivery:
    """Shows lines in a view that may fail: that is logged once, and once when it works again.

    Args:
        name: of the view, for the log.
    """

    def __init__(self, name: str, view: View) -> None:
        self._name = name
        self._view = view
        self._failed = 0

    def show(self, line: RecordLine) -> None:
        """Show a line; never raises."""
        try:
            show(line, self._view)
        except Exception as error:  # noqa: BLE001 - of a library, a disk or a network that the run does not depend on
            if not self._failed:
                _logger.warning("%s does not take records: %s: %s", self._name, type(error).__name__, error)
            self._failed += 1
        else:
            if self._failed:
                _logger.warning("%s takes records again; %d were lost", self._name, self._failed)
            self._failed = 0

    def close(self) -> None:
        """End the view; never raises."""
        try:
            self._view.close()
        except Exception as error:  # noqa: BLE001
            _logger.warning("%s could not be ended: %s: %s", self._name, type(error).__name__, error)
