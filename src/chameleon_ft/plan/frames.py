"""The frames in which values are sent: a line of JSON, and after it the bytes that it refers to.

Arrays are such bytes, and so is what the orders of thousands of workers have in common: it is compressed once, for all
of them. In a line of JSON alone, such as one of a journal, both stand in place.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args

if TYPE_CHECKING:
    # Loaded by those who write or read: the pure part computes without it.
    from pydantic import GetCoreSchemaHandler, SerializationInfo, TypeAdapter, ValidationInfo
    from pydantic_core import CoreSchema

T = TypeVar("T")

_PLACE: Final = "at"
_MIN_SHARED: Final = 256
"""Bytes of JSON from which on a shared value is worth compression."""


@dataclass(slots=True)
class Frame:
    """The bytes after the JSON of a frame that is being written; the context in which pydantic writes it.

    Attributes:
        shared: the values that frames share, by identity, with their JSON or their compressed bytes.
    """

    shared: dict[int, tuple[object, Any]] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)

    def attach(self, part: bytes) -> dict[str, tuple[int, int]]:
        """Add bytes, unless the frame has the same object; return what stands for them in the JSON."""
        if id(part) not in self._places:
            self._places[id(part)] = self.size, len(part)
            self.parts.append(part)
            self.size += len(part)
        return {_PLACE: self._places[id(part)]}


def _attached(value: object, info: ValidationInfo) -> bytes | None:
    """Return the bytes that a value of the JSON stands for; None if it stands for itself.

    The context is all that follows the JSON of the frame.
    """
    if not (isinstance(value, dict) and value.keys() == {_PLACE} and isinstance(info.context, bytes)):
        return None
    match value[_PLACE]:
        case [int(start), int(size)] if 0 <= start <= start + size <= len(info.context):
            return info.context[start : start + size]
    raise ValueError("refers to bytes that the frame does not have")


def _decompressed(packed: bytes) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise ValueError(str(error)) from None


class _Binary:
    """Writes bytes after the JSON of a frame; elsewhere compressed, in base 64."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        def read(value: object, info: ValidationInfo) -> bytes:
            if isinstance(value, str):
                return _decompressed(b64decode(value, validate=True))
            found = value if isinstance(value, bytes) else _attached(value, info)
            if found is None:
                raise ValueError("is not binary")
            return found

        def write(value: bytes, info: SerializationInfo) -> object:
            return b64encode(zlib.compress(value)).decode() if info.context is None else info.context.attach(value)

        return core_schema.with_info_plain_validator_function(
            read, serialization=core_schema.plain_serializer_function_ser_schema(write, info_arg=True)
        )


class _Shared:
    """Writes a value once for all frames that have it, compressed if it is long."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic import TypeAdapter
        from pydantic_core import core_schema

        @cache
        def adapter() -> TypeAdapter[Any]:
            return TypeAdapter(source)

        def read(value: object, info: ValidationInfo) -> Any:
            if (attached := _attached(value, info)) is None:
                return adapter().validate_python(value)
            return adapter().validate_json(_decompressed(attached))

        def write(value: object, info: SerializationInfo) -> object:
            frame = info.context
            if not isinstance(frame, Frame):
                return adapter().dump_python(value, mode="json")
            if id(value) not in frame.shared:
                text = adapter().dump_json(value)
                short = adapter().dump_python(value, mode="json") if len(text) < _MIN_SHARED else zlib.compress(text)
                frame.shared[id(value)] = value, short
            _, written = frame.shared[id(value)]
            return frame.attach(written) if isinstance(written, bytes) else written

        return core_schema.with_info_plain_validator_function(
            read, serialization=core_schema.plain_serializer_function_ser_schema(write, info_arg=True)
        )


class _Repeated:
    """Writes a tuple of which many values are equal: each value once, and the place of each in these.

    Also reads one that was written as any other tuple.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        whole, (item, _) = handler(source), get_args(source)

        def read(written: tuple[tuple[Any, ...], tuple[int, ...]]) -> tuple[Any, ...]:
            values, places = written
            if not all(0 <= place < len(values) for place in places):
                raise ValueError("refers to a value that is not there")
            return tuple(values[place] for place in places)

        def write(value: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
            places = {each: place for place, each in enumerate(dict.fromkeys(value))}
            return tuple(places), tuple(places[each] for each in value)

        items, numbers = (
            core_schema.tuple_schema([each], variadic_item_index=0)
            for each in (handler.generate_schema(item), core_schema.int_schema())
        )
        written = core_schema.tuple_schema([items, numbers])
        as_read = core_schema.no_info_after_validator_function(read, written)
        return core_schema.union_schema(
            [as_read, whole],
            serialization=core_schema.plain_serializer_function_ser_schema(write, return_schema=written),
        )


Binary = Annotated[bytes, _Binary()]
Repeated = Annotated[tuple[T, ...], _Repeated()]
Shared = Annotated[T, _Shared()]


def plain(value: object) -> object:
    """Return what JSON has for a value that is neither a dataclass nor of the standard library."""
    from pydantic import TypeAdapter

    return dict(value) if isinstance(value, Mapping) else TypeAdapter(type(value)).dump_python(value, mode="json")
