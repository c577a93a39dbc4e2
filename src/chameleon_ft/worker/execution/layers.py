"""The layers a rank holds: modules and optimizer.

Every use of a layer's state takes its tensors from here: the update, checkpoints, transfers and the comparison between
holders.

- Updated tensors, by name of the parameter: what the optimizer changes. Under fp32 these are the parameters; under bf16
  a parameter in bfloat16 has a float32 master. If holders share the optimizer's state, owners of slices have the slices
  of the master, and the layer itself has the parameter in bfloat16.
- The optimizer's state, by updated tensor.
- Derived parameters: those in bfloat16, rounded from their masters after each update. Where the layer has the master,
  they are no part of the state.
- Frozen parameters, which nothing changes. Those that were read from the job's files of weights move with a layer, but
  snapshots and checkpoints leave them out, because a layer that is restored reads them again.
- Persistent buffers, which no forward may change, but for those that a layer declares to be summed over the step.
- Of layer 0, if the data is a stream, the position of the next step in it. So whatever holds that layer after a number
  of steps, a worker, a checkpoint or a snapshot, knows which samples come next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from chameleon_ft.data.streams import POSITION_KEY, START
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.job.job import Job
from chameleon_ft.job.stored import frozen_in, read_frozen
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.build import blank_layer, initial_layer, seed_forward
from chameleon_ft.models.checks import range_of
from chameleon_ft.models.compilation import runner
from chameleon_ft.models.optimizer import ModelOptimizer
from chameleon_ft.models.precision import cast_layer
from chameleon_ft.models.recomputation import selective_recomputation
from chameleon_ft.plan import LayerRange
from chameleon_ft.side_outputs import AUXILIARY, SideOutputs, SummedBuffer, collecting, run_after_step, summed_buffers
from chameleon_ft.trees import Boundary
from chameleon_ft.weights import FROZEN, frozen_names
from chameleon_ft.worker.execution.bad_steps import noting
from chameleon_ft.worker.execution.optimizer import LayerOptimizer, Range

NO_FIELDS: Final[Mapping[str, Tensor]] = MappingProxyType({})

LayerState = dict[str, Any]
"""One layer's state by flat key: ``module/NAME`` for updated tensors and persistent buffers, ``optimizer/NAME/KEY``.

