"""Messages as JSON objects, one each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.control.wire.messages import Message, Prepare
from chameleon_ft.errors import ControlError

__all__ = ["decode", "encode", "encode_alike"]

_LONGEST_REASON = 200  # characters

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[reduce(or_, Message.__subclasses__()), Field(discriminator="type")]  # type: ignore[arg-type]
)


def encode(message: Message) -> str:
    """Write a message as one JSON object."""
    return message.model_dump_json()


def encode_alike(messages: Sequence[Message]) -> list[str]:
    """Write messages of one type. Fields in which all have the same object, such as a plan, are written only once."""
    if len(messages) < 2:
        return list(map(encode, messages))
    first, *others = messages
    if isinstance(first, Prepare):
        orders = [each.order for each in messages if isinstance(each, Prepare)]
        return [f'{{"type":"{first.type}","order":{order}}}' for order in encode_alike(orders)]
    names = set(type(first).model_fields)
    common = {name for name in names if all(getattr(each, name) is getattr(first, name) for each in others)}
    if common == names:
        return [encode(first)] * len(messages)
    start = first.model_dump_json(include=common).removesuffix("}")  # they all have their type
    return [f"{start},{each.model_dump_json(include=names - common).removeprefix('{')}" for each in messages]


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
