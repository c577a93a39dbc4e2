"""The state of a run as metrics for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from chameleon_ft.events import kinds
from chameleon_ft.events.base import Event
from chameleon_ft.events.records import JoinRecord
from chameleon_ft.report.view import CONDITIONS, WORKER_STATES, RunReport, RunView

_COUNTED: Final[Mapping[type[Event], tuple[str, str]]] = {
    kinds.BadStep: ("chameleon_bad_steps", "Steps whose loss or gradient was bad."),
    kinds.SampleLeftOut: ("chameleon_left_out_samples", "Samples that could not be read, and were left out."),
    kinds.EmptyStep: ("chameleon_empty_steps", "Steps without a loss term, which were skipped."),
    kinds.Refused: ("chameleon_refused_connections", "Connections that were rejected, as far as they are recorded."),
    kinds.CheckpointFailed: ("chameleon_failed_checkpoints", "Checkpoints that could not be written."),
    JoinRecord: ("chameleon_plan_switches", "Plans that the run has switched to without a failure."),
    kinds.Stalled: ("chameleon_coordinator_stalls", "Times in which the coordinator did not run."),
}
"""Events that are counted: name and help of the metric."""


def exposition(view: RunView, report: RunReport, *, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics of a run, and their content type, in the format that an Accept header asks for.

    That is OpenMetrics if it is named, and else Prometheus' text format.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view, report))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Collector(Collector):
    def __init__(self, view: RunView, report: RunReport) -> None:
        self._view = view
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report, costs = self._report, self._report.costs
        yield InfoMetricFamily("chameleon_run", "The run.", {"directory": report.run, "policy": report.policy})
        conditions: dict[str, bool] = {name: name == report.condition for name in CONDITIONS}
        yield StateSetMetricFamily("chameleon_condition", "The condition of the run.", conditions)
        yield from self._progress()
        workers = GaugeMetricFamily("chameleon_workers", "Workers by state.", labels=["state"])
        for worker_state in WORKER_STATES:
            workers.add_metric([worker_state], len(report.workers.get(worker_state, ())))
        yield workers
        speeds = GaugeMetricFamily(
            "chameleon_worker_speed_ratio", "Speed of slow workers, relative to others.", labels=["worker", "host"]
        )
        for worker, speed in report.speeds.items():
            speeds.add_metric([str(worker), report.hosts.get(worker, "")], speed)
        yield speeds
        yield _counter("chameleon_failures", "Lost workers.", costs.failures)
        yield _counter("chameleon_incidents", "Recoveries; workers that are lost together share one.", costs.incidents)
        # No counter: an incident costs less than nothing if the step that it interrupted was a quick one.
        yield _gauge("chameleon_failure_cost_steps", "Cost of all incidents, in usual steps.", costs.steps)
        stalls = CounterMetricFamily(
            "chameleon_failure_cost_seconds", "Seconds of stalls and of repeated work, by phase.", labels=["phase"]
        )
        for phase, seconds in costs.phases_s.items():
            stalls.add_metric([phase], max(0.0, seconds))
        yield stalls
        yield from self._predictions()
        for name, saved in (("checkpoint", report.checkpoint), ("snapshot", report.snapshot)):
            if saved is not None:
                age_s = max(0.0, report.at - saved.time)
                yield _gauge(f"chameleon_{name}_age_seconds", f"Age of the newest complete {name}.", age_s)
                yield _gauge(f"chameleon_{name}_step", f"Step that the newest {name} resumes with.", saved.step)
        for kind, (name, text) in _COUNTED.items():
            yield _counter(name, text, self._view.counts[kind])

    def _progress(self) -> Iterable[Metric]:
        report = self._report
        yield _gauge("chameleon_steps", "Steps of the whole run.", report.steps)
        yield _gauge("chameleon_generation", "Number of the plan in force.", report.generation)
        yield _counter("chameleon_tokens", "Loss terms trained, each counted once.", report.tokens)
        if (last := report.last) is not None:
            yield _gauge("chameleon_step", "Newest committed step.", last.step)
            yield _gauge("chameleon_loss", "Loss of that step; NaN if it was skipped.", last.loss)
            yield _gauge("chameleon_grad_norm", "Norm of its gradient.", last.grad_norm)
            yield _gauge("chameleon_learning_rate", "Its learning rate.", last.lr)
        if (evaluation := report.evaluation) is not None:
            family = GaugeMetricFamily("chameleon_evaluation", "The newest evaluation.", labels=["of"])
            for name, value in {
                "step": evaluation.step,
                "loss": evaluation.loss,
                "perplexity": evaluation.perplexity,
                **evaluation.metrics,
            }.items():
                if value is not None:
                    family.add_metric([name], value)
            yield family
        pace, earlier = report.pace, report.earlier
        for name, text, value in (
            ("last_step_age_seconds", "Seconds since the newest step.", report.last_step_age_s),
            ("step_seconds", "Median time of the newest steps.", None if pace is None else pace.step_s),
            ("earlier_step_seconds", "Median time of earlier steps.", None if earlier is None else earlier.step_s),
            (
                "tokens_per_second",
                "Median throughput of the newest steps.",
                None if pace is None else pace.tokens_per_s,
            ),
            (
                "data_wait_ratio",
                "Share of the newest steps that reads took.",
                None if pace is None else pace.data_share,
            ),
            ("goodput_ratio", "Share of the time in which steps were trained that count.", report.goodput),
            ("remaining_seconds", "Seconds until the last step at this pace and goodput.", report.eta_s),
            ("next_failure_seconds", "Expected seconds until the next failure, as learned.", report.next_failure_s),
        ):
            if value is not None:
                yield _gauge(f"chameleon_{name}", text, value)

    def _predictions(self) -> Iterable[Metric]:
        """Yield predicted over actual values of the newest decision whose outcome is known."""
        if (outcome := self._view.outcome) is None:
            return
        family = GaugeMetricFamily(
            "chameleon_predicted_over_actual",
            "Predicted value of the newest decision, divided by the measured one.",
            labels=["of"],
        )
        for name, error in (("step", outcome.step_error), ("stall", outcome.stall_error)):
            if error is not None and math.isfinite(error) and error > -1:
                family.add_metric([name], 1 / (1 + error))
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
