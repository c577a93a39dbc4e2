"""Checks of the functions of a job before any worker is started, by a call or two of each.

Running the layers once gives their outputs, and shows whether a forward does what it may not do.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from chameleon_ft.data.order import EvaluationOrder
from chameleon_ft.data.samples import SamplesInOrder, fields_of, load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.job_record import Fact
from chameleon_ft.keys import generator_lock, generators_kept
from chameleon_ft.models.build import (
    OtherGenerators,
    build_layer,
    build_on_meta,
    changed,
    digest,
    digests_beside_state,
    gradient_bytes,
    marks_of_state,
    seed_forward,
)
from chameleon_ft.models.fields import require_padding_at_end, with_fields
from chameleon_ft.models.precision import as_loss_input, cast_layer, kept_by_name, looks_sensitive, loss_of, terms_of
from chameleon_ft.models.sample_checks import first_micro_batch
from chameleon_ft.side_outputs import SideOutputs, collecting, run_after_step, summed_buffers
from chameleon_ft.trees import (
    Boundary,
    BoundarySpec,
    boundary_of,
    described,
    flatten,
    is_differentiable,
    leaf_spec,
    leaves_of,
    mapped,
    structure_to_json,
)

_CPU, _META = torch.device("cpu"), torch.device("meta")
# Least relative tolerance: some kernels of accelerators sum in any order.
_ROUNDING: Final = 1e-3


def boundary_specs(
    job: Job,
    micro_batch_size: int,
    *,
    device: torch.device = _CPU,
    seed: int = 0,
    hints: list[str] | None = None,
    ran: Callable[[int, Any], object] = lambda layer, output: None,
    side: dict[int, tuple[str, ...]] | None = None,
) -> tuple[Boundary, ...]:
    """Return the output of each layer for a micro-batch of `micro_batch_size` samples, first layer to last.

    It is `job.boundaries` if set, with bfloat16 for float32 under bf16, and otherwise found by running one micro-batch
    through the layers on `device`, as a worker does. Only one layer is in memory at a time, and layers with the same
    factory and the same kind of input run once. The meta device computes nothing, but does not see what depends on the
    device or on values, such as autocast.

    Args:
        hints: gets a sentence on each buffer whose values bfloat16 rounds.
        ran: called with each layer that has run, and its output.
        side: gets for each layer that is run the names of what it gives beside its output.

    Raises:
        ConfigError: the dataset does not hold pairs of tensors of one shape; or the named layer cannot be built or run,
            does not return a tree of tensors, or depends on more than its input, its parameters and torch's generator.
    """
    read = first_micro_batch(job, micro_batch_size, seed)
    job = with_fields(job, *read)
    all_fields = fields_of(*read)
    require_padding_at_end(job, all_fields)
    if job.boundaries is not None:
        stated = tuple(job.boundaries(micro_batch_size))
        if not all(isinstance(leaf, BoundarySpec) for each in stated for leaf in flatten(each)[0]):
            raise ConfigError("`boundaries` returns a list of BoundarySpec, one for the output of each layer")
        if len(stated) != job.num_layers:
            raise ConfigError(f"`boundaries` gives {len(stated)} shapes for {job.num_layers} layers: give one for each")
        cast = {torch.float32: torch.bfloat16} if job.precision.is_lower else {}
        return tuple(
            boundary_of(each, lambda leaf: replace(leaf, dtype=cast.get(leaf.dtype, leaf.dtype))) for each in stated
        )
    fields = {name: all_fields[name].to(device) for name in {name for names in job.fields or () for name in names}}
    boundary = fields[job.fields[0][0]] if job.fields else mapped(lambda tensor: tensor.to(device), read[0])
    before = boundary_of(boundary, leaf_spec)
    specs: list[Boundary] = []
    # The blocks of a model mostly share one factory.
    outputs: dict[tuple[int, Boundary, tuple[str, ...], bool], tuple[Any, Boundary, tuple[str, ...]]] = {}
    for layer, factory in enumerate(job.layers):
        keywords = {name: fields[name] for name in job.keywords(layer)}
        key = (id(factory), before, tuple(keywords), layer == 0)
        if key not in outputs:
            own = zip(leaves_of(boundary), before.leaves, strict=True)
            given = [leaf.detach().requires_grad_(layer > 0 and spec.has_gradient) for leaf, spec in own]
            noted = [] if hints is None else hints
            outputs[key] = _output(job, layer, before.unflatten(given), keywords=keywords, seed=seed, hints=noted)
            ran(layer, outputs[key][0])
        boundary, before, names = outputs[key]
        if side is not None:
            side[layer] = names
        specs.append(before)
    return tuple(specs)


def _output(
    job: Job, layer: int, boundary: Any, *, keywords: Mapping[str, Tensor], seed: int, hints: list[str]
) -> tuple[Any, Boundary, tuple[str, ...]]:
    """Build a layer, and run it with gradients, as a worker does.

    Return its output without its graph, as what it is expected from now on, and the names of what it gives beside it.
    """
    leaves = leaves_of(boundary)
    device = leaves[0].device
    module = build_on_meta(job, layer) if device == _META else _build_alike(job, layer, seed).to(device).train()
    name, buffers = f"layer {layer} ({type(module).__name__})", dict(module.named_buffers())
    cast_layer(module, job.precision, is_first=layer == 0)
    for key, buffer in module.named_buffers():
        hint = (
            f"bf16 rounds the buffer {key!r} of {type(module).__name__}; name it in fp32_modules to keep it in float32"
        )
        if device != _META and hint not in hints and not torch.equal(buffer.to(buffers[key].dtype), buffers[key]):
            hints.append(hint)
    hints += _hints_of_rounded(module, hints) if job.precision.is_lower else []
    if kept := sorted(kept_by_name(module, job.precision)):
        name += f" with {kept[0]!r} in float32 by fp32_modules"
    # The clone is no leaf, so that a layer which changes it in place runs, and is refused.
    given, boundary = boundary, mapped(torch.clone, boundary)
    state, beside = marks_of_state(module), digests_beside_state(module)
    versions = [each._version for each in keywords.values()]
    run = partial(_run, module, name=name, layer=layer, seed=seed, keywords=keywords)
    # Another thread may read a sample, for which it seeds the generators.
    with generator_lock:
        generators = OtherGenerators()
        output, side = run(boundary)
        used = generators.used_since()
    if used:
        raise ConfigError(
            f"{name} draws numbers from `{used}` in its forward, which differ between workers; draw them from torch, "
            "whose generator is seeded before each run of a layer"
        )
    if any(each._version for each in leaves_of(boundary)) or versions != [each._version for each in keywords.values()]:
        raise ConfigError(
            f"{name} changes its input in place, which torch refuses on a worker whose layers begin there, and which a "
            "layer that is run again would find changed; return a new tensor, for example by inplace=False or x = x + y"
        )
    if found := changed(state, marks_of_state(module)):
        raise ConfigError(
            f"{name} changes {found[0]!r} of its state in its forward, which would come out differently on each worker "
            "that holds it; compute it from the input and the parameters each time, or if it is a sum over the step, "
            "name it in step_sums, and use the sum in after_step"
        )
    made, structure = flatten(output)
    if not made or not all(isinstance(each, torch.Tensor) for each in made):
        raise ConfigError(
            f"{name} returned {described(output)}: a layer returns a tensor, or a tuple, list, dict or dataclass of "
            "tensors"
        )
    structure_to_json(structure, name=name)
    spec = boundary_of(output, leaf_spec)
    _require_gradients(job, layer, module, given, _roots(output, side), run, keywords)
    output = mapped(torch.Tensor.detach, output)
    if found := changed(beside, after := digests_beside_state(module)):
        # A cache, or what is left of one input, is the same after the same input; a count or a mean is not.
        with contextlib.suppress(ConfigError):
            run(mapped(_others, boundary))
        again, _ = run(boundary)
        if device == _META or all(map(_is_close, leaves_of(output), leaves_of(again))):
            found = changed(after, digests_beside_state(module))
        if found:
            raise ConfigError(
                f"{name} changes {found[0]!r} in its forward, of which each worker would have another value, and its "
                "output may depend on it; let it depend on nothing but its input, its parameters and torch's generator"
            )
    _check_step_sums(module, side, name=name)
    return output, spec, side.names


def _hints_of_rounded(module: nn.Module, known: Collection[str]) -> list[str]:
    """Return a hint if bf16 rounds parameters that look as if they should stay in float32."""
    rounded = [
        name for name, each in module.named_parameters() if each.dtype == torch.bfloat16 and looks_sensitive(name)
    ]
    hint = (
        f"bf16 rounds {', '.join(rounded[:4])}{' and others' if rounded[4:] else ''} of {type(module).__name__}, which "
        "models mostly keep in float32: name them or their classes in fp32_modules"
    )
    return [hint] if rounded and hint not in known else []


def _roots(output: Any, side: SideOutputs) -> list[torch.Tensor]:
    """Return the tensors at which the backward of a layer begins: its output and its auxiliary losses."""
    return [*leaves_of(output), *(value for value, _ in side.losses)]


def _check_step_sums(module: nn.Module, side: SideOutputs, *, name: str) -> None:
    """Run the `after_step` of a layer, on the sums of one micro-batch.

    Raises ConfigError if such a sum has another shape or type than its buffer, or more than buffers is changed.
    """
    buffers = summed_buffers(module)
    for each, own in zip(buffers, side.step_sums, strict=True):
        if (own.shape, own.dtype) != (each.value.shape, each.value.dtype):
            raise ConfigError(
                f"{name} makes {each.path!r} of its step_sums {own.dtype} of shape {tuple(own.shape)} in its forward, "
                f"and builds it as {each.value.dtype} of shape {tuple(each.value.shape)}; add to it in place"
            )
    if not buffers or buffers[0].value.is_meta:
        return
    state, beside = marks_of_state(module), digests_beside_state(module)
    run_after_step(buffers, side.step_sums)
    parameters = {key for key, _ in module.named_parameters()}
    others = [key for key in changed(state, marks_of_state(module)) if key in parameters]
    if others := others + changed(beside, digests_beside_state(module)):
        raise ConfigError(
            f"{name} changes {others[0]!r} in after_step, which may change persistent buffers only, because they move "
            "and are saved with the layer; let it be one, by register_buffer"
        )


def _require_gradients(
    job: Job,
    layer: int,
    module: nn.Module,
    given: Any,
    roots: Sequence[torch.Tensor],
    run: Callable[[Any], tuple[Any, SideOutputs]],
    keywords: Mapping[str, Tensor],
) -> None:
    """Raise ConfigError if something would not be trained by `roots`, the output and losses, that seems meant to.

    A layer that does not choose by values what it computes, as a mixture of experts does, also runs on the meta device,
    and always uses the parameters that it uses there. Only one that is used nowhere is refused.
    """
    name, graph = f"layer {layer} ({type(module).__name__})", _graph_of(roots)
    for key, value in ((key, value) for part in module.modules() for key, value in vars(part).items()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None and value.grad_fn not in graph:
            raise ConfigError(
                f"{name} keeps {key!r}, of which no gradient is computed, because only what the last layer returns is "
                "part of the loss; return what is to be trained, and keep other values by detach()"
            )
    own = [*leaves_of(given), *module.parameters()]
    if (leaf := untracked_leaf(roots, lambda: _roots(*run(given)), own=own)) is not None:
        raise ConfigError(
            f"{name} computes with a tensor of shape {tuple(leaf.shape)} that requires a gradient and is none of its "
            "parameters, so it would not be trained; register it, as nn.Parameter or by nn.ModuleList, or freeze it by "
            "requires_grad_(False)"
        )
    idle = _without_gradient(module, given, roots, is_first=layer == 0)
    if idle and not leaves_of(given)[0].is_meta:
        idle &= _without_gradient_on_meta(job, layer, given, keywords)
    if parameters := sorted(idle - job.tied_in(layer) - {""}):
        raise ConfigError(
            f"{name} does not use its parameter {parameters[0]!r} for its output, so it would not be trained; leave it "
            "out, or freeze it by requires_grad_(False)"
        )
    last = max(number for number, factory in enumerate(job.layers) if factory is job.layers[layer])
    if "" in idle and any(gradient_bytes(job)[:last]):
        raise ConfigError(
            f"the output of {name} has no gradient by its input, so the layers before it would not be trained; compute "
            "it from the input without detach(), or freeze their parameters by requires_grad_(False)"
        )


def _without_gradient(module: nn.Module, given: Any, roots: Sequence[torch.Tensor], *, is_first: bool) -> set[str]:
    """Run the backward; return the names of the trained parameters without a gradient, and "" if the input has none."""
    try:
        if differentiable := [each for each in roots if each.requires_grad]:
            with generator_lock:
                torch.autograd.backward(differentiable, list(map(torch.zeros_like, differentiable)))
    except Exception:
        # Not all operations can run on the meta device.
        if leaves_of(given)[0].is_meta:
            return set()
        raise
    idle = {name for name, each in module.named_parameters() if each.requires_grad and each.grad is None}
    module.zero_grad()
    return idle if is_first or any(each.grad is not None for each in leaves_of(given)) else idle | {""}


def _without_gradient_on_meta(job: Job, layer: int, given: Any, keywords: Mapping[str, Tensor]) -> set[str]:
    try:
        module = build_on_meta(job, layer)
        cast_layer(module, job.precision, is_first=layer == 0)
        given = mapped(lambda leaf: leaf.detach().to(_META).requires_grad_(leaf.requires_grad), given)
        on_meta = {name: each.to(_META) for name, each in keywords.items()}
        output, side = _run(module, given, name="", layer=layer, seed=0, keywords=on_meta)
        return _without_gradient(module, given, _roots(output, side), is_first=layer == 0)
    except Exception:  # noqa: BLE001 - of any class: the layer looks at values, or cannot run there
        return set()


def _graph_of(roots: Iterable[torch.Tensor]) -> dict[Any, None]:
    """Return the nodes of the graph that a backward of `roots` runs through."""
    found: dict[Any, None] = {}
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = None
            stack.extend(each for each, _ in node.next_functions)
    return found


def untracked_leaf(
    roots: Iterable[torch.Tensor], run: Callable[[], Iterable[torch.Tensor]], *, own: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """Return a tensor beside `own` that a backward of `roots` would add a gradient to; `run` computes them again."""
    known = set(map(id, own))
    strange = {id(leaf): leaf for leaf in leaves_of_graph(roots) if id(leaf) not in known}
    # A tensor that is made by `run` is another one in the second run.
    again = {id(leaf) for leaf in leaves_of_graph(run())} if strange else set()
    return next((leaf for key, leaf in strange.items() if key in again), None)


def leaves_of_graph(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [node.variable for node in _graph_of(roots) if hasattr(node, "variable")]


def _run(
    module: nn.Module,
    boundary: Any,
    *,
    name: str,
    layer: int,
    seed: int,
    keywords: Mapping[str, Tensor],
) -> tuple[Any, SideOutputs]:
    """Run a layer; return its output, and what it gives beside it."""
    device, buffers = leaves_of(boundary)[0].device, summed_buffers(module)
    try:
        # A tensor that forward creates without naming a device would otherwise not fit an input on the meta device.
        with generator_lock, torch.random.fork_rng(devices=[]), device if device == _META else nullcontext():
            seed_forward(seed, step=0, micro_batch=0, layer=layer)
            with collecting(buffers) as side:
                output = module(boundary, **keywords)
            return output, side
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be run on an input of {described(boundary)}{range_of(boundary)} on the device {device} "
            f"({type(error).__name__}: {error}); check that it takes what the layer before it returns, or set "
            "the job's `boundaries`"
        ) from error


def range_of(boundary: Any) -> str:
    """Return the values of whole numbers, such as ids that an embedding may not have, as text."""
    leaves = [leaf for leaf in leaves_of(boundary) if leaf.dtype in (torch.int32, torch.int64) and leaf.numel()]
    if not leaves or leaves[0].is_meta:
        return ""
    return f" from {min(int(leaf.min()) for leaf in leaves)} to {max(int(leaf.max()) for leaf in leaves)}"


def _build_alike(job: Job, layer: int, seed: int) -> nn.Module:
    """Build a layer. Raises ConfigError if it gets other values each time, from a generator that is not torch's."""
    with generator_lock:
        generators = OtherGenerators()
        module = build_layer(job, layer, seed)
        used = generators.used_since()
    if used:
        state, again = module.state_dict(), build_layer(job, layer, seed).state_dict()
        if any(isinstance(value, torch.Tensor) and not torch.equal(value, again[key]) for key, value in state.items()):
            raise ConfigError(
                f"the factory of layer {layer} draws numbers from `{used}`, so that each worker would begin with other "
                "weights; draw them from torch, whose generator is seeded before a layer is built"
            )
    return module


