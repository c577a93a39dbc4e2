"""A replay is the longest path over the operations of a program."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program, list_schedule, replay
from tests.strategies import Planned, pipelined, planned

# What an operation makes: whether it is a gradient, the micro-batch, and the hop.
Tensor = tuple[bool, int, int]


def needed(operation: Operation) -> Tensor | None:
    kind, micro_batch, hop = operation.kind, operation.micro_batch, operation.hop
    if kind is OperationKind.FORWARD:
        return None if operation.first else (False, micro_batch, hop - 1)
    if kind is OperationKind.WEIGHT_GRAD:
        return True, micro_batch, hop
    return (False, micro_batch, hop) if operation.last else (True, micro_batch, hop + 1)


def earliest_starts(program: Program, costs: CostModel) -> dict[tuple[int, int], float]:
    """Longest way to each (worker, index of operation), in the order of networkx."""
    graph = nx.DiGraph()
    makers = {
        (operation.kind is not OperationKind.FORWARD, operation.micro_batch, operation.hop): (worker, index)
        for worker in program.workers
        for index, operation in enumerate(program.of(worker))
        if operation.kind is not OperationKind.WEIGHT_GRAD
    }

    def take(node: tuple[int, int]) -> float:
        worker, index = node
        return costs.operation_s(worker, program.of(worker)[index])

    for worker in program.workers:
        own = [(worker, index) for index in range(len(program.of(worker)))]
        graph.add_nodes_from(own)
        for node, after in pairwise(own):
            graph.add_edge(node, after, weight=take(node))
        for node, operation in zip(own, program.of(worker), strict=True):
            tensor = needed(operation)
            if tensor is None:
                continue
            maker = makers[tensor]
            boundary = operation.layers.start if operation.kind is OperationKind.FORWARD else operation.layers.stop
            message_s = costs.message_s(maker[0], worker, costs.message_bytes(boundary - 1))
            # Where the maker also comes right before on the worker, the message takes no time: one edge says both.
            graph.add_edge(maker, node, weight=take(maker) + message_s)
    # Not by its Bellman-Ford with negative weights, which skips some ways.
    found: dict[tuple[int, int], float] = {}
    for node in nx.topological_sort(graph):
        ways = graph.in_edges(node, data="weight")
        found[node] = max((found[before] + weight for before, _, weight in ways), default=0.0)
    return found


@given(st.one_of(planned(), pipelined()), st.booleans())
def test_every_operation_starts_at_the_end_of_the_longest_way_to_it(case: Planned, forward_first: bool) -> None:
    program = list_schedule(case.plan, case.costs, forward_first=forward_first)

    timeline = replay(program, case.costs)

    starts = earliest_starts(program, case.costs)
    assert len(timeline.operations) == len(starts)
    for worker in program.workers:
        own = timeline.of(worker)
        assert tuple(timed.operation for timed in own) == program.of(worker)
        for index, timed in enumerate(own):
            assert timed.worker == worker
            assert timed.start_s == pytest.approx(starts[worker, index], abs=1e-9)
            assert timed.end_s == pytest.approx(timed.start_s + case.costs.operation_s(worker, timed.operation))
    assert timeline.step_s == max(timed.end_s for timed in timeline.operations)
