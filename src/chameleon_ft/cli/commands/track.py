"""`chameleon track`: hand the records of a run to other tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Final

from chameleon_ft.cli.arguments import OptionalStr, RunPath, metavar, parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.report.facts import describe_damage
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.report.sinks.registry import SINKS
from chameleon_ft.storage.files import RunDirectory

_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class TrackArguments:
    """Follow a run, live or over, and hand its records to other tools until it is over; Ctrl-C ends only the tracking.

    Only the files of the run are read, so a tool that fails or hangs cannot disturb the run; a failure is reported
    once.
    """

    run: RunPath
    """Run directory."""
    tensorboard: Annotated[OptionalStr, metavar("DIR")] = None
    """Folder for TensorBoard's event files; needs the extra `tensorboard`."""
    wandb: Annotated[OptionalStr, metavar("PROJECT")] = None
    """Project of Weights & Biases, whose environment variables apply (WANDB_MODE=offline); needs the extra `wandb`."""
    mlflow: Annotated[OptionalStr, metavar("EXPERIMENT")] = None
    """Experiment of MLflow, whose environment variables apply (MLFLOW_TRACKING_URI); needs the extra `mlflow`."""
    trackio: Annotated[OptionalStr, metavar("PROJECT")] = None
    """Project of Trackio, whose environment variables apply (TRACKIO_DIR); needs the extra `trackio`."""
    otel: Annotated[OptionalStr, metavar("URL")] = None
    """Collector of OpenTelemetry (OTLP/HTTP), which gets a trace of each incident; needs the extra `otel`."""
    webhook: Annotated[OptionalStr, metavar("URL")] = None
    """Address to which incidents are sent as JSON, from now on, in a form that Slack and Mattermost take."""
    sink: Annotated[OptionalStr, metavar("NAME=VALUE[,NAME=VALUE ...]")] = None
    """Sinks of installed packages, each with what it needs."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(TrackArguments, arguments, command="track")
    run = RunDirectory.open(given.run)
    flags = [field.name for field in fields(given) if field.name not in ("run", "sink")]
    chosen = {flag: value for flag in flags if (value := getattr(given, flag)) is not None}
    chosen |= {
        name: value for name, _, value in (each.partition("=") for each in (given.sink or "").split(",")) if name
    }
    if not chosen:
        raise ConfigError(f"give at least one tool: {', '.join(f'--{flag}' for flag in flags)}")
    deliveries = {flag: SINKS[flag].deliver_to(flag, value, run) for flag, value in chosen.items()}
    watcher, has_said, is_new = RunWatcher(run), False, False
    try:
        while True:
            records = watcher.update_readable()
            if watcher.damaged and not has_said:
                has_said = True
                print(f"chameleon track: {describe_damage(watcher.damaged)}", file=sys.stderr, flush=True)
            for record in records:
                for flag, delivery in deliveries.items():
                    if is_new or not SINKS[flag].is_for_news:
                        delivery.deliver(record)
            # The records that follow are new. Their times do not tell: the clock of the run may be another.
            is_new = True
            if not records and watcher.report().is_over:
                return 0
            time.sleep(_EVERY_S)
    finally:
        for delivery in deliveries.values():
            delivery.close()