def _is_close(output: torch.Tensor, again: Any) -> bool:
    """Return whether two outputs are equal but for rounding."""
    if not isinstance(again, torch.Tensor) or again.shape != output.shape or again.dtype != output.dtype:
        return False
    if not (output.is_floating_point() or output.is_complex()):
        return torch.equal(output, again)
    largest = float(output.abs().nan_to_num().max()) if output.numel() else 0.0
    rounding = max(_ROUNDING, 2 * torch.finfo(output.dtype).eps)
    return torch.allclose(output, again, rtol=rounding, atol=rounding * largest, equal_nan=True)


# Relative difference up to which two losses count as equal.
_ALIKE: Final = 1e-3


def check_separate_parameters(job: Job) -> None:
    """Build the layers on the meta device, those with the same factory at most twice.

    Raises:
        ConfigError: two layers have the same trained parameter, without being tied.
    """
    # Modules are kept, so that no other parameter gets the id of one of theirs.
    modules: list[nn.Module] = []
    places: dict[int, tuple[int, str]] = {}
    builds: dict[int, int] = defaultdict(int)
    for layer, factory in enumerate(job.layers):
        builds[id(factory)] += 1
        if builds[id(factory)] > 2:
            continue
        modules.append(build_on_meta(job, layer))
        for name, parameter in modules[-1].named_parameters():
            first = places.setdefault(id(parameter), (layer, name))
            are_tied = any({first, (layer, name)}.issubset(copies) for copies in job.tied)
            if parameter.requires_grad and first[0] != layer and not are_tied:
                raise ConfigError(
                    f"layers {first[0]} and {layer} share the parameter {name!r}, of which each worker would train a "
                    "copy of its own; let each factory build its own parameters, and name the copies that are to stay "
                    "equal in the job's `tied`"
                )


