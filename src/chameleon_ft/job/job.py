"""Jobs: the layers, loss, data and optimizer to train, as plain callables that know nothing of the runtime.

A job is all that the runtime, the plain reference loop and the checkpoints share about a model. This module does not
import torch, so that a reference to a job can be checked before torch is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsFloat, TypeAlias

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Compile, Precision
from chameleon_ft.job.datasets import check_dataset, check_evaluation, require_callable
from chameleon_ft.job_arguments import ArgumentValue
from chameleon_ft.weights import StoredName, Weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from chameleon_ft.job.datasets import Collate, Dataset
    from chameleon_ft.trees import BoundarySpec

    LayerFactory: TypeAlias = Callable[[], nn.Module]
    Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Metric: TypeAlias = Callable[[torch.Tensor, torch.Tensor], SupportsFloat]
    OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]


class Scheduler(Protocol):
    """Options of groups, such as their rates, by the number of the step; see `chameleon_ft.optim.scheduler`."""

    def options(
        self, step: int, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> list[dict[str, Any]]: ...


def sample_count(targets: Any) -> int:
    """Return the number of samples of a micro-batch from its targets, a tensor or a tree of tensors."""
    # Whoever has targets has loaded torch.
    from torch.utils._pytree import tree_leaves

    return len(tree_leaves(targets)[0])


class ModelParameters(list["nn.Parameter"]):
    """The parameters of a model in the order of its layers, as `list(model.parameters())` has them, with their names.

    The model is `nn.Sequential(*layers)`, so a name is "LAYER.NAME", such as "3.attention.query.weight". A parameter
    that layers share has the name of its first copy.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = tuple(named)
        super().__init__(parameter for _, parameter in self._named)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter), as the method of a module does; torch's optimizers take these, too."""
        yield from self._named


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model as a list of layers, with its loss, data and optimizer.

    A layer is any ``nn.Module`` from a tensor, or a tree of tensors, to another; every worker builds only those that it
    holds. It may depend only on its input, its parameters and torch's generator, which is seeded before each run of a
    layer, so that the result does not depend on the worker that runs it.

    Attributes:
        layers: a factory for each layer, first to last. Layer 0 gets the dataset's inputs, stacked: (micro-batch, ...).
            If these are a dict of fields, every layer also gets the fields that its forward names as arguments.
        loss: (output of the last layer, stacked targets) -> the *sum* of the loss terms of the micro-batch, a scalar.
        loss_terms: stacked targets -> number of terms that `loss` sums, or the sum of their weights: any real number of
            0 or more. Their sum over the global batch divides the gradients, so that the loss trained on is the mean
            over all terms. A micro-batch without terms contributes nothing, and its loss is not computed. A step
            without terms is skipped. Default: one for each sample.
        dataset: sample number -> (input, target), each a tensor of the same shape for every sample; or a dict of
            tensors by the names of fields, with labels as the target; or a `Stream` of such samples, which one worker
            reads for all. With `collate`, samples may be anything.
        collate: samples of a micro-batch -> (inputs, targets), each a tensor of one shape for every micro-batch; or a
            dict of fields, such as input_ids, position_ids and labels, as the data collators of transformers return.
            `chameleon_ft.data.Buckets` pads micro-batches to a few lengths.
            What it draws from global generators is seeded. None: samples are stacked, those that are no pairs of
            tensors by torch's `default_collate`.
        evaluation: a map-style dataset of held-out samples, of the same shapes, on which the loss and the metrics are
            computed during training; see `[evaluation]` of the configuration. None: nothing is evaluated.
        metrics: by name, (output of the last layer, stacked targets) -> a *sum* over the micro-batch, like `loss`, such
            as the number of right answers. An evaluation divides the sum over all samples by their loss terms.
        optimizer: all parameters of the model, in the order of its layers -> optimizer. They are `ModelParameters`: a
            list with `named_parameters()`, of which `chameleon_ft.optim` makes groups by name. They are whole, with
            the attributes that a layer's factory sets, but without values: of each group a worker updates those that
            it holds. The state and the update of a parameter may depend on that parameter alone. Numbers that are
            counted in groups, on the optimizer or in its hooks, as by torch's schedulers, are saved and move with the
            layers.
        elementwise: True if the optimizer updates each element of a parameter from the element's own gradient and
            state alone, so that the holders of a layer can divide the update of a parameter; otherwise they divide
            whole parameters. None: that is known of most of torch's own (SGD, Adam, AdamW and others), also of those
            in `chameleon_ft.optim.combined`, and not assumed of any other.
        learning_rate: step (from 0) -> rate of the update of that step. It replaces the optimizer's default rate, or if
            no group has that, the largest rate of a group; groups keep their ratio to it, as by torch's LambdaLR. None
            leaves the rates to `schedule`, or to the optimizer.
        schedule: step (from 0) -> factor of the rate of each group in the update of that step, such as
            `chameleon_ft.optim.cosine(...)` or any function; or `chameleon_ft.optim.scheduler(...)`, which computes
            all that a scheduler of torch sets. None: rates are those of `learning_rate`, or of the optimizer.
        clip_norm: largest global L2 norm of the gradient, which is scaled down above it. None: no clipping.
        clip_value: largest absolute value of an element of the gradient, after `clip_norm`. None: no clipping.
        layer_costs: relative cost of running each layer, by which layers are distributed; None: all equal.
        tied: parameters that layers share: for each, the (layer, name in the layer) of all its copies. The first copy
            gives the initial value. The gradients of all copies are added, so they stay equal and are one parameter.
        weights: safetensors files that the initial weights are read from, and the names that they have there and in an
            export. None: all layers are initialised by their factories.
        boundaries: micro-batch size -> output of each layer, for a model whose layers cannot be run before training: a
            `BoundarySpec`, or a tree of them. None: found by running one micro-batch through the layers.
        fields: the fields of a micro-batch that each layer's forward gets by keyword, whatever the worker; those of
            layer 0 begin with the one that is its first argument. None: found before a run, by the names of the
            arguments of each forward.
        precision: element type that the layers compute in; `load_job` sets that of the configuration.
        compile: how layers are compiled; `load_job` sets that of the configuration.
        built_in_full: layers of which a worker initialises the parameters even if it then loads a state, because the
            factory computes more from them than the state; None: found whenever a worker builds such a layer. The
            inspection of a job finds them before a run.
        side_outputs: for each layer, the names of what it gives beside its output, "auxiliary_loss" and the metrics
            that it logs; the inspection of a job finds them before a run.
        arguments: those that the function of the job was called with, its defaults included; `load_job` sets them.

    Raises:
        ConfigError: a field is missing or out of range; the message says which and what to change.
    """

    layers: Sequence[LayerFactory]
    loss: Loss
    loss_terms: Callable[[Any], SupportsFloat] = sample_count
    dataset: Dataset | Any
    collate: Collate | None = None
    evaluation: Dataset | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    optimizer: OptimizerFactory
    elementwise: bool | None = None
    learning_rate: Callable[[int], float] | None = None
    schedule: Callable[[int], float] | Scheduler | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    layer_costs: Sequence[float] | None = None
    tied: Sequence[Sequence[tuple[int, str]]] = ()
    weights: Weights | None = None
    boundaries: Callable[[int], Sequence[BoundarySpec]] | None = None
    fields: Sequence[Sequence[str]] | None = None
    precision: Precision = Precision()
    compile: Compile = Compile()
    built_in_full: Collection[int] | None = None
    side_outputs: Sequence[Sequence[str]] = ()
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # nn.Sequential is not a Sequence and neither is a class; both would fail later with a less clear error.
        if not isinstance(self.layers, Sequence):
            raise ConfigError(f"`layers` is {type(self.layers).__name__}: give a list of functions that build layers")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError("a job needs at least one layer: put layer factories in `layers`")
        for index, factory in enumerate(self.layers):
            # A module is callable too, but must be built by the worker: name the mistake instead of failing there.
            if hasattr(factory, "parameters") and not isinstance(factory, type):
                example = "give a factory that builds it, e.g. `lambda: Block(...)`"
                raise ConfigError(f"layers[{index}] is a module: {example}")
            require_callable(f"layers[{index}]", factory)
        for name in ("loss", "loss_terms", "optimizer"):
            require_callable(name, getattr(self, name))
        for name in ("learning_rate", "boundaries", "collate"):
            if getattr(self, name) is not None:
                require_callable(name, getattr(self, name))
        _check_schedule(self.schedule, self.learning_rate)
        check_dataset(self.dataset)
        check_evaluation(self.evaluation, self.metrics)
        for name in ("clip_norm", "clip_value"):
            if (largest := getattr(self, name)) is not None and not _is_positive(largest):
                raise ConfigError(f"`{name}` is {largest}: it must be positive, or None for no clipping")
        if self.layer_costs is not None:
            object.__setattr__(self, "layer_costs", _checked_costs(self.layer_costs, len(self.layers)))
        if self.fields and len(self.fields) != len(self.layers):
            raise ConfigError(f"`fields` has {len(self.fields)} lists of names for {len(self.layers)} layers: give all")
        object.__setattr__(self, "tied", _checked_tied(self.tied, len(self.layers)))
        if self.weights is not None:
            _check_weights(self.weights, len(self.layers))

    @classmethod
    def from_transformers(
        cls,
        model: Any,
        *,
        attention: str | None = None,
        targets: Literal["labels", "next tokens"] = "labels",
        **fields: Any,
    ) -> Job:
        """Return the job of a decoder-only model of transformers, each of whose decoder layers is a layer.

        Its layers are made of the model's own modules; what comes before them, such as the embedding, is layer 0, and
        what comes after them, such as the head, the last layer.

        Args:
            model: a folder with a config.json, or a configuration of transformers.
            attention: implementation of the attention, such as "sdpa" or "eager"; None: the model's usual one.
            targets: labels: the tokens of the input, where -100 is no target, as transformers takes them; next tokens:
                for each token the one after it, as in a corpus of `chameleon_ft.data`.
            fields: of the job: `dataset` and `optimizer`, and others. Those that the model decides, such as the loss,
                may be given, too.

        Raises:
            ConfigError: the model has no such layers; the message names the part that stands in the way.
        """
        models = importlib.import_module("chameleon_ft.models.transformers")
        job: Job = models.job_from_transformers(model, attention=attention, targets=targets, **fields)
        return job

    def with_adapters(self, config: Any) -> Job:
        """Return this job with adapters of peft in its layers, which alone are trained.

        Modules have the names that they have in files of `weights`, as in the model of transformers. An export of the
        adapters has the format of peft.

        Args:
            config: of the adapters, such as a `peft.LoraConfig` with its `target_modules`.

        Raises:
            ConfigError: no layer has such modules, or an option is not supported.
        """
        adapters = importlib.import_module("chameleon_ft.models.adapters")
        job: Job = adapters.with_adapters(self, config)
        return job

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def tied_with(self, layers: Collection[int]) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Return the copies, by (layer, name), of each parameter that exactly these layers share."""
        wanted = set(layers)
        return tuple(tuple(copies) for copies in self.tied if {layer for layer, _ in copies} == wanted)

    def tied_in(self, layer: int) -> frozenset[str]:
        """Return the names of a layer's parameters that other layers share."""
        return frozenset(name for copies in self.tied for number, name in copies if number == layer)

    def stored_as(self, layer: int, name: str) -> StoredName | None:
        """Return the name of a tensor of a layer in files of weights; None if it has none.

        A tied parameter has that of its first copy.
        """
        for copies in self.tied:
            if (layer, name) in copies:
                layer, name = copies[0]
        return (self.weights or Weights()).stored_as(layer, name)

    def keywords(self, layer: int) -> Sequence[str]:
        """Return the fields of a micro-batch that a layer gets by keyword."""
        if not self.fields:
            return ()
        return self.fields[layer] if layer else self.fields[0][1:]

    @property
    def relative_costs(self) -> tuple[float, ...]:
        """The cost of each layer relative to the others; all 1 if the job gives none."""
        return (1.0,) * self.num_layers if self.layer_costs is None else tuple(self.layer_costs)


