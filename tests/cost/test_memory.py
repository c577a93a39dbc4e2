"""Peak memory against a count of every tensor there is."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.memory import MessageBuffers, program_memory, workload_memory
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import LayerRange, Placement, Plan, RecomputedLayers
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program, list_schedule
from chameleon_ft.workload import LayerCost, TiedParameters, Workload
from tests.golden import refused
from tests.strategies import Planned, Shape, equal_costs, mixed, pipelines, planned, recomputing, some_recompute

sizes = st.integers(0, 1000)
buffers = st.builds(
    lambda receives_ahead, in_flight: MessageBuffers(receives_ahead, receives_ahead + in_flight),
    st.integers(1, 4),
    st.integers(1, 3),
)


@st.composite
def sized(draw: st.DrawFn) -> Planned:
    """Any plans with any recomputation; layers have bytes of every kind, and activations with their input."""
    case = draw(mixed(planned()))
    plan = draw(some_recompute(case.plan))
    layers: list[LayerCost] = []
    for layer in case.costs.workload.layers:
        slow = draw(sizes) + (layers[-1].output_bytes if layers else 0)
        layers.append(
            dataclasses.replace(
                layer,
                param_bytes=draw(sizes),
                gradient_bytes=draw(sizes),
                optimizer_bytes=draw(sizes),
                activation_bytes=slow + (fast := draw(sizes)),
                selective_bytes=slow if fast else None,
                selective_weight_grad_bytes=draw(st.none() | sizes),
                selective_working_bytes=draw(st.none() | sizes),
                weight_grad_bytes=draw(sizes),
                output_bytes=draw(sizes),
                working_bytes=draw(sizes),
                halves_working_bytes=draw(st.none() | sizes),
                sample_bytes=draw(sizes),
            )
        )
    workload = dataclasses.replace(case.costs.workload, layers=tuple(layers))
    return Planned(plan, CostModel(workload, case.costs.cluster))


Name = tuple[object, ...]


class Tensors:
    """Every tensor of a worker by name, each counted once however many refer to it."""

    def __init__(self, layers: tuple[LayerCost, ...], again: RecomputedLayers | None) -> None:
        self.layers = layers
        self.again = set(range(1, len(layers) - 1)).intersection(again.full if again else ())
        """Return the layers whose forward is run again."""
        self.partly = set(range(1, len(layers) - 1)).intersection(again.selective if again else ())
        """The layers of which the fast part is run again."""
        self.saved: dict[Name, set[Name]] = {}
        """By hop: what its backward needs."""
        self.pending: dict[Name, set[Name]] = {}
        """By hop: what its W needs."""
        self.handed: set[Name] = set()

    def size(self, name: Name) -> int:
        kind, _, layer = name
        assert isinstance(layer, int)
        if kind in ("between", "gradient"):  # after `layer`, or of it; the model's own input and loss are none of them
            return self.layers[layer].output_bytes if 0 <= layer < len(self.layers) - 1 else 0
        cost = self.layers[layer]
        before = self.size(("between", 0, layer - 1))
        return {
            "slow": self._slow(layer) - before,
            "fast": cost.activation_bytes - self._slow(layer),
            "kept": before
            if layer in self.again
            else self._slow(layer)
            if layer in self.partly
            else cost.activation_bytes,
            "output again": cost.output_bytes,
            "left": self._left(layer),
            "work": cost.working_bytes,
            "work in halves": cost.working_bytes if cost.halves_working_bytes is None else cost.halves_working_bytes,
            "work again": self._work_again(cost),
        }[str(kind)]

    def _left(self, layer: int) -> int:
        cost = self.layers[layer]
        if layer not in self.partly or cost.selective_bytes is None or cost.selective_weight_grad_bytes is None:
            return cost.weight_grad_bytes
        return cost.selective_weight_grad_bytes

    def _work_again(self, cost: LayerCost) -> int:
        """Return the work space of F and B of a layer that is recomputed selectively."""
        again = 0 if cost.selective_bytes is None else cost.activation_bytes - cost.selective_bytes
        known = None if cost.selective_bytes is None else cost.selective_working_bytes
        return cost.working_bytes + again if known is None else known

    def _slow(self, layer: int) -> int:
        cost = self.layers[layer]
        return cost.activation_bytes if cost.selective_bytes is None else cost.selective_bytes

    def of_layer(self, m: int, layer: int) -> set[Name]:
        """Return the bytes kept of a layer: its input, and its other activations unless they are recomputed."""
        every: set[Name] = {("between", m, layer - 1), ("slow", m, layer), ("fast", m, layer)}
        return every - self.made_again(m, layer)

    def made_again(self, m: int, layer: int) -> set[Name]:
        """Return the bytes of a layer's recomputed activations."""
        if layer in self.again:
            return {("slow", m, layer), ("fast", m, layer)}
        return {("fast", m, layer)} if layer in self.partly else set()

    def kept_output(self, m: int, top: int) -> set[Name]:
        """The output of a hop if its last layer keeps it, once it need not be kept as a message any more."""
        return set() if top in self.again else {("between", m, top)}

    def while_running(self, o: Operation) -> list[set[Name]]:
        """Return the bytes that an operation needs while each of its layers runs, in turn."""
        m, layers = o.micro_batch, list(o.layers)
        top = layers[-1]
        kind = OperationKind.BACKWARD if o.kind is OperationKind.WEIGHT_GRAD and o.first else o.kind
        moments: list[set[Name]] = []
        for at, layer in enumerate(layers):
            below, above = layers[: at + 1], layers[at:]
            now: set[Name] = {("work in halves", m, layer)}
            whole: set[Name] = self.made_again(m, layer) | {("work", m, layer)}
            if layer in self.partly:
                whole = {("work again", m, layer)}
            match kind:
                case OperationKind.FORWARD:
                    now = {("between", m, layer)} | whole
                    now |= set().union(*(self.of_layer(m, i) for i in below))
                case OperationKind.BACKWARD:
                    now = whole | {("gradient", m, top), ("gradient", m, layer), ("gradient", m, layer - 1)}
                    now |= self.kept_output(m, top)
                    now |= set().union(*(self.of_layer(m, i) for i in below))
                    now |= {("output again", m, layer)} if layer in self.again else set()
                case OperationKind.INPUT_GRAD:
                    left = {i for i in above if self._left(i) >= self.size(("kept", m, i))}
                    now |= self.kept_output(m, top) | {("gradient", m, layer - 1)}
                    now |= {("left", m, i) for i in above} | {("kept", m, i) for i in layers if i not in left}
                    now |= {("output again", m, layer)} if layer in self.again else set()
                    if self._left(layer) < self.layers[layer].activation_bytes:
                        now |= self.made_again(m, layer)
                case OperationKind.WEIGHT_GRAD:
                    now |= {("left", m, i) for i in layers}
            moments.append(now)
        return moments

    def after(self, o: Operation) -> Name | None:
        """Let go of what `o` has used and keep what is needed of what it made; return the gradient that it sends."""
        m, hop = o.micro_batch, (o.micro_batch, o.hop)
        output, incoming = ("between", m, o.layers.stop - 1), ("gradient", m, o.layers.stop - 1)
        gradient = ("gradient", m, o.layers.start - 1)
        match o.kind:
            case OperationKind.FORWARD:
                self.saved[hop] = {output}.union(*(self.of_layer(m, layer) for layer in o.layers))
                return None
            case OperationKind.INPUT_GRAD if o.first:
                self.pending[hop] = {incoming}
                if o.layers.stop - 1 in self.again:
                    self.saved[hop].discard(output)
                return None
            case OperationKind.WEIGHT_GRAD:
                del self.pending[hop]
                if not o.first:
                    return None
            case OperationKind.INPUT_GRAD:
                self.pending[hop] = {("left", m, layer) for layer in o.layers}
        del self.saved[hop]
        self.handed.discard(incoming)
        if o.first:
            return None
        if o.send_to is None:
            self.handed.add(gradient)
            return None
        return gradient