``NAME[START:STOP]`` in place of a name is a slice of the elements of a parameter. `POSITION_KEY` and `FROZEN` are as
described there.
"""


@dataclass(slots=True, eq=False)
class StepSum:
    """Numbers of a layer that are summed over micro-batches and holders, in the way of a parameter's gradient.

    Attributes:
        grad: The sum; None if what is added does not count.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: Tensor | None = None

    def numel(self) -> int:
        return self.shape.numel()

    def add(self, values: Tensor) -> None:
        """Add those of a micro-batch."""
        if self.grad is not None:
            self.grad.add_(values)


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """A layer on a device.

    Attributes:
        masters: by name, of parameters that have one in the layer.
        divided: names of parameters whose masters are divided among the owners of slices.
        summed: The buffers that it declares to be summed over the step.
        totals: The sums of those, in order.
        fixed: The other persistent buffers, which no forward may change: module, name there, and name in the layer.
        side_names: Of its auxiliary losses and metrics; see `SideOutputs.names`.
        side: The sums of those over the step; None if there is nothing.
        frozen: Describes the parameters that can be read again, as `frozen_in`.
    """

    module: nn.Module
    masters: Mapping[str, nn.Parameter]
    divided: frozenset[str] = frozenset()
    summed: tuple[SummedBuffer, ...] = ()
    totals: tuple[StepSum, ...] = ()
    fixed: tuple[tuple[nn.Module, str, str], ...] = ()
    side_names: Sequence[str] = ()
    side: StepSum | None = None
    frozen: str = ""

    @classmethod
    def initial(cls, job: Job, layer: int, *, seed: int, device: torch.device) -> Self:
        """Build a layer with the parameters that a run begins with. Raises ConfigError if they cannot be read."""
        own = cls._of(job, layer, initial_layer(job, layer, seed), device)
        return replace(own, frozen=frozen_in(job, layer, own.module))

    @classmethod
    def blank(cls, job: Job, layer: int, *, seed: int, device: torch.device, is_divided: bool = False) -> Self:
        """Build a layer to restore a state into; its updated tensors may hold anything.

        It has no masters if these are divided among the owners of slices.
        """
        blank = cls._of(job, layer, blank_layer(job, layer, seed), device)
        return blank.divide(job.tied_in(layer)) if is_divided else blank

    @classmethod
    def _of(cls, job: Job, layer: int, module: nn.Module, device: torch.device) -> Self:
        module = module.to(device).train()
        names = job.side_outputs[layer] if job.side_outputs else ()
        side = StepSum(torch.Size((2 * len(names),)), torch.float32, device) if names else None
        masters, summed = cast_layer(module, job.precision, is_first=layer == 0), summed_buffers(module)
        totals = tuple(StepSum(each.value.shape, each.value.dtype, device) for each in summed)
        declared, persistent = {each.path for each in summed}, module.state_dict().keys()
        fixed = tuple(
            (module.get_submodule(place), key, name)
            for name, _ in module.named_buffers()
            if name in persistent and name not in declared
            for place, _, key in [name.rpartition(".")]
        )
        return cls(module, masters, summed=summed, totals=totals, fixed=fixed, side_names=names, side=side)

    def marks(self) -> list[tuple[int, int]]:
        """Return what differs for each of the `fixed` buffers once it is changed."""
        values = [module._buffers.get(key) for module, key, _ in self.fixed]
        return [(id(value), 0 if value is None or value.is_inference() else value._version) for value in values]

    def require_unchanged(self, before: Sequence[tuple[int, int]], layer: int) -> None:
        """Raise ConfigError if a buffer was changed since `marks` were taken."""
        if before == (after := self.marks()):
            return
        changed = next(name for (_, _, name), old, new in zip(self.fixed, before, after, strict=True) if old != new)
        raise ConfigError(
            f"layer {layer} ({type(self.module).__name__}) changes its buffer {changed!r} in a forward, so that each "
            "worker that holds it would have another value; name it in step_sums if it is a sum over the step, change "
            "it in after_step, or register it with persistent=False if it only keeps what its input gives again"
        )

    def divide(self, tied: Collection[str]) -> Self:
        """Return the layer without its masters, except those of tied parameters, which every holder keeps."""
        kept = {name: master for name, master in self.masters.items() if name in tied}
        return replace(self, masters=kept, divided=self.divided | (self.masters.keys() - kept.keys()))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in order, which a forward uses and a backward gives gradients."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @property
    def updated(self) -> dict[str, nn.Parameter]:
        """The tensor that the optimizer updates for each of `parameters`: its master, or itself; by name.

        Of a parameter whose master is divided, owners update their slices of the master instead.
        """
        named = self.module.named_parameters()
        return {name: self.masters.get(name, parameter) for name, parameter in named if parameter.requires_grad}

    @property
    def targets(self) -> LayerState:
        """The tensors of the state that do not depend on the optimizer, by their keys."""
        return {f"module/{name}": self.masters.get(name, value) for name, value in self.module.state_dict().items()}

    @property
    def derived(self) -> dict[str, Tensor]:
        """The parameters that are rounded from their masters, by name."""
        return {name: self.module.get_parameter(name) for name in (*self.masters, *sorted(self.divided))}

    @property
    def state(self) -> LayerState:
        """The state without the optimizer's: its own tensors."""
        described = {FROZEN: self.frozen} if self.frozen else {}
        own = {key: value.detach() if isinstance(value, Tensor) else value for key, value in self.targets.items()}
        return {**own, **described}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the updated tensors and buffers of a state; tensors that are its own are not copied."""
        own = under("module/", state)
        for name, master in self.masters.items():
            if name in own and not _is_same(master, own[name]):
                master.data.copy_(own[name])
        if any(not _is_same(value, own.get(name)) for name, value in self.module.state_dict().items()):
            self.module.load_state_dict(own)

    @property
    def rounded(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """The parameters that are rounded from masters in the layer, with these masters."""
        return [(self.module.get_parameter(name), master) for name, master in self.masters.items()]


def under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state whose keys begin with `prefix`, by the rest of their keys."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two tensors have the same memory."""
    return isinstance(other, Tensor) and isinstance(value, Tensor) and value.data_ptr() == other.data_ptr()


