"""A classifier of pictures, trained in a plain PyTorch loop: what own_model.py was before it was a job.

Run it with `python examples/own_model_plain.py`; compare with `diff examples/own_model_plain.py examples/own_model.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

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


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=2, padding=1),
        Block(8),
        nn.Conv2d(8, 16, 2, stride=2),
        Block(16),
        nn.Conv2d(16, 32, 2, stride=2),
        Block(32),
        Head(32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = DataLoader(Shapes(first=0, count=100_000), batch_size=16, shuffle=True)
    for step, (pictures, kinds) in zip(range(80), samples, strict=False):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pictures), kinds)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")
    print(f"right on pictures it has not seen: {accuracy(model):.1%}")


def accuracy(model: nn.Module) -> float:
    """The share of 1000 pictures outside the training data that `model` names rightly."""
    unseen = DataLoader(Shapes(first=100_000, count=1000), batch_size=100)
    with torch.no_grad():
        return sum(int((model(pictures).argmax(1) == kinds).sum()) for pictures, kinds in unseen) / 1000


if __name__ == "__main__":
    main()