def peak_by_tensor(
    operations: tuple[Operation, ...],
    layers: tuple[LayerCost, ...],
    buffers: MessageBuffers,
    again: RecomputedLayers | None,
) -> int:
    """The most bytes of tensors alive at once."""
    tensors = Tensors(layers, again)
    sends: defaultdict[int | None, deque[Name]] = defaultdict(lambda: deque(maxlen=buffers.sends_kept))
    to_post = [o for o in operations if o.receive_from is not None]
    posted: deque[Name] = deque()
    peak = 0
    for operation in operations:
        while to_post and len(posted) < buffers.receives_ahead:
            o = to_post.pop(0)
            forward = o.kind is OperationKind.FORWARD
            posted.append(
                ("between", o.micro_batch, o.layers.start - 1)
                if forward
                else ("gradient", o.micro_batch, o.layers.stop - 1)
            )
        waiting = set(posted).union(*tensors.saved.values(), *tensors.pending.values(), tensors.handed, *sends.values())
        peak = max(peak, sum(map(tensors.size, waiting)))
        if operation.receive_from is not None:
            posted.popleft()
        hop = (operation.micro_batch, operation.hop)
        computes = not (operation.kind is OperationKind.INPUT_GRAD and operation.first)
        for now in tensors.while_running(operation) if computes else ():
            others = [held for its, held in tensors.saved.items() if its != hop]
            alive = now.union(*others, *tensors.pending.values(), tensors.handed, *sends.values(), posted)
            peak = max(peak, sum(map(tensors.size, alive)))
        if (sent := tensors.after(operation)) is not None:
            sends[operation.send_to].append(sent)
    return peak


