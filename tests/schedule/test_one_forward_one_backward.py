"""On equal pipelines the list scheduler makes 1F1B, and with split backward ZB-H1."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.pipelining.stage import PipelineStage

from chameleon_ft.schedule import OperationKind, Program, check_program, list_schedule, replay
from tests.strategies import Shape, equal_costs, pipelines, seconds

DEPTHS = (1, 2, 3, 4, 5, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 7, 8, 16)


def torch_order(stage_index: int, *, depth: int, micro_batches: int) -> list[tuple[str, int]]:
    """The (F or B, micro-batch) that PyTorch's Schedule1F1B runs on a stage, taken down while it runs.

    The order it gives for pictures is not used: on the last stage that one numbers the forwards from 1.
    """
    order: list[tuple[str, int]] = []

    def forward(micro_batch: int, *_: Any, **__: Any) -> None:
        order.append(("F", micro_batch))

    def backward(micro_batch: int, *_: Any, **__: Any) -> None:
        order.append(("B", micro_batch))

    stage = mock.NonCallableMagicMock(spec=PipelineStage)
    stage.num_stages = depth
    stage.stage_index = stage_index
    stage.submod = None
    stage.forward_one_chunk.side_effect = forward
    stage.backward_one_chunk.side_effect = backward
    for messages in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, messages).return_value = []
    # It refuses fewer micro-batches than stages, though its loop runs them as well as more.
    schedule = Schedule1F1B(stage, max(micro_batches, depth))
    schedule._n_microbatches = micro_batches
    inputs: list[Any] = [()] * micro_batches
    options: list[Any] = [{}] * micro_batches
    with (
        mock.patch.object(schedule, "_check_inputs", return_value=(inputs, options)),
        mock.patch.object(schedule, "_initialize_stage"),
        mock.patch.object(schedule, "_maybe_compute_loss"),
        mock.patch.object(schedule, "_maybe_get_loss"),
        mock.patch.object(schedule, "_update_losses"),
    ):
        schedule._step_microbatches(inputs, options)
    return order


def our_order(program: Program, worker: int) -> list[tuple[str, int]]:
    return [(operation.kind.value, operation.micro_batch) for operation in program.of(worker)]


def max_kept(program: Program, worker: int, *, until: OperationKind) -> int:
    """The most micro-batches that a worker has forwarded and not yet run `until` of."""
    kept = most = 0
    for operation in program.of(worker):
        if operation.kind is OperationKind.FORWARD:
            kept += 1
        elif operation.kind is until:
            kept -= 1
        most = max(most, kept)
    return most


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_the_order_is_that_of_pytorch(depth: int, micro_batches: int) -> None:
    plan = pipelines(Shape(dp=1, pp=depth, share=micro_batches))
    costs = equal_costs(layers=depth, micro_batches=micro_batches, workers=depth)

    program = list_schedule(plan, costs)

    for stage in range(depth):
        assert our_order(program, stage) == torch_order(stage, depth=depth, micro_batches=micro_batches)


@given(
    shape=st.builds(Shape, dp=st.integers(1, 3), pp=st.integers(1, 6), share=st.integers(1, 9)),
    forward_s=seconds,
    backward_s=seconds,
    latency_s=st.one_of(st.just(0.0), seconds),
)
def test_every_pipeline_is_1f1b_whatever_equal_stages_and_messages_cost(
    shape: Shape, forward_s: float, backward_s: float, latency_s: float
) -> None:
    plan = pipelines(shape)
    costs = equal_costs(
        layers=shape.pp,
        micro_batches=shape.dp * shape.share,
        workers=shape.dp * shape.pp,
        forward_s=forward_s,
        input_grad_s=backward_s,
        weight_grad_s=0.0,
        latency_s=latency_s,
    )

    program = list_schedule(plan, costs)

    check_program(program, plan)
    for pipeline in range(shape.dp):
        for stage in range(shape.pp):
            warm_up = min(shape.share, shape.pp - stage)
            order = [("F", m) for m in range(warm_up)]
            for m in range(shape.share):
                order.append(("B", m))
                order += [("F", m + warm_up)] if m + warm_up < shape.share else []
            first = pipeline * shape.share
            assert our_order(program, pipeline * shape.pp + stage) == [(kind, first + m) for kind, m in order]


@given(
    shape=st.builds(Shape, dp=st.integers(1, 3), pp=st.integers(1, 6), share=st.integers(1, 9)),
    forward_s=seconds,
    backward_s=seconds,
)
def test_the_replayed_time_is_the_closed_form(shape: Shape, forward_s: float, backward_s: float) -> None:
    costs = equal_costs(
        layers=shape.pp,
        micro_batches=shape.dp * shape.share,
        workers=shape.dp * shape.pp,
        forward_s=forward_s,
        input_grad_s=backward_s,
        weight_grad_s=0.0,
    )

    timeline = replay(list_schedule(pipelines(shape), costs), costs)

    # The paper's time of symmetric pipelines.
    assert timeline.step_s == pytest.approx((shape.share + shape.pp - 1) * (forward_s + backward_s))
    assert timeline.busy_s(0) == pytest.approx(shape.share * (forward_s + backward_s))


RATIOS = (
    (1.0, 1.0, 1.0),
    (0.1, 0.1, 0.1),
    (1.0, 1.2, 0.8),
    (1.0, 1.5, 0.5),
    (1.0, 0.8, 1.2),
    (0.7, 1.0, 0.9),
    (1.0, 1.7, 1.1),
    (1.0, 1.0, 0.4),
    (1.0, 0.9, 0.8),
)


@pytest.mark.parametrize(("forward_s", "input_s", "weight_s"), RATIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_split_backward_is_zb_h1_in_time_and_memory(
    depth: int, forward_s: float, input_s: float, weight_s: float
) -> None:
    for micro_batches in (m for m in (*MICRO_BATCHES, 32) if m >= depth):
        plan = pipelines(Shape(dp=1, pp=depth, share=micro_batches), split_backward=True)
        costs = equal_costs(
            layers=depth,
            micro_batches=micro_batches,
            workers=depth,
            forward_s=forward_s,
            input_grad_s=input_s,
            weight_grad_s=weight_s,
        )

        program = list_schedule(plan, costs)

        check_program(program, plan)
        work_s = micro_batches * (forward_s + input_s + weight_s)
        closed_form_s = work_s + (depth - 1) * (forward_s + input_s - weight_s)
        # With no more than `depth` kept, stage 0 is idle for (depth - 1) I while the first micro-batch turns round, and
        # the last stage waits (depth - 1) F: where F or I exceeds W, the closed form asks for less than is possible.
        possible_s = max(
            work_s + (depth - 1) * max(forward_s, input_s),
            (micro_batches + depth - 1) * (forward_s + input_s) + weight_s,
        )
        assert replay(program, costs).step_s <= max(closed_form_s, possible_s) * (1 + 1e-9)
        for stage in range(depth):
            assert max_kept(program, stage, until=OperationKind.INPUT_GRAD) <= depth - stage
            assert max_kept(program, stage, until=OperationKind.WEIGHT_GRAD) <= depth


@pytest.mark.parametrize(("depth", "micro_batches"), [(p, m) for p in DEPTHS for m in MICRO_BATCHES if m >= p])
def test_split_backward_of_equal_thirds_meets_the_closed_form_exactly(depth: int, micro_batches: int) -> None:
    plan = pipelines(Shape(dp=1, pp=depth, share=micro_batches), split_backward=True)
    costs = equal_costs(layers=depth, micro_batches=micro_batches, workers=depth)

    program = list_schedule(plan, costs)

    assert replay(program, costs).step_s == pytest.approx(3 * micro_batches + depth - 1)
    for stage in range(depth):
        kinds = Counter(operation.kind for operation in program.of(stage))
        assert kinds == dict.fromkeys(("F", "I", "W"), micro_batches)
