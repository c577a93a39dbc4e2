"""Incidents of a run, sent to an address as JSON."""

from __future__ import annotations

import json
import urllib.request
from typing import Final

from chameleon_ft.events.records import OtherRecord, RunRecord, StepRecord
from chameleon_ft.report.story import notices_of
from chameleon_ft.storage.recorder import line_of

_TIMEOUT_S: Final = 10.0
_SENT: Final = frozenset(
    {"lost", "bad_step", "checkpoint_failed", "drain_failed", "finished", "hang", "slow", "state_differs", "took_over"}
)
"""Events that are sent beside failures, their costs and outcomes, and switches."""


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

    def take(self, record: RunRecord, *, at: float) -> bool:
        """See `Sink`."""
        match record:
            case StepRecord():
                return False
            case OtherRecord(event=event) if event not in _SENT:
                return False
        values = record.to_json()
        lines = [
            line
            for notice in notices_of(record)
            for line in (notice.title, *(f"{key}: {value}" for key, value in notice.facts))
        ]
        event = line_of(record)[1]["event"]
        text = "\n".join(lines) or f"{event}: " + ", ".join(f"{key} {value}" for key, value in values.items())
        body = {"run": self._run, "event": event, "text": f"{self._run}: {text}", "record": values}
        request = urllib.request.Request(
            self._url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return True

    def close(self) -> None:
        """See `Sink`."""