def _check_schedule(schedule: object, learning_rate: object) -> None:
    if schedule is None:
        return
    if learning_rate is not None:
        raise ConfigError(
            "`learning_rate` and `schedule` both set the rates: give `schedule`, which scales the rate of each group, "
            "or `learning_rate`, which replaces it"
        )
    if inspect.isclass(schedule) or not (callable(schedule) or hasattr(schedule, "options")):
        raise ConfigError(
            f"`schedule` is {schedule!r:.60}: give a function of the step, such as chameleon_ft.optim.cosine(...), or "
            "a scheduler of torch by chameleon_ft.optim.scheduler(CLASS, ...)"
        )


def _check_weights(weights: object, num_layers: int) -> None:
    if not isinstance(weights, Weights):
        raise ConfigError(f"`weights` is {weights!r:.80}: give Weights(path, names)")
    if weights.names is not None and len(weights.names) != num_layers:
        raise ConfigError(
            f"`weights` has the names of {len(weights.names)} layers, and the job has {num_layers}: give one mapping "
            "of names for each layer"
        )


def _checked_tied(
    tied: Sequence[Sequence[tuple[int, str]]], num_layers: int
) -> tuple[tuple[tuple[int, str], ...], ...]:
    try:
        groups = tuple(tuple((int(layer), str(name)) for layer, name in copies) for copies in tied)
    except (TypeError, ValueError):
        raise ConfigError(
            f"`tied` is {tied!r:.80}: give for each shared parameter a list of its copies, each as (layer, name)"
        ) from None
    for copies in groups:
        layers = [layer for layer, _ in copies]
        if len(layers) < 2 or len(set(layers)) < len(layers):
            raise ConfigError(f"`tied` has {copies}: give (layer, name) in two layers or more, each layer once")
        if not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(f"`tied` has {copies}: the layers are 0 to {num_layers - 1}")
    every = [copy for copies in groups for copy in copies]
    if len(set(every)) < len(every):
        raise ConfigError("`tied` has a parameter twice: put all copies of it into one group")
    return groups


def _checked_costs(costs: Sequence[float], num_layers: int) -> tuple[float, ...]:
    # A user may give anything.
    given: object = costs
    if not isinstance(given, Iterable) or len(costs := tuple(given)) != num_layers:
        raise ConfigError(f"`layer_costs` is {costs!r:.80}: give a list of {num_layers} numbers, one for each layer")
    if not all(map(_is_positive, costs)):
        raise ConfigError(
            "`layer_costs` must all be positive and finite; a layer that costs nearly nothing gets a small one"
        )
    return tuple(float(cost) for cost in costs)


def _is_positive(number: object) -> bool:
    try:
        return math.isfinite(number) and number > 0  # type: ignore[operator, arg-type]
    except TypeError:
        return False
