"""The page over real connections: what it tells, and who may act."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import uvicorn
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rich.console import Console

from chameleon_ft.errors import ControlError
from chameleon_ft.events.records import OutcomeRecord
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.report.page.app import STATIC, TokenGate, page_app
from chameleon_ft.report.terminal import TerminalView
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import write_generation
from chameleon_ft.storage.recorder import Recorder
from chameleon_ft.storage.timelines import TimelineLog
from tests.report.live.lines import SLOW, add, event, failed, new_run, read, started, stepped
from tests.report.records import join_record, outcome_record
from tests.report.test_comparison import planned, recorded

TOKEN = "a token"
MONITORING = Path(__file__).parents[3] / "examples" / "monitoring"


@dataclass
class FakeActions:
    """Notes what it is asked for."""

    asked: list[Any] = field(default_factory=list)

    def inject(self, *, worker: int, kind: str, factor: float | None) -> str:
        self.asked.append(("inject", worker, kind, factor))
        return "done"

    def drain(self, *, workers: tuple[int, ...], host: str | None) -> str:
        self.asked.append(("drain", workers, host))
        return "done"

    def checkpoint(self) -> str:
        self.asked.append("checkpoint")
        return "done"

    def finish(self) -> str:
        raise ControlError("it has not begun")


@dataclass
class Served:
    """A page that listens on this machine."""

    port: int
    actions: FakeActions

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self._ask("GET", path, None, headers)

    def json(self, path: str) -> Any:
        status, text = self.get(path)
        assert status == 200, text
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    def act(self, name: str, values: object = None, *, token: str = TOKEN) -> tuple[int, str]:
        body = values if isinstance(values, bytes) else json.dumps({} if values is None else values).encode()
        return self._ask("POST", f"/api/actions/{name}", body, {"Authorization": f"Bearer {token}"})

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    @contextmanager
    def following(self, query: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
        """Yield the server-sent events of a browser that follows, as names and values."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", f"/api/events{query}")
            answer = connection.getresponse()
            assert answer.getheader("Content-Type", "").startswith("text/event-stream")

            def events() -> Iterator[tuple[str, Any]]:
                name = ""
                while line := answer.readline().decode().rstrip("\n"):
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        yield name, json.loads(line.removeprefix("data: "))
                        answer.readline()

            yield events()


@contextmanager
def served(run: RunDirectory) -> Iterator[Served]:
    actions = FakeActions()
    app = page_app(RunWatcher(run), token=TOKEN, actions=actions, host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        )
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield Served(listener.getsockname()[1], actions)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = new_run(tmp_path)
    add(run, started(), stepped(0, 1.0), stepped(1, 2.0), event("checkpoint", 2.1, step=1))
    return run


@pytest.fixture
def page(run: RunDirectory) -> Iterator[Served]:
    with served(run) as page:
        yield page


def test_the_page_and_all_that_it_loads_are_here(page: Served) -> None:
    status, text = page.get("/")
    assert status == 200
    assert "://" not in text, "no other origin"
    for path in STATIC.rglob("*"):
        if path.is_file():
            assert page.get(f"/static/{path.relative_to(STATIC)}")[0] == 200
    assert (STATIC / "uplot" / "LICENSE").read_text().startswith("The MIT License")


def test_the_state_is_all_that_is_needed_to_draw(page: Served, run: RunDirectory) -> None:
    add(run, failed(3, 2.5), stepped(2, 3.0, loss=float("nan"), is_skipped=True, samples=0, tokens=0))
    state = page.json("/api/state")
    assert state["report"]["last"]["loss"] is None
    assert state["series"]["step"] == [0, 1, 2]
    assert state["series"]["loss"] == [2.0, 2.0, None]
    assert [row["state"] for row in state["grid"]["workers"]] == ["live", "live", "live", "lost"]
    assert state["news"][0]["title"] == "worker 3 lost in step 3"
    assert ["action", "reroute: micro-batches 2, 3 of worker 3 go to worker 1"] in state["news"][0]["facts"]
    assert state["next"] == {"steps": 3, "events": 3}
    assert state["evaluations"] == {"step": [], "loss": []}


