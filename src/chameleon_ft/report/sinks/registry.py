"""All sinks, by their names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.registry import Registry
from chameleon_ft.report.sinks.sink import Delivery, Sink
from chameleon_ft.report.sinks.trackers import Delivered, TrackerSink
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkType:
    """A kind of sink.

    Attributes:
        title: for messages.
        make: makes one, of the value of its flag; loads its package.
        package: that it needs, if any; the extra has the name of the sink.
        is_for_news: It gets only records that are written from now on.
    """

    title: str
    make: Callable[[str, RunDirectory], Sink]
    package: str | None = None
    is_for_news: bool = False

    def deliver_to(self, flag: str, value: str, run: RunDirectory) -> Delivery:
        """Begin the delivery to one. Raises ConfigError if its package is missing or it cannot begin."""
        if self.package is not None and not _is_installed(self.package):
            raise ConfigError(
                f"--{flag}: {self.title} needs {self.package}, which is not installed; "
                f"run `pip install 'chameleon-ft[{flag}]'`, or leave this flag out"
            )
        try:
            return Delivery(self.title, self.make(value, run))
        except ConfigError as error:
            raise ConfigError(f"--{flag} {value}: {error}") from None
        except OSError as error:
            raise ConfigError(f"--{flag} {value}: cannot begin there: {error.strerror or error}") from None


def _is_installed(package: str) -> bool:
    with suppress(ModuleNotFoundError):  # of a package around it
        return importlib.util.find_spec(package) is not None
    return False


def _tensorboard(folder: str, _: RunDirectory) -> Sink:
    from chameleon_ft.report.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(Path(folder))


def _wandb(project: str, run: RunDirectory) -> Sink:
    from wandb.errors import Error

    from chameleon_ft.report.sinks.weights_and_biases import WandbTracker

    delivered = Delivered(run, "wandb", project)
    try:
        return TrackerSink(WandbTracker(project, run, delivered), delivered)
    except Error as error:
        raise ConfigError(f"{error}; run `wandb login`, or set WANDB_MODE=offline") from None


def _mlflow(experiment: str, run: RunDirectory) -> Sink:
    from mlflow.exceptions import MlflowException

    from chameleon_ft.report.sinks.mlflow import MlflowTracker

    delivered = Delivered(run, "mlflow", experiment)
    try:
        return TrackerSink(MlflowTracker(experiment, run, delivered), delivered)
    except MlflowException as error:
        remedy = "set MLFLOW_TRACKING_URI to a server, such as http://127.0.0.1:5000"
        raise ConfigError(f"{str(error).splitlines()[0]:.200}; {remedy}") from None


def _trackio(project: str, run: RunDirectory) -> Sink:
    from chameleon_ft.report.sinks.trackio import TrackioTracker

    delivered = Delivered(run, "trackio", project)
    return TrackerSink(TrackioTracker(project, run, delivered), delivered)


def _otel(url: str, run: RunDirectory) -> Sink:
    from chameleon_ft.report.sinks.traces import TraceSink, otlp_exporter

    return TraceSink(otlp_exporter(_checked(url)), run=run.path.name)


def _webhook(url: str, run: RunDirectory) -> Sink:
    from chameleon_ft.report.sinks.webhook import WebhookSink

    return WebhookSink(_checked(url), run=run.path.name)


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError("should begin with http:// or https://")
    return url


SINKS: Final = Registry[SinkType](
    "sink",
    "sinks",
    {
        "tensorboard": SinkType(title="TensorBoard", make=_tensorboard, package="tensorboard"),
        "wandb": SinkType(title="Weights & Biases", make=_wandb, package="wandb"),
        "mlflow": SinkType(title="MLflow", make=_mlflow, package="mlflow"),
        "trackio": SinkType(title="Trackio", make=_trackio, package="trackio"),
        "otel": SinkType(
            title="the OpenTelemetry collector", make=_otel, package="opentelemetry.exporter.otlp.proto.http"
        ),
        "webhook": SinkType(title="the webhook", make=_webhook, is_for_news=True),
    },
)
"""The sinks, each by the name of its flag of `chameleon track` and of its extra."""
