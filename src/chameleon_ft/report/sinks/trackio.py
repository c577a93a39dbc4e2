"""The records of a run in Trackio; importing this module loads trackio."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from chameleon_ft.report.sinks.trackers import Delivered, facts_of
from chameleon_ft.report.story import Notice
from chameleon_ft.storage.files import RunDirectory


class TrackioTracker:
    """A run of Trackio; what the terminal prints are its alerts.

    Trackio's own environment variables apply, such as TRACKIO_DIR.

    Args:
        project: to which the run belongs.
        run: gives it its name and configuration.
    """

    def __init__(self, project: str, run: RunDirectory, delivered: Delivered) -> None:
        self._run = trackio.init(
            project=project,
            # Runs of one name are one run for it.
            name=f"{run.path.name}-{delivered.id[:8]}",
            config=run.config().model_dump(mode="json"),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, scalars: Mapping[str, float], *, step: int, time_s: float) -> None:
        """See `Tracker`."""
        self._run.log(dict(scalars), step=step)

    def tell(self, notice: Notice, *, step: int, time_s: float, is_alert: bool) -> None:
        """See `Tracker`."""
        level = trackio.AlertLevel.ERROR if is_alert else trackio.AlertLevel.INFO
        self._run.alert(notice.title, facts_of(notice), level=level)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()
