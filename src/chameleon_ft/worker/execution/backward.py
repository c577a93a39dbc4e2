"""The activations that a worker saves from the forward of a hop to its backward, and the backward, whole or in halves.

The halves are I, the gradient of the input of some layers, and W, the gradients of their parameters.

I runs the nodes of autograd's graph on the paths from the output to the input. W starts at those of them at which paths
to parameters branch off, with the gradients that I has found there (Qi et al., "Zero Bubble Pipeline Parallelism",
2024). So these nodes run twice, once for each half. The gradient of a parameter is found in I, and added by W,

- if paths to it branch off at several nodes, as to a weight that is used twice: W would have to run all nodes between
  these again;
- if they branch off at a function of Python, or pass through one that I runs for another parameter, because such a
  function may do all its work each time, or work a single time.

Where that holds for all parameters, and where a graph does not run in parts, as with functions of torch.compile and
reentrant checkpoints between output and input, I is the whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import Operation
from chameleon_ft.side_outputs import SideOutputs
from chameleon_ft.trees import leaves_of, mapped
from chameleon_ft.worker.execution.bad_steps import naming_layer
from chameleon_ft.worker.execution.gradients import without_gradients
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.workload import is_recomputed

WeightHalf = Callable[[], object]
"""The W of a split backward. A single call adds to the gradients of the parameters."""

Gradients = Sequence[Tensor | None]
"""Those of the tensors of the input of some layers, or of their output."""

_Gradients = tuple[Tensor | None, ...]

Roots = Sequence[tuple[Tensor, Tensor | None]]
"""Tensors at which a backward begins: the output of some layers and their auxiliary losses, each with its gradient,
which is None for a scalar of which that is 1."""


def whole_backward(roots: Roots) -> None:
    """Add to the gradients of all leaves, if there are any."""
    if differentiable := [each for each in roots if each[0].requires_grad]:
        outputs, gradients = zip(*differentiable, strict=True)
        torch.autograd.backward(outputs, gradients)


def input_gradient(
    roots: Roots, boundary: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> tuple[list[Tensor | None], WeightHalf]:
    """Compute the gradients of `boundary` and save what W needs.

    Args:
        roots: of the layers.
        boundary: the tensors of the input of the layers. If none has a gradient, W is the whole backward.
        parameters: the trained parameters of the layers.
    """
    whole, roots = partial(whole_backward, roots), [each for each in roots if each[0].requires_grad]
    none: list[Tensor | None] = [None] * len(boundary)
    inputs = [each for each in boundary if each.requires_grad]
    if not (roots and inputs):
        return none, whole
    edges = [get_gradient_edge(root) for root, _ in roots]
    branches = _branches([edge.node for edge in edges], [get_gradient_edge(each).node for each in inputs])
    if branches is None:
        return none, whole
    of_roots: dict[Node, _Start] = {}
    for edge, root in zip(edges, roots, strict=True):
        of_roots.setdefault(edge.node, _Start(edge.node)).add_root(edge.output_nr, *root)
    starts: dict[Node, _Start] = {}
    at_once: list[nn.Parameter] = []
    for parameter in parameters:
        node = get_gradient_edge(parameter).node
        if node not in branches:
            continue
        branch = branches[node]
        if branch is None:
            at_once.append(parameter)
        else:
            starts.setdefault(branch, of_roots.get(branch) or _Start(branch)).parameters.append(parameter)
    if not starts:
        return _both_at_once(whole, boundary, parameters)
    try:
        with ExitStack() as hooks:
            for start in starts.values():
                hooks.enter_context(start.node.register_prehook(start.keep))
            outputs, gradients = zip(*roots, strict=True)
            found = torch.autograd.grad(outputs, [*inputs, *at_once], gradients, retain_graph=True, allow_unused=True)
    except RuntimeError:
        # A part of the graph runs as a whole only.
        return _both_at_once(whole, boundary, parameters)
    of_inputs = iter(found[: len(inputs)])
    passed_back = [next(of_inputs) if each.requires_grad else None for each in boundary]
    return passed_back, partial(_run_weight_half, list(starts.values()), at_once, list(found[len(inputs) :]))


@dataclass(slots=True)
class _Start:
    """A node at which W starts to find gradients of parameters, with the gradients of its outputs from I."""

    node: Node
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: _Gradients = ()

    def add_root(self, number: int, root: Tensor, gradient: Tensor | None) -> None:
        """Begin at a root, which is this output of the node; I may not run the node."""
        own = torch.ones_like(root) if gradient is None else gradient
        known = [*self.gradients, *[None] * (number + 1 - len(self.gradients))]
        before = known[number]
        known[number] = own if before is None else before + own
        self.gradients = tuple(known)

    def keep(self, gradients: _Gradients) -> None:
        """Keep gradients; a hook that is called before the node runs."""
        self.gradients = gradients

    def run(self) -> None:
        """Add to the gradients of the parameters."""
        edges = [GradientEdge(self.node, index) for index, each in enumerate(self.gradients) if each is not None]
        if not edges:
            return
        # Hooks of tensors have changed these gradients before they were kept, and would do so once more.
        with self.node.register_prehook(lambda _: self.gradients):
            torch.autograd.backward(edges, [e for e in self.gradients if e is not None], inputs=self.parameters)


def _branches(roots: Sequence[Node], boundary: Sequence[Node]) -> dict[Node, Node | None] | None:
    """Find where paths to other leaves branch off those from the roots to the boundary.

    Returns:
        For each node below the roots from which no path leads to the boundary, the only node with such a path at which
        all paths to it branch off, or the only root above it, if that is no such node; None if there are several, or if
        a function of Python would run in both halves from there. None if the boundary is not below the roots.
    """
    children = _children(roots)
    on_path = {node for node in boundary if node in children}
    for node in children:
        if not on_path.isdisjoint(children[node]):
            on_path.add(node)
    if not on_path:
        return None
    branches: dict[Node, Node | None] = {root: root for root in roots if root not in on_path}
    for node in reversed(children):
        start = node if node in on_path else branches[node]
        for child in children[node]:
            if child not in on_path and branches.setdefault(child, start) is not start:
                branches[child] = None
    first_half = {node for node, start in branches.items() if start is None}
    for node in children:
        if node in branches and not first_half.isdisjoint(children[node]):
            first_half.add(node)
    undivided = {branches.get(node, node) for node in first_half | on_path if _is_of_python(node)}
    return {node: None if start in undivided else start for node, start in branches.items()}


def _children(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the children of the roots and of each node below them; a node comes after its children."""
    visited: dict[Node, list[Node]] = {}
    complete: dict[Node, list[Node]] = {}
    stack = [*roots]
    while stack:
        node = stack[-1]
        if node in visited:
            complete[stack.pop()] = visited[node]
        else:
            visited[node] = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in visited[node] if child not in visited]
    return complete


