"""Parsing of command lines: arguments as dataclasses, and a flag for every field of a configuration.

The arguments of a command are a frozen dataclass: its docstring is the help of the command, and the docstring below a
field is the help of that argument. Flags of a configuration are parsed into a dataclass made from its fields, which
checks types only. The values are validated once, together with those of the configuration file, so a flag may correct
what does not fit together in the file, and all mistakes are reported in the same words.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar, get_args, get_origin

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Own = TypeVar("_Own", bound="DataclassInstance")


_SET_BY_STARTS = ("forked", "run_id")  # not by hand
_FAILURE_PARTS = ("step", "worker", "phase", "kind")
_FAILURE_FORM = "STEP:WORKER[:PHASE[:KIND]]"
_NO_FAILURES = "none"


def metavar(text: str, description: str | None = None) -> Any:
    """Annotate an argument that may be left out: the help writes its value as `text`, with no default beside it."""
    return tyro.conf.arg(metavar=text, help=description, help_behavior_hint="")


# Optional, because tyro loads a type checker, which takes a tenth of a second, for `X | None`.
OptionalInt = Annotated[Optional[int], metavar("INT")]  # noqa: UP045
OptionalFloat = Annotated[Optional[float], metavar("FLOAT")]  # noqa: UP045
OptionalStr = Annotated[Optional[str], metavar("STR")]  # noqa: UP045
OptionalPath = Annotated[Optional[Path], metavar("PATH")]  # noqa: UP045
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag without a value."""
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""The directory of a run."""

_RULES = ConstructorRegistry()


@_RULES.primitive_rule
def _read_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read a number; the error names the text and what is expected."""
    if info.type not in (int, float):
        return None
    expected = "a whole number" if info.type is int else "a number"

    def read(texts: list[str]) -> Any:
        try:
            return info.type(texts[0])
        except ValueError:
            raise ValueError(f'"{texts[0]}" should be {expected}') from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    )


@_RULES.primitive_rule
def _read_optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read an optional argument as its type, so that neither help nor errors mention None."""
    kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
    if NoneType not in get_args(info.type) or len(kinds) != 1:
        return None
    found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if not isinstance(found, PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        found,
        is_instance=lambda value: value is None or found.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else found.str_from_instance(value),
    )


def parse_arguments(own: type[_Own], arguments: Sequence[str], *, command: str) -> _Own:
    """Parse `arguments` as the dataclass `own`. The process ends at --help and at a mistake."""
    # Lines that are not indented tyro would join to long ones.
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(own.__doc__ or "").split("\n\n")
    text = "\n".join(textwrap.fill(each, width, initial_indent=" ", subsequent_indent=" ") for each in paragraphs)
    with _RULES:
        return tyro.cli(
            own, prog=f"chameleon {command}", description=text, args=arguments, config=(tyro.conf.DisallowNone,)
        )


def given_flags(arguments: DataclassInstance) -> Iterator[tuple[str, Any]]:
    """Yield the flag and the value of each argument that differs from its default, those of nested arguments too."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from given_flags(value)
        elif value != field.default:
            yield f"--{field.name.replace('_', '-')}", value


def parse_with_flags(
    own: type[_Own], model: type[BaseModel], arguments: Sequence[str], *, command: str, without: Collection[str] = ()
) -> tuple[_Own, dict[str, Any]]:
    """Parse `arguments` as the dataclass `own`, and flags for the fields of `model`, except those in `without`.

    Returns:
        The own arguments; and the values by key, sections as dictionaries, only those given and not validated yet.

    Raises:
        ConfigError: a failure is malformed. The process ends at --help, an unknown flag and a value of a wrong type.
    """
    mirror = dataclasses.make_dataclass(own.__name__, _flags(model, without), bases=(own,), frozen=True)
    mirror.__doc__ = own.__doc__
    values = dataclasses.asdict(parse_arguments(mirror, arguments, command=command))
    own_values = {field.name: values.pop(field.name) for field in dataclasses.fields(own)}
    given = _without_none(values)
    if "failures" in given:
        text = given["failures"]
        given["failures"] = [] if text == _NO_FAILURES else [_failure(part) for part in text.split(",")]
    return own(**own_values), given


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in given.items() if value is not None and value != {}}


def _flags(model: type[BaseModel], without: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return (name, annotation, default) of each field, as `dataclasses.make_dataclass` takes them."""
    return [_flag(name, info) for name, info in model.model_fields.items() if name not in (*without, *_SET_BY_STARTS)]


def _flag(name: str, info: FieldInfo) -> tuple[str, Any, Any]:
    kind: Any = info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        section: Any = dataclasses.make_dataclass(kind.__name__, _flags(kind), frozen=True)
        return name, Annotated[section, tyro.conf.arg(help=kind.__doc__)], dataclasses.field(default_factory=section)
    form, text, default = None, info.description, info.get_default()
    if name == "failures":
        kind, form, default = str, "FAILURE[,FAILURE ...]", _NO_FAILURES
        text = f"{text} Each as {_FAILURE_FORM}; or {_NO_FAILURES}."
    elif Path in {get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(kind)}:
        kind, form = str, "PATH"
    hint = "" if default in (None, "") else f"(default: {default})"
    extra = info.json_schema_extra
    aliases = [str(extra["flag"])] if isinstance(extra, dict) and "flag" in extra else []
    described = tyro.conf.arg(metavar=form, help=text, help_behavior_hint=hint, aliases=aliases)
    return name, Annotated[kind | None, described], dataclasses.field(default=None)


def _failure(text: str) -> dict[str, Any]:
    step, *rest = text.split(":")
    if not 1 <= len(rest) < len(_FAILURE_PARTS) or not (step.isdecimal() and rest[0].isdecimal()):
        raise ConfigError(
            f'--failures "{text}": should be {_FAILURE_FORM}, such as 12:5:backward:kill; put commas between several'
        )
    return dict(zip(_FAILURE_PARTS, (int(step), int(rest[0]), *rest[1:]), strict=False))
