"""Implementations by name, which are imported when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

_PLACES: Final[Mapping[str, Mapping[str, str]]] = {
    "planners": {
        "equal": "chameleon_ft.lab.planned_layouts:equal_layouts",
        "oobleck": "chameleon_ft.lab.oobleck:OobleckPlanner",
        "paper": "chameleon_ft.lab.paper:PaperPlanner",
    },
    # Their options in simulations whose pipelines are counted by class.
    "class_planners": {
        "oobleck": "chameleon_ft.lab.by_class:oobleck_options",
        "paper": "chameleon_ft.lab.by_class:paper_options",
    },
    "links": {
        "emulated": "chameleon_ft.lab.emulation:EmulatedDevice",
        "slowed": "chameleon_ft.lab.emulation:SlowedLinks",
    },
}


def load(group: str, name: str) -> Any:
    """Return the implementation of this name in a group."""
    module, _, attribute = _PLACES[group][name].partition(":")
    return getattr(import_module(module), attribute)