class HeldLayers:
    """The layers a rank holds, on its device, and one optimizer over all their updated tensors.

    Args:
        boundaries: The expected output of each layer of the model; empty: any.
        owned: layer -> the ranges of units that the rank updates; None: all of its layers.
        optimizer: The optimizer of the job, if the process has made one before, which saves time.

    Attributes:
        arriving: Layers that are blank, because their state has not arrived yet. They are not held: no update changes
            them, but they have gradients.
        position: The position of the next step in the stream that the job reads, which counts if layer 0 is held.
    """

    def __init__(
        self,
        job: Job,
        layers: Iterable[int],
        *,
        seed: int,
        device: torch.device,
        boundaries: Sequence[Boundary] = (),
        owned: Mapping[int, Sequence[Range]] | None = None,
        optimizer: ModelOptimizer | None = None,
    ) -> None:
        self._job = job
        self._run_layer = runner(job.compile)
        # The last output goes into the loss, and is not sent.
        self._checked = boundaries[:-1]
        self._seed = seed
        self._device = device
        self._layers: dict[int, HeldLayer] = {}
        self.arriving: frozenset[int] = frozenset()
        self.position = START
        self._unknown = set[str]()
        self._optimizer = LayerOptimizer(job, optimizer)
        self._optimizer.owned = owned
        masters = {}
        for layer in sorted(layers):
            self._layers[layer] = HeldLayer.initial(job, layer, seed=seed, device=device)
            masters[layer] = self._divide(layer)
        self._renew_optimizer(masters)

    @property
    def first_trained(self) -> int:
        """The first layer of the model with a parameter that is trained: a backward ends there."""
        return self._optimizer.first_trained

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._layers) - self.arriving

    def expect(self, blanks: Mapping[int, HeldLayer]) -> None:
        """Add layers whose state will arrive."""
        self._layers = dict(sorted({**self._layers, **blanks}.items()))
        self.arriving |= blanks.keys()

    def take_in(self, layer: int, state: Mapping[str, Any], blank: HeldLayer | None = None) -> None:
        """Hold one more layer, with the state that `state_of` gave elsewhere; tensors of `state` may be kept.

        A layer that is not expected may be given as `blank`; if tensors of `state` are its own, nothing is copied.
        """
        if layer not in self.arriving:
            self.expect({layer: blank or self._blank(layer)})
        self.arriving -= {layer}
        self._renew_optimizer()
        self.restore(layer, state)

    def targets_of(self, layer: int) -> dict[str, Tensor]:
        """The tensors that the state of a layer can be received into, by their keys."""
        return self._layers[layer].targets

    def keep_only(self, layers: Collection[int]) -> None:
        """Release all other layers, and their memory; also those that are arriving."""
        if not self.layers.union(self.arriving).issubset(layers):
            self._layers = {layer: own for layer, own in self._layers.items() if layer in layers}
            self.arriving &= self._layers.keys()
            self._renew_optimizer()

    def drop_gradients(self) -> None:
        """Release the memory of the gradients, unless something else refers to it."""
        for own in self._layers.values():
            own.module.zero_grad(set_to_none=True)

    def forward(
        self,
        layers: LayerRange,
        boundary: Any,
        *,
        step: int,
        micro_batch: int,
        fields: Mapping[str, Tensor] = NO_FIELDS,
        selective: Collection[int] = (),
    ) -> Any:
        """Run `layers` on one micro-batch, each with its own random key; save less of `selective` layers.

        `fields` has those of the micro-batch, if a layer gets some.

        Raises:
            ConfigError: an output differs from the expected one in its shape or type, or is another tree.
        """
        for layer in layers:
            module = self._layers[layer].module
            with (
                generator_lock,
                # The compiler itself chooses what a compiled layer saves.
                selective_recomputation() if layer in selective and not self._job.compile.is_on else nullcontext(),
                noting(f"in layer {layer} ({type(module).__name__})"),
            ):
                seed_forward(self._seed, step=step, micro_batch=micro_batch, layer=layer, device=self._device)
                marks = self._layers[layer].marks()
                named = {name: fields[name] for name in self._job.keywords(layer)}
                try:
                    boundary = self._run_layer(module, boundary, **named)
                except IndexError as error:
                    error.add_note(f"on an input{range_of(boundary)}")
                    raise
                if module.training:
                    self._layers[layer].require_unchanged(marks, layer)
            if layer < len(self._checked):
                self._checked[layer].flatten(boundary, layer=layer)
        return boundary

    def collecting(self, layers: Iterable[int]) -> AbstractContextManager[SideOutputs]:
        """Return a context that collects what `layers` give beside their output; see there."""
        return collecting([each for layer in layers for each in self._layers[layer].summed])

    def side_sums(self, layer: int, side: SideOutputs, terms: Callable[[], float]) -> Callable[[], None] | None:
        """Return what adds the outputs of a micro-batch to the sums over the step; None if there are none.

        Args:
            side: of a forward of the layer.
            terms: Returns the loss terms of the micro-batch.

        Raises:
            ConfigError: they include an auxiliary loss, of which nothing was known before the run.
        """
        own = self._layers[layer]
        if side.losses and AUXILIARY not in own.side_names:
            raise ConfigError(
                f"layer {layer} ({type(own.module).__name__}) has an auxiliary loss, which it had not for the first "
                "micro-batch, before the run; call auxiliary_loss in each forward, with 0.0 where there is none"
            )
        added = [*zip(own.totals, side.step_sums, strict=True)]
        for name in side.logged.keys() - set(own.side_names) - self._unknown:
            self._unknown.add(name)
            print(
                f"layer {layer} ({type(own.module).__name__}) logs {name!r}, which is not recorded, because it was not "
                "logged for the first micro-batch, before the run; log it in each forward, with weight=0 where there "
                "is nothing to record",
                file=sys.stderr,
            )
        if own.side is not None:
            sums = side.sums(own.side_names, terms() if side.has_own_terms else 0.0, self._device)
            added.append((own.side, sums))

        def add() -> None:
            for total, values in added:
                total.add(values)

        return add if added else None

    def sums(self, layers: Iterable[int]) -> list[StepSum]:
        """The sums over the step of what `layers` give beside their output, in order."""
        held = [self._layers[layer] for layer in layers]
        return [each for own in held for each in (*own.totals, own.side) if each is not None]

    def after_step(self) -> None:
        """Have the layers use the sums that they have declared, after the update."""
        for layer in sorted(self.layers):
            own = self._layers[layer]
            if own.summed:
                with noting(f"in after_step of layer {layer} ({type(own.module).__name__})"):
                    run_after_step(own.summed, [each.grad.clone() for each in own.totals if each.grad is not None])

    def side_totals(self, layers: Iterable[int]) -> dict[str, tuple[float, float]]:
        """The numbers in `sums`, added up by name: sums, and those of their weights."""
        found: dict[str, tuple[float, float]] = {}
        for own in map(self._layers.__getitem__, layers):
            if own.side is None or own.side.grad is None:
                continue
            numbers = own.side.grad.tolist()
            for name, *both in zip(own.side_names, numbers[::2], numbers[1::2], strict=True):
                total, weight = found.get(name, (0.0, 0.0))
                found[name] = total + both[0], weight + both[1]
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the layers evaluate inside the block, without dropout. Then they train, with the buffers of before."""
        modules = [module for own in self._layers.values() for module in own.module.modules()]
        modes = [module.training for module in modules]
        buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        copies = [
            (each, each._version, each.clone()) for _, own in buffers for each in own.values() if each is not None
        ]
        try:
            for own in self._layers.values():
                own.module.eval()
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for now, before in buffers:
                now.update(before)
            with torch.no_grad():
                for buffer, version, copy in copies:
                    if buffer._version != version:
                        buffer.copy_(copy)

    def parameters(self, layers: Iterable[int]) -> list[nn.Parameter]:
        """The trained parameters of `layers`, in order."""
        return [parameter for layer in layers for parameter in self._layers[layer].parameters]

    @property
    def master_bytes(self) -> int:
        """Bytes of the masters of parameters."""
        return sum(master.nbytes for own in self._layers.values() for master in own.masters.values())

    def tied(self, layers: Collection[int]) -> list[list[nn.Parameter]]:
        """The trained parameters that exactly these layers share: of each, the copies in layers that are held."""
        groups = (
            [self._layers[layer].module.get_parameter(name) for layer, name in copies if layer in self._layers]
            for copies in self._job.tied_with(layers)
        )
        return [copies for copies in groups if copies and copies[0].requires_grad]

    def update(self, step: int) -> float:
        """Run the optimizer on the gradients as they are and return the learning rate of that step."""
        rounded = [pair for layer in self.layers for pair in self._layers[layer].rounded]
        for parameter, master in rounded:
            master.grad = parameter.grad
        lr = self._optimizer.update(step)
        with torch.no_grad():
            for parameter, master in rounded:
                master.grad = None
                parameter.copy_(master)
        return lr

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self._optimizer.learning_rate(step)

    def own(
        self, owned: Mapping[int, Sequence[Range]], received: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """Update only these ranges of units from now on, layer -> ranges.

        Other owners gave the state of slices in `received`, layer -> state, by `state_of_slice`.
        """
        if received or owned != self._optimizer.owned:
            self._optimizer.owned = owned
            given = received or {}
            self._renew_optimizer({layer: {**self._divide(layer), **given.get(layer, {})} for layer in self.layers})

    def own_more(self, received: Mapping[int, Mapping[Range, LayerState]]) -> None:
        """Update more ranges of units from now on: layer -> range -> its state, by `state_of_slice`."""
        owned = {layer: tuple(ranges) for layer, ranges in (self._optimizer.owned or {}).items()}
        for layer, own in received.items():
            owned[layer] = (*owned.get(layer, ()), *own)
        states = {layer: {k: v for state in own.values() for k, v in state.items()} for layer, own in received.items()}
        self.own(owned, states)

    def views_of_slice(self, layer: int, units: Range) -> list[Tensor]:
        """The elements of parameters in a range of units of a layer, in place, whoever owns them."""
        own = self._layers[layer]
        parameters = dict(zip(own.updated, own.parameters, strict=True))
        return self._optimizer.vector_of(layer, parameters).views(units)

    def state_of_slice(self, layer: int, units: Range) -> LayerState:
        """The optimizer's state of a range of units of a layer, which this rank owns."""
        return self._optimizer.state_of_slice(layer, self._layers[layer].updated, units)

    def owned_state_of(self, layer: int) -> LayerState:
        """All slices of optimizer state of a layer that this rank owns."""
        owned = self._optimizer.owned or {}
        return {k: v for units in owned.get(layer, ()) for k, v in self.state_of_slice(layer, units).items()}

    def state_of(self, layer: int) -> LayerState:
        """The tensors that move with a layer: its own, so training changes them.

        Slices of optimizer state have owners of their own, and are not part of it.
        """
        return {**self._layers[layer].state, **self._optimizer.state_of(layer), **self._position_of(layer)}

    def constant_state_of(self, layer: int) -> LayerState:
        """As `state_of`, but constant until the next update: with copies of the buffers."""
        buffers = {f"module/{name}" for name, _ in self._layers[layer].module.named_buffers()}
        state = self.state_of(layer)
        return {key: value.clone() if key in buffers else value for key, value in state.items()}

    def kept_state_of(self, layer: int) -> LayerState:
        """As `constant_state_of`, without the parameters that a restored layer reads from the job's files again."""
        own, state = self._layers[layer], self.constant_state_of(layer)
        frozen = {f"module/{name}" for name in frozen_names(own.frozen)}
        return {key: value for key, value in state.items() if key not in frozen}

    def replicated_state_of(self, layer: int) -> LayerState:
        """As `state_of`, without buffers that are summed over the step, so that it is equal on all holders.

        The copies of tied parameters are part of it. Parameters whose masters are divided are not.
        """
        own = self._layers[layer]
        names = [name for name, _ in own.module.named_parameters() if name not in own.divided]
        equal = {f"module/{name}" for name in (*names, *(name for _, _, name in own.fixed))}
        # It may have come from another holder in another order.
        state = sorted(self.state_of(layer).items())
        return {key: value for key, value in state if key in equal or key.startswith("optimizer/")}

    def compared_state_of(self, layer: int) -> LayerState:
        """As `replicated_state_of`, with the parameters that are rounded from their masters."""
        derived = {f"derived/{name}": value.detach() for name, value in sorted(self._layers[layer].derived.items())}
        return {**self.replicated_state_of(layer), **derived}

    def snapshot(self, layer: int) -> LayerState:
        """Copy `kept_state_of` a layer to host memory, even if it is there: training keeps changing it."""
        return _copied(self.kept_state_of(layer))

    def snapshot_of_slice(self, layer: int, start: int, stop: int) -> LayerState:
        """Copy the optimizer's state of some units of a layer to host memory."""
        return _copied(self.state_of_slice(layer, (start, stop)))

    def restore(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over the state that `state_of` or `snapshot` gave for this layer, maybe with slices.

        Raises ConfigError if the frozen parameters that it lacks cannot be read from the job's files.
        """
        frozen = state.get(FROZEN, "")
        if any(f"module/{name}" not in state for name in frozen_names(frozen)):
            read = read_frozen(self._job, layer, frozen)
            state = {**state, **{f"module/{name}": value for name, value in read.items()}}
        # A resumed job may train them now.
        is_frozen = self._layers[layer].updated.keys().isdisjoint(frozen_names(frozen))
        self._layers[layer] = replace(self._layers[layer], frozen=frozen if is_frozen else "")
        self._layers[layer].restore(state)
        self._optimizer.restore(layer, state)
        if (position := state.get(POSITION_KEY)) is not None:
            self.position = position

    def restore_slices(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over what this rank owns of the slices of a layer, of which `state_of_slice` gave the state."""
        self._optimizer.restore(layer, state)

    def _position_of(self, layer: int) -> LayerState:
        if layer or not is_stream(self._job.dataset):
            return {}
        return {POSITION_KEY: self.position}

    def _blank(self, layer: int) -> HeldLayer:
        is_divided = self._optimizer.owned is not None
        return HeldLayer.blank(self._job, layer, seed=self._seed, device=self._device, is_divided=is_divided)

    def _divide(self, layer: int) -> LayerState:
        """Release the masters of a layer if they are divided; return the slices of them that this rank owns."""
        own = self._layers[layer]
        if self._optimizer.owned is None or not own.masters:
            return {}
        divided = self._layers[layer] = own.divide(self._job.tied_in(layer))
        return self._optimizer.slices_of_masters(layer, divided.updated, own.masters)

    def _renew_optimizer(self, received: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Update what is held now, with the state that was kept for it or is received."""
        self._optimizer.renew({layer: self._layers[layer].updated for layer in sorted(self.layers)}, received)


def _copied(state: LayerState) -> LayerState:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in state.items()
    }
