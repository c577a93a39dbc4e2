"""A classifier of pictures, as a job: no Llama, no text, and it survives the loss of workers like one.

Run it with `chameleon run examples/own_model.py`; own_model_plain.py is the plain PyTorch loop that it was made of.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from chameleon_ft import Job

SIZE = 24
CLASSES = ("disc", "ring", "cross", "stripes")


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures (1, SIZE, SIZE) of four kinds of shapes, each drawn when it is asked for, and their kind."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.first + index)
        kind = int(torch.randint(len(CLASSES), (), generator=random))
        right, down, growth = torch.rand(3, generator=random).tolist()
        radius = 5 + 4 * growth
        x = (torch.arange(SIZE) - SIZE / 2 + 3 * (0.5 - right)).expand(SIZE, SIZE)
        y = (torch.arange(SIZE) - SIZE / 2 + 3 * (0.5 - down)).unsqueeze(1).expand(SIZE, SIZE)
        from_center = torch.hypot(x, y)
        in_square = (x.abs() < radius) & (y.abs() < radius)
        shape = (
            from_center < radius,
            (from_center < radius) & (from_center > radius - 2.5),
            in_square & (torch.minimum(x.abs(), y.abs()) < 1.5),
            in_square & (y.remainder(4) < 2),
        )[kind]
        picture = shape + 0.3 * torch.randn(SIZE, SIZE, generator=random)
        return picture.unsqueeze(0), torch.tensor(kind)


class Block(nn.Module):
    """Two convolutions, normalised, that add to what passes by them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.gelu(self.first_norm(self.first(x)))
        return functional.gelu(x + self.second_norm(self.second(inner)))


class Head(nn.Module):
    """The mean over the picture, then a score for each class."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scores = nn.Linear(channels, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x.mean(dim=(2, 3)))
        return scores


def job() -> Job:
    return Job(
        layers=[
            lambda: nn.Conv2d(1, 8, 4, stride=2, padding=1),
            lambda: Block(8),
            lambda: nn.Conv2d(8, 16, 2, stride=2),
            lambda: Block(16),
            lambda: nn.Conv2d(16, 32, 2, stride=2),
            lambda: Block(32),
            lambda: Head(32),
        ],
        loss=partial(functional.cross_entropy, reduction="sum"),
        dataset=Shapes(first=0, count=100_000),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        clip_norm=1.0,
    )
