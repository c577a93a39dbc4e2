"""Records as other tools get them, and tools that fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from chameleon_ft.cli import main
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory, View
from chameleon_ft.observe.live.delivery import Delivery
from chameleon_ft.observe.sinks.webhook import WebhookView
from tests.observe.live.lines import add, event, failed, new_run, started, stepped
from tests.observe.records import outcome_record

Hook = tuple[str, list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that is over: it went back to step 1, and lost a worker."""
    run = new_run(tmp_path)
    add(run, started(), stepped(0, 1.0, loss=3.0), stepped(1, 2.0, loss=2.5), stepped(2, 3.0, loss=9.0))
    add(run, failed(3, 3.5), event("checkpoint", 3.6, step=2, copy_s=0.5, write_s=1.0))
    add(run, event("outcome", 3.7, **outcome_record().to_json()), stepped(1, 4.0, loss=2.4), stepped(2, 5.0, loss=2.0))
    add(run, event("finished", 6.0, status="interrupted", reason="by its user"))
    return run


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars as TensorBoard shows them, by tag: (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
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


# --- webhook ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hook() -> Iterator[Hook]:
    """The address of a server, and what is sent to it."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/broken" else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


def test_incidents_are_sent(hook: Hook) -> None:
    url, bodies = hook
    delivery = Delivery("the webhook", WebhookView(url, run="mine"))
    for line in (started(), failed(3, 1.0), event("snapshot", 2.0, step=1), event("lost", 3.0, worker=1, host="b")):
        delivery.show(("events", line))
    delivery.show(("metrics", stepped(0, 1.0)))
    assert [body["event"] for body in bodies] == ["failure", "lost"]
    assert bodies[0]["text"].startswith("mine: worker 3 lost in step 3\ncause: SIGKILL\n")
    assert bodies[0]["record"]["worker"] == 3
    assert bodies[1]["text"] == "mine: lost: worker 1, host b"


def test_a_webhook_that_fails_is_told_once(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    url, bodies = hook
    view = WebhookView(f"{url}/broken", run="mine")
    delivery = Delivery("the webhook", view)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            delivery.show(("events", failed(number, 1.0)))
        assert caplog.text.count("the webhook does not take records: HTTPError") == 1
        view._url = url
        delivery.show(("events", failed(3, 1.0)))
    assert "takes records again; 3 were lost" in caplog.text
    assert len(bodies) == 4


def test_a_sink_that_cannot_be_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Full(View):
        def close(self) -> None:
            raise OSError("no space left on device")

    with caplog.at_level(logging.WARNING):
        Delivery("TensorBoard", Full()).close()
    assert "TensorBoard could not be ended: OSError: no space left on device" in caplog.text


# --- the command -----------------------------------------------------------------------------------------------------


def test_only_what_is_new_goes_to_the_webhook(run: RunDirectory, hook: Hook) -> None:
    url, bodies = hook
    assert main(["track", str(run.path), "--webhook", url]) == 0
    assert bodies == []


def test_a_tool_is_needed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track", str(run.path)]) == 2
    assert "give at least one tool" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="should begin with http"):
        WebhookView("file:///etc/passwd", run="mine")
    assert main(["track", str(run.path), "--webhook", "ftp://x"]) == 2
