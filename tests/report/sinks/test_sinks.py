"""Records as other tools get them, and tools that fail."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sqlite3
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from chameleon_ft.cli import main
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import Evaluation
from chameleon_ft.report.sinks.registry import SINKS
from chameleon_ft.report.sinks.sink import Delivery
from chameleon_ft.report.sinks.trackers import Delivered, TrackerSink
from chameleon_ft.report.sinks.webhook import WebhookSink
from chameleon_ft.report.story import Notice
from chameleon_ft.storage.files import RunDirectory
from tests.report.live.lines import add, event, failed, lost, new_run, read, started, stepped
from tests.report.records import join_record, outcome_record, step_record


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that is over: it went back to step 1, and lost a worker."""
    run = new_run(tmp_path)
    add(run, started(), stepped(0, 1.0, loss=3.0), stepped(1, 2.0, loss=2.5), stepped(2, 3.0, loss=9.0))
    add(run, failed(3, 3.5), event("checkpoint", 3.6, step=2, copy_s=0.5, write_s=1.0))
    add(run, event("outcome", 3.7, **outcome_record().values()), stepped(1, 4.0, loss=2.4), stepped(2, 5.0, loss=2.0))
    add(run, event("finished", 6.0, status="interrupted", reason="by its user"))
    return run


@dataclass(frozen=True)
class Post:
    path: str
    body: bytes

    def json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.body)
        return values


@dataclass
class Hook:
    """A server, and what is sent to it."""

    url: str
    posts: list[Post]


