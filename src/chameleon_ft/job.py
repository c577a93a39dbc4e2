"""Jobs: the layers, loss, data and optimizer to train, as plain callables that know nothing of the runtime.

A job is all that the runtime, the plain reference loop and the checkpoints share about a model. This module does not
import torch, so that a reference to a job can be checked before torch is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, SupportsFloat, TypeAlias

from chameleon_ft.errors import ConfigError
from chameleon_ft.job_arguments import ArgumentValue, JobArgument, bound_arguments, settable_arguments
from chameleon_ft.keys import Purpose, random_key, seeded
from chameleon_ft.weights import StoredName, Weights

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import nn

    from chameleon_ft.config import RunConfig

    TensorPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
    Collate: TypeAlias = Callable[[list[Any]], Any]
    LayerFactory: TypeAlias = Callable[[], nn.Module]
    Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Metric: TypeAlias = Callable[[torch.Tensor, torch.Tensor], SupportsFloat]
    OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]

__all__ = [
    "BoundarySpec",
    "Compile",
    "Dataset",
    "Job",
    "ModelParameters",
    "Precision",
    "Stream",
    "call_function",
    "check_job_reference",
    "is_stream",
    "load_job",
    "random_key",
]


RESERVED_METRICS: Final = ("loss", "perplexity")
"""Names of what an evaluation has beside the job's own metrics."""


