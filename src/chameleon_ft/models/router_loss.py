"""The load-balancing loss of a model of transformers, whose decoder layers may be on different workers.

It is a product of sums over all layers: of how often each expert is chosen, and of its probabilities (Fedus et al.,
"Switch Transformers", 2021). So the sums so far go from layer to layer beside the hidden state, and the last layer adds
the loss to that of the job.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
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
        num_routers: decoder layers that have a router.
        weight: of the loss, beside that of the tokens.
        index: of the logits in what a router returns.
    """

    router: type[nn.Module]
    index: int
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
        config, recorder = model.config, (getattr(owner, "_can_record_outputs", None) or {}).get(_LOGITS)
        weight = getattr(config, "router_aux_loss_coef", None)
        if recorder is None or weight is None or not hasattr(sys.modules[type(model).__module__], _FUNCTION):
            raise ConfigError(
                f"{type(model).__name__}: output_router_logits is set, and the model does not compute the loss of its "
                f"routers by {_FUNCTION}; unset it, to train without that loss"
            )
        router = getattr(recorder, "target_class", recorder)
        number = sum(isinstance(module, router) for module in model.modules())
        experts, chosen = config.num_experts, config.num_experts_per_tok
        return cls(router, getattr(recorder, "index", 1), number, experts, chosen, weight) if weight else None

    def begin(self, device: torch.device) -> Sums:
        """Return the sums before the first decoder layer."""
        return torch.zeros(self.num_experts, dtype=torch.int64, device=device), torch.zeros(
            self.num_experts, device=device
        )

    def watch(self, module: nn.Module, logits: list[Tensor]) -> None:
        """Have the logits of each forward of the routers in a module appended to a list."""

        def note(_: nn.Module, __: Any, output: Any) -> None:
            logits.append(output[self.index] if isinstance(output, tuple) else output)

        for part in module.modules():
            if isinstance(part, self.router):
                part.register_forward_hook(note)

    def add(self, sums: Sums, logits: Tensor, mask: Tensor | None) -> Sums:
        """Return the sums with those of a layer, whose logits are (tokens, experts); without padding, given a mask."""
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.topk(self.num_chosen, dim=-1).indices
        kept = torch.ones_like(chosen[:, 0]) if mask is None else mask.flatten().to(torch.int64)
        counts = torch.zeros_like(sums[0]).scatter_add_(0, chosen.flatten(), kept.repeat_interleave(self.num_chosen))
        return sums[0] + counts, sums[1] + (probabilities.float() * kept.unsqueeze(-1)).sum(dim=0)

    def end(self, sums: Sums, num_tokens: int) -> None:
        """Add the loss of a micro-batch with so many tokens."""
        rows = num_tokens * self.num_routers
        if rows:
            loss = (sums[0] / rows * (sums[1].float() / rows)).sum() * self.num_experts
            auxiliary_loss(self.weight * loss, terms=1)
