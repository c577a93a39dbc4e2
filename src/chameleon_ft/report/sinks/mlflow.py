"""The records of a run in MLflow; importing this module loads mlflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

# Of the library, to its makers.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from chameleon_ft.report.sinks.trackers import Delivered, facts_of
from chameleon_ft.report.story import Notice
from chameleon_ft.storage.files import RunDirectory

# The tag by which the run is found again.
_TAG: Final = "chameleon_id"
_MAX_PARAMETER: Final = 500
_MAX_NOTICES: Final = 1_000


class MlflowTracker:
    """A run of MLflow; what the terminal prints is an artifact for each time that the run is tracked.

    MLflow's own environment variables apply, such as MLFLOW_TRACKING_URI.

    Args:
        experiment: to which the run belongs; made if there is none.
        run: gives it its name and parameters.

    Raises:
        mlflow.exceptions.MlflowException: it cannot begin, for example because there is no server.
    """

    def __init__(self, experiment: str, run: RunDirectory, delivered: Delivered) -> None:
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([place], f"tags.{_TAG} = '{delivered.id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(place, run_name=run.path.name, tags={_TAG: delivered.id}).info.run_id
            values = _flat("", run.config().model_dump(mode="json"))
            parameters = [Param(name, str(value)[:_MAX_PARAMETER]) for name, value in values.items()]
            for begin in range(0, len(parameters), 100):
                self._client.log_batch(self._id, params=parameters[begin : begin + 100])
        self._notices: list[str] = []
        self._first_s = 0.0

    def log(self, scalars: Mapping[str, float], *, step: int, time_s: float) -> None:
        """See `Tracker`."""
        metrics = [Metric(name, value, int(1e3 * time_s), step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def tell(self, notice: Notice, *, step: int, time_s: float, is_alert: bool) -> None:
        """See `Tracker`."""
        self._first_s = self._first_s or time_s
        self._notices.append(f"step {step}: {notice.title}\n{facts_of(notice)}\n")

    def close(self) -> None:
        """See `Tracker`."""
        try:
            if self._notices:
                text = "\n".join(self._notices[-_MAX_NOTICES:])
                self._client.log_text(self._id, text, f"events-{self._first_s:.0f}.txt")
        finally:
            self._client.set_terminated(self._id)


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, each in value.items():
        flat |= _flat(f"{prefix}.{key}" if prefix else key, each)
    return flat
