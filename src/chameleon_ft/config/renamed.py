"""Keys that have a new name, and are accepted under the old one for one more release."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

__all__ = ["RENAMED_KEYS", "with_new_keys"]

RENAMED_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "out": "output_dir",
        "data.kind": "data.format",
        "recovery.host_share": "recovery.host_failure_fraction",
        "recovery.restart_s": "recovery.restart_cost_s",
        "timeouts.collective_s": "timeouts.collective_timeout_s",
        "timeouts.heartbeat_s": "timeouts.heartbeat_timeout_s",
    }
)
"""Old dotted key -> new one, in the same section."""


def with_new_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Rename the old keys of a configuration.

    Returns:
        The values under their new keys, and the old keys that were found. An old key beside its new one stays, to be
        refused as unknown.
    """
    renamed = dict(values)
    found = []
    for old, new in RENAMED_KEYS.items():
        section, _, old_name = old.rpartition(".")
        new_name = new.rpartition(".")[2]
        own = renamed.get(section) if section else renamed
        if isinstance(own, Mapping) and old_name in own and new_name not in own:
            current = {new_name if key == old_name else key: value for key, value in own.items()}
            renamed = {**renamed, section: current} if section else current
            found.append(old)
    return renamed, tuple(found)
