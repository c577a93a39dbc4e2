"""A command line that records runs instead of starting them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.storage.checkpoints import mark_complete
from chameleon_ft.storage.files import RunDirectory
from tests.stored import step_directory

OWN_MODEL = """
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job

def job():
    layers = [partial(nn.Linear, 4, 4)] * 3
    data = [(torch.zeros(4), torch.zeros(4))] * 8
    return Job(layers=layers, loss=nn.MSELoss(reduction="sum"), dataset=data, optimizer=torch.optim.SGD)
"""


@dataclass
class Launched:
    """The runs that the command line would have started."""

    config: RunConfig
    run: RunDirectory
    resume: bool


@dataclass
class CommandLine:
    """Calls commands in this process."""

    capture: pytest.CaptureFixture[str]
    launched: list[Launched] = field(default_factory=list)
    joined: list[dict[str, object]] = field(default_factory=list)
    error: ChameleonError | None = None
    """The error that starting a run raises."""
    knocks: list[Callable[[], None]] = field(default_factory=list)
    """Raise the errors of the next attempts to reach a coordinator; all others succeed."""

    def require_coordinator(self, address: str, token: str, *, tls: Path | None) -> None:
        if self.knocks:
            self.knocks.pop(0)()

    def __call__(self, *arguments: str | Path) -> int:
        """Run `chameleon` with `arguments` and return its exit code."""
        try:
            return main([str(argument) for argument in arguments])
        except SystemExit as ending:
            return int(ending.code or 0)

    def refused(self, *arguments: str | Path, code: int = 2) -> str:
        """Run `chameleon` with `arguments` that it must refuse, and return what it says."""
        assert self(*arguments) == code
        assert not self.launched
        captured = self.capture.readouterr()
        assert "Traceback" not in captured.err
        assert "\n\n" not in captured.err, "a message is one paragraph"
        return captured.err

    def configured(self, *arguments: str | Path) -> RunConfig:
        """Run `chameleon` with `arguments` that it must accept, and return the configuration it would start."""
        assert self(*arguments) == 0, self.capture.readouterr().err
        return self.launched[-1].config


def nothing_listens() -> None:
    """Be the answer of an address at which no coordinator is."""
    raise ConnectionRefusedError("nothing listens there")


def finished_run(chameleon: CommandLine, config_file: Path, *, checkpoint: int | None = 10) -> RunDirectory:
    """Return the directory of a run that has stopped after a checkpoint."""
    chameleon.configured("train", config_file)
    run = chameleon.launched.pop().run
    if checkpoint is not None:
        step_directory(run.checkpoints, checkpoint).mkdir()
        mark_complete(run.checkpoints, checkpoint, model="some model", num_layers=0)
    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text that is enough to train on: the library's own takes seconds to find."""
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 200)
    return path


@pytest.fixture
def config_file(tmp_path: Path, text: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(
        f'workers = 4\nsteps = 20\n[data]\npath = "{text}"\n[[failures]]\nstep = 12\nworker = 3\nphase = "sync"\n'
    )
    return path


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A file with a job of the user's own."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL)
    return path


@pytest.fixture
def chameleon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Return a command line in an empty working directory, beside a stand-in for what starts processes."""
    command_line = CommandLine(capsys)

    def start(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
        if command_line.error is not None:
            raise command_line.error
        command_line.launched.append(Launched(config, run, resume))
        return 0

    def joins_by(access: CoordinatorAccess) -> dict[str, object]:
        return {"coordinator": access.address, "token": access.token, "tls": access.tls}

    def run_agent(access: CoordinatorAccess, *, run: RunDirectory | None, stands_by: bool, **arguments: object) -> int:
        standby = {"stands_by_for": run.path} if run is not None and stands_by else {}
        command_line.joined.append({**joins_by(access), **arguments, **standby})
        return 0

    def work(access: CoordinatorAccess, *, environ: Mapping[str, str]) -> int:
        command_line.joined.append({**joins_by(access), "rank": environ["RANK"]})
        return 0

    def stand_by(config: RunConfig, *, run: RunDirectory, host: str | None) -> int:
        command_line.joined.append({"stands_by_for": run.path, "host": host})
        return 0

    def take_over(config: RunConfig, *, run: RunDirectory) -> int:
        command_line.joined.append({"takes_over": run.path})
        return 0

    starts = {
        "local.train": start,
        "coordinator.coordinate": start,
        "agent.run_agent": run_agent,
        "agent.work": work,
        "coordinator.stand_by": stand_by,
        "coordinator.take_over": take_over,
    }
    for name, function in starts.items():
        monkeypatch.setattr(f"chameleon_ft.launch.{name}", function)
    monkeypatch.setattr("chameleon_ft.launch.live_run.require_coordinator", command_line.require_coordinator)
    monkeypatch.delenv("CHAMELEON_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "80")  # of boxes around messages, which are as wide as the terminal
    monkeypatch.chdir(tmp_path)
    return command_line
