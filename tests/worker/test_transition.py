"""Layers that move between workers: threads take the part of ranks, and queues that of the network."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_ft.config import Failure, FailurePhase
from chameleon_ft.models.build import tensor_bytes
from chameleon_ft.plan import LayerRange
from chameleon_ft.recovery.transition import placement_of, plan_transition
from chameleon_ft.storage.files import FaultLog
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.execution.layers import HeldLayer, HeldLayers, LayerState
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.state_transfer import layer_messages
from chameleon_ft.worker.state_transfer.layer_messages import Memory
from tests.examples import examples
from tests.worker.toy import SEED, toy_job
from tests.worker.transitions import (
    COSTS,
    CPU,
    LAYERS,
    Network,
    assert_equal,
    carry_out,
    passed_on,
    receive,
    send,
    train,
    trained,
    transition_between,
)

# --- one layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [8, 1 << 25])
def test_a_layer_arrives_as_it_was_sent(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(layer_messages, "_PIECE_BYTES", piece_bytes)
    held = trained(toy_job(LAYERS), [1])
    arrived = passed_on(held.state_of(1))
    assert_equal(arrived, held.state_of(1))
    assert any(key.endswith("/step") for key in arrived), "counters move as well"


def test_all_values_of_an_optimizer_move_with_its_layer() -> None:
    state: LayerState = {
        "module/empty": torch.empty(0, 3),
        "module/scalar": torch.tensor(1.5, dtype=torch.float64),
        "module/odd": torch.arange(3, dtype=torch.uint8),
        "module/flags": torch.tensor([True, False]),
        "module/half": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
        "module/turned": torch.arange(6.0).view(2, 3).t(),
        "optimizer/w/step": 17,
        "optimizer/w/history": [torch.ones(2).tolist(), None],
    }
    assert_equal(passed_on(state), state)
    assert tensor_bytes(state) == 8 + 3 + 2 + 4 + 24
    assert passed_on({}) == {}


def test_emulated_links_carry_the_bytes_of_the_profile() -> None:
    network = Network()
    state = {"a": torch.ones(3), "b": torch.ones(9)}
    send([state], network, num_bytes=4000)
    assert [stands_for for stands_for in network.stood_for if stands_for] == [1000, 3000]


@pytest.mark.parametrize("piece_bytes", [64, 1 << 25])
@pytest.mark.parametrize("number", [1, 2, -2, -1])  # the description, the first tensor, the last one, the checksums
def test_a_layer_that_was_damaged_on_its_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, number: int
) -> None:
    monkeypatch.setattr(layer_messages, "_PIECE_BYTES", piece_bytes)
    held = trained(toy_job(LAYERS), [1])
    network = Network()
    send([held.state_of(1)], network)
    queue = network.queue(0, 1, 2)
    parts = [queue.get() for _ in range(queue.qsize())]
    parts[number].view(torch.uint8)[0] ^= 1
    for part in parts:
        queue.put(part)
    with pytest.raises(CommunicationError, match=r"worker 0 failed: .* another checksum") as caught:
        receive(network)
    assert caught.value.peer == 0


def test_several_layers_may_be_under_way_at_once() -> None:
    held = trained(toy_job(LAYERS), range(LAYERS))
    network = Network()
    send([held.state_of(layer) for layer in range(LAYERS)], network)
    for layer, arrived in enumerate(receive(network, count=LAYERS)):
        assert_equal(arrived, held.state_of(layer))


def test_tensors_are_received_where_there_is_room_that_fits() -> None:
    state = {name: torch.arange(6.0).view(2, 3) for name in ("fits", "type", "shape", "turned", "none")}
    room = {
        "fits": torch.zeros(2, 3),
        "type": torch.zeros(2, 3, dtype=torch.float64),
        "shape": torch.zeros(3, 2),
        "turned": torch.zeros(3, 2).t(),
        "other": torch.zeros(2, 3),
    }
    network = Network()
    send([state], network)
    (arrived,) = receive(network, room=lambda number: room)
    assert_equal(arrived, state)
    taken = {name for name in room.keys() & arrived.keys() if arrived[name].data_ptr() == room[name].data_ptr()}
    assert taken == {"fits"}
    assert all(not room[name].any() for name in room.keys() - taken)


@pytest.mark.parametrize("fitting", [4, 2, 0])
def test_what_has_no_room_goes_to_the_memory_that_is_there_as_far_as_that_goes(fitting: int) -> None:
    state: LayerState = {f"optimizer/w/{n}": torch.full((32, 33), float(n)) for n in range(4)}
    state["optimizer/w/step"] = torch.tensor(7.0)
    state["module/w"] = torch.ones(32, 33)
    room = {"module/w": torch.zeros(32, 33)}
    memory = Memory(fitting * 34 * 32 * 4)
    memory.touch(unless=lambda: False)
    network = Network()
    send([state], network)
    (arrived,) = receive(network, room=lambda number: room, memory=memory)
    assert_equal(arrived, state)
    blocks = [arrived[f"optimizer/w/{n}"].untyped_storage().data_ptr() for n in range(4)]
    assert len(set(blocks[:fitting])) == min(fitting, 1), "they lie in one block"
    assert len(set(blocks)) == min(fitting, 1) + 4 - fitting, "and each of the others in its own"
    assert arrived["module/w"].data_ptr() == room["module/w"].data_ptr()
    assert arrived["optimizer/w/step"].untyped_storage().nbytes() == 4, "a counter does not keep a block alive"


# --- layers that come and go -----------------------------------------------------------------------------------------


def test_layers_come_and_go_while_the_others_train_on() -> None:
    job = toy_job(LAYERS)
    whole, part = trained(job, range(LAYERS)), trained(job, [0, 2, 4])
    part.take_in(1, passed_on(whole.state_of(1)))
    assert part.layers == {0, 1, 2, 4}
    part.keep_only({1, 2, 4})
    assert part.layers == {1, 2, 4}
    for step in (3, 4):
        train(whole, step)
        train(part, step)
    for layer in (1, 2, 4):
        assert_equal(part.state_of(layer), whole.state_of(layer))


def test_parameters_stay_where_they_were_received() -> None:
    job = toy_job(LAYERS)
    source, target = trained(job, [1]), HeldLayers(job, (), seed=SEED, device=CPU)
    blank = HeldLayer.blank(job, 1, seed=SEED, device=CPU)
    room = blank.targets
    network = Network()
    send([source.state_of(1)], network)
    (arrived,) = receive(network, room=lambda number: room)
    target.take_in(1, arrived, blank)
    assert_equal(target.state_of(1), source.state_of(1))
    for key, value in target.state_of(1).items():
        if isinstance(value, Tensor):
            assert value.data_ptr() == arrived[key].data_ptr(), key


def test_gradients_can_be_let_go_of() -> None:
    held = trained(toy_job(LAYERS), [0, 1])
    held.drop_gradients()
    assert all(parameter.grad is None for parameter in held.parameters(LayerRange(0, 2)))


def test_frozen_parameters_and_other_optimizers_move_too() -> None:
    job = dataclasses.replace(toy_job(LAYERS), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    source, target = trained(job, [1]), HeldLayers(job, (), seed=SEED, device=CPU)
    with torch.no_grad():
        source._layers[1].module.frozen.fill_(3.0)  # type: ignore[operator]
    target.take_in(1, passed_on(source.state_of(1)))
    train(source, 3)
    train(target, 3)
    assert_equal(target.state_of(1), source.state_of(1))


# --- all workers -----------------------------------------------------------------------------------------------------


def holders(workers: int = 4) -> st.SearchStrategy[dict[int, list[int]]]:
    """Placements in which every layer has a holder."""
    layer_sets = st.lists(st.sets(st.integers(0, workers - 1), min_size=1), min_size=LAYERS, max_size=LAYERS)

    def by_worker(found: list[set[int]]) -> dict[int, list[int]]:
        held: dict[int, list[int]] = defaultdict(list)
        for layer, own in enumerate(found):
            for worker in own:
                held[worker].append(layer)
        return dict(sorted(held.items()))

    return layer_sets.map(by_worker)


@settings(max_examples=examples(40), deadline=None)
@given(before=holders(), after=holders(), ahead=st.booleans())
def test_from_any_placement_to_any_other(
    before: dict[int, list[int]], after: dict[int, list[int]], ahead: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if before == after:
        assert (
            plan_transition(placement_of(before, LAYERS), placement_of(after, LAYERS), held=before, layers=COSTS)
            is None
        )
        return
    job = toy_job(LAYERS)
    reference = trained(job, range(LAYERS))
    planned = transition_between(before, after)
    states = {worker: trained(job, before.get(worker, [])) for worker in planned.participants}
    moved = carry_out(planned, states, Network(), tmp_path_factory.getbasetemp(), ahead=ahead)
    size = {layer: tensor_bytes(reference.state_of(layer)) for layer in range(LAYERS)}
    expected = sum(size[layer] for worker, own in after.items() for layer in set(own) - set(before.get(worker, [])))
    assert set(moved.values()) == {expected}, "every worker knows how many bytes moved in all, and nothing moved twice"
    for worker, held in states.items():
        assert held.layers == {*before.get(worker, []), *after.get(worker, [])}, "nothing is dropped before the switch"
        held.keep_only(after.get(worker, []))
    train(reference, 3)
    for held in states.values():
        train(held, 3)
        for layer in held.layers:
            assert_equal(held.state_of(layer), reference.state_of(layer))


def test_no_worker_switches_when_one_has_not_received_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = threading.Event()

    def spoil(tensor: Tensor) -> Tensor:
        if tensor.numel() == 36 * 4 and not damaged.is_set():
            damaged.set()
            tensor[-1] ^= 1
        return tensor

    network = Network(spoil)
    monkeypatch.setattr(network.full, "wait", lambda timeout: network.full.is_set())
    job = toy_job(LAYERS)
    planned = transition_between({0: [0, 1, 2, 3, 4], 1: [0]}, {0: [0, 2, 4], 1: [1, 3]})
    states = {0: trained(job, range(LAYERS)), 1: trained(job, [0])}
    found = carry_out(planned, states, network, tmp_path)
    assert all(isinstance(result, CommunicationError) for result in found.values())
    assert damaged.is_set()
    assert states[0].layers >= {0, 1, 2, 3, 4}
    assert states[1].layers == {0}, "what was damaged is not taken in"


@pytest.mark.parametrize("phase", ["transfer", "confirm"])
@pytest.mark.parametrize("worker", [0, 2])  # one that moves layers, one that only confirms
def test_failures_of_the_phases_come_when_they_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: FailurePhase, worker: int
) -> None:
    failed: list[str] = []
    monkeypatch.setattr(FaultInjector, "fail", lambda self, kind, *, phase, step: failed.append(f"{phase} of {step}"))
    planned = transition_between({0: [0, 1], 1: [2, 3], 2: [4]}, {0: [0], 1: [1, 2, 3], 2: [4]})
    states = {each: trained(toy_job(LAYERS), planned.keep[each]) for each in planned.participants}
    planning = Failure(step=2, worker=worker, phase=phase)
    faults = {
        each: FaultInjector(each, [planning], log=FaultLog(tmp_path / "faults.jsonl"), disconnect=lambda: None)
        for each in states
    }
    monkeypatch.setattr("tests.worker.transitions.no_faults", lambda worker, directory: faults[worker])
    carry_out(planned, states, Network(), tmp_path)
    assert failed == [f"{phase} of 3"]
