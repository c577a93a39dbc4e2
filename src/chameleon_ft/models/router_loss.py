"""The load-balancing loss of a model of transformers, whose decoder layers may be on different workers.

It is a product of sums over all layers: of how often each expert is chosen, and of its probabilities (Fedus et al.,
"Switch Transformers", 2021). So the sums so far go from layer to layer beside the hidden state, and the last layer adds
the loss to that of the job.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.side_outputs import auxiliary_loss

# Choices of each expert, int64, and sums of their probabilities, float32: (experts,) each, of all layers so far.
Sums: TypeAlias = tuple[Tensor, Tensor]
_LOGITS: Final = "router_logits"
_FUNCTION: Final = "load_balancing_loss_func"


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """How a model computes the loss of its routers.

    Attributes:
        routers: their types, each with the index of the logits in what it returns.
        num_routers: in all decoder layers.
        weight: of the loss, beside that of the tokens.
    """

    routers: tuple[tuple[type[nn.Module], int], ...]
    num_routers: int
    num_experts: int
    num_chosen: int
    weight: float

    @classmethod
    def of(cls, model: Any, owner: Any) -> RouterLoss | None:
        """Return that of a model whose module `owner` has the decoder layers, None if its weight is 0.

        Raises:
            ConfigError: the model has no such loss, or one of its own.
        """
        recorder = (getattr(owner, "_can_record_outputs", None) or {}).get(_LOGITS, [])
        found = [
            (getattr(each, "target_class", each), getattr(each, "index", 1))
            for each in (recorder if isinstance(recorder, list) else [recorder])
        ]
        routers = tuple((router, index) for router, index in found if isinstance(router, type))
        function: Any = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
        weight = _setting(model, "router_aux_loss_coef", "aux_loss_coef")
        experts, chosen = _setting(model, "num_experts", "num_local_experts"), _setting(model, "num_experts_per_tok")
        if routers and len(routers) == len(found) and None not in (function, weight, experts, chosen):
            number = sum(isinstance(module, router) for module in model.modules() for router, _ in routers)
            loss = cls(routers, number, experts, chosen, weight)
            if loss._is_computed_by(function):
                return loss if weight else None
        raise ConfigError(
            f"{type(model).__name__}: output_router_logits is set, and the model does not compute the loss of its "
            f"routers by the usual {_FUNCTION}; unset it, to train without that loss"
        )

    def _is_computed_by(self, function: Any) -> bool:
        """Return whether a function of a model gives the loss of a layer with random logits."""
        logits = torch.randn(3, self.num_experts, generator=torch.Generator().manual_seed(0))
        own = replace(self, num_routers=1)
        ours = own._value(own.add(own.begin(logits.device), logits, None), len(logits))
        try:
            theirs = function((logits,), self.num_experts, self.num_chosen, None)
        except Exception:  # noqa: BLE001 - of any class: it takes other arguments
            return False
        return bool(torch.isclose(ours, torch.as_tensor(theirs)))

    def begin(self, device: torch.device) -> Sums:
        """Return the sums before the first decoder layer."""
        return torch.zeros(self.num_experts, dtype=torch.int64, device=device), torch.zeros(
            self.num_experts, device=device
        )

    def watch(self, module: nn.Module, logits: list[Tensor]) -> None:
        """Have the logits of each forward of the routers in a module appended to a list."""

        def note(index: int, _: nn.Module, __: Any, output: Any) -> None:
            logits.append(output[index] if isinstance(output, tuple) else output)

        for part in module.modules():
            for router, index in self.routers:
                if isinstance(part, router):
                    part.register_forward_hook(partial(note, index))

    def add(self, sums: Sums, logits: Tensor, mask: Tensor | None) -> Sums:
        """Return the sums with those of a layer, whose logits are (tokens, experts); without padding, given a mask."""
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.topk(self.num_chosen, dim=-1).indices
        kept = torch.ones_like(chosen[:, 0]) if mask is None else mask.flatten().to(torch.int64)
        counts = torch.zeros_like(sums[0]).scatter_add_(0, chosen.flatten(), kept.repeat_interleave(self.num_chosen))
        return sums[0] + counts, sums[1] + (probabilities.float() * kept.unsqueeze(-1)).sum(dim=0)

    def end(self, sums: Sums, num_tokens: int) -> None:
        """Add the loss of a micro-batch with so many tokens."""
        if num_tokens and self.num_routers:
            auxiliary_loss(self.weight * self._value(sums, num_tokens), terms=1)

    def _value(self, sums: Sums, num_tokens: int) -> Tensor:
        rows = num_tokens * self.num_routers
        return (sums[0] / rows * (sums[1].float() / rows)).sum() * self.num_experts


def _setting(model: Any, *names: str) -> Any:
    """Return the first of some values that a model or its configuration has, None if they have none."""
    found = (getattr(each, name, None) for each in (model, model.config) for name in names)
    return next((value for value in found if value is not None), None)
