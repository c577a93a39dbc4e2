"""Leftovers of an earlier start of a run in a Ray cluster, without a cluster: its coordinator is a stand-in."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import GetTimeoutError

from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.ray import cluster
from tests.golden import refused


@dataclass
class Coordinator:
    """An actor that answers after a while, or never, and is not over.

    Attributes:
        state: as Ray tells it.
        answers_after_s: None: never.
        killed: whether it was.
    """

    state: str
    answers_after_s: float | None
    killed: list[object] = field(default_factory=list)

    _actor_id = b"7"

    @property
    def outcome(self) -> Coordinator:
        return self

    def remote(self, *_: object) -> Coordinator:
        return self

    def get(self, _: object, *, timeout: float) -> None:
        if self.answers_after_s is None or self.answers_after_s > timeout:
            raise GetTimeoutError("it does not answer")

    def actor_table(self, actor: str) -> dict[str, str]:
        assert actor == self._actor_id.hex()
        return {"State": self.state}


def removed(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the start of that coordinator has left."""
    monkeypatch.setattr(cluster, "state", coordinator)
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: coordinator)
    monkeypatch.setattr(ray, "get", coordinator.get)
    monkeypatch.setattr(ray, "kill", coordinator.killed.append)
    monkeypatch.setattr(cluster, "give_back", lambda _: None)
    monkeypatch.setattr(cluster, "_is_taken", lambda _: False)
    cluster.remove_leftovers("chameleon-run")


@pytest.mark.parametrize("state", ["DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"])
def test_a_coordinator_whose_process_starts_is_waited_for_and_not_killed(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    coordinator = Coordinator(state, answers_after_s=30.0)
    with refused(ConfigError):
        removed(coordinator, monkeypatch)
    assert not coordinator.killed


@pytest.mark.parametrize("state", ["ALIVE", "PENDING_CREATION"])
def test_a_coordinator_that_does_not_answer_is_removed(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    coordinator = Coordinator(state, answers_after_s=None)
    removed(coordinator, monkeypatch)
    assert coordinator.killed == [coordinator]
