"""Emulated devices: what lasts how long, and that the run behind them is a real one."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import (
    STAND_IN_JOB,
    Batch,
    Checkpoint,
    Emulation,
    Failure,
    Parallel,
    Recovery,
    RunConfig,
    Snapshots,
    Timelines,
    config_to_toml,
)
from chameleon_ft.errors import ConfigError, ProfileError
from chameleon_ft.job import load_job
from chameleon_ft.models.stand_in import stand_in, stand_in_scale
from chameleon_ft.observe import RunDirectory, read_generation_plans, read_recorded_steps
from chameleon_ft.observe.comparison import compare_generations
from chameleon_ft.plan import LayerRange, RecomputedLayers, data_pipeline_plan
from chameleon_ft.profiles import Fingerprint, Profile, profile_of_run, read_profile, write_profile
from chameleon_ft.runtime import device
from chameleon_ft.runtime.communicators import CommunicationError, Membership, Rendezvous, emulated
from chameleon_ft.runtime.communicators.emulated import EmulatedLinks
from chameleon_ft.runtime.device import EmulatedPace
from chameleon_ft.runtime.execution.held_layer import HeldLayer
from chameleon_ft.schedule import CostModel, Operation, OperationKind
from chameleon_ft.workload import LayerCost, Workload
from tests.harness import (
    PATIENT,
    Command,
    Ended,
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    train_here,
)
from tests.strategies import recomputing


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Sleeper(threading.Event):
    """An event that advances the clock while it is awaited."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._clock.now += timeout
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (device, emulated):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr("chameleon_ft.runtime.communicators.delayed.threading.Event", lambda: Sleeper(found))
    return found


def cluster(hosts: Sequence[str] = ("a", "a", "b")) -> Cluster:
    workers = tuple(Worker(number, host) for number, host in enumerate(hosts))
    return Cluster(workers, Link(1.0, 1000.0), Link(5.0, 100.0))


class Wire:
    """Communicators that deliver at once, what is sent by one worker to whoever receives next."""

    def __init__(self) -> None:
        self.sent: deque[tuple[int, int, Tensor]] = deque()
        self.calls: list[str] = []

    def open(self, membership: Membership) -> None:
        self.calls.append("open")

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> Any:
        self.sent.append((peer, tag, tensor.clone()))
        return _Done()

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> Any:
        return _Done(lambda: tensor.copy_(self.sent.popleft()[2]))

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Any:
        self.calls.append(f"all_reduce {group}")
        return _Done(lambda: tensor.mul_(len(group)))

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> Any:
        self.calls.append(f"vote {group}")
        return _Done()

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def settle(self) -> None: ...

    def close(self) -> None:
        self.calls.append("close")


class _Done:
    def __init__(self, then: Any = lambda: None) -> None:
        self._then = then

    def wait(self) -> None:
        self._then()


NOWHERE = Rendezvous(lambda timeout_s: HashStore())


def linked(wire: Wire, worker: int, *, scale: int = 1) -> EmulatedLinks:
    found = EmulatedLinks(wire, lambda members: cluster(), scale=scale)
    members = (0, 1, 2)
    found.open(Membership(generation=1, worker=worker, members=members, groups=(), channels=(), rendezvous=NOWHERE))
    return found


@pytest.mark.parametrize(("peer", "seconds"), [(1, 1.0 + 24 * 10 / 1000), (2, 5.0 + 24 * 10 / 100)])
def test_a_message_takes_the_time_of_its_link(clock: Clock, peer: int, seconds: float) -> None:
    wire = Wire()
    sender, receiver = linked(wire, 0, scale=10), linked(wire, peer, scale=10)
    message = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    arrived = torch.empty(2, 3)

    sender.send(message, peer=peer, tag=4)
    assert clock.now == 100.0, "a send holds up nobody"
    receiver.receive(arrived, peer=0, tag=4).wait()

    assert torch.equal(arrived, message)
    assert clock.now == pytest.approx(100.0 + seconds)


def test_a_late_receive_finds_its_message(clock: Clock) -> None:
    wire = Wire()
    linked(wire, 0).send(torch.ones(3), peer=1, tag=0)
    clock.now += 50
    linked(wire, 1).receive(torch.empty(3), peer=0, tag=0).wait()
    assert clock.now == 150.0


