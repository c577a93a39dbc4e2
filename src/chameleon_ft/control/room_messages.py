"""What is said of the room that a rank makes for layers before they move."""

from __future__ import annotations

from typing import Literal

from chameleon_ft.control.message_parts import MessagePart

__all__ = ["Expect", "RoomMade"]


class Expect(MessagePart):
    """Layers will come to this rank: make room for them, and let go of room for any other; then say `RoomMade`."""

    type: Literal["expect"] = "expect"
    layers: tuple[tuple[int, int], ...]
    """(layer, bytes of its state), in the order in which they come; none if nothing comes after all."""


class RoomMade(MessagePart):
    """A rank has room for all layers that it was told to expect."""

    type: Literal["room_made"] = "room_made"
    layers: tuple[tuple[int, int], ...]
    """As `Expect` had them: it may have been told of others since."""