def check_loss(
    job: Job, output: Boundary, micro_batch_size: int, *, device: torch.device, seed: int = 0
) -> tuple[Fact, tuple[str, ...]]:
    """Compute the loss of the first micro-batch, of random numbers as the output of the last layer.

    Returns it with its terms, and hints.

    Raises:
        ConfigError: `loss` or `loss_terms` cannot be called, or returns something else than it should; or `loss` has
            parameters of its own, or changes what it keeps.
    """
    samples = SamplesInOrder(job.dataset, seed, job.collate, is_tolerant=True)
    _, targets = samples.micro_batch(0, micro_batch_size)
    targets = mapped(lambda tensor: tensor.to(device), targets)
    before = digest((job.loss, job.loss_terms))
    with generator_lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = _made_like(output, device)
        leaves = [leaf for leaf in leaves_of(made) if is_differentiable(leaf.dtype)]
        for leaf in leaves:
            leaf.requires_grad_()
        try:
            loss: Any = loss_of(job, made, targets)
            terms = terms_of(job, targets)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the loss of an output of {described(made)} and targets of {described(targets)} cannot be computed "
                f"({type(error).__name__}: {error}); check that `loss` takes the output of the last layer and "
                "the stacked targets, and `loss_terms` the targets"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"`loss` returned {found}: it returns the sum of the loss terms of a micro-batch, a tensor of one "
                'number; give torch\'s losses reduction="sum"'
            )
        if (own := untracked_leaf([loss], lambda: [loss_of(job, made, targets)], own=leaves)) is not None:
            raise ConfigError(
                f"`loss` computes with a parameter of its own, of shape {tuple(own.shape)}, which would not be "
                "trained; move it into the last layer, or freeze it by requires_grad_(False)"
            )
        if (after := digest((job.loss, job.loss_terms))) != before:
            for other in (mapped(lambda leaf: _others(leaf.detach()), made), made):
                loss_of(job, other, targets), job.loss_terms(targets)
            if digest((job.loss, job.loss_terms)) != after:
                raise ConfigError(
                    "`loss` or `loss_terms` changes what it keeps, such as a count or a mean, of which each worker "
                    "would have another value; let it depend on nothing but the output and the targets"
                )
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
        if all(each is None for each in gradients):
            raise ConfigError(
                "`loss` returned a number that has no gradient by the output of the last layer, so nothing would be "
                "trained; compute it from the output, without detach() or no_grad()"
            )
        hints: tuple[str, ...] = ()
        # The error may be of any class: the loss takes no other shapes.
        with contextlib.suppress(Exception):
            hints = _hints(job, mapped(torch.Tensor.detach, made), targets, float(loss.detach()), terms)
    return ["loss and terms", float(loss.detach()), terms], hints