def test_states_go_out_one_after_the_other(clock: Clock) -> None:
    wire = Wire()
    sender, receiver = linked(wire, 0, scale=10**9), linked(wire, 1, scale=10**9)
    for number in range(3):
        sender.send(torch.full((2,), float(number)), peer=1, tag=0, stands_for_bytes=2000)
    assert clock.now == 100.0, "a send holds up nobody"
    arrived = torch.empty(2)
    for number in range(3):
        receiver.receive(arrived, peer=0, tag=0).wait()
        assert float(arrived[0]) == number
        assert clock.now == pytest.approx(101.0 + 2 * (number + 1)), "the latency once, then the bytes of each"


def test_states_are_received_one_after_the_other_from_any_peer(clock: Clock) -> None:
    wire = Wire()
    for sender in (0, 1):
        linked(wire, sender).send(torch.ones(2), peer=2, tag=0, stands_for_bytes=1000)
    receiver = linked(wire, 2)
    for number, sender in enumerate((0, 1), start=1):
        receiver.receive(torch.empty(2), peer=sender, tag=0).wait()
        assert clock.now == pytest.approx(105.0 + 10 * number)


def test_reductions_are_rings_one_after_the_other(clock: Clock) -> None:
    wire = Wire()
    emulated = linked(wire, 0, scale=100)
    first, second = torch.ones(4), torch.ones(8)
    reductions = [emulated.all_reduce(first, (0, 1)), emulated.all_reduce(second, (0, 1, 2))]
    assert wire.calls == ["open"], "a ring turns when all have come to it"

    reductions[0].wait()
    near = cluster().ring_all_reduce_s((0, 1), 1600)
    assert clock.now == pytest.approx(100 + near)
    reductions[1].wait()

    assert clock.now == pytest.approx(100 + near + cluster().ring_all_reduce_s((0, 1, 2), 3200))
    assert (float(first[0]), float(second[0])) == (2.0, 3.0)
    assert wire.calls == ["open", "all_reduce (0, 1)", "all_reduce (0, 1, 2)"]


def test_a_vote_takes_its_own_time_only(clock: Clock) -> None:
    wire = Wire()
    linked(wire, 0, scale=10**9).vote(torch.ones(6), (0, 1)).wait()
    assert clock.now == 100.0
    assert wire.calls == ["open", "vote (0, 1)"]


def test_a_wait_for_a_link_ends_with_the_generation(clock: Clock) -> None:
    wire = Wire()
    receiver = linked(wire, 1)
    linked(wire, 0).send(torch.ones(3), peer=1, tag=0)
    receiver.interrupt()
    with pytest.raises(CommunicationError, match="the generation is over"):
        receiver.receive(torch.empty(3), peer=0, tag=0).wait()
    receiver.close()
    assert wire.calls[-2:] == ["interrupt", "close"]


def test_an_operation_takes_the_time_of_its_layers(clock: Clock) -> None:
    layers = (LayerCost("a", 1.0, 2.0, 3.0), LayerCost("b", 4.0, 5.0, 6.0, fused_backward_s=9.0))
    costs = CostModel(Workload(layers, 1, 1, operation_overhead_s=0.5), cluster())
    route = data_pipeline_plan(layer_costs=[1, 1], dp=1, pp=2, micro_batches=1).routes[0]
    paced = EmulatedPace(costs, 1)
    expected = {OperationKind.FORWARD: 4.5, OperationKind.BACKWARD: 9.5, OperationKind.WEIGHT_GRAD: 6.5}
    for kind, seconds in expected.items():
        since = clock.now
        clock.now += 0.25  # what the real computing took
        paced(Operation.of(kind, route, 1), since)
        assert clock.now == pytest.approx(since + seconds)


