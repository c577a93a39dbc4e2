"""A mapping that cannot change, so that the value types which hold one can be hashed and shared."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Self, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V", covariant=True)
D = TypeVar("D")


class FrozenMap(Mapping[K, V]):
    """An immutable copy of a mapping that keeps its order, compares like a dict, and is hashable if its values are.

    A copy of one is itself, so that the many records which pass one on share it.
    """

    __slots__ = ("_items",)

    _items: dict[K, V]

    def __new__(cls, items: Mapping[K, V]) -> Self:
        return items if isinstance(items, cls) else cls._of(dict(items))

    @classmethod
    def _of(cls, items: dict[K, V]) -> Self:
        """Return a map of these items, to which nothing else refers."""
        self = super().__new__(cls)
        object.__setattr__(self, "_items", items)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a FrozenMap cannot change; build a new one instead of setting {name!r}")

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    # Without these, `Mapping` would call `__getitem__` for each key.

    @overload
    def get(self, key: K, /) -> V | None: ...

    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...

    def get(self, key: K, /, default: object = None) -> object:
        return self._items.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, FrozenMap) else other)

    def keys(self) -> KeysView[K]:
        return self._items.keys()

    def values(self) -> ValuesView[V]:
        return self._items.values()

    def items(self) -> ItemsView[K, V]:
        return self._items.items()

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def __reduce__(self) -> tuple[type[FrozenMap[K, V]], tuple[dict[K, V]]]:
        return FrozenMap, (self._items,)


def updated(mapping: Mapping[K, V], changes: Mapping[K, V]) -> FrozenMap[K, V]:
    """Return a mapping with values replaced, in their places, or added at the end."""
    if not isinstance(mapping, FrozenMap):
        return FrozenMap._of({**mapping, **changes})
    # Copying is much faster than inserting all items.
    items = mapping._items.copy()
    items.update(changes)
    return FrozenMap._of(items)


def without(mapping: Mapping[K, V], key: object) -> FrozenMap[K, V]:
    """Return a mapping that lacks a key; one that lacks it already as it is."""
    frozen = FrozenMap(mapping)
    return FrozenMap._of({each: value for each, value in frozen.items() if each != key}) if key in frozen else frozen
