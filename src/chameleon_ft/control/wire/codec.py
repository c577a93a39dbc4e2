"""Messages as JSON objects, one each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.control.wire.messages import Message
from chameleon_ft.control.wire.parts import MessagePart
from chameleon_ft.errors import ControlError

__all__ = ["decode", "encode", "encode_alike"]

_LONGEST_REASON = 200  # characters

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[reduce(or_, Message.__subclasses__()), Field(discriminator="type")]  # type: ignore[arg-type]
)


def encode(message: Message) -> str:
    """Write a message as one JSON object."""
    return message.model_dump_json()


def encode_alike(parts: Sequence[MessagePart]) -> list[str]:
    """Write messages of one type. Objects that all of them share, such as a plan, are written only once."""
    if len(parts) < 2:
        return [each.model_dump_json() for each in parts]
    common, alike, own = set(), set(), set()
    for name in type(parts[0]).model_fields:
        first, *others = (getattr(each, name) for each in parts)
        if all(other is first for other in others):
            common.add(name)
        elif isinstance(first, MessagePart) and all(type(other) is type(first) for other in others):
            alike.add(name)
        else:
            own.add(name)
    shared = parts[0].model_dump_json(include=common)[1:-1]
    written = [[shared, each.model_dump_json(include=own)[1:-1] if own else ""] for each in parts]
    for name in alike:
        for fields, text in zip(written, encode_alike([getattr(each, name) for each in parts]), strict=True):
            fields.append(f'"{name}":{text}')
    return [f"{{{','.join(filter(None, fields))}}}" for fields in written]


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