def test_evaluations_are_there_to_draw_without_those_before_a_return(page: Served, run: RunDirectory) -> None:
    def evaluation(step: int, time: float, loss: float | None, **metrics: float) -> dict[str, Any]:
        return event(
            "evaluation", time, step=step, loss=loss, metrics=metrics, samples=1, terms=1.0, seconds=0.1, generation=1
        )

    add(run, evaluation(0, 2.2, 3.0), evaluation(1, 2.3, None, accuracy=0.5), evaluation(5, 2.4, 1.0))
    add(run, {**started(), "first_step": 2, "time": 2.5})
    found = {"step": [0, 1], "loss": [3.0, None], "accuracy": [None, 0.5]}
    assert page.json("/api/state")["evaluations"] == found
    with page.following("?steps=0&events=0") as events:
        assert next(value for name, value in events if name == "evaluations") == found


def test_all_that_the_terminal_prints_of_an_incident_is_on_the_page(page: Served, run: RunDirectory) -> None:
    message = "worker 3 hung in forward 2 at model.py:7 in attention"
    hang = event("hang", 2.4, worker=3, file="worker-3-1.txt", message=message)
    cost = {"incident_generations": [2], "step": 3, "failure_cost_steps": 1.25, "predicted_steps": 1.0}
    outcome = event("outcome", 2.7, **outcome_record().to_json())
    join = event("join", 2.8, **join_record(5).to_json())
    lines = [hang, failed(3, 2.5, lost_layers=[2, 3]), event("failure_cost", 2.6, **cost), outcome, join]
    printed = StringIO()
    with Recorder(run, TerminalView(Console(file=printed, width=200))) as recorder:
        for line in lines:
            recorder.record(read(line))
    known = {word for told in page.json("/api/state")["news"] for word in told["title"].split()}
    for told in page.json("/api/state")["news"]:
        known |= {word for fact in told["facts"] for text in fact for word in text.split()}
    heads = {"step", "loss", "tokens/s", "s", "workers"}  # of the columns that follow a banner
    words = set(printed.getvalue().replace("|", " ").split())
    assert {word for word in words if word.strip("+-")} - heads <= known
    assert "model.py:7" in known


