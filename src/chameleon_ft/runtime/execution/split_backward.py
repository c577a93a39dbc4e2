"""A backward in halves: I, the gradient of the input of some layers, and W, the gradients of their parameters.

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

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from chameleon_ft.runtime.execution.gradients import without_gradients

WeightHalf = Callable[[], object]
"""The W of a split backward. A single call adds to the gradients of the parameters."""

_Gradients = tuple[Tensor | None, ...]


def whole_backward(output: Tensor, output_gradient: Tensor | None) -> None:
    """Add to the gradients of all leaves, if there are any. The gradient is None for a loss."""
    if output.requires_grad:
        torch.autograd.backward(output, output_gradient)


def input_gradient(
    output: Tensor, output_gradient: Tensor | None, boundary: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor | None, WeightHalf]:
    """Compute the gradient of `boundary` and save what W needs.

    Args:
        output: the output of some layers, or the scalar loss.
        output_gradient: gradient of `output`; None for the loss.
        boundary: the input of the layers. If it has no gradient, W is the whole backward.
        parameters: the trained parameters of the layers.
    """
    whole = partial(whole_backward, output, output_gradient)
    if not (output.requires_grad and boundary.requires_grad):
        return None, whole
    branches = _branches(get_gradient_edge(output).node, get_gradient_edge(boundary).node)
    if branches is None:
        return None, whole
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
            starts.setdefault(branch, _Start(branch)).parameters.append(parameter)
    if not starts:
        return _both_at_once(whole, boundary, parameters)
    try:
        with ExitStack() as hooks:
            for start in starts.values():
                hooks.enter_context(start.node.register_prehook(start.keep))
            gradient, *found = torch.autograd.grad(
                [output], [boundary, *at_once], [output_gradient], retain_graph=True, allow_unused=True
            )
    except RuntimeError:  # a part of the graph runs as a whole only
        return _both_at_once(whole, boundary, parameters)
    return gradient, partial(_run_weight_half, list(starts.values()), at_once, found)


@dataclass(slots=True)
class _Start:
    """A node at which W starts, with the parameters whose gradients it finds from there.

    Attributes:
        gradients: those of the node's outputs, from I.
    """

    node: Node
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: _Gradients = ()

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


def _branches(output: Node, boundary: Node) -> dict[Node, Node | None] | None:
    """Find where paths to other leaves branch off those from the output to the boundary.

    Returns:
        For each node below the output from which no path leads to the boundary, the only node with such a path at
        which all paths to it branch off; None if there are several, or if a function of Python would run in both halves
        from there. None if the boundary is not below the output.
    """
    children = _children(output)
    on_path: set[Node] = {boundary} if boundary in children else set()
    for node in children:
        if not on_path.isdisjoint(children[node]):
            on_path.add(node)
    if not on_path:
        return None
    branches: dict[Node, Node | None] = {}
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


def _children(output: Node) -> dict[Node, list[Node]]:
    """Return the children of the output and of each node below it; a node comes after its children."""
    visited: dict[Node, list[Node]] = {}
    complete: dict[Node, list[Node]] = {}
    stack = [output]
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
    whole: Callable[[], None], boundary: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor | None, WeightHalf]:
    """Run a backward that cannot be divided; W adds the gradients of parameters, which are kept until then."""
    with without_gradients(parameters):
        whole()
        found = [parameter.grad for parameter in parameters]
    gradient, boundary.grad = boundary.grad, None
    return gradient, partial(_run_weight_half, [], parameters, found)


def _run_weight_half(
    starts: list[_Start], parameters: Sequence[nn.Parameter], found: list[Tensor] | list[Tensor | None]
) -> None:
    """Run W from its starts, and add the gradients that I has found."""
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:  # which may share its memory with another gradient
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
    found.clear()
    while starts:  # each keeps the graph below it, until it has run
        starts.pop().run()
