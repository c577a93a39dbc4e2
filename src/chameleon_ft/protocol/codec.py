"""Messages as JSON objects, one each.

Long fields that many messages have in common are written as one, `zlib`: their text, compressed and in base 64.
"""

from __future__ import annotations

import binascii
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Message
from chameleon_ft.protocol.parts import MessagePart

_LONGEST_REASON = 200  # characters
_SHORT: Final = 1024  # characters of a field that is not worth compression
_COMPRESSED: Final = "zlib"
_FIELDS: Final = re.compile(f'"{_COMPRESSED}":"([A-Za-z0-9+/=]*)"')

_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[reduce(or_, Message.__subclasses__()), Field(discriminator="type")]  # type: ignore[arg-type]
)


def encode(message: Message) -> str:
    """Write a message as one JSON object."""
    return message.model_dump_json()


def encode_alike(parts: Sequence[MessagePart]) -> list[str]:
    """Write messages of one type. Objects that all of them share, such as a plan, are encoded once."""
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
    shared = _shared(parts[0], common)
    written = [[shared, each.model_dump_json(include=own)[1:-1] if own else ""] for each in parts]
    for name in alike:
        for fields, text in zip(written, encode_alike([getattr(each, name) for each in parts]), strict=True):
            fields.append(f'"{name}":{text}')
    return [f"{{{','.join(filter(None, fields))}}}" for fields in written]


def _shared(part: MessagePart, names: Collection[str]) -> str:
    """Write fields of a part without braces; the long ones compressed, because they may go to thousands of peers."""
    short: list[str] = []
    long: list[str] = []
    for name in type(part).model_fields:
        if name in names:
            text = part.model_dump_json(include={name})[1:-1]
            (short if len(text) < _SHORT else long).append(text)
    if long:
        short.append(f'"{_COMPRESSED}":"{b64encode(zlib.compress(",".join(long).encode())).decode("ascii")}"')
    return ",".join(short)


def message_of(fields: object) -> Message:
    """Return a message as it is, or read from its fields. Raises ValidationError."""
    return _ADAPTER.validate_python(fields)


def decode(text: str | bytes) -> Message:
    """Read a message. Raises ControlError if it is not one."""
    try:
        text = text if isinstance(text, str) else text.decode()
        return _ADAPTER.validate_json(_FIELDS.sub(_decompressed, text) if f'"{_COMPRESSED}":' in text else text)
    except (UnicodeDecodeError, binascii.Error, zlib.error) as error:
        raise ControlError(f"not a message of this protocol: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."  # it may quote what was sent, which may be anything
        raise ControlError(f"not a message of this protocol: {reason}") from None


def _decompressed(found: re.Match[str]) -> str:
    return zlib.decompress(b64decode(found[1])).decode()