@pytest.fixture
def hook() -> Iterator[Hook]:
    posts: list[Post] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(Post(self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/broken" else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Hook(f"http://127.0.0.1:{server.server_port}", posts)
        finally:
            server.shutdown()
            thread.join()


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars as TensorBoard shows them, by tag: (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]} | {
        tag: [] for tag in found.Tags()["tensors"]
    }


def test_tensorboard_shows_steps_and_incidents(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert main(["track", str(run.path), "--tensorboard", str(tmp_path / "board")]) == 0
    found = scalars(tmp_path / "board")
    assert found["train/loss"] == [(0, 3.0), (1, pytest.approx(2.4)), (2, 2.0)], (
        "those trained again replace the others"
    )
    assert found["pace/tokens_per_s"] == [(0, 400.0), (1, 400.0), (2, 400.0)]
    assert {"failures/stall_s", "failures/detect_s", "predictions/step_error", "checkpoints/copy_s"} <= found.keys()
    assert "events" in found
    assert main(["track", str(run.path), "--tensorboard", str(tmp_path / "board")]) == 0
    assert scalars(tmp_path / "board")["train/loss"] == found["train/loss"], "once more changes nothing"


def test_a_full_disk_ends_nothing_and_is_told_once(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    command = ["prlimit", "--fsize=300", sys.executable, "-m", "chameleon_ft", "track"]
    done = subprocess.run(
        [*command, str(run.path), "--tensorboard", str(tmp_path / "board")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stderr
    assert done.stderr.count("TensorBoard does not take records") == 1
    assert "Traceback" not in done.stderr
    assert scalars(tmp_path / "board")["train/loss"] == [(0, 3.0)], "what fits is whole"


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a log of blocks, each with headers of checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""  # behind the header of the file
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def test_weights_and_biases_gets_steps_and_incidents_offline(run: RunDirectory) -> None:
    pytest.importorskip("wandb")
    # In a process of its own: the library keeps one session for each process, and replaces `sys.exit` in it.
    command = [sys.executable, "-m", "chameleon_ft", "track", str(run.path), "--wandb", "mine"]
    records: list[Any] = []
    for _ in range(2):
        subprocess.run(command, env={**os.environ, "WANDB_MODE": "offline"}, check=True)
    for file in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        records += wandb_records(file)
    begun, *again = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {each.run_id for each in again} == {begun.run_id}, "the second tracking goes on with the same run"
    assert (begun.project, begun.display_name) == ("mine", run.path.name)
    assert "steps" in {item.key for item in begun.config.update}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(0, 3.0), (1, 2.5), (2, 9.0)], "steps that are trained again are there once"
    (failure,) = [row for row in rows if "failures/stall_s" in row]
    assert failure["step"] == 2
    assert [record.alert.title for record in records if record.WhichOneof("record_type") == "alert"] == [
        "worker 3 lost in step 3"
    ]
    (table,) = run.path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert "worker 3 lost in step 3" in table.read_text()


def test_a_missing_key_of_weights_and_biases_is_told(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    errors = pytest.importorskip("wandb.errors")

    def init(**_: object) -> None:
        raise errors.UsageError("no API key configured")

    monkeypatch.setattr("wandb.init", init)
    assert main(["track", str(run.path), "--wandb", "mine"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--wandb mine: no API key configured; run `wandb login`, or set WANDB_MODE=offline" in told


# --- MLflow and Trackio ----------------------------------------------------------------------------------------------


def test_mlflow_has_one_run_and_each_step_once(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    env = {
        **os.environ,
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    track = [sys.executable, "-m", "chameleon_ft", "track", str(run.path), "--mlflow", "mine"]
    subprocess.run(track, env=env, check=True)
    # As after a requeue.
    add(run, started(), stepped(3, 7.0, loss=1.5), event("finished", 8.0, status="finished", reason="all steps"))
    subprocess.run(track, env=env, check=True)
    # Each line: milliseconds, value, step.
    (losses,) = (tmp_path / "mlflow").rglob("metrics/train/loss")
    assert [tuple(map(float, line.split()[1:])) for line in losses.read_text().splitlines()] == [
        *((3.0, 0.0), (2.5, 1.0), (9.0, 2.0), (1.5, 3.0))
    ]
    (stalls,) = (tmp_path / "mlflow").rglob("metrics/failures/stall_s")
    assert len(stalls.read_text().splitlines()) == 1
    told = "".join(file.read_text() for file in sorted((tmp_path / "mlflow").rglob("events-*.txt")))
    assert told.count("worker 3 lost in step 3") == 1
    (steps,) = (tmp_path / "mlflow").rglob("params/steps")
    assert steps.read_text() == str(run.config().steps)


def test_trackio_has_one_run_and_each_step_once(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    track = [sys.executable, "-m", "chameleon_ft", "track", str(run.path), "--trackio", "mine"]
    for _ in range(2):
        subprocess.run(track, env=env, check=True)
    (database,) = (tmp_path / "trackio").glob("mine*.db")
    rows = list(sqlite3.connect(database).execute("SELECT run_id, step, metrics FROM metrics ORDER BY id"))
    assert len({run_id for run_id, _, _ in rows}) == 1
    losses = [(step, json.loads(values).get("train/loss")) for _, step, values in rows]
    assert [each for each in losses if each[1] is not None] == [(0, 3.0), (1, 2.5), (2, 9.0)]


@dataclass
class Noted:
    """A tracker that keeps what it is given."""

    scalars: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def log(self, scalars: Mapping[str, float], *, step: int, time_s: float) -> None:
        self.scalars.append((step, scalars))

    def tell(self, notice: Notice, *, step: int, time_s: float, is_alert: bool) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_has_the_evaluation_of_each_step_once(run: RunDirectory) -> None:
    noted = Noted()

    def evaluated(step: int, loss: float) -> Evaluation:
        return Evaluation(step=step, loss=loss, samples=1, terms=1.0, seconds=1.0, generation=1)

    # The second one after a return to step 1, and a requeue.
    for steps in ({0: 3.0, 1: 9.0}, {1: 2.0, 2: 1.0}):
        sink = TrackerSink(noted, Delivered(run, "a tool", "a place"))
        for step, loss in steps.items():
            sink.take(step_record(step))
            sink.take(evaluated(step, loss))
        sink.close()
    losses = [(step, own["evaluation/loss"]) for step, own in noted.scalars if "evaluation/loss" in own]
    assert losses == [(0, 3.0), (1, 9.0), (2, 1.0)]
    assert [step for step, own in noted.scalars if "train/loss" in own] == [0, 1, 2]


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------


def test_an_incident_is_a_trace(run: RunDirectory) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from chameleon_ft.report.sinks.traces import TraceSink

    exporter = InMemorySpanExporter()
    delivery = Delivery("traces", TraceSink(exporter, run="mine"))
    cost = {"incident_generations": [1], "step": 3, "failure_cost_steps": 1.25, "predicted_steps": None}
    for line in (
        started(),
        lost(3, 3.4),
        failed(3, 3.5),
        failed(2, 3.5),
        event("failure_cost", 4.0, **cost),
        event("outcome", 9.0, **outcome_record().values()),
        event("join", 20.0, **join_record(9).values()),
    ):
        delivery.deliver(read(line))
    delivery.close()
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    assert [root.name for root in roots] == ["incident", "switch"]
    incident = [span for span in spans if span.context.trace_id == roots[0].context.trace_id]
    assert {span.name for span in incident} - {"incident"} == {
        *("detect", "stop", "decide", "regroup", "worker 3 lost", "worker 2 lost", "interrupted step", "outcome")
    }
    by_name = {span.name: span for span in incident}
    assert [each.name for each in roots[0].events] == ["lost"]
    assert (by_name["worker 3 lost"].attributes or {})["chameleon.cause"] == "SIGKILL"
    assert not by_name["worker 3 lost"].status.is_ok
    assert (by_name["interrupted step"].attributes or {})["chameleon.failure_cost_steps"] == 1.25
    assert by_name["detect"].start_time == roots[0].start_time
    assert by_name["stop"].start_time == by_name["detect"].end_time
    assert by_name["regroup"].end_time == pytest.approx(roots[0].end_time, abs=1e6)
    assert roots[0].resource.attributes["chameleon.run"] == "mine"


def test_a_collector_gets_traces(run: RunDirectory, hook: Hook) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    assert main(["track", str(run.path), "--otel", hook.url]) == 0
    assert {post.path for post in hook.posts} == {"/v1/traces"}
    names = set()
    for post in hook.posts:
        request = ExportTraceServiceRequest()
        request.ParseFromString(post.body)
        names |= {span.name for spans in request.resource_spans for scope in spans.scope_spans for span in scope.spans}
    assert names >= {"incident", "worker 3 lost", "outcome"}


def test_a_collector_that_fails_is_told_once(run: RunDirectory, hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp")
    with caplog.at_level(logging.WARNING):
        assert main(["track", str(run.path), "--otel", f"{hook.url}/broken"]) == 0
    assert len(hook.posts) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith("the OpenTelemetry collector does not take records: OSError: spans were not")


# --- webhook ---------------------------------------------------------------------------------------------------------


def test_incidents_are_sent(hook: Hook) -> None:
    delivery = Delivery("the webhook", WebhookSink(hook.url, run="mine"))
    for line in (started(), failed(3, 1.0), event("snapshot", 2.0, step=1), lost(1, 3.0)):
        delivery.deliver(read(line))
    delivery.deliver(read(stepped(0, 1.0)))
    bodies = [post.json() for post in hook.posts]
    assert [body["event"] for body in bodies] == ["failure", "lost"]
    assert bodies[0]["text"].startswith("mine: worker 3 lost in step 3\ncause: SIGKILL\n")
    assert bodies[0]["record"]["worker"] == 3
    assert bodies[1]["text"] == "mine: lost: worker 1, host b, step 3, noticed_by child, cause SIGKILL"


def test_a_webhook_that_fails_is_told_once(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    sink = WebhookSink(f"{hook.url}/broken", run="mine")
    delivery = Delivery("the webhook", sink)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            delivery.deliver(read(failed(number, 1.0)))
            delivery.deliver(read(stepped(number, 1.0)))  # is not sent, so that nothing seems to work again
        assert caplog.text.count("the webhook does not take records: HTTPError") == 1
        sink._url = hook.url
        delivery.deliver(read(failed(3, 1.0)))
    assert "takes records again; 3 were lost" in caplog.text
    assert len(hook.posts) == 4


def test_a_sink_that_cannot_be_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def take(self, record: Record) -> bool:
            return True

        def close(self) -> None:
            raise OSError("no space left on device")

    with caplog.at_level(logging.WARNING):
        Delivery("TensorBoard", Full()).close()
    assert "TensorBoard could not be ended: OSError: no space left on device" in caplog.text


# --- the command -----------------------------------------------------------------------------------------------------


def test_only_what_is_new_goes_to_the_webhook(run: RunDirectory, hook: Hook) -> None:
    assert main(["track", str(run.path), "--webhook", hook.url]) == 0
    assert hook.posts == []


def test_a_tool_is_needed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track", str(run.path)]) == 2
    assert (
        "give at least one tool: --tensorboard, --wandb, --mlflow, --trackio, --otel, --webhook"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("webhook", "file:///etc/passwd", "should begin with http:// or https://"),
        ("otel", "localhost:4318", "should begin with http:// or https://"),
        ("tensorboard", "/dev/null/board", "cannot begin there: Not a directory"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], flag: str, value: str, expected: str
) -> None:
    assert main(["track", str(run.path), f"--{flag}", value]) == 2
    assert f"--{flag} {value}: {expected}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [flag for flag, sink in SINKS.items() if sink.package])
def test_packages_that_are_missing_are_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    package = str(SINKS[flag].package)

    def find_spec(name: str) -> None:
        if "." in name:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert main(["track", str(run.path), f"--{flag}", "http://127.0.0.1:9"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"needs {package}, which is not installed; run `pip install 'chameleon-ft[{flag}]'`" in told


def test_each_sink_has_its_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert {flag for flag, sink in SINKS.items() if sink.package} <= project["optional-dependencies"].keys()
