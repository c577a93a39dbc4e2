"""Writes the tables of configuration.md from the configuration's own types: `python docs/reference.py`.

A test compares the page with the code.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from chameleon_ft.config import Failure, RunConfig, TrainConfig

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- reference -->", "<!-- end of reference -->"


def reference() -> str:
    """Return the tables as Markdown."""
    own = {name: info for name, info in TrainConfig.model_fields.items() if name not in RunConfig.model_fields}
    parts = ["### Of every run", "", *_table(RunConfig.model_fields)]
    for name, info in RunConfig.model_fields.items():
        parts += _section(name, info)
    parts += ["### `[[failures]]`", "", _summary(Failure), "", *_table(Failure.model_fields)]
    for name, info in own.items():
        parts += _section(name, info)
    return "\n".join(parts).rstrip() + "\n"


def with_reference(page: str) -> str:
    """Return `page` with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _section(name: str, info: FieldInfo) -> list[str]:
    kind = info.annotation
    if not _is_section(kind):
        return []
    return [f"### `[{name}]`", "", _summary(kind), "", *_table(kind.model_fields)]


def _table(fields: dict[str, FieldInfo]) -> list[str]:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {_values(info)} | {_default(info)} | {info.description} |"
        for name, info in fields.items()
        if not _is_section(info.annotation)
    ]
    return [*rows, ""]


def _values(info: FieldInfo) -> str:
    return " or ".join(_values_of(kind, info.metadata) for kind in _alternatives(info.annotation))


def _values_of(kind: Any, constraints: Sequence[object]) -> str:
    if get_origin(kind) is dict:
        return "table"
    if kind == tuple[str, ...]:
        return "list of texts"
    if get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Literal:
        return f"list of {_values_of(get_args(kind)[0], ())}"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in get_args(kind))
    limits = [limit for constraint in constraints if (limit := _limit(constraint))]
    words = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}
    return " ".join([words.get(kind, "list of tables"), " and ".join(limits)]).strip()


def _limit(constraint: object) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return " ".join(f"{sign} {getattr(constraint, key)}" for key, sign in signs.items() if hasattr(constraint, key))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "none, must be given"
    return "" if info.default in (None, ()) else f"`{_toml(info.default)}`"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union but None, or the type itself, without metadata."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for each in get_args(annotation) for kind in _alternatives(each) if kind is not type(None)]
    return [annotation]


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _summary(kind: type[BaseModel]) -> str:
    return next(_paragraphs(kind.__doc__ or ""))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield " ".join(paragraph.split())


if __name__ == "__main__":
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