def test_a_browser_is_sent_little_however_many_workers_there_are(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    pipelines = [[2 * number, 2 * number + 1] for number in range(512)]
    add(run, {**started(), "pipelines": pipelines}, stepped(0, 1.0), failed(700, 1.5))
    with served(run) as page, page.following() as events:
        name, report = next(events)
        assert (name, report["counts"]) == ("report", {"live": 1023, "lost": 1})
        assert len(json.dumps(report)) < 4_000, "which is sent each second"


def test_what_is_new_is_sent_once(page: Served, run: RunDirectory) -> None:
    with page.following() as events:
        assert next(events)[0] == "report"
        add(run, stepped(2, 3.0), failed(3, 3.5), stepped(3, 4.0))
        found: dict[str, Any] = {}
        for name, value in events:
            assert name not in found or name == "report", "nothing else is sent again"
            found[name] = value
            if found.keys() >= {"steps", "news", "grid"} and found["report"]["last"]["step"] == 3:
                break
    assert found["steps"]["step"] == [2, 3]
    assert [told["title"] for told in found["news"]["told"]] == ["worker 3 lost in step 3"]


def test_a_browser_that_was_away_gets_what_it_lacks(page: Served) -> None:
    with page.following("?steps=1&events=x") as events:
        found = dict([next(events), next(events)])
    assert found["steps"]["step"] == [1]


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    with served(new_run(tmp_path)) as page:
        assert page.json("/api/state")["report"]["condition"] == "waiting"
        assert page.json("/api/incidents") == []
        assert page.json("/api/schedule") is None
        assert samples(page)["chameleon_steps", ""] == 20


def test_a_damaged_line_is_told_and_left_out(page: Served, run: RunDirectory) -> None:
    run.metrics_file.write_text(run.metrics_file.read_text() + "{\n")
    add(run, stepped(2, 3.0))
    report = page.json("/api/state")["report"]
    assert report["last"]["step"] == 2
    assert "metrics.jsonl, line 3: is not JSON" in dict(report["facts"])["damaged"]


def test_a_damaged_decision_is_told_and_left_out(page: Served, run: RunDirectory) -> None:
    add(run, event("decision", 3.0, generation=2), failed(3, 3.5))
    (incident,) = page.json("/api/incidents")
    assert (incident["diagnosis"]["step"], incident["decision"]) == (3, None)
    facts = dict(page.json("/api/state")["report"]["facts"])
    assert "a line cannot be read, and is left out: " in facts["damaged"]
    assert "events.jsonl, line 3: search_s: Field required" in facts["damaged"]


def test_a_recorded_step_is_shown_beside_plans_and_records_that_are_damaged(page: Served, run: RunDirectory) -> None:
    plan = planned()
    write_generation(plan, run.plan_file(plan.generation))
    for part in (*recorded(plan, 3), *recorded(plan, 4)):
        TimelineLog(run.timeline_file(part.worker)).append(part)
    assert (page.json("/api/schedule")["step"], page.json("/api/schedule")["damaged"]) == (4, [])
    run.plan_file(plan.generation + 1).write_text("{")
    with run.timeline_file(0).open("a") as file:
        file.write("{}\n")
    found = page.json("/api/schedule")
    assert found["step"] == 4
    assert [text.partition(": ")[0] for text in found["damaged"]] == [
        str(run.plan_file(plan.generation + 1)),
        f"{run.timeline_file(0)}, line 3",
    ]
    run.plan_file(plan.generation).write_text("{")
    status, text = page.get("/api/schedule")
    assert (status, "does not hold the plan of a generation" in text) == (500, True)


# --- metrics ---------------------------------------------------------------------------------------------------------

_OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def samples(page: Served) -> dict[tuple[str, str], float]:
    """The metrics by name and labels, as the client's own strict parser reads them."""
    status, text = page.get("/metrics", Accept=_OPEN_METRICS)
    assert status == 200
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def test_metrics_are_those_of_the_report(page: Served, run: RunDirectory) -> None:
    record: OutcomeRecord = outcome_record()
    add(run, event("slow", 2.2, worker=1, speed=0.5, **SLOW), failed(3, 2.5), event("outcome", 2.6, **record.to_json()))
    found = samples(page)
    assert found["chameleon_step", ""] == 1
    assert found["chameleon_tokens_total", ""] == 800
    assert found["chameleon_workers", "live"] == 2
    assert found["chameleon_workers", "slow"] == found["chameleon_workers", "lost"] == 1
    assert found["chameleon_failures_total", ""] == found["chameleon_incidents_total", ""] == 1
    assert found["chameleon_failure_cost_seconds_total", "regroup"] == pytest.approx(0.1)
    assert found["chameleon_predicted_over_actual", "step"] == pytest.approx(0.4 / 0.41)
    assert found["chameleon_worker_speed_ratio", ",1"] == 0.5
    assert found["chameleon_checkpoint_step", ""] == 1
    assert found["chameleon_condition", "lost"] == 1, "nothing coordinates it"


def test_metrics_come_in_the_format_that_is_asked_for(page: Served) -> None:
    for accept, is_open in (("", False), ("*/*", False), ("text/plain", False), (_OPEN_METRICS, True)):
        text = page.get("/metrics", Accept=accept)[1]
        assert text.endswith("# EOF\n") == is_open
        assert "chameleon_step 1.0" in text


def test_a_run_that_has_ended_has_no_workers_and_expects_no_failure(page: Served, run: RunDirectory) -> None:
    assert page.json("/api/state")["report"]["next_failure_s"] is not None
    add(run, failed(3, 2.5), event("finished", 9.0, status="finished", reason="all steps are trained"))
    report = page.json("/api/state")["report"]
    assert report["condition"] == "finished"
    assert report["counts"] == {"lost": 1}
    assert report["next_failure_s"] is None
    assert samples(page)["chameleon_workers", "live"] == 0


def test_an_incident_that_costs_less_than_nothing_can_be_scraped(page: Served, run: RunDirectory) -> None:
    cost = {"incident_generations": [2], "step": 3, "failure_cost_steps": -0.98, "predicted_steps": None}
    add(run, failed(3, 2.5), event("failure_cost", 2.6, **cost))
    assert samples(page)["chameleon_failure_cost_steps", ""] == -0.98


def test_dashboard_and_alerts_use_metrics_that_there_are(page: Served, run: RunDirectory) -> None:
    record = outcome_record()
    add(run, event("slow", 2.2, worker=1, speed=0.5, **SLOW), failed(3, 2.5), event("outcome", 2.6, **record.to_json()))
    add(run, event("snapshot", 2.7, step=1))
    add(run, *(stepped(step, step + 1.0) for step in range(2, 20)), *(stepped(step, 30.0 + step) for step in range(5)))
    known = {name for name, _ in samples(page)}
    known |= {"chameleon_remaining_seconds"}  # of a run that has a coordinator
    for name in ("grafana-dashboard.json", "alerts.yml"):
        text = (MONITORING / name).read_text()
        used = set(re.findall(r"\bchameleon_[a-z_]+(?=[{ )/<\[])", text))
        assert used, name
        assert used <= known, name
    assert json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]


