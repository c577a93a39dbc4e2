"""Commands that inject failures into a live run, and drain its workers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from chameleon_ft.config import TrainConfig
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Inject, Message
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.cli.conftest import CommandLine
from tests.golden import message


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", TrainConfig())


def test_a_failure_is_injected_into_a_live_run(
    chameleon: CommandLine, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected: list[Message] = []

    def request(run: RunDirectory, message: Message) -> Message:
        injected.append(message)
        return message

    monkeypatch.setattr("chameleon_ft.launch.live_run.request", request)
    assert chameleon("inject", run.path, "--worker", "2") == 0
    assert chameleon("inject", run.path, "--worker", "1", "--kind", "hang", "--phase", "sync", "--step", "9") == 0
    assert chameleon("inject", run.path, "--worker", "3", "--kind", "slow", "--factor", "0.5") == 0
    assert chameleon("inject", run.path, "--worker", "3", "--kind", "nan") == 0
    assert chameleon("inject", run.path, "--worker", "3", "--step", "9") == 0
    assert injected == [
        Inject(worker=2, kind="kill"),
        Inject(worker=1, kind="hang", phase="sync", step=9),
        Inject(worker=3, kind="slow", factor=0.5),
        Inject(worker=3, kind="nan", phase="backward"),
        Inject(worker=3, kind="kill", phase="forward", step=9),
    ]
    assert chameleon.capture.readouterr().out.splitlines() == [
        "worker 2 is killed now",
        "worker 1 is stopped in the sync of step 9, or of the first later step that has one",
        "worker 3 computes at 0.5 of its speed now",
        "worker 3 has an element of its gradient spoilt in its next backward",
        "worker 3 is killed in step 9",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--worker", "-1"],
        ["--worker", "1", "--step", "100"],
        ["--worker", "1", "--kind", "melt"],
        ["--worker", "1", "--kind", "slow"],
        ["--worker", "1", "--kind", "slow", "--factor", "2"],
        ["--worker", "1", "--factor", "0.5"],
        ["--worker", "1"],
    ],
)
def test_a_failure_that_cannot_be_injected_is_refused(
    chameleon: CommandLine, run: RunDirectory, arguments: list[str]
) -> None:
    message(chameleon.refused("inject", run.path, *arguments))


def test_workers_of_a_live_run_are_drained(
    chameleon: CommandLine, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def drain(run: RunDirectory, *, workers: tuple[int, ...], host: str | None) -> tuple[int, ...]:
        if host == "10.0.0.9":
            raise ControlError("there is no such host")
        return workers or (4, 5)

    def wait_until_out(run: RunDirectory, workers: tuple[int, ...], *, after: int) -> None:
        waited.append((workers, after))

    module = ModuleType("chameleon_ft.launch.live_run")
    module.drain, module.wait_until_out = drain, wait_until_out  # type: ignore[attr-defined]
    module.count_events = lambda run: len(run.events())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "chameleon_ft.launch.live_run", module)
    run.write_control(ControlAddress(address="127.0.0.1:4000", token="secret", pid=1))
    assert chameleon("drain", run.path, "--worker", "3") == 0
    assert chameleon("drain", run.path, "--worker", "3", "--worker", "1", "--wait") == 0
    assert chameleon("drain", run.path, "--host", "10.0.0.2") == 0
    one = ": it trains until a plan without it is in force\n"
    several = ": they train until a plan without them is in force\n"
    assert chameleon.capture.readouterr().out == (
        f"draining worker 3{one}draining workers 3, 1{several}no longer in the run: workers 3, 1\n"
        f"draining workers 4, 5{several}"
    )
    assert waited == [((3, 1), 0)]
    assert chameleon("drain", run.path, "--host", "10.0.0.9") == 1
    assert chameleon.capture.readouterr().err == "chameleon drain: there is no such host\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--worker", "1", "--host", "10.0.0.2"],
        ["--worker", "1", "--worker", "-1"],
        ["--worker", "x"],
        ["--worker", "1"],
    ],
)
def test_workers_that_cannot_be_drained_are_refused(
    chameleon: CommandLine, run: RunDirectory, arguments: list[str]
) -> None:
    message(chameleon.refused("drain", run.path, *arguments))
