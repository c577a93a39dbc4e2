"""Incidents of a run, sent to an address as JSON."""

from __future__ import annotations

import json
import urllib.request
from typing import Final

from chameleon_ft.events import kinds
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import FailureCostRecord, FailureRecord, JoinRecord, OutcomeRecord
from chameleon_ft.report.story import notices_of

_TIMEOUT_S: Final = 10.0
_SENT: Final = (
    *(FailureRecord, FailureCostRecord, OutcomeRecord, JoinRecord, kinds.Lost, kinds.Hang, kinds.Slow),
    *(kinds.BadStep, kinds.StateDiffers, kinds.CheckpointFailed, kinds.DrainFailed, kinds.TookOver, kinds.Finished),
)
"""Events that are sent."""


class WebhookSink:
    """Sends a POST request for each incident and its consequences.

    Its body has `run`, `event`, the `text` to show (which Slack and Mattermost take as it is), and the fields of the
    record. An answer that is an error is raised as OSError.

    Args:
        url: http or https.
        run: what to call the run.
    """

    def __init__(self, url: str, *, run: str) -> None:
        self._url = url
        self._run = run

    def take(self, record: Record) -> bool:
        """See `Sink`."""
        if not isinstance(record, _SENT):
            return False
        values = record.values()
        lines = [
            line
            for notice in notices_of(record)
            for line in (notice.title, *(f"{key}: {value}" for key, value in notice.facts))
        ]
        text = "\n".join(lines) or f"{record.name}: " + ", ".join(f"{key} {value}" for key, value in values.items())
        body = {"run": self._run, "event": record.name, "text": f"{self._run}: {text}", "record": values}
        request = urllib.request.Request(
            self._url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return True

    def close(self) -> None:
        """See `Sink`."""