# --- actions ---------------------------------------------------------------------------------------------------------


def test_actions_are_carried_out_with_the_token(page: Served) -> None:
    assert page.act("checkpoint") == (200, '{"done":"done"}')
    assert page.act("drain", {"workers": [1, 2]})[0] == 200
    assert page.act("drain", {"host": "10.0.0.1"})[0] == 200
    assert page.act("inject", {"worker": 1, "kind": "slow", "factor": 0.5})[0] == 200
    assert page.act("finish") == (409, '{"error":"it has not begun"}')
    assert page.actions.asked == [
        "checkpoint",
        ("drain", (1, 2), None),
        ("drain", (), "10.0.0.1"),
        ("inject", 1, "slow", 0.5),
    ]


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("checkpoint", b"{", 400),
        ("checkpoint", [], 400),
        ("checkpoint", b"\xff", 400),
        ("checkpoint", b"[" * 9_000, 400),
        ("checkpoint", b'{"a":' * 1_900, 400),
        ("drain", {}, 400),
        ("drain", {"workers": ["1"]}, 400),
        ("drain", {"workers": []}, 400),
        ("inject", {"worker": 1, "kind": "slow", "factor": "half"}, 400),
        ("inject", {"worker": "1", "kind": "kill"}, 400),
        ("reboot", {}, 400),
        ("checkpoint", b"x" * 20_000, 413),
    ],
)
def test_garbage_is_refused(page: Served, name: str, values: object, status: int) -> None:
    assert page.act(name, values)[0] == status
    assert page.actions.asked == []


def test_a_wrong_token_is_refused_logged_and_soon_locked_out(page: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [page.act("checkpoint", token="wrong")[0] for _ in range(5)] == [401] * 5
    assert caplog.text.count("wrong token from 127.0.0.1") == 5
    assert page.act("checkpoint", token="wrong")[0] == 429, "guessing does not go on"
    assert page.actions.asked == []
    assert page.json("/api/state"), "looking does"
    assert page.act("checkpoint")[0] == 200, "and so does the owner, behind the same proxy"


def test_the_lock_opens_again() -> None:
    now = [0.0]
    gate = TokenGate("t", clock=lambda: now[0])
    assert gate.check("a", "Bearer t") == "open"
    assert [gate.check("a", "") for _ in range(6)] == ["wrong"] * 5 + ["locked"]
    assert gate.check("b", "Bearer t") == "open"
    now[0] = 29.0
    assert gate.check("a", "Bearer t") == "open"
    assert gate.check("a", "") == "locked"
    now[0] = 31.0
    assert [gate.check("a", "\udc80Bearer") for _ in range(4)] == ["wrong"] * 4


def test_another_host_name_is_refused_on_loopback(page: Served) -> None:
    assert page.get("/api/state", Host="evil.example:80")[0] == 421
    assert page.get("/api/state", Host="localhost:80")[0] == 200
    assert page.get("/api/state", Host="[::1]:80")[0] == 200


def test_browsers_that_vanish_are_forgotten(page: Served, run: RunDirectory) -> None:
    for _ in range(5):
        with page.following() as events:
            assert next(events)[0] == "report"
    add(run, stepped(2, 3.0))
    assert page.json("/api/state")["report"]["last"]["step"] == 2
