"""Policies, detectors, sinks, backends and planners of an installed package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from chameleon_ft import registry
from chameleon_ft.cli.commands import track
from chameleon_ft.config import BACKENDS, PolicyName, RunConfig, Timeouts, TrainConfig
from chameleon_ft.coordinator.detectors import DETECTORS, Detectors
from chameleon_ft.coordinator.detectors.base import Lost, ProcessExited
from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery import POLICIES, decide
from chameleon_ft.report.sinks.registry import SINKS
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.worker.device import communicators_for
from tests.coordinator.histories import History, new_state
from tests.recovery.contexts import after, context, rate_of

MODULE = """
from dataclasses import dataclass

from chameleon_ft.config import Backend
from chameleon_ft.coordinator.detectors.base import Note, ProcessExited
from chameleon_ft.events.base import Event, event
from chameleon_ft.recovery import Policy, Proposal
from chameleon_ft.report.sinks.registry import SinkType

CAUTIOUS = Policy(kinds={"reroute": "cautious"}, planner="slow")


class Slow:
    @staticmethod
    def propose(name, proposer):
        return [Proposal(name=name, reason="it takes too long")]


@event("exits")
class ExitCount(Event):
    count: int


@dataclass(frozen=True)
class Exits:
    count: int = 0

    def observe(self, signal):
        if not isinstance(signal, ProcessExited):
            return self, ()
        return Exits(self.count + 1), (Note(ExitCount(count=self.count + 1)),)


class File:
    def __init__(self, path):
        self.path = path

    def take(self, record):
        with open(self.path, "a") as file:
            print(type(record).__name__, file=file)
        return True

    def close(self):
        pass


FILE = SinkType(title="a file", make=lambda path, run: File(path))
PIGEONS = Backend(communicators="other_package:communicators", devices=("cpu",))


def communicators(config, *, address, device):
    return (config.backend, address, device)
"""
ENTRY_POINTS = """
[chameleon_ft.policies]
cautious = other_package:CAUTIOUS
chameleon = other_package:MISSING
broken = other_package:MISSING
[chameleon_ft.planners]
slow = other_package:Slow
[chameleon_ft.detectors]
exits = other_package:Exits
[chameleon_ft.sinks]
file = other_package:FILE
[chameleon_ft.backends]
pigeons = other_package:PIGEONS
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package."""
    (tmp_path / "other_package.py").write_text(MODULE)
    info = tmp_path / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    registry.installed.cache_clear()
    yield
    registry.installed.cache_clear()


def test_a_policy_decides_with_a_planner() -> None:
    assert [*POLICIES][-2:] == ["broken", "cautious"]
    config = RunConfig.model_validate({"recovery": {"policy": "cautious"}})
    now = after(context(dp=2, pp=2), 1)
    rerouted, planned = decide(now, config.recovery.policy, rate_of(1e6, now)).candidates
    assert (rerouted.policy, rerouted.feasible) == ("cautious", True)
    assert (planned.policy, planned.reason) == ("slow", "it takes too long")


def test_one_of_ours_is_not_replaced() -> None:
    assert POLICIES["chameleon"].salvages
    assert list(POLICIES).count("chameleon") == 1


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        POLICIES["careless"]
    assert {*get_args(PolicyName), "cautious"} <= {*str(refused.value).replace(",", "").split()}
    with pytest.raises(ValidationError) as invalid:
        RunConfig.model_validate({"recovery": {"policy": "careless"}})
    assert "'cautious'" in str(invalid.value)
    with pytest.raises(ConfigError, match="MISSING"):
        POLICIES["broken"]


def test_a_detector_observes_and_is_journaled() -> None:
    assert [*DETECTORS][-1] == "exits"
    detectors, findings = Detectors.with_timeouts(Timeouts()).observe(ProcessExited(3, 1))
    assert [type(each) for each in findings][:1] == [Lost]
    assert detectors.by_name["exits"].count == 1
    history = History(new_state())
    history.train()
    history.reap(1)
    assert [event["count"] for event in history.events("exits")] == [1]
    assert history.replayed.last is not None
    assert history.replayed.last.state.detectors.by_name["exits"].count == 1


def test_a_sink_gets_records(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", TrainConfig())
    run.events_file.write_text('{"time": 1.0, "event": "finished", "status": "finished", "reason": ""}\n')
    assert "file" in SINKS
    track.main([str(run.path), "--sink", f"file={tmp_path / 'records.txt'}"])
    assert (tmp_path / "records.txt").read_text() == "Finished\n"


def test_a_backend_makes_the_communicators_of_a_rank() -> None:
    assert BACKENDS["pigeons"].devices == ("cpu",)
    config = RunConfig.model_validate({"backend": "pigeons"})
    device = torch.device("cpu")
    made: object = communicators_for(config, address="10.0.0.1", device=device)
    assert made == ("pigeons", "10.0.0.1", device)
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"backend": "pigeons", "device": "cuda"})
