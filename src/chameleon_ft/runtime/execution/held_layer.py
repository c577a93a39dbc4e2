"""A layer on the device of a rank, and the tensors that make up its state.

Every use of a layer's state takes its tensors from here: the update, checkpoints, transfers and the comparison between
holders.

- Updated tensors, by name of the parameter: what the optimizer changes. Under fp32 these are the parameters; under bf16
  a parameter in bfloat16 has a float32 master. If holders share the optimizer's state, owners of slices have the slices
  of the master, and the layer itself has the parameter in bfloat16.
- The optimizer's state, by updated tensor.
- Derived parameters: those in bfloat16, rounded from their masters after each update. Where the layer has the master,
  they are no part of the state.
- Persistent buffers, which a forward may change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from chameleon_ft.job import Job
from chameleon_ft.models.build import blank_layer, build_layer
from chameleon_ft.models.precision import cast_layer

LayerState = dict[str, Any]
"""One layer's state by flat key: ``module/NAME`` for updated tensors and persistent buffers, ``optimizer/NAME/KEY``.

``NAME[START:STOP]`` in place of a name is a slice of the elements of a parameter.
"""


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """A layer on a device.

    Attributes:
        masters: by name, of parameters that have one in the layer.
        divided: names of parameters whose masters are divided among the owners of slices.
    """

    module: nn.Module
    masters: Mapping[str, nn.Parameter]
    divided: frozenset[str] = frozenset()

    @classmethod
    def initial(cls, job: Job, layer: int, *, seed: int, device: torch.device) -> Self:
        """Build a layer with its initial parameters."""
        return cls._of(job, layer, build_layer(job, layer, seed), device)

    @classmethod
    def blank(cls, job: Job, layer: int, *, seed: int, device: torch.device, is_divided: bool = False) -> Self:
        """Build a layer to restore a state into; its updated tensors may hold anything.

        Args:
            is_divided: whether owners of slices have the masters.
        """
        blank = cls._of(job, layer, blank_layer(job, layer, seed), device)
        return blank.divide(job.tied_in(layer)) if is_divided else blank

    @classmethod
    def _of(cls, job: Job, layer: int, module: nn.Module, device: torch.device) -> Self:
        module = module.to(device).train()
        return cls(module, cast_layer(module, job.precision, is_first=layer == 0))

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
        return {f"module/{name}": self.masters.get(name, value) for name, value in self._module_state()}

    @property
    def derived(self) -> dict[str, Tensor]:
        """The parameters that are rounded from their masters, by name."""
        return {name: self.module.get_parameter(name) for name in (*self.masters, *sorted(self.divided))}

    @property
    def state(self) -> LayerState:
        """The state without the optimizer's: its own tensors, of which a forward changes only the buffers."""
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in self.targets.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the updated tensors and buffers of a state; tensors that are its own are not copied."""
        own = under("module/", state)
        for name, master in self.masters.items():
            if name in own and not _is_same(master, own[name]):
                master.data.copy_(own[name])
        if any(not _is_same(value, own.get(name)) for name, value in self._module_state()):
            self.module.load_state_dict(own)  # which rounds

    def pass_gradients_on(self) -> None:
        """Give the masters the gradients of their parameters."""
        for name, master in self.masters.items():
            master.grad = self.module.get_parameter(name).grad

    def drop_passed_gradients(self) -> None:
        """Release the gradients of masters, which have been updated."""
        for master in self.masters.values():
            master.grad = None

    def derive(self) -> None:
        """Round the parameters from the masters in the layer."""
        with torch.no_grad():
            for name, master in self.masters.items():
                self.module.get_parameter(name).copy_(master)

    def _module_state(self) -> Iterable[tuple[str, Any]]:
        return self.module.state_dict().items()


def under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state whose keys begin with `prefix`, by the rest of their keys."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two tensors have the same memory."""
    return isinstance(other, Tensor) and isinstance(value, Tensor) and value.data_ptr() == other.data_ptr()
