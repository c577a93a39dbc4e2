"""The base of all sections of a configuration: frozen and strict, with relations between fields that are checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_LONGEST_S: Final = 1e9  # 32 years

RELATION_ERROR: Final = "relation"
"""Type of the error that lists the relations between fields that do not hold."""


class Section(BaseModel):
    """Base of every section: frozen, refuses unknown keys and values of another type.

    A section overrides `problems` to state what its fields must satisfy together; all of them are reported at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what to change) for every relation between fields that does not hold."""
        yield from ()

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        found = [*self._endless_times(), *self.problems()]
        if found:
            summary = "; ".join(f"{field}: {message}" for field, message in found)
            # A validator can raise only one error, so all problems travel in its context.
            problems = [(field, self._value_at(field), message) for field, message in found]
            raise PydanticCustomError(RELATION_ERROR, "{summary}", {"summary": summary, "problems": problems})
        return self

    def _endless_times(self) -> Iterator[tuple[str, str]]:
        """Yield the times that clocks cannot count."""
        for name, value in self:
            if name.endswith("_s") and isinstance(value, float) and value > _LONGEST_S:
                yield name, f"should be {_LONGEST_S:g} at most"

    def _value_at(self, key: str) -> object:
        """Return the value at a key such as failures[0].worker."""
        value: Any = self
        for part in re.findall(r"\w+", key):
            value = value[int(part)] if part.isdecimal() else getattr(value, part)
        return value