class Dataset(Protocol):
    """A map-style dataset: sample `i` is the same (input, target) in every process, at any time.

    What it draws from the global generators of Python, NumPy and torch is; see `chameleon_ft.data.read_sample`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TensorPair: ...


class Stream(Protocol):
    """A dataset that is read from its beginning on: iterating it gives one epoch of (input, target).

    It, or its iterator, has ``state_dict()`` and ``load_state_dict(state)``, or ``get_state()`` and
    ``set_state(state)``, so that reading can continue at a position. Without them, all before it is read again.
    """

    def __iter__(self) -> Iterator[TensorPair]: ...


class Scheduler(Protocol):
    """Options of groups, such as their rates, by the number of the step; see `chameleon_ft.optim.scheduler`."""

    def options(
        self, step: int, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> list[dict[str, Any]]: ...


def is_stream(dataset: object) -> bool:
    """Return whether a dataset is read as a `Stream`, and not by the numbers of its samples.

    That is what can be iterated and is not map-style, or has a state although it is.
    """
    bases = {f"{each.__module__}.{each.__name__}" for each in type(dataset).__mro__}
    # Torch's base class has a `__getitem__` that only raises an error.
    has_numbers = hasattr(dataset, "__getitem__") and not any(
        base.startswith("torch.") and base.endswith(".IterableDataset") for base in bases
    )
    is_map_style = has_numbers and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and (not is_map_style or hasattr(dataset, "state_dict"))


def sample_count(targets: Any) -> int:
    """Return the number of samples of a micro-batch from its targets, a tensor or a tree of tensors."""
    # Whoever has targets has loaded torch.
    from torch.utils._pytree import tree_leaves

    return len(tree_leaves(targets)[0])


@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """The output tensor of a layer for one micro-batch: its shape, micro-batch dimension included, and element type.

    The gradient that comes back has the same shape and type. Of a layer that returns a tree of tensors, this is a leaf.

    Attributes:
        requires_grad: whether the tensor has a gradient; None: if it is floating-point or complex.
        shapes: its shape in each of the job's buckets, of which `shape` is the last; empty: it has none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool | None = None
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ConfigError(f"a boundary tensor has the shape {self.shape}: every dimension must be at least 1")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_gradient(self) -> bool:
        """Whether the tensor has a gradient."""
        known, dtype = self.requires_grad, self.dtype
        return dtype.is_floating_point or dtype.is_complex if known is None else known

    @property
    def leaves(self) -> tuple[Self]:
        """The tensors of the output."""
        return (self,)

    @property
    def returned(self) -> tuple[int, ...]:
        """The numbers of the leaves whose gradients come back."""
        return (0,)

    @property
    def text(self) -> str:
        """The type and the shape in words."""
        return _described(self.dtype, self.shape)

    def flatten(self, output: Any, *, layer: int) -> list[torch.Tensor]:
        """Return the leaves of the output of a layer. Raises ConfigError if it is not what is expected."""
        self.require(output, layer=layer)
        return [output]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the output with these leaves."""
        return leaves[0]

    def require(self, tensor: Any, *, layer: int, gradient: bool = False) -> None:
        """Raise ConfigError if `tensor` is not what is expected of the output of `layer`, or of its gradient."""
        if getattr(tensor, "dtype", None) == self.dtype and tensor.shape in (self.shapes or (self.shape,)):
            return
        name = f"the gradient of the output of layer {layer}" if gradient else f"the output of layer {layer}"
        found = _described(tensor.dtype, tensor.shape) if hasattr(tensor, "dtype") else f"a {type(tensor).__name__}"
        raise ConfigError(
            f"{name} is {found}, but {self.text} is expected, by the job's `boundaries` or by a run of one micro-batch "
            "before training. A layer must return one shape and type for every micro-batch: at its end cast the "
            f"result, for example by `.to({self.dtype})`, or pad it; or state in `boundaries` what it returns"
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """The element type that layers compute in.

    Attributes:
        name: fp32: that of the model's own parameters; bf16: parameters and activations in bfloat16, with gradients
            summed in float32, and updates applied to float32 masters of the parameters.
        fp32_modules: modules, parameters and buffers that bf16 leaves in float32, as patterns of the names of classes
            of modules, or of names within a layer, such as "*RMSNorm", "feed_forward.router" and "*inv_freq".
    """

    name: Literal["fp32", "bf16"] = "fp32"
    fp32_modules: tuple[str, ...] = ()

    @property
    def is_lower(self) -> bool:
        """Whether layers compute in fewer bits than those in which their parameters are updated."""
        return self.name != "fp32"

    def keeps(self, *names: str) -> bool:
        """Return whether a module, parameter or buffer with one of these names is left in float32."""
        return any(fnmatchcase(name, pattern) for pattern in self.fp32_modules for name in names)


@dataclass(frozen=True, slots=True)
class Compile:
    """Compilation of layers by `torch.compile`.

    Attributes:
        shapes: off: layers are not compiled; static: for the shapes that they get; dynamic: for variable shapes.
        backend: one of torch's, which compiles.
    """

    shapes: Literal["off", "static", "dynamic"] = "off"
    backend: str = "inductor"

    @property
    def is_on(self) -> bool:
        """Whether layers are compiled."""
        return self.shapes != "off"


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

    A layer is any ``nn.Module`` from one tensor to one tensor, because every worker builds only the layers it holds. It
    may depend only on its input, its parameters and torch's generator, which is seeded before each run of a layer, so
    that the result does not depend on the worker that runs it.

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
            _require_callable(f"layers[{index}]", factory)
        for name in ("loss", "loss_terms", "optimizer"):
            _require_callable(name, getattr(self, name))
        for name in ("learning_rate", "boundaries", "collate"):
            if getattr(self, name) is not None:
                _require_callable(name, getattr(self, name))
        _check_schedule(self.schedule, self.learning_rate)
        _check_dataset(self.dataset)
        _check_evaluation(self.evaluation, self.metrics)
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

    def read_weights(self, layer: int, module: nn.Module) -> None:
        """Read the tensors of a layer that the job's files have into it. Raises ConfigError if they cannot be read."""
        if (weights := self.weights) is None or weights.path is None:
            return
        tensors = {**dict(module.named_parameters()), **module.state_dict(keep_vars=True)}
        named = ((self.stored_as(layer, name), tensor) for name, tensor in tensors.items())
        weights.read((stored, tensor) for stored, tensor in named if stored is not None and weights.is_read(stored))

    def frozen_in(self, layer: int, module: nn.Module) -> str:
        """Describe the parameters of a layer that are not trained, and that `read_frozen` reads from the job's files.

        Empty if there are none.
        """
        frozen = {
            name: [str(each.dtype).removeprefix("torch."), list(each.shape)]
            for name, each in module.named_parameters()
            if not each.requires_grad and self._is_read(self.stored_as(layer, name))
        }
        if not frozen or self.weights is None:
            return ""
        return json.dumps({"files": self.weights.fingerprint(), "parameters": frozen})

    def read_frozen(self, layer: int, described: str) -> dict[str, torch.Tensor]:
        """Read the parameters of a layer that `frozen_in` described, by name; none if that is empty.

        Raises ConfigError if they cannot be read, or the files are others now.
        """
        if not described:
            return {}
        import torch

        content = json.loads(described)
        weights = self.weights
        if weights is None or weights.path is None or weights.fingerprint() != content["files"]:
            now = "has none now" if weights is None or weights.path is None else f"has others now, {weights.path}"
            raise ConfigError(
                f"the frozen parameters of layer {layer} are in the files of weights that the run was begun with, and "
                f"the job {now}; give it the files of before"
            )
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in content["parameters"].items()
        }
        stored = {name: self.stored_as(layer, name) for name in found}
        if lacking := [name for name, each in stored.items() if not self._is_read(each)]:
            raise ConfigError(
                f"`weights` has no name in its files for the frozen parameter {lacking[0]!r} of layer {layer}, which "
                "it had when the run began; give it the names of before"
            )
        weights.read((each, found[name]) for name, each in stored.items() if each is not None)
        return found

    def _is_read(self, stored: StoredName | None) -> bool:
        return stored is not None and self.weights is not None and self.weights.is_read(stored)

    def keywords(self, layer: int) -> Sequence[str]:
        """Return the fields of a micro-batch that a layer gets by keyword."""
        if not self.fields:
            return ()
        return self.fields[layer] if layer else self.fields[0][1:]

    @property
    def relative_costs(self) -> tuple[float, ...]:
        """The cost of each layer relative to the others; all 1 if the job gives none."""
        return (1.0,) * self.num_layers if self.layer_costs is None else tuple(self.layer_costs)