def _is_of_python(node: object) -> bool:
    return isinstance(node, BackwardCFunction)


def _both_at_once(
    whole: Callable[[], None], boundary: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> tuple[list[Tensor | None], WeightHalf]:
    """Run a backward that cannot be divided; W adds the gradients of parameters, which are kept until then."""
    with without_gradients(parameters):
        whole()
        found = [parameter.grad for parameter in parameters]
    gradients = [each.grad for each in boundary]
    for each in boundary:
        each.grad = None
    return gradients, partial(_run_weight_half, [], parameters, found)


def _run_weight_half(
    starts: list[_Start], parameters: Sequence[nn.Parameter], found: list[Tensor] | list[Tensor | None]
) -> None:
    """Run W from its starts, and add the gradients that I has found."""
    for parameter, gradient in zip(parameters, found, strict=True):
        # The memory of a gradient may be that of another one.
        if gradient is not None:
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
    found.clear()
    # Each keeps the graph below it, until it has run.
    while starts:
        starts.pop().run()


@dataclass(slots=True)
class _Part:
    """Some layers of a hop: their input, detached from the layers before, and what they made from it, with its graph.

    The output is None if the backward runs the layers again; then they have auxiliary losses if they `had_auxiliary`.
    Of others `auxiliary` are these, each with its gradient. `ends` are the last nodes of each layer in the graph.
    """

    layers: LayerRange
    boundary: Any
    output: Any = None
    had_auxiliary: bool = False
    auxiliary: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    ends: list[list[Any]] = field(default_factory=list)


class SavedActivations:
    """The saved state of one hop, whose backward runs once, whole or in halves.

    Each layer recomputed in full is a part of its own, of which only the input is saved. Each stretch of layers between
    those is a part too, and autograd keeps its graph. The first run of a layer recomputed in full also builds a graph,
    which is freed at once: without a graph torch may choose other kernels, and the loss would differ in its last bits.
    A layer recomputed selectively keeps its graph, which recomputes some of its tensors: see
    `chameleon_ft.models.recomputation`.

    The sums that layers give beside their output are those of the first run. The end of the backward adds them to the
    sums of the step, so they are part of whatever has the hop's weight gradients.

    Args:
        operation: the hop's F.
        num_layers: layers of the model.
        fields: those of the micro-batch, if a layer gets some.
        terms: Returns the loss terms of the micro-batch; called if an auxiliary loss depends on them.
    """

    def __init__(
        self,
        held: HeldLayers,
        operation: Operation,
        *,
        step: int,
        num_layers: int,
        fields: Mapping[str, Tensor],
        terms: Callable[[], float],
    ) -> None:
        again = operation.recompute
        selective = frozenset(layer for layer in (again.selective if again else ()) if is_recomputed(layer, num_layers))
        self._held = held
        self._operation = operation
        self._num_layers = num_layers
        self._terms = terms
        self._run = partial(
            held.forward, step=step, micro_batch=operation.micro_batch, fields=fields, selective=selective
        )
        self._parts: list[_Part] = []
        self._sums: list[WeightHalf] = []

    def forward(self, boundary: Any) -> Any:
        """Run the hop's F on its input; return the output, with its graph if the model's last layer made it."""
        for layers, again in _parts_of(self._operation, self._num_layers):
            boundary = self._part_forward(layers, boundary, again=again)
        return boundary

    def end_in(self, loss: Tensor) -> None:
        """Replace the output of the route's last hop by the loss computed from it."""
        self._parts[-1].output = loss

    def backward(self, gradients: Gradients) -> Gradients:
        """Add to the gradients of the parameters; return those of the hop's input, None where there is none.

        `gradients` are those of the tensors of the hop's output; [None] for the loss.
        """
        is_top = self._operation.last
        while self._parts:
            part = self._parts.pop()
            with naming_layer(part.layers, part.ends):
                whole_backward(self._roots(part, gradients, is_top=is_top))
            gradients, is_top = [leaf.grad for leaf in leaves_of(part.boundary)], False
        _run_all(self._sums)
        return gradients

    def input_gradient(self, gradients: Gradients) -> tuple[Gradients, WeightHalf]:
        """Run I: return the gradients of the hop's input, None where there is none, and the remaining W."""
        inputs = leaves_of(self._parts[0].boundary)
        if not any(leaf.requires_grad for leaf in inputs):
            return [None] * len(inputs), partial(self.backward, gradients)
        halves, is_top = self._sums, self._operation.last
        while self._parts:
            part = self._parts.pop()
            parameters = self._held.parameters(part.layers)
            with naming_layer(part.layers, part.ends):
                roots = self._roots(part, gradients, is_top=is_top)
                gradients, half = input_gradient(roots, leaves_of(part.boundary), parameters)
            halves.append(half)
            is_top = False
        return gradients, partial(_run_all, halves)

    def _part_forward(self, layers: LayerRange, boundary: Any, *, again: bool) -> Any:
        part, output = _Part(layers, boundary), boundary
        for layer in layers:
            with self._held.collecting([layer]) as side:
                output = self._run(LayerRange(layer, layer + 1), output)
            part.ends.append([leaf.grad_fn for leaf in leaves_of(output)])
            part.auxiliary += self._auxiliary(side)
            if side.is_training and (add := self._held.side_sums(layer, side, self._terms)) is not None:
                self._sums.append(add)
        part.output = output
        self._parts.append(_Part(layers, boundary, had_auxiliary=bool(part.auxiliary)) if again else part)
        if layers.stop == self._num_layers:
            return output
        return mapped(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), output)

    def _roots(self, part: _Part, gradients: Gradients, *, is_top: bool) -> Roots:
        """Return the roots of the backward of a part, the output first, if it has a gradient; the loss is the top."""
        output, auxiliary = part.output, part.auxiliary
        has_gradient = is_top or any(gradient is not None for gradient in gradients)
        if output is None:
            if not (has_gradient or part.had_auxiliary):
                return []
            with self._held.collecting(part.layers) as side:
                output = self._run(part.layers, part.boundary)
            auxiliary = self._auxiliary(side)
        if not has_gradient:
            return auxiliary
        roots = zip(leaves_of(output), gradients, strict=True)
        # The gradient of the loss is not given.
        return [*(each for each in roots if each[1] is not None or is_top), *auxiliary]

    def _auxiliary(self, side: SideOutputs) -> list[tuple[Tensor, Tensor | None]]:
        terms = self._terms() if side.has_own_terms else 0.0
        return [(value, torch.full_like(value, share)) for value, share in side.roots(terms)]


def _run_all(halves: list[WeightHalf]) -> None:
    while halves:
        halves.pop()()


def _parts_of(operation: Operation, num_layers: int) -> Iterator[tuple[LayerRange, bool]]:
    """Yield the parts of a hop from below, and whether the backward recomputes each."""
    layers, recomputed = operation.layers, operation.recompute
    again = [layer for layer in (recomputed.full if recomputed else ()) if is_recomputed(layer, num_layers)]
    edges = {layers.start, layers.stop, *again, *(layer + 1 for layer in again)}
    for start, stop in pairwise(sorted(edges)):
        yield LayerRange(start, stop), start in again
