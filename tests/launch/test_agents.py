"""How the command of an agent ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from chameleon_ft.host.agent import Agent
from chameleon_ft.launch.agent import _HostedStandby, _run_agent, _told
from chameleon_ft.launch.processes import unattended
from chameleon_ft.protocol.messages import Exit
from chameleon_ft.storage.files import ControlAddress, RunDirectory


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 0), ("terminated", os.EX_TEMPFAIL)])
def test_one_that_was_not_connected_when_the_run_ended_reads_how_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    run = RunDirectory(tmp_path)
    assert _told(None, run, is_terminated=False) == 1, "it has not ended yet"
    run.summary_file.write_text(f'{{"status": "{status}"}}')
    run.write_control(ControlAddress(address="h:1", token="t", pid=1))
    assert _told(None, run, is_terminated=False) == 1, "another start of the run has"
    assert "the connection to the coordinator is lost" in capsys.readouterr().err
    run.remove_control()
    assert _told(None, run, is_terminated=False) == code
    assert capsys.readouterr().out == f"the agent ends: the run is over: {status}\n"
    assert _told(Exit(reason="all steps are trained", status="finished"), None, is_terminated=False) == 0


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (Exit(reason="drained", is_drained=True), 7),
        (Exit(reason="all steps are trained", status="finished"), 0),
        (Exit(reason="terminated", status="terminated"), os.EX_TEMPFAIL),
    ],
)
def test_only_one_that_is_drained_ends_with_the_exit_code_for_that(order: Exit, code: int) -> None:
    class Ended:
        async def serve(self) -> Exit:
            return order

    agent = cast(Agent, Ended())
    with unattended():
        assert asyncio.run(_run_agent(agent, None, None, drained_exit_code=7)) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_coordinator_that_stands_by_gets_the_signal_that_has_ended_its_agent(number: signal.Signals) -> None:
    class Drained:
        async def serve(self) -> Exit:
            self.left = asyncio.Event()
            signal.raise_signal(number)
            await self.left.wait()
            return Exit(reason="drained", is_drained=True)

        def drain(self, number: signal.Signals) -> bool:
            self.left.set()
            return True

    class Standby(_HostedStandby):
        def __init__(self) -> None:
            super().__init__(RunDirectory(Path("run")), None)
            self.sent: list[signal.Signals] = []

        async def run(self) -> None: ...

        def send(self, number: signal.Signals) -> None:
            self.sent.append(number)

    standby = Standby()
    with unattended():
        assert asyncio.run(_run_agent(cast(Agent, Drained()), None, standby, drained_exit_code=0)) == 0
    assert standby.sent == [number]
