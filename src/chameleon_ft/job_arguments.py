"""The arguments of a job's function that a configuration or the command line sets: their types, and their values."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from chameleon_ft.errors import ConfigError

__all__ = ["ArgumentValue", "JobArgument", "as_setting", "bound_arguments", "settable_arguments"]

ArgumentValue: TypeAlias = "bool | int | float | str | None"

_NONE: Final = "none"
"""None in a configuration, whose format has no such value."""
_EXPECTED: Final[Mapping[Any, str]] = {
    NoneType: _NONE,
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
"""The types of arguments, in the order in which a value is tried as one of them."""


@dataclass(frozen=True, slots=True)
class JobArgument:
    """An argument that can be set.

    Attributes:
        choices: types, and values of a `Literal`; nothing if it has another type, and cannot be set.
        default: `inspect.Parameter.empty` if it must be given.
    """

    name: str
    choices: tuple[Any, ...]
    default: Any

    @property
    def expected(self) -> str:
        """Describe the values that it takes."""
        return " or ".join(_EXPECTED.get(each) or f"{each}" for each in self.choices)

    @property
    def description(self) -> str:
        """Describe the values that it takes, and its default."""
        is_needed = self.default is inspect.Parameter.empty
        return f"{self.expected}, required" if is_needed else f"{self.expected}, by default {as_setting(self.default)}"

    def value_of(self, given: bool | int | float | str) -> ArgumentValue:
        """Return the value that a setting or the text of a flag stands for. Raises ValueError if there is none."""
        for literal in self.choices:
            if literal not in _EXPECTED and str(given) == str(literal):
                return literal  # type: ignore[no-any-return]
        for kind in (each for each in _EXPECTED if each in self.choices):
            if (found := _read(kind, given)) is not None:
                return None if kind is NoneType else found
        raise ValueError(f"should be {self.expected}")


def _read(kind: type, given: bool | int | float | str) -> bool | int | float | str | None:
    """Return the value as of a type; None if it is not of that."""
    is_text, is_number = isinstance(given, str), isinstance(given, int | float) and not isinstance(given, bool)
    if kind in (str, NoneType):
        return given if is_text and (kind is str or given == _NONE) else None
    if kind is bool:
        return given if isinstance(given, bool) else {"true": True, "false": False}.get(str(given).lower())
    if not (is_text or is_number) or (kind is int and isinstance(given, float)):
        return None
    try:
        number: int | float = kind(given)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def as_setting(value: Any) -> bool | int | float | str:
    """Return the value of an argument as a configuration holds it."""
    return value if isinstance(value, bool | int | float | str) else _NONE if value is None else str(value)


def settable_arguments(function: Callable[..., Any]) -> dict[str, JobArgument]:
    """Return the arguments that have a default or are given by name only; the first one may be the configuration."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, AttributeError, SyntaxError, TypeError):  # of an annotation that is for type checkers alone
        parameters = inspect.signature(function).parameters.values()
    return {
        each.name: JobArgument(each.name, _choices_of(each), each.default)
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
        or (each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty)
    }


def bound_arguments(
    function: Callable[..., Any], given: Mapping[str, bool | int | float | str], *, job: str
) -> dict[str, ArgumentValue]:
    """Return all arguments that can be set, by name: those given, and the defaults of the others.

    Raises ConfigError that names each wrong one, and the arguments that there are.
    """
    arguments = settable_arguments(function)
    known = {name: each for name, each in arguments.items() if each.choices}
    needed = [each for each in known.values() if each.default is inspect.Parameter.empty]
    values, wrong = dict[str, ArgumentValue](), [f"{each.name} is missing" for each in needed if each.name not in given]
    for name, value in given.items():
        if name in arguments and name not in known:
            wrong.append(f"{name} is of a type that no setting has: annotate it by bool, int, float, str or Literal")
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            wrong.append(f"there is no argument {name}" + (f" (did you mean {near[0]}?)" if near else ""))
            continue
        try:
            values[name] = known[name].value_of(value)
        except ValueError as error:
            wrong.append(f"{name} = {value} {error}")
    if wrong:
        there_is = (
            ", ".join(f"{name} ({each.description})" for name, each in known.items())
            or "none; give its function one with a default"
        )
        raise ConfigError(f"job {job!r}: {'; '.join(wrong)}; its arguments that can be set are: {there_is}")
    return {name: values.get(name, each.default) for name, each in known.items()}


def _choices_of(parameter: inspect.Parameter) -> tuple[Any, ...]:
    kind = parameter.annotation
    if kind is parameter.empty or isinstance(kind, str):
        kind = type(parameter.default)
    choices = tuple(_alternatives(kind))
    is_settable = all(each in _EXPECTED or isinstance(each, str | int | float) for each in choices)
    return choices if is_settable and choices != (NoneType,) else ()


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the types of a union, and the values of literals."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for each in get_args(kind):
            yield from _alternatives(each)
    elif origin is Literal:
        yield from get_args(kind)
    else:
        yield NoneType if kind is None else kind
