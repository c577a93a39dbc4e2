"""A run over several hosts, which are network namespaces of this machine; one of them is cut off."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from chameleon_ft.config import Batch, Control, Parallel, Recovery, Timeouts
from chameleon_ft.coordinator.journal import LastEntry
from chameleon_ft.launch.coordinator import DEPOSED
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import Command, Ended, assert_as_the_plain_loop, every_process_ends, small_config
from tests.network import ADDRESSES, Network
from tests.stored import event_lines

pytestmark = pytest.mark.multiprocess

TIMEOUTS = Timeouts(
    heartbeat_timeout_s=2.0,
    watchdog_min_s=3.0,
    watchdog_factor=50.0,
    collective_timeout_s=60.0,
    rendezvous_s=90.0,
    reconnect_s=3.0,
)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command to make network namespaces with")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Network(f"chameleon-{os.getpid()}"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made


def test_a_host_that_is_cut_off_is_lost_and_training_goes_on(tmp_path: Path, network: Network) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        steps=100_000,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=8, micro_batch_size=4),
        timeouts=TIMEOUTS,
        control=Control(host=ADDRESSES["coordinator"]),
        failures=unhurried(4, speed=0.25),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            Command("coordinator", file, "--output-dir", run.path, network=network.name("coordinator"))
        )
        coordinator.read_until(r"chameleon agent --coordinator 10\.77\.0\.1:\d+")
        hosts = {
            host: stack.enter_context(Command("agent", "--run", run.path, "--workers", "2", network=network.name(host)))
            for host in ("first", "second")
        }
        coordinator.read_until(r"^\s+5\s")
        cut_off: list[psutil.Process] = hosts["second"].session()
        assert len(cut_off) >= 4, "the agent, its fork server and two workers"
        with every_process_ends(cut_off):
            network.cut_off("second")
            lost_in = int(coordinator.read_until(r"lost in step (\d+)")[1])
            coordinator.read_until(rf"^\s+{lost_in + 3}\s")
            # Its agent is missed last, when its own heartbeats stop; the test's time limit bounds this.
            while not any(event["event"] == "host_lost" for event in event_lines(run)):
                time.sleep(0.05)
            assert hosts["second"].wait() == 1, hosts["second"].printed
            coordinator.signal(signal.SIGINT)
            assert coordinator.wait() == 130
            assert hosts["first"].wait() == 0
        assert "the connection to the coordinator is lost" in hosts["second"].printed
    ended = Ended(130, run)
    assert_as_the_plain_loop(ended, steps=60)
    assert ended.steps == list(range(len(ended.steps)))
    assert ended.lost in ({0, 1}, {2, 3}), "those of one host"
    assert {failure.noticed_by for failure in ended.failures} <= {"heartbeat", "peer"}
    assert [ADDRESSES["second"] in event["host"] for event in ended.events("host_lost")] == [True]


def test_a_coordinator_that_is_cut_off_leaves_the_run_to_a_standby(tmp_path: Path, network: Network) -> None:
    config = small_config(
        tmp_path,
        workers=2,
        steps=100_000,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=TIMEOUTS.model_copy(update={"reconnect_s": 60.0}),
        control=Control(host=ADDRESSES["second"], lease_s=4.0),
        failures=unhurried(2, speed=0.25),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        first = stack.enter_context(
            Command("coordinator", file, "--output-dir", run.path, network=network.name("second"))
        )
        first.read_until(r"chameleon agent --coordinator 10\.77\.0\.3:\d+")
        standby = stack.enter_context(
            Command("coordinator", "--standby", run.path, network=network.name("coordinator"))
        )
        standby.read_until(r"standing by at 10\.77\.0\.1:\d+")
        agent = stack.enter_context(
            Command("agent", "--run", run.path, "--workers", "2", network=network.name("first"))
        )
        first.read_until(r"^\s+5\s")
        with every_process_ends([*agent.session(), *first.session()]):
            network.cut_off("second")
            standby.read_until("this one leads in term 2")
            standby.read_until("took_over")
            standby.read_until(r"^\s+\d+\s")
            while (last := LastEntry.newest(run)) is None or last.state.reconnection.awaited:
                time.sleep(0.05)
            assert first.wait() == DEPOSED, first.printed
            standby.signal(signal.SIGINT)
            assert standby.wait() == 130, standby.printed
            assert agent.wait() == 0, agent.printed
    ended = Ended(130, run)
    assert_as_the_plain_loop(ended, steps=60)
    assert ended.steps == list(range(len(ended.steps)))
    assert ended.failures == []
    assert {step.generation for step in run.steps()} == {1}, "no worker stops for it"


def test_a_coordinator_that_is_cut_off_for_a_while_loses_no_worker(tmp_path: Path, network: Network) -> None:
    """Without a standby: its workers train on, on two other hosts, and come back."""
    config = small_config(
        tmp_path,
        workers=2,
        steps=100_000,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=TIMEOUTS.model_copy(update={"reconnect_s": 60.0}),
        control=Control(host=ADDRESSES["second"]),
        failures=unhurried(2, speed=0.25),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            Command("coordinator", file, "--output-dir", run.path, network=network.name("second"))
        )
        coordinator.read_until(r"chameleon agent --coordinator 10\.77\.0\.3:\d+")
        agents = [
            stack.enter_context(Command("agent", "--run", run.path, "--workers", "1", network=network.name(host)))
            for host in ("first", "coordinator")
        ]
        coordinator.read_until(r"^\s+5\s")
        network.cut_off("second")
        time.sleep(5 * TIMEOUTS.heartbeat_timeout_s)  # for which the coordinator is cut off
        network.connect("second")
        coordinator.read_until("reclaimed")
        step = int(coordinator.read_until(r"^\s+(\d+)\s")[1])
        coordinator.read_until(rf"^\s+{step + 10}\s")
        while (last := LastEntry.newest(run)) is None or last.state.reconnection.awaited:
            time.sleep(0.05)
        coordinator.signal(signal.SIGINT)
        assert coordinator.wait() == 130, coordinator.printed
        assert [agent.wait() for agent in agents] == [0, 0]
    ended = Ended(130, run)
    assert_as_the_plain_loop(ended, steps=60)
    assert ended.steps == list(range(len(ended.steps)))
    assert ended.failures == []
    assert ended.events("stalled") == []
    assert {step.generation for step in run.steps()} == {1}, "no worker stops for it"


@pytest.mark.parametrize("way", ["both", "one"])
def test_one_side_of_a_link_that_is_cut_leaves_and_comes_back_once_it_is_healed(
    tmp_path: Path, network: Network, way: str
) -> None:
    config = small_config(
        tmp_path,
        workers=3,
        steps=100_000,
        parallel=Parallel(dp=3, pp=1),
        batch=Batch(micro_batches=6, micro_batch_size=2),
        timeouts=TIMEOUTS.model_copy(update={"collective_timeout_s": 0.0}),
        control=Control(host=ADDRESSES["coordinator"]),
        recovery=Recovery(respawn=True, respawn_delay_s=0.2, max_respawns=100),
        failures=unhurried(3, speed=0.25),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    cuts = [("first", "second"), ("second", "first")][: 2 if way == "both" else 1]
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            Command("coordinator", file, "--output-dir", run.path, network=network.name("coordinator"))
        )
        coordinator.read_until(r"chameleon agent --coordinator 10\.77\.0\.1:\d+")
        for host, workers in (("first", "2"), ("second", "1")):
            stack.enter_context(Command("agent", "--run", run.path, "--workers", workers, network=network.name(host)))
        coordinator.read_until(r"^\s+5\s")
        for cut in cuts:
            network.drop(*cut)
        lost_in = int(coordinator.read_until(r"lost in step (\d+)")[1])
        coordinator.read_until(rf"^\s+{lost_in + 3}\s")
        while not any("cannot connect with" in event.get("cause", "") for event in event_lines(run)):
            time.sleep(0.05)
        for cut in cuts:
            network.heal(*cut)
        while not [event for event in event_lines(run) if event["event"] == "join"]:
            time.sleep(0.05)
        coordinator.signal(signal.SIGINT)
        assert coordinator.wait() == 130
    ended = Ended(130, run)
    assert_as_the_plain_loop(ended, steps=60)
    assert ended.steps == list(range(len(ended.steps)))
    # Two workers are on one host, and the third on the other: all of one host are cut off from all of the other.
    (first,) = ended.events("messages_failed")
    pairs = {frozenset((each["reporter"], each["peer"])) for each in first["reports"]}
    (alone,) = frozenset.intersection(*pairs)
    assert len(pairs) == 2
    assert {failure.worker for failure in ended.failures} == {alone}, "the smaller side leaves"
    assert {failure.noticed_by for failure in ended.failures} == {"peer"}
    joined = ended.events("join")[0]
    assert joined["workers"] == [alone], "it is back"
