"""Peak memory against a count of every tensor there is."""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.estimate import MessageBuffers, program_memory
from chameleon_ft.plan import Plan
from chameleon_ft.presets import derive_workload, device, model_shape
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program, list_schedule
from chameleon_ft.workload import LayerCost, Workload
from tests.strategies import Planned, Shape, equal_costs, pipelines, planned

sizes = st.integers(0, 1000)
buffers = st.builds(
    MessageBuffers, receives_ahead=st.integers(1, 5), sends_kept=st.one_of(st.none(), st.integers(0, 3))
)


@st.composite
def sized(draw: st.DrawFn) -> Planned:
    """Any plans, with layers that have bytes of every kind."""
    case = draw(planned())
    layers = tuple(
        dataclasses.replace(
            layer,
            param_bytes=draw(sizes),
            gradient_bytes=draw(sizes),
            optimizer_bytes=draw(sizes),
            activation_bytes=draw(sizes),
            weight_grad_bytes=draw(sizes),
            output_bytes=draw(sizes),
            working_bytes=draw(sizes),
        )
        for layer in case.costs.workload.layers
    )
    workload = dataclasses.replace(case.costs.workload, layers=layers)
    return Planned(case.plan, CostModel(workload, case.costs.cluster))


def peak_by_tensor(operations: tuple[Operation, ...], layers: tuple[LayerCost, ...], buffers: MessageBuffers) -> int:
    """The most bytes of tensors alive at once, each storage by name, counted once while anything refers to it."""
    size: dict[tuple[object, ...], int] = {}
    held: dict[str, set[tuple[object, ...]]] = {"saved": set(), "pending": set(), "handed": set()}
    sends: deque[tuple[object, ...]] = deque()
    to_post = [o for o in operations if o.receive_from is not None]
    posted: deque[tuple[object, ...]] = deque()
    peak = 0

    def tensor(*name: object, num_bytes: int) -> tuple[object, ...]:
        size[name] = num_bytes
        return name

    for operation in operations:
        m, hop, first, stop = operation.micro_batch, operation.hop, operation.layers.start, operation.layers.stop
        forward = operation.kind is OperationKind.FORWARD
        while to_post and len(posted) < buffers.receives_ahead:
            o = to_post.pop(0)
            edge = (o.layers.start if o.kind is OperationKind.FORWARD else o.layers.stop) - 1
            posted.append(tensor("received", o.kind, o.micro_batch, o.hop, num_bytes=layers[edge].output_bytes))
        during = set()
        if operation.receive_from is not None:
            message = posted.popleft()
            # A forward's input is one of its layer's activations.
            during |= set() if forward else {message}
        during.add(tensor("work", m, hop, num_bytes=max(layer.working_bytes for layer in layers[first:stop])))
        result: tuple[object, ...] | None = None
        if forward:
            for layer in operation.layers:
                held["saved"].add(tensor("activation", m, layer, num_bytes=layers[layer].activation_bytes))
            if not operation.last:
                result = tensor("output", m, hop, num_bytes=layers[stop - 1].output_bytes)
                held["saved"].add(result)
        elif operation.kind is not OperationKind.WEIGHT_GRAD:
            if operation.kind is OperationKind.INPUT_GRAD:
                for layer in operation.layers:
                    held["pending"].add(tensor("weight grad", m, layer, num_bytes=layers[layer].weight_grad_bytes))
            if not operation.first:
                result = tensor("gradient", m, hop, num_bytes=layers[first - 1].output_bytes)
                during.add(result)
        alive = set().union(*held.values(), sends, posted, during)
        peak = max(peak, sum(size[name] for name in alive))
        if operation.kind is OperationKind.WEIGHT_GRAD:
            held["pending"] -= {("weight grad", m, layer) for layer in operation.layers}
        elif not forward:
            held["saved"] -= {("activation", m, layer) for layer in operation.layers} | {("output", m, hop)}
            held["handed"].discard(("gradient", m, hop + 1))
        if result is not None and operation.send_to is not None:
            sends.append(result)
            while buffers.sends_kept is not None and len(sends) > buffers.sends_kept:
                sends.popleft()
        elif result is not None and not forward:
            held["handed"].add(result)
    return peak


