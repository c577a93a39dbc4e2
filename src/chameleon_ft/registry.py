"""Implementations by name: policies, detectors, sinks, backends and planners, ours and those of installed packages.

A package adds one by an entry point of the group `chameleon_ft.policies`, `chameleon_ft.detectors`, and so on:

    [project.entry-points."chameleon_ft.policies"]
    cautious = "my_package.policies:CAUTIOUS"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from chameleon_ft.errors import ConfigError

T = TypeVar("T", covariant=True)


@cache
def installed(group: str) -> Mapping[str, str]:
    """Return the places of what installed packages add to a group, by name."""
    from importlib.metadata import entry_points  # imports sockets, which few need

    return {entry.name: entry.value for entry in sorted(entry_points(group=f"chameleon_ft.{group}"))}


def imported(place: str) -> Any:
    """Return what is at a place, "module:attribute". Raises ConfigError if it cannot be imported."""
    module, _, attribute = place.partition(":")
    try:
        return attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place} cannot be loaded: {error}") from error


class Registry(Mapping[str, T]):
    """All implementations of one kind, ours first. No installed package can replace one of ours.

    Args:
        kind: for messages.
        group: the group of entry points, after "chameleon_ft.".
        own: name -> implementation; or its place, for one that is imported when it is used.
    """

    def __init__(self, kind: str, group: str, own: Mapping[str, T | str]) -> None:
        self._kind = kind
        self._group = group
        self._own = own

    def __getitem__(self, name: str) -> T:
        """Return an implementation. Raises ConfigError for an unknown name, or if it cannot be imported."""
        if (found := self._own.get(name)) is None and (found := installed(self._group).get(name)) is None:
            raise ConfigError.unknown_name(self._kind, name, [*self])
        return cast(T, imported(found) if isinstance(found, str) else found)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in installed(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **installed(self._group)})

    def __len__(self) -> int:
        return len({**self._own, **installed(self._group)})


PLANNERS: Final = Registry[Any](
    "planner",
    "planners",
    {
        "equal": "chameleon_ft.lab.planned_layouts:equal_layouts",
        "oobleck": "chameleon_ft.lab.oobleck:OobleckPlanner",
        "paper": "chameleon_ft.lab.paper:PaperPlanner",
    },
)
"""Planners to compare with."""

CLASS_PLANNERS: Final = Registry[Any](
    "planner",
    "class_planners",
    {"oobleck": "chameleon_ft.lab.by_class:oobleck_options", "paper": "chameleon_ft.lab.by_class:paper_options"},
)
"""Their options in simulations whose pipelines are counted by class."""

EMULATION: Final = Registry[Any](
    "emulation",
    "emulation",
    {"device": "chameleon_ft.lab.emulation:EmulatedDevice", "links": "chameleon_ft.lab.emulation:SlowedLinks"},
)
"""Emulated devices, and links that carry tensors slowly."""
