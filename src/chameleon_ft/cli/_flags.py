"""Flags for every field of a configuration, over the values of a configuration file.

The flags are parsed into a mirror of the configuration, dataclasses that know types only, and what comes out of it is
validated once, together with the values of the file. So a flag may set right what does not fit together in the file,
and every mistake, whether in the file or in a flag, is reported in the same words.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_origin

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from chameleon_ft.config import Failure
from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Parsed", "Switch", "optional_argument", "parse_arguments", "parse_with_flags", "with_new_flags"]

_Own = TypeVar("_Own", bound="DataclassInstance")

_FAILURES = "failures"
_FAILURE_PARTS = ("step", "worker", "phase", "kind")
_FAILURE_FORM = "STEP:WORKER[:PHASE[:KIND]]"
_NO_FAILURES = "none"

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag without a value, which is False where it is not given; described by `optional_argument`."""

_logger = logging.getLogger(__name__)

_RULES = ConstructorRegistry()


@_RULES.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A number, with an error that names what is wrong in the words of the one who wrote it."""
    if info.type is int:
        return _number_spec(int, "INT", "a whole number")
    return _number_spec(float, "FLOAT", "a number") if info.type is float else None


def _number_spec(kind: Callable[[str], Any], metavar: str, words: str) -> PrimitiveConstructorSpec[Any]:
    def read(texts: list[str]) -> Any:
        try:
            return kind(texts[0])
        except ValueError:
            raise ValueError(f'"{texts[0]}" should be {words}') from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    )


@_RULES.primitive_rule
def _left_out(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """An argument that is None where it is left out is read as one that is not: nobody writes "None"."""
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


@dataclass(frozen=True, slots=True)
class Parsed(Generic[_Own]):
    """What a command line says."""

    own: _Own
    """The arguments that are the command's own."""
    values: dict[str, Any]
    """The configuration by key, sections as dictionaries, not validated yet."""


def optional_argument(metavar: str, text: str) -> Any:
    """Return the metadata of an argument that may be left out."""
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint="")


def parse_arguments(own: type[_Own], arguments: Sequence[str], *, command: str) -> _Own:
    """Parse `arguments` into an `own`, whose docstring is the help. Ends the process at --help and at a mistake."""
    with _RULES:
        return tyro.cli(own, prog=f"chameleon {command}", description=_wrapped(own.__doc__ or ""), args=arguments)


def with_new_flags(arguments: Sequence[str], renamed: Mapping[str, str], *, command: str) -> list[str]:
    """Replace flags that have a new name, `renamed` as old -> new, and warn of each."""
    return [_with_new_flag(argument, renamed, command) for argument in arguments]


def _with_new_flag(argument: str, renamed: Mapping[str, str], command: str) -> str:
    flag, equals, value = argument.partition("=")
    # Flags may be written with underscores, too.
    old = flag.replace("_", "-")
    if old not in renamed:
        return argument
    _logger.warning("chameleon %s: %s is deprecated, and gone in the next release; use %s", command, old, renamed[old])
    return f"{renamed[old]}{equals}{value}"


def _wrapped(text: str) -> str:
    """Paragraphs that fit the terminal; lines that are not indented tyro would join to long ones."""
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n".join(textwrap.fill(each, width, initial_indent=" ", subsequent_indent=" ") for each in paragraphs)


def parse_with_flags(
    own: type[_Own],
    model: type[BaseModel],
    arguments: Sequence[str],
    *,
    command: str,
    defaults: Mapping[str, Any],
    without: Collection[str] = (),
) -> Parsed[_Own]:
    """Parse `arguments` into an `own` and the values of a `model`, those of `defaults` where no flag is given.

    There are no flags for the fields in `without`. Raises ConfigError at a failure that is written wrongly. Ends the
    process at --help, at a flag that does not exist, and at one with a value of the wrong type.
    """
    mirror = dataclasses.make_dataclass(
        own.__name__, [flag for flag in _flags(model, defaults) if flag[0] not in without], bases=(own,), frozen=True
    )
    mirror.__doc__ = own.__doc__
    values = dataclasses.asdict(parse_arguments(mirror, arguments, command=command))
    own_values = {field.name: values.pop(field.name) for field in dataclasses.fields(own)}
    if _FAILURES in values:
        values[_FAILURES] = _failures(values[_FAILURES])
    return Parsed(own(**own_values), values)


def _flags(model: type[BaseModel], defaults: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [_flag(name, info, defaults) for name, info in model.model_fields.items()]


def _flag(name: str, info: FieldInfo, defaults: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return name, annotation and default, as `dataclasses.make_dataclass` takes a field."""
    kind: Any = info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        section: Any = dataclasses.make_dataclass(kind.__name__, _flags(kind, defaults.get(name, {})), frozen=True)
        # Given here, the help need not be searched for in source files, which takes longer than all the rest.
        described = Annotated[section, tyro.conf.arg(help=kind.__doc__)]
        return name, described, dataclasses.field(default_factory=section)
    default = defaults.get(name, info.get_default())
    if name == _FAILURES:
        kind, default = str, ",".join(map(_failure_text, default)) or _NO_FAILURES
        text = f"{info.description} Each as {_FAILURE_FORM}; or {_NO_FAILURES}."
        form = tyro.conf.arg(metavar="FAILURE[,FAILURE ...]", help=text)
    elif default is None:
        form = optional_argument("PATH", info.description or "")
    elif isinstance(default, str) and Path in _members_of(kind):
        default, form = Path(default), optional_argument("PATH", info.description or "")
    else:
        form = tyro.conf.arg(help=info.description, aliases=_short_flags(info))
    return name, Annotated[kind, form], dataclasses.field(default=default)


def _short_flags(info: FieldInfo) -> list[str]:
    """Names by which a flag may be given beside the one that says its section."""
    extra = info.json_schema_extra
    return [str(extra["flag"])] if isinstance(extra, dict) and "flag" in extra else []


def _members_of(kind: Any) -> set[Any]:
    """The types of a union, without what annotates them."""
    return {get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(kind)}


def _failure_text(failure: Mapping[str, Any]) -> str:
    # What a file leaves out is written out, for a part can be left out only at the end.
    return ":".join(str(failure.get(part, Failure.model_fields[part].default)) for part in _FAILURE_PARTS)


def _failures(text: str) -> list[dict[str, Any]]:
    return [] if text == _NO_FAILURES else [_failure(part) for part in text.split(",")]


def _failure(text: str) -> dict[str, Any]:
    step, *rest = text.split(":")
    if not 1 <= len(rest) < len(_FAILURE_PARTS) or not (step.isdecimal() and rest[0].isdecimal()):
        raise ConfigError(
            f'--failures "{text}": should be {_FAILURE_FORM}, such as 12:5:backward:kill; put commas between several'
        )
    return {"step": int(step), "worker": int(rest[0]), **dict(zip(_FAILURE_PARTS[2:], rest[1:], strict=False))}
