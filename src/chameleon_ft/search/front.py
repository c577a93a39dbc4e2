"""Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["pareto_front"]

T = TypeVar("T")


def pareto_front(items: Iterable[T], figures: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Those that no other equals or beats in all their figures, of which less is better; least in the first one first.

    Of items with equal figures, the first.
    """
    front: list[tuple[tuple[float, ...], T]] = []
    for own, item in sorted(((figures(item), item) for item in items), key=lambda each: each[0]):
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in front):
            front.append((own, item))
    return [item for _, item in front]
