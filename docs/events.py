"""Writes the tables of records in files.md from their types: `python docs/events.py`.

A test compares the page with the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from chameleon_ft.events.base import Event
from chameleon_ft.events.lines import EVENT_TYPES
from chameleon_ft.events.records import StepRecord

PAGE = Path(__file__).with_name("files.md")


def with_tables(page: str) -> str:
    """Return `page` with the tables between their marks."""
    for name, table in (("metrics", _metrics()), ("events", _events())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def _metrics() -> str:
    """Return a row for each field of a step."""
    meanings = _attributes(StepRecord) | {"tokens_per_s": "`tokens` / `step_s`."}
    rows = [f"| `{name}` | {_without_stop(text)} |" for name, text in meanings.items()]
    return "\n".join(["| field | meaning |", "|---|---|", *rows])


def _events() -> str:
    """Return a row for each type of event; the fields that its docstring does not name follow it."""
    rows = [f"| `{name}` | {_meaning(kind)} |" for name, kind in EVENT_TYPES.items()]
    return "\n".join(["| event | meaning and further fields |", "|---|---|", *rows])


def _meaning(kind: type[Event]) -> str:
    text = _without_stop(" ".join(_doc(kind).partition("Attributes:")[0].split()))
    common = {field.name for field in fields(Event)}
    own = [field.name for field in fields(kind) if field.name not in common]
    if "see below" not in text and (more := [name for name in own if f"`{name}`" not in text]):
        text += f". Also {', '.join(f'`{name}`' for name in more)}"
    return text


def _attributes(kind: type) -> dict[str, str]:
    """Return the descriptions in the section Attributes of a docstring."""
    return dict(_described(_doc(kind).partition("Attributes:\n")[2]))


def _described(section: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n    (?=\w)", f"\n{section}")[1:]:
        name, _, text = entry.partition(": ")
        yield name, " ".join(text.split())


def _doc(kind: type) -> str:
    return inspect.getdoc(kind) or ""


def _without_stop(text: str) -> str:
    return text.removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