@given(sized(), buffers)
def test_the_peak_is_that_of_the_tensors_that_are_alive(case: Planned, buffers: MessageBuffers) -> None:
    program = list_schedule(case.plan, case.costs)
    layers = case.costs.workload.layers

    found = program_memory(program, case.plan.placement, case.costs.workload, buffers)

    assert tuple(found) == case.plan.workers
    for worker, memory in found.items():
        held = [layers[layer] for part in case.plan.placement.ranges_of(worker) for layer in part]
        assert memory.peak.param_bytes == sum(layer.param_bytes for layer in held)
        assert memory.peak.gradient_bytes == sum(layer.gradient_bytes for layer in held)
        assert memory.peak.optimizer_bytes == sum(layer.optimizer_bytes for layer in held)
        state = memory.peak.param_bytes + memory.peak.gradient_bytes + memory.peak.optimizer_bytes
        assert memory.peak_bytes - state == peak_by_tensor(program.of(worker), layers, buffers)


def activations_only(plan: Plan) -> tuple[Program, Workload]:
    costs = equal_costs(layers=plan.placement.num_layers, micro_batches=plan.micro_batches, workers=len(plan.workers))
    layer = dataclasses.replace(costs.workload.layers[0], activation_bytes=1, weight_grad_bytes=1)
    workload = dataclasses.replace(costs.workload, layers=(layer,) * plan.placement.num_layers)
    return list_schedule(plan, CostModel(workload, costs.cluster)), workload


@pytest.mark.parametrize(("depth", "micro_batches"), [(1, 1), (4, 2), (4, 4), (4, 16), (8, 32)])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(depth: int, micro_batches: int) -> None:
    plan = pipelines(Shape(dp=2, pp=depth, share=micro_batches))
    program, workload = activations_only(plan)

    memory = program_memory(program, plan.placement, workload)

    for worker in plan.workers:
        assert memory[worker].peak.activation_bytes == min(depth - worker % depth, micro_batches)


def test_zero_bubble_keeps_no_more_than_the_first_stage_of_1f1b() -> None:
    plan = pipelines(Shape(dp=1, pp=4, share=12), split_backward=True)
    program, workload = activations_only(plan)

    for memory in program_memory(program, plan.placement, workload).values():
        # While an I runs, what it leaves for W comes on top of its activations.
        assert memory.peak.activation_bytes + memory.peak.weight_grad_bytes <= 4 + 1


def test_a_model_in_bf16_with_a_master_copy_takes_16_bytes_a_parameter() -> None:
    shape = model_shape("llama2-7b")
    workload = derive_workload(shape, device("a100-80g"), micro_batch_size=1, micro_batches=8)
    plan = pipelines(Shape(dp=1, pp=34, share=8))
    costs = CostModel(workload, device("a100-80g").cluster(34))

    memory = program_memory(list_schedule(plan, costs), plan.placement, workload)

    state = sum(m.peak.param_bytes + m.peak.gradient_bytes + m.peak.optimizer_bytes for m in memory.values())
    assert state == 16 * shape.num_params


def test_an_idle_worker_holds_its_state_only() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=1))
    workload = Workload((LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=7, activation_bytes=5),) * 2, 1, 1)

    memory = program_memory(Program({}), plan.placement, workload)

    assert [(m.peak_bytes, m.during) for m in memory.values()] == [(7, None), (7, None)]


def test_the_workload_of_another_model_is_refused() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=1))
    _, workload = activations_only(pipelines(Shape(dp=1, pp=3, share=1)))

    with pytest.raises(PlanError, match="2 layers are placed, but the workload has 3"):
        program_memory(Program({}), plan.placement, workload)


def test_buffers_need_room_for_the_message_that_is_next() -> None:
    with pytest.raises(ConfigError, match="receives_ahead"):
        MessageBuffers(receives_ahead=0)
    with pytest.raises(ConfigError, match="sends_kept"):
        MessageBuffers(sends_kept=-1)