def check_job_reference(reference: str, kind: str = "job") -> None:
    """Check that the file or module of a reference exists, without importing more than the packages around it.

    Args:
        reference: The reference of a function, as for `load_job`.
        kind: what the function is, which is also its name where the reference names none.

    Raises:
        ConfigError: the reference is malformed, or its file or module does not exist.
    """
    location, _ = _split_reference(reference, kind)
    if _is_file(location):
        if not Path(location).is_file():
            raise ConfigError(f"{kind} {reference!r}: there is no file {location}")
        return
    if location == "__main__":
        raise ConfigError(
            f"{kind} {reference!r}: `__main__` is this program alone, and each worker is a process of its own; put the "
            f"function into a file, and name that, such as my_{kind}.py"
        )
    # An installed command, unlike `python -m`, does not look in the working directory. Appended, so that no local file
    # shadows an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not _module_exists(location):
        raise ConfigError(
            f"{kind} {reference!r}: there is no module {location}; a file is named with its ending, {location}.py"
        )


def load_job(reference: str, config: RunConfig) -> Job:
    """Call the function that `reference` names and return its job, with the precision of `config`.

    The random generators of torch on the CPU, Python and NumPy are seeded before its module is loaded and before it is
    called, so that every worker gets the same data, and the same modules if the function builds them itself.

    Args:
        reference: ``package.module:function`` or ``path/to/file.py:function``; without ``:function`` it is ``job``.
            Modules are also looked for in the working directory. The folder of a file is put on the import path, as
            for a script.
        config: passed to the function if it requires an argument, with the horizon of the schedule as its steps. Its
            `job_arguments` are passed by their names.

    Raises:
        ConfigError: there is no such function, it has no such arguments, or it returns no `Job`. Errors of the function
            itself pass through.
    """
    function = _import_function(reference, config, kind="job")
    arguments = bound_arguments(function, config.job_arguments, job=reference)
    # A schedule is not to move when a run resumes with more steps.
    job = _call(function, config.model_copy(update={"steps": config.horizon}), arguments)
    if not isinstance(job, Job):
        _, name = _split_reference(reference, "job")
        raise ConfigError(f"job {reference!r}: {name}() returned {type(job).__name__}, not a chameleon_ft.Job")
    return replace(
        job,
        precision=Precision(config.precision, config.fp32_modules),
        compile=Compile(config.compile, config.compile_backend),
        arguments=arguments,
    )


def arguments_of_job(reference: str, config: RunConfig) -> tuple[JobArgument, ...]:
    """Return the arguments of a job's function that a configuration may set. Raises as `load_job`."""
    return tuple(settable_arguments(_import_function(reference, config, kind="job")).values())


