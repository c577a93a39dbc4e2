"""Incidents of a run, sent to an address as JSON."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.recorder import View
from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OtherRecord,
    OutcomeRecord,
    RunRecord,
)
from chameleon_ft.observe.story import tell

__all__ = ["WebhookView"]

_TIMEOUT_S: Final = 10.0
_TOLD: Final = frozenset(
    {"lost", "bad_step", "checkpoint_failed", "drain_failed", "finished", "hang", "slow", "state_differs", "took_over"}
)
"""Events that are sent beside failures, their costs and outcomes, and switches."""


class WebhookView(View):
    """Sends a POST request for each incident and its consequences.

    Its body has `run`, `event`, the `text` to show (which Slack and Mattermost take as it is), and the fields of the
    record. An answer that is an error is raised as OSError.

    Args:
        url: http or https. Raises ConfigError for others.
        run: what to call the run.
    """

    def __init__(self, url: str, *, run: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--webhook {url}: should begin with http:// or https://")
        self._url = url
        self._run = run

    def failure(self, record: FailureRecord) -> None:
        """Send a lost worker, once the recovery is complete."""
        self._send("failure", record)

    def failure_cost(self, record: FailureCostRecord) -> None:
        """Send the cost of an incident."""
        self._send("failure_cost", record)

    def outcome(self, record: OutcomeRecord) -> None:
        """Send the outcome of a decision."""
        self._send("outcome", record)

    def join(self, record: JoinRecord) -> None:
        """Send a switch to another plan."""
        self._send("join", record)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Send another event, if it is about an incident."""
        if name in _TOLD:
            self._send(name, OtherRecord(name, fields))

    def _send(self, name: str, record: RunRecord) -> None:
        told = [
            part for each in tell(record) for part in (each.title, *(f"{key}: {value}" for key, value in each.facts))
        ]
        text = "\n".join(told) or f"{name}: " + ", ".join(f"{key} {value}" for key, value in record.to_json().items())
        body = {"run": self._run, "event": name, "text": f"{self._run}: {text}", "record": record.to_json()}
        request = urllib.request.Request(
            self._url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            pass
