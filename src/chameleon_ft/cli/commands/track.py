"""`chameleon track`: hand the records of a run to other tools."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from chameleon_ft.cli.arguments import OptionalPath, OptionalStr, RunPath, metavar, parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory, View
from chameleon_ft.observe.live.delivery import Delivery
from chameleon_ft.observe.live.watcher import RunWatcher

__all__ = ["main"]

_EVERY_S: Final = 1.0
_OVER: Final = ("finished", "interrupted", "terminated", "failed")


@dataclass(frozen=True)
class TrackArguments:
    """Follow a run, live or over, and hand its records to other tools until it is over; Ctrl-C ends only that.

    Only the files of the run are read, so a tool that fails or hangs cannot disturb it; that is said once.
    """

    run: RunPath
    """Run directory."""
    tensorboard: Annotated[OptionalPath, metavar("DIR")] = None
    """Folder for TensorBoard's event files; needs the extra `tensorboard`."""
    webhook: Annotated[OptionalStr, metavar("URL")] = None
    """Address to which incidents are sent as JSON, from now on, in a form that Slack and Mattermost take."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(TrackArguments, arguments, command="track")
    run = RunDirectory.open(given.run)
    all_records = [Delivery("TensorBoard", _tensorboard(given.tensorboard))] if given.tensorboard else []
    news = []
    if given.webhook is not None:
        from chameleon_ft.observe.sinks.webhook import WebhookView

        news.append(Delivery("the webhook", WebhookView(given.webhook, run=run.path.name)))
    if not all_records and not news:
        raise ConfigError("give at least one tool: --tensorboard DIR or --webhook URL")
    watcher, began = RunWatcher(run), time.time()
    try:
        while True:
            lines = watcher.update()
            for line in lines:
                is_new = line[1].get("time", 0.0) >= began
                for delivery in (*all_records, *(news if is_new else ())):
                    delivery.show(line)
            if not lines and watcher.report().condition in _OVER:
                return 0
            time.sleep(_EVERY_S)
    finally:
        for delivery in (*all_records, *news):
            delivery.close()


def _tensorboard(folder: Path) -> View:
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard: it is not installed; run `pip install 'chameleon-ft[tensorboard]'`, or leave this flag out"
        )
    from chameleon_ft.observe.sinks.tensorboard import TensorBoardView

    return TensorBoardView(folder)
