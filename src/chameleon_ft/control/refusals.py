"""Those who were turned away."""

from __future__ import annotations

from typing import Final

from chameleon_ft.observe import Recorder

__all__ = ["Refusals"]

_ALL: Final = 100  # are written down; after that those at every power of two


class Refusals:
    """Writes down who was turned away; of very many, as from a scanner, ever fewer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._count = 0

    def add(self, address: str, reason: str) -> None:
        """Somebody was turned away."""
        self._count += 1
        if self._count <= _ALL or self._count.bit_count() == 1:
            self._recorder.event("refused", address=address, reason=reason, count=self._count)