def _hints(job: Job, made: Any, targets: Any, loss: float, terms: float) -> tuple[str, ...]:
    """Return hints if the terms do not seem to be those that the loss sums."""

    def of(output: Any, targets: Any) -> tuple[float, float]:
        return float(loss_of(job, output, targets)), terms_of(job, targets)

    twice, twice_terms = of(*(mapped(lambda leaf: torch.cat([leaf, leaf]), each) for each in (made, targets)))
    if loss and terms and math.isclose(twice, loss, rel_tol=_ALIKE) and twice_terms > terms:
        return (
            "`loss` seems to return the mean over a micro-batch, which is divided by the terms again; return the sum",
        )
    if not (isinstance(made, Tensor) and isinstance(targets, Tensor)):
        return ()
    if made.ndim > 2 and made.shape[:2] == targets.shape[:2]:
        places = 1
    elif targets.ndim > 1 and made.shape[2:] == targets.shape[1:]:
        places = -1
    else:
        return ()
    # The loss of every other place in a sample, such as a token, and of the others, which are terms if it is their sum.
    chosen = [torch.arange(first, targets.shape[places], 2, device=targets.device) for first in (0, 1)]
    halves = [of(made.index_select(places, each), targets.index_select(places, each)) for each in chosen]
    is_sum = math.isclose(sum(half for half, _ in halves), loss, rel_tol=_ALIKE)
    if is_sum and all(half > loss / 10 and counted == terms > 0 for half, counted in halves):
        return (
            f"`loss` seems to sum {targets.shape[places]} values of a sample that `loss_terms` does not count, which "
            "multiplies gradients; count them, as by loss_terms=torch.Tensor.numel",
        )
    return ()


