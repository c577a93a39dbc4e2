"""The records of a run in Weights & Biases; importing this module loads wandb."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import wandb

from chameleon_ft.report.sinks.trackers import Delivered, facts_of
from chameleon_ft.report.story import Notice
from chameleon_ft.storage.files import RunDirectory

_MAX_ROWS: Final = 1_000
_COLUMNS: Final[list[str | int]] = ["time", "step", "event", "facts"]


class WandbTracker:
    """A run of Weights & Biases; lost workers are alerts, and all that the terminal prints is the table `events`.

    wandb's own environment variables apply, such as WANDB_MODE=offline and WANDB_ENTITY.

    Args:
        project: to which the run of Weights & Biases belongs.
        run: gives it its name and configuration.

    Raises:
        wandb.errors.Error: it cannot begin, for example without an API key.
    """

    def __init__(self, project: str, run: RunDirectory, delivered: Delivered) -> None:
        self._run = wandb.init(
            project=project,
            name=run.path.name,
            id=delivered.id,
            resume="allow",
            dir=run.path,
            config=run.config().model_dump(mode="json"),
            # Of this machine and process, which are not those that train.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._rows: deque[list[float | int | str]] = deque(maxlen=_MAX_ROWS)

    def log(self, scalars: Mapping[str, float], *, step: int, time_s: float) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, "time": time_s, **scalars})

    def tell(self, notice: Notice, *, step: int, time_s: float, is_alert: bool) -> None:
        """See `Tracker`."""
        self._rows.append([time_s, step, notice.title, facts_of(notice)])
        if is_alert:
            self._run.alert(notice.title, facts_of(notice))

    def close(self) -> None:
        """See `Tracker`."""
        if self._rows:
            self._run.log({"step": self._rows[-1][1], "events": wandb.Table(columns=_COLUMNS, data=list(self._rows))})
        self._run.finish()
