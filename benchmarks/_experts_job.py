"""A mixture of experts most of which never get a token: the router prefers two of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft import Job

DIM, HIDDEN, EXPERTS, PREFERRED, SEQ_LEN, VOCAB = 64, 176, 8, 2, 64, 256


class Sentences:
    """Random tokens, and each one's successor."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (SEQ_LEN + 1,), generator=random)
        return ids[:-1], ids[1:]


class Experts(nn.Module):
    """Gives each token to the expert with the highest score, and runs only experts that get some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, PREFERRED, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=-1).max(dim=-1)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().squeeze(-1)
            if len(places):
                output = output.index_add(0, places, weights[places].unsqueeze(-1) * expert(tokens[places]))
        return x + output.view_as(x)


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def job() -> Job:
    return Job(
        layers=[partial(nn.Embedding, VOCAB, DIM), *[Experts] * 5, partial(nn.Linear, DIM, VOCAB, bias=False)],
        loss=_loss,
        loss_terms=Tensor.numel,
        dataset=Sentences(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
    )
