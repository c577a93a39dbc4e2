"""Delivers the lines of a run's files to a sink that may fail."""

from __future__ import annotations

import logging

from chameleon_ft.observe.recorder import RecordLine
from chameleon_ft.observe.records import StepRecord
from chameleon_ft.observe.sinks.sink import Sink
from chameleon_ft.observe.story import record_of

_logger = logging.getLogger(__name__)


class Delivery:
    """Hands lines to a sink that may fail: that is logged once, and once when it works again.

    Args:
        name: of the sink, for the log.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink = sink
        self._failed = 0

    def deliver(self, line: RecordLine) -> None:
        """Deliver a line; never raises."""
        name, fields = line
        try:
            record = StepRecord.from_json(fields) if name == "metrics" else record_of(fields)
            is_delivered = self._sink.take(record, at=fields["time"])
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