def test_a_forward_that_is_run_again_takes_its_time(clock: Clock) -> None:
    layers = (LayerCost("a", 1.0, 2.0, 3.0), LayerCost("b", 4.0, 5.0, 6.0), LayerCost("c", 1.0, 1.0, 1.0))
    route = data_pipeline_plan(layer_costs=[1, 1, 1], dp=1, pp=3, micro_batches=1).routes[0]
    paced = EmulatedPace(CostModel(Workload(layers, 1, 1), cluster()), 1)
    for recompute, seconds in (({}, 11.0), ({1: RecomputedLayers(1, 2)}, 15.0), ({}, 11.0)):
        since = clock.now
        paced(Operation.of(OperationKind.BACKWARD, route, 1, recompute), since)
        assert clock.now == pytest.approx(since + seconds)


def test_an_operation_that_is_late_already_is_not_held_up(clock: Clock) -> None:
    costs = CostModel(Workload((LayerCost("a", 1.0, 1.0, 1.0),), 1, 1), cluster())
    operation = Operation(OperationKind.FORWARD, 0, 0, LayerRange(0, 1), None, None, True, True)
    EmulatedPace(costs, 0)(operation, clock.now - 7)
    assert clock.now == 100.0


# --- the stand-in, and a whole run -----------------------------------------------------------------------------------

LAYERS = tuple(
    LayerCost(f"layer {n}", 0.004, 0.004, 0.002, output_bytes=1 << 20, gradient_bytes=4 << 20, param_bytes=4 << 20)
    for n in range(5)
)


def emulated_config(folder: Path, **changes: Any) -> RunConfig:
    profile = Profile(
        name="five layers",
        fingerprint=Fingerprint(
            model="five", micro_batch_size=2, dtype="bf16", device="a device", threads=0, versions={}
        ),
        source="derived",
        provenance="by hand",
        layers=LAYERS,
        intra_host=Link(1e-5, 1e10),
    )
    write_profile(profile, folder / "profile.json")
    fields: dict[str, Any] = {
        "job": STAND_IN_JOB,
        "device": "emulated",
        "profile": folder / "profile.json",
        "workers": 4,
        "steps": 8,
        "parallel": Parallel(dp=2, pp=2, optimizer_redundancy="all"),
        "batch": Batch(micro_batches=8, micro_batch_size=2),
        "timeouts": PATIENT,
        "timelines": Timelines(every=2),
        "checkpoint": Checkpoint(every=0),
        "snapshots": Snapshots(every=0),
    }
    return RunConfig(**{**fields, **changes})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_stand_in_is_a_part_of_the_model_in_every_tensor(tmp_path: Path, precision: str) -> None:
    config = emulated_config(tmp_path, precision=precision)
    profile_scale = stand_in_scale(
        Profile(
            name="",
            fingerprint=Fingerprint(model="", micro_batch_size=2, dtype="", device="", threads=0, versions={}),
            source="derived",
            provenance="",
            layers=LAYERS,
            intra_host=Link(0, 1),
        )
    )
    job = load_job(config.job, config)
    boundary = torch.zeros(2, 1)
    for number, cost in enumerate(LAYERS):
        layer = HeldLayer.initial(job, number, seed=0, device=torch.device("cpu"))
        boundary = layer.module(boundary)
        assert boundary.dtype is (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert boundary.nbytes * profile_scale == cost.output_bytes
        boundary.sum().backward(retain_graph=True)
        gradients = [parameter.grad for parameter in layer.parameters]
        assert sum(each.nbytes for each in gradients if each is not None) * profile_scale == cost.gradient_bytes
    assert profile_scale == 256
    assert job.relative_costs == pytest.approx([0.010] * 5)


def test_an_emulated_device_has_the_precision_of_its_profile(tmp_path: Path) -> None:
    config = emulated_config(tmp_path, precision="bf16")
    assert config.profile is not None
    profile = read_profile(config.profile)
    other = dataclasses.replace(profile.fingerprint, dtype="float32")
    write_profile(dataclasses.replace(profile, fingerprint=other), config.profile)
    with pytest.raises(ProfileError, match=r'precision = "bf16": the profile of five layers was made for float32'):
        profile_of_run(config)


def test_the_stand_in_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match="is made of its profile; set profile"):
        stand_in(RunConfig(workers=4))