def check_evaluation(
    job: Job,
    output: Boundary | None,
    micro_batch_size: int,
    *,
    device: torch.device,
    seed: int = 0,
    trained: tuple[Any, Any] | None = None,
) -> None:
    """Compare the first held-out samples with those of training, and compute their metrics.

    Args:
        trained: the first micro-batch of training, if it was read before.
        output: of the last layer, in place of which random numbers are taken; None: no metric is computed.

    Raises:
        ConfigError: it has other shapes or types, or a metric cannot be computed, or is no number.
    """
    assert job.evaluation is not None
    trained = trained or first_micro_batch(job, micro_batch_size, seed)
    order = EvaluationOrder(len(job.evaluation), seed)
    held_out = load_micro_batch(job.evaluation, order, 0, micro_batch_size, collate=job.collate)
    for name, *both in zip(("input", "target"), trained, held_out, strict=False):
        one, other = map(described, both)
        if one != other:
            raise ConfigError(
                f"`evaluation` has the {name} {other}, and `dataset` {one}: give both the same shapes and types, "
                "because layers return one shape"
            )
    if output is None:
        return
    targets = mapped(lambda tensor: tensor.to(device), held_out[1])
    with generators_kept(device), torch.no_grad():
        made = as_loss_input(job, _made_like(output, device))
        for name, metric in job.metrics.items():
            try:
                float(metric(made, targets))
            except Exception as error:
                raise ConfigError(
                    f"metrics[{name!r}] of an output of {described(made)} and targets of {described(targets)} cannot "
                    f"be computed ({type(error).__name__}: {error}); let it take the output of the last layer and the "
                    "stacked targets, and return their sum, a number"
                ) from error


def _made_like(output: Boundary, device: torch.device) -> Any:
    """Return random numbers as the output of a layer."""
    return output.unflatten([torch.rand(leaf.shape).to(device=device, dtype=leaf.dtype) for leaf in output.leaves])


def _others(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type with other values."""
    flipped = tensor.flip(0) if tensor.ndim else tensor
    return 2 * flipped + 1 if is_differentiable(tensor.dtype) else flipped
