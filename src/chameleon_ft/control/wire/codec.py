"""Messages as JSON objects, one each."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.control.wire.messages import Message
from chameleon_ft.errors import ControlError

__all__ = ["decode", "encode"]

_LONGEST_REASON = 200  # characters

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[reduce(or_, Message.__subclasses__()), Field(discriminator="type")]  # type: ignore[arg-type]
)


def encode(message: Message) -> str:
    """Write a message as one JSON object."""
    return message.model_dump_json()


def decode(text: str | bytes) -> Message:
    """Read a message. Raises ControlError if it is not one."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."  # it may quote what was sent, which may be anything
        raise ControlError(f"not a message of this protocol: {reason}") from None
