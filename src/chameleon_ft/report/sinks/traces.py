"""Incidents of a run as traces of OpenTelemetry; importing this module loads opentelemetry."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Status, StatusCode, set_span_in_context

import chameleon_ft
from chameleon_ft.events.base import Event
from chameleon_ft.events.kinds import Hang, Lost, StateDiffers
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import FailureCostRecord, FailureRecord, JoinRecord, OutcomeRecord
from chameleon_ft.report.story import PHASES

_TIMEOUT_S: Final = 5.0
_Value = str | int | float | bool


def otlp_exporter(url: str) -> SpanExporter:
    """Return an exporter to a collector; the path of a URL without one is /v1/traces."""
    # It would log each attempt; `Delivery` does so once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    has_path = "/" in url.rstrip("/").partition("://")[2]
    return OTLPSpanExporter(url if has_path else f"{url.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)


class TraceSink:
    """Exports a trace of each incident and of each switch to another plan.

    Its root span is the stall; the spans below it are the phases, each lost worker, the interrupted step until it was
    committed, and the steps over which the outcome was measured.

    Args:
        exporter: whose failure is raised as OSError.
        run: what to call the run.
    """

    def __init__(self, exporter: SpanExporter, *, run: str) -> None:
        self._exporter = exporter
        self._ended = _EndedSpans()
        resource = Resource.create({"service.name": "chameleon", "chameleon.run": run})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("chameleon_ft", chameleon_ft.__version__)
        self._noticed: list[Event] = []
        # The newest plan: its generation, the root span, and when training resumed.
        self._trace: tuple[int, Context, float] | None = None

    def take(self, record: Record) -> bool:
        """See `Sink`."""
        match record:
            case Lost() | Hang() | StateDiffers():
                self._noticed.append(record)
            case FailureRecord():
                self._failure(record)
            case JoinRecord():
                self._begin("switch", record)
            case FailureCostRecord() | OutcomeRecord() if self._trace is not None:
                _, root, resumed = self._trace
                name = "interrupted step" if isinstance(record, FailureCostRecord) else "outcome"
                self._span(name, resumed, record.time, record.values(), within=root)
        spans = self._ended.take()
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise OSError("spans were not accepted; is this the address of a collector for OTLP over HTTP?")
        return bool(spans)

    def close(self) -> None:
        """See `Sink`."""
        self._exporter.shutdown()

    def _failure(self, record: FailureRecord) -> None:
        # Workers that are lost together share a trace.
        if self._trace is None or self._trace[0] != record.generation:
            self._begin("incident", record)
        assert self._trace is not None
        self._span(
            f"worker {record.worker} lost",
            record.time - record.stall_s,
            record.time,
            record.values(),
            within=self._trace[1],
            error=record.cause,
        )

    def _begin(self, name: str, record: FailureRecord | JoinRecord) -> None:
        """Begin the trace of a plan with the stall before it and its phases."""
        start = record.time - record.stall_s
        fields = ("generation", "resume_step", "policy", "action", "stall_s", "moved_bytes", "step")
        values = {field: value for field, value in record.values().items() if field in fields}
        root = self._tracer.start_span(name, Context(), start_time=_ns(start), attributes=_attributes(values))
        for noticed in self._noticed:
            root.add_event(noticed.name, _attributes(noticed.values()), timestamp=_ns(noticed.time))
        self._noticed.clear()
        self._trace = record.generation, set_span_in_context(root, Context()), record.time
        for field, phase in PHASES.items():
            if seconds := getattr(record, field, None):
                self._span(phase, start, start + seconds, {}, within=self._trace[1])
                start += seconds
        root.end(_ns(record.time))

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        values: Mapping[str, object],
        *,
        within: Context,
        error: str | None = None,
    ) -> None:
        span = self._tracer.start_span(name, within, start_time=_ns(start), attributes=_attributes(values))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(end))


class _EndedSpans(SpanProcessor):
    """Keeps spans that have ended until they are taken. Processors of the SDK would hide that an export failed."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


def _attributes(values: Mapping[str, object]) -> dict[str, _Value]:
    return {f"chameleon.{name}": value for name, value in values.items() if isinstance(value, _Value)}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