@given(sized(), buffers)
def test_the_peak_is_that_of_the_tensors_that_are_alive(case: Planned, buffers: MessageBuffers) -> None:
    program = list_schedule(case.plan, case.costs)
    layers = case.costs.workload.layers

    found = program_memory(program, case.plan.placement, case.costs.workload, buffers)

    assert tuple(found) == case.plan.workers
    for worker, memory in found.items():
        held = [layers[layer] for layer in case.plan.placement.layers_of(worker)]
        assert memory.peak.param_bytes == sum(layer.param_bytes for layer in held)
        assert memory.peak.gradient_bytes == sum(layer.gradient_bytes for layer in held)
        assert memory.peak.optimizer_bytes == sum(layer.optimizer_bytes for layer in held)
        assert memory.peak.sample_bytes == max((layer.sample_bytes for layer in held), default=0)
        state = (
            memory.peak.param_bytes
            + memory.peak.gradient_bytes
            + memory.peak.optimizer_bytes
            + memory.peak.sample_bytes
        )
        assert memory.peak_bytes - state == peak_by_tensor(
            program.of(worker), layers, buffers, case.plan.recompute.get(worker)
        )


@given(sized())
def test_costs_that_have_recomputation_in_them_are_an_upper_bound(case: Planned) -> None:
    plan = recomputing(case.plan, case.plan.workers)
    workload = case.costs.workload
    program = list_schedule(plan, case.costs)

    of_plan = program_memory(program, plan.placement, workload)
    of_costs = program_memory(without_recomputation(program), plan.placement, workload.recomputed())

    for worker in plan.workers:
        assert of_plan[worker].peak_bytes <= of_costs[worker].peak_bytes


def without_recomputation(program: Program) -> Program:
    return Program(
        {
            worker: tuple(dataclasses.replace(operation, recompute=None) for operation in program.of(worker))
            for worker in program.workers
        }
    )


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


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_what_is_held_does_not_grow_with_the_micro_batches(split: bool) -> None:
    peaks: set[tuple[int, ...]] = set()
    for share in (12, 13, 200):
        plan = pipelines(Shape(dp=1, pp=4, share=share), split_backward=split)
        layer = LayerCost("layer", 1.0, 1.0, 1.0, activation_bytes=10, weight_grad_bytes=10, output_bytes=1000)
        workload = Workload((layer,) * 4, share, 1)
        costs = CostModel(workload, equal_costs(layers=4, micro_batches=share, workers=4).cluster)
        memory = program_memory(list_schedule(plan, costs), plan.placement, workload)
        peaks.add(tuple(own.peak_bytes for own in memory.values()))

    assert len(peaks) == 1


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

    with refused(PlanError):
        program_memory(Program({}), plan.placement, workload)


def test_buffers_need_room_for_the_message_that_is_next() -> None:
    with refused(ConfigError):
        MessageBuffers(receives_ahead=0)
    with refused(ConfigError):
        MessageBuffers(receives_ahead=2, sends_kept=2)


@pytest.mark.parametrize(("redundancy", "share"), [(1, 3), (2, 3), (3, 3), (None, 3)])
def test_holders_share_the_state_of_the_optimizer(redundancy: int | None, share: int) -> None:
    layers = tuple(
        LayerCost(f"layer {n}", 1.0, 1.0, 1.0, param_bytes=100, gradient_bytes=100, optimizer_bytes=240)
        for n in range(3)
    )
    workload = Workload(layers, 6, 1, tied=(TiedParameters((0, 2), 50),), owners=redundancy)
    # Three workers hold layers 0 and 1, one of them layer 2 as well.
    placement = Placement(3, {0: (LayerRange(0, 3),), 1: (LayerRange(0, 2),), 2: (LayerRange(0, 2),)})
    found = workload_memory(workload).state_bytes(placement)
    owned = 240 if redundancy is None else 240 * min(redundancy, share) // share
    of_tied = 240 if redundancy is None else 120 + 120 * min(redundancy, share) // share
    assert found[1] == 2 * 200 + of_tied + owned
    assert found[0] == 3 * 200 + of_tied + owned + 240, "the only holder of a layer owns all of it"


def test_holders_share_masters() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=50, gradient_bytes=100, optimizer_bytes=300, master_bytes=100)
    workload = Workload((layer,), 6, 1, owners=1)
    placement = Placement(1, {0: (LayerRange(0, 1),), 1: (LayerRange(0, 1),)})
    assert workload_memory(workload).state_bytes(placement) == {0: 300, 1: 300}, "150 + half of 300"
