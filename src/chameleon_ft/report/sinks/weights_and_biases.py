"""The records of a run in Weights & Biases; importing this module loads wandb."""

from __future__ import annotations

from collections import deque
from typing import Final

import wandb

from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import FailureRecord, StepRecord
from chameleon_ft.report.sinks.sink import scalars_of
from chameleon_ft.report.story import notices_of
from chameleon_ft.storage.files import RunDirectory

_MAX_ROWS: Final = 1_000
_COLUMNS: Final[list[str | int]] = ["time", "step", "event", "facts"]


class WandbSink:
    """Logs the scalars of records over the training step, lost workers as alerts, and the table `events`.

    wandb's own environment variables apply, such as WANDB_MODE=offline and WANDB_ENTITY. Steps that are trained again
    are logged again.

    Args:
        project: to which the new run of Weights & Biases belongs.
        run: gives it its name and configuration.

    Raises:
        wandb.errors.Error: it cannot begin, for example without an API key.
    """

    def __init__(self, project: str, *, run: RunDirectory) -> None:
        self._run = wandb.init(
            project=project,
            name=run.path.name,
            dir=run.path,
            config=run.config().model_dump(mode="json"),
            # Of this machine and process, which are not those that train.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._step = 0
        self._rows: deque[list[float | int | str]] = deque(maxlen=_MAX_ROWS)

    def take(self, record: Record) -> bool:
        """See `Sink`."""
        if isinstance(record, StepRecord):
            self._step = record.step
        if scalars := scalars_of(record):
            self._run.log({"step": self._step, "time": record.time, **scalars})
        for notice in notices_of(record):
            facts = "\n".join(f"{name}: {value}" for name, value in notice.facts)
            self._rows.append([record.time, self._step, notice.title, facts])
            if isinstance(record, FailureRecord):
                self._run.alert(notice.title, facts)
        return bool(scalars)

    def close(self) -> None:
        """See `Sink`."""
        if self._rows:
            self._run.log({"step": self._step, "events": wandb.Table(columns=_COLUMNS, data=list(self._rows))})
        self._run.finish()