@pytest.mark.multiprocess
def test_an_emulated_run_through_a_kill_is_a_real_one_and_takes_the_time_of_its_profile(tmp_path: Path) -> None:
    failure = Failure(step=3, worker=1, phase="backward")
    emulation = Emulation(time_scale=2.0)
    # Without a search for a better plan, which would lead to further generations.
    recovery = Recovery(policy="reroute")
    config = emulated_config(tmp_path, failures=(failure,), emulation=emulation, recovery=recovery)
    ended = train_here(config, tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    plans = read_generation_plans(ended.run.plans)
    recorded = read_recorded_steps(ended.run.timelines)
    assert [plan.costs_from for plan in plans.values()] == ["profile", "corrected"]
    # Devices keep the profile, whatever has been corrected by what they did.
    plans = {number: dataclasses.replace(plan, costs=plans[1].costs) for number, plan in plans.items()}
    assert sorted({(step.step, step.generation, step.part) for step in recorded}) == [
        (0, 1, "whole"),
        (1, 1, "whole"),
        (2, 1, "whole"),
        (3, 1, "interrupted"),
        (3, 2, "rest"),
        (4, 2, "whole"),
        (5, 2, "whole"),
        (6, 2, "whole"),
    ]
    for step in (step for step in recorded if step.part == "whole"):
        plan = plans[step.generation]
        for operation, (start, end) in zip(plan.program.of(step.worker), step.operations, strict=True):
            assert end - start >= plan.costs.operation_s(step.worker, operation) - 1e-5
    for comparison in compare_generations(plans, recorded):
        assert comparison.error < 0, "the real system can only be slower than what it emulates"


@pytest.mark.multiprocess
def test_a_run_starts_with_the_plan_that_it_is_given(tmp_path: Path) -> None:
    plan = data_pipeline_plan(layer_costs=[1, 1, 1, 9, 1], dp=2, pp=2, micro_batches=8, split_backward=True)
    plan = recomputing(plan, {1, 2})
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    config = emulated_config(tmp_path, plan=file, steps=3)
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert [found.plan for found in read_generation_plans(ended.run.plans).values()] == [plan]


@pytest.mark.multiprocess
def test_state_moves_at_the_speed_of_the_emulated_links(tmp_path: Path) -> None:
    config = emulated_config(
        tmp_path,
        precision="bf16",
        workers=6,
        parallel=Parallel(dp=2, pp=3, optimizer_redundancy="all"),
        recovery=Recovery(policy="repartition"),
        failures=(Failure(step=3, worker=1, phase="backward"),),
    )
    assert config.profile is not None
    slow = dataclasses.replace(
        read_profile(config.profile),
        layers=tuple(dataclasses.replace(layer, optimizer_bytes=28 << 20) for layer in LAYERS),
        intra_host=Link(1e-4, 1e9),
    )
    write_profile(slow, config.profile)
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    (transition,) = ended.events("transition")
    (decision,) = ended.events("decision")
    chosen = next(each for each in decision["candidates"] if each["policy"] == decision["chosen"])
    assert transition["moved_bytes"] == transition["planned_bytes"] == chosen["bytes"]
    assert transition["planned_bytes"] % (32 << 20) == 0
    assert transition["transfer_s"] >= (32 << 20) / 1e9, "a layer's bytes are those of the profile"


@pytest.mark.multiprocess
def test_an_emulated_worker_that_is_new_takes_part(tmp_path: Path) -> None:
    config = emulated_config(
        tmp_path,
        steps=100_000,
        recovery=Recovery(policy="chameleon"),
        batch=Batch(micro_batches=10, micro_batch_size=2),
    )
    file = tmp_path / "config.toml"
    file.write_text(config_to_toml(config))
    run = RunDirectory(tmp_path / "run")
    with Command("train", file, "--output-dir", run.path) as training:
        training.read_until(r"^\s+3\s")
        with Command("agent", "--run", run.path, "--workers", 1) as late:
            training.read_until("worker 4 joined before step")
            training.read_until(r"^\s+\d+\s")
            training.interrupt_all()
            assert training.wait() == 130
            assert late.wait() == 0, late.printed
    assert {len(plan.plan.workers) for plan in read_generation_plans(run.plans).values()} == {4, 5}
    assert_as_the_plain_loop(Ended(130, run))
