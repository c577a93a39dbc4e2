"""Messages as frames of a WebSocket: one line of JSON, and the bytes that it refers to; see `plan.frames`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.plan.frames import Frame
from chameleon_ft.protocol.messages import Message

_LONGEST_REASON = 200  # characters

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[reduce(or_, Message.__subclasses__()), Field(discriminator="type")]  # type: ignore[arg-type]
)


def encode(message: Message, shared: dict[int, tuple[object, Any]] | None = None) -> str | bytes:
    """Write a message: as text if its JSON is all there is.

    Args:
        shared: what messages with the same argument have in common is written once; see `Frame.shared`.
    """
    frame = Frame({} if shared is None else shared)
    text = message.model_dump_json(context=frame)
    return b"\n".join((text.encode(), b"".join(frame.parts))) if frame.parts else text


def message_of(fields: object) -> Message:
    """Return a message as it is, or read from its fields. Raises ValidationError."""
    return _ADAPTER.validate_python(fields)


def decode(received: str | bytes) -> Message:
    """Read a message. Raises ControlError if it is not one."""
    try:
        if isinstance(received, str):
            return _ADAPTER.validate_json(received)
        text, _, parts = received.partition(b"\n")
        return _ADAPTER.validate_json(text, context=parts)
    except ChameleonError as error:  # of a value in it
        raise ControlError(f"not a message of this protocol: {_shortened(str(error))}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise ControlError(f"not a message of this protocol: {_shortened(reason)}") from None


def _shortened(reason: str) -> str:
    """Shorten a reason, which may quote what was sent, which may be anything."""
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