def call_function(reference: str, config: RunConfig, *, kind: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Import the function that `reference` names, call it, and return its result.

    As `load_job`, but for any kind of function, and for any arguments. Raises ConfigError if there is none.
    """
    return _call(_import_function(reference, config, kind=kind), config, arguments or {})


def _call(function: Callable[..., Any], config: RunConfig, arguments: Mapping[str, Any]) -> Any:
    with seeded(random_key(config.seed, Purpose.JOB)):
        return function(*((config,) if _needs_an_argument(function, arguments) else ()), **arguments)


def _import_function(reference: str, config: RunConfig, *, kind: str) -> Callable[..., Any]:
    check_job_reference(reference, kind)
    location, name = _split_reference(reference, kind)
    with seeded(random_key(config.seed, Purpose.JOB)):
        module = _import_file(Path(location)) if _is_file(location) else importlib.import_module(location)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{kind} {reference!r}: {location} has no function {name!r}; name one as {location}:FUNCTION")
    if not callable(function):
        raise ConfigError(f"{kind} {reference!r}: {name!r} is not a function; name one that returns a {kind}")
    return function  # type: ignore[no-any-return]


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


def _check_dataset(dataset: Any) -> None:
    if is_stream(dataset):
        if getattr(dataset, "batch_size", None) is not None and hasattr(dataset, "collate_fn"):
            raise ConfigError(
                f"`dataset` is a loader of batches of {dataset.batch_size}, but a micro-batch is stacked from samples; "
                "give the loader batch_size=None, and set the sizes in [batch]"
            )
        if hasattr(dataset, "__next__") and not hasattr(dataset, "state_dict") and not hasattr(dataset, "get_state"):
            raise ConfigError(
                f"`dataset` is {type(dataset).__name__}, which can be read only once: no other worker could read on "
                "after a failure; give an object whose __iter__ begins again, with state_dict() and load_state_dict()"
            )
        return
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            "`dataset` must be map-style, with __len__ and __getitem__(i) -> (input, target), or a stream, with "
            "__iter__, state_dict() and load_state_dict()"
        )
    if len(dataset) < 1:
        raise ConfigError("`dataset` is empty: training needs at least one sample")


def _check_evaluation(dataset: Any, metrics: Mapping[str, Any]) -> None:
    if dataset is None:
        if metrics:
            raise ConfigError("`metrics` are computed in evaluations: give `evaluation`, a dataset of held-out samples")
        return
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError("`evaluation` must be map-style: give it __len__ and __getitem__(i) -> (input, target)")
    if len(dataset) < 1:
        raise ConfigError("`evaluation` is empty: give it at least one sample, or leave it out")
    for name, metric in metrics.items():
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", name) or name in RESERVED_METRICS:
            raise ConfigError(
                f"`metrics` has the name {name!r}: a name begins with a letter, has no blanks, and is none of "
                f"{', '.join(RESERVED_METRICS)}"
            )
        _require_callable(f"metrics[{name!r}]", metric)


def _described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise ConfigError(f"`{name}` is {type(value).__name__}: it must be a function")


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


def _split_reference(reference: str, kind: str) -> tuple[str, str]:
    head, colon, tail = reference.rpartition(":")
    # A path may contain a colon; the one that separates the function is followed by an identifier.
    location, name = (head, tail) if colon and tail.isidentifier() else (reference, kind)
    if not (_is_file(location) or all(part.isidentifier() for part in location.split("."))):
        raise ConfigError(f"{kind} {reference!r}: write it as package.module:function or path/to/file.py:function")
    return location, name


def _is_file(location: str) -> bool:
    return location.endswith(".py")


def _module_exists(location: str) -> bool:
    try:
        return importlib.util.find_spec(location) is not None
    except ModuleNotFoundError as error:
        # A parent package that exists but fails to import something else is another error.
        if f"{location}.".startswith(f"{error.name}."):
            return False
        raise


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    # The name is derived from the path, so that other processes, and pickle, find the module under the same name.
    name = f"chameleon_job_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"job {str(path)!r}: this file cannot be imported")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _needs_an_argument(function: Callable[..., Any], given: Collection[str]) -> bool:
    # A parameter with a default may be meant for anything.
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in given]
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
