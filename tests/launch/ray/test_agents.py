"""Which nodes of a Ray cluster get an agent, without a cluster: the agents stand in for actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError

from chameleon_ft.launch.ray import actors as agents
from chameleon_ft.launch.ray.cluster import Node, NodeRequest
from chameleon_ft.storage.files import ControlAddress, RunDirectory

REQUEST = NodeRequest(num_nodes=1, workers_per_node=2, resources={"CPU": 2.0})
CONTROL = ControlAddress(address="10.0.0.1:4000", token="secret", pid=1)


class Method:
    """A method of an actor, which answers at once or never."""

    def __init__(self, answer: object = None) -> None:
        self._answer = answer

    def remote(self, *_: object) -> asyncio.Future[object]:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self._answer is not None:
            answer.set_result(self._answer)
        return answer


class Handle:
    """An agent that serves the run without an end."""

    sees = Method(True)
    serve = Method()

    def __init__(self) -> None:
        self.drained = 0

    @property
    def drain(self) -> Method:
        self.drained += 1
        return Method(True)


@dataclass
class Cluster:
    """Nodes with two CPUs each.

    Attributes:
        placed: index of the bundle on each node that has one.
        lacks: whether other bundles are not placed.
        agents: those of the nodes that have been given one, in that order.
        draining: nodes that Ray drains.
    """

    nodes: list[str]
    placed: dict[str, int]
    agents: dict[str, Handle] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    lacks: bool = False
    head_is_away: bool = False

    def live_nodes(self) -> tuple[Node, ...]:
        if self.head_is_away:
            raise RayError("the GCS does not answer")
        return tuple(Node(id=each, address=f"10.0.0.{each}", resources={"CPU": 2.0}) for each in self.nodes)

    @property
    def started(self) -> list[str]:
        """Nodes that have been given an agent, in that order."""
        return list(self.agents)

    def actor(self, node: Node, bundle: int | None) -> Handle:
        return self.agents.setdefault(node.id, Handle())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(["1", "2"], {"1": 0})
    monkeypatch.setattr(agents, "live_nodes", made.live_nodes)
    monkeypatch.setattr(agents, "draining_nodes", lambda: frozenset(made.draining))
    monkeypatch.setattr(agents, "agents_of", lambda _: frozenset(made.agents))
    monkeypatch.setattr(agents, "bundles_by_node", lambda _: (dict(made.placed), not made.lacks))
    monkeypatch.setattr(agents, "_POLL_S", 0.01)
    monkeypatch.setattr(agents.Agents, "_actor", made.actor)
    return made


def keep(
    run: Path,
    *happens: Callable[[], None],
    until: Callable[[], object],
    starts: bool = True,
    request: NodeRequest = REQUEST,
) -> None:
    """Keep agents until something holds, after what happens meanwhile; the process ends then."""

    async def kept() -> None:
        group: Any = None
        own = agents.Agents(
            name="run", run=RunDirectory(run), request=request, group=group, needs_directory="checkpoints are there"
        )
        if starts:
            await own.start()
        keeping = asyncio.create_task(own.keep(CONTROL, failed=pytest.fail))
        for happen in happens:
            await asyncio.sleep(0.05)
            happen()
        while not until():
            assert not keeping.done(), keeping.exception()
            await asyncio.sleep(0.01)
        keeping.cancel()

    asyncio.run(kept())


def test_a_node_that_was_not_needed_is_used_once_the_placement_group_needs_it(cluster: Cluster, tmp_path: Path) -> None:
    def lose() -> None:
        assert set(cluster.started) == {"1"}
        cluster.nodes.remove("1")
        cluster.placed = {"2": 0}

    keep(tmp_path, lose, until=lambda: "2" in cluster.started)


def test_a_node_that_joins_while_there_is_no_coordinator_joins_the_run(cluster: Cluster, tmp_path: Path) -> None:
    keep(tmp_path, until=lambda: cluster.started)
    cluster.nodes.append("3")
    cluster.agents.clear()
    keep(tmp_path, until=lambda: "3" in cluster.started, starts=False)
    assert "2" not in cluster.started


@pytest.mark.parametrize("placing_s", [0.0, 1000.0])
def test_a_node_that_joins_when_more_were_lost_joins_the_run_after_a_while(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placing_s: float
) -> None:
    monkeypatch.setattr(agents, "_PLACING_S", placing_s)
    cluster.lacks = True

    def join() -> None:
        cluster.nodes += ["3", "4"]
        cluster.placed["4"] = 1

    keep(tmp_path, join, until=lambda: "4" in cluster.started and (placing_s or "3" in cluster.started))
    assert ("3" in cluster.started) == (placing_s == 0), "it may still get a bundle"


@pytest.mark.parametrize("placing_s", [0.0, 1000.0])
def test_a_node_that_was_not_needed_joins_the_run_after_a_while_if_more_were_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placing_s: float
) -> None:
    monkeypatch.setattr(agents, "_PLACING_S", placing_s)
    cluster.nodes, cluster.placed = list("12345678"), {"1": 0, "2": 1, "3": 2, "4": 3}

    def lose() -> None:
        assert set(cluster.started) == set("1234")
        cluster.nodes, cluster.placed, cluster.lacks = list("15678"), {"1": 0}, True
        cluster.agents.clear()

    def look() -> None:
        """Nothing more happens."""

    until, request = (lambda: placing_s or len(cluster.started) >= 3), replace(REQUEST, num_nodes=4)
    keep(tmp_path, lose, look, until=until, request=request)
    assert cluster.started == (list("567") if placing_s == 0 else []), "as many as are missing"


@pytest.mark.parametrize("is_draining", [False, True], ids=["drained later", "drained meanwhile"])
def test_a_node_without_a_bundle_that_serves_the_run_is_drained_after_a_takeover(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_draining: bool
) -> None:
    monkeypatch.setattr(agents, "_PLACING_S", 0.0)
    cluster.nodes, cluster.placed = ["1", "2", "3"], {"1": 0, "2": 1}
    request = replace(REQUEST, num_nodes=2)

    def lose() -> None:
        cluster.nodes.remove("2")
        cluster.placed, cluster.lacks = {"1": 0}, True

    keep(tmp_path, lose, until=lambda: "3" in cluster.started, request=request)
    monkeypatch.setattr(agents, "_PLACING_S", 1000.0)
    if is_draining:
        cluster.draining.add("3")
    keep(
        tmp_path,
        lambda: cluster.draining.add("3"),
        until=lambda: cluster.agents["3"].drained,
        starts=False,
        request=request,
    )


def test_a_head_that_is_away_for_a_while_ends_no_run(cluster: Cluster, tmp_path: Path) -> None:
    def leave() -> None:
        cluster.head_is_away = True

    def come_back() -> None:
        cluster.nodes.append("3")
        cluster.head_is_away = False

    keep(tmp_path, leave, come_back, until=lambda: "3" in cluster.started)
