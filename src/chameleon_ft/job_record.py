"""The facts of a job that a checkpoint records, so that a resume with another job is found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

Fact: TypeAlias = "str | int | float | Sequence[str | int | float] | None"
"""A value to name, or the sketch of a tensor: a digest, or numbers that agree on all machines up to rounding."""

ACCEPTABLE: Final = ("data", "layers")
"""Topics whose changes end a resume unless they are accepted. Changes of others are only said."""
FROZEN_FILES: Final = "files of frozen parameters"
"""The setting with the fingerprint of the files that have what checkpoints leave out."""
_ROUNDING: Final = {"data": 1e-6, "outputs": 1e-3}
_COARSE: Final = 5e-2
"""Of outputs in 16 bits."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of a job from the one that its checkpoint was written by; `text` names the fact, before and now."""

    topic: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The facts of a job by their names.

    Attributes:
        data: number of samples, and sketches of some.
        layers: number, and the class and parameters of each.
        outputs: sketches of what each layer returns for the first micro-batch with initial weights, and of the loss.
        conditions: on which the outputs depend, besides data and layers; without equal ones they are not compared.
        settings: class and options of the optimizer, learning rates, clipping and precision.
        sources: digests of the files of the job's own modules.
        versions: The versions of packages.
    """

    data: Mapping[str, Fact] = field(default_factory=dict)
    layers: Mapping[str, Fact] = field(default_factory=dict)
    outputs: Mapping[str, Fact] = field(default_factory=dict)
    conditions: Mapping[str, Fact] = field(default_factory=dict)
    settings: Mapping[str, Fact] = field(default_factory=dict)
    sources: Mapping[str, Fact] = field(default_factory=dict)
    versions: Mapping[str, Fact] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobRecord:
        """Return the record that `to_json` wrote; topics of other versions are left out."""
        return cls(**{topic: value.get(topic, {}) for topic in cls.__slots__})

    def changes_to(self, now: JobRecord) -> list[Change]:
        """Return how the job `now` differs from this one, as far as both records say; first what may be refused."""
        found = [change for topic in ("data", "layers") for change in self._changes(topic, now)]
        if not found and self.conditions == now.conditions:
            found += self._changes("outputs", now)
        return found + [each for topic in ("settings", "sources", "versions") for each in self._changes(topic, now)]

    def _changes(self, topic: str, now: JobRecord) -> Iterator[Change]:
        before, after = getattr(self, topic), getattr(now, topic)
        for name in before:
            if name not in after or _are_like(before[name], after[name], _ROUNDING.get(topic, 0.0)):
                continue
            if topic in ("outputs", "sources") or not isinstance(before[name], str | int | float | None):
                yield Change(topic, f"{name} has changed")
            else:
                yield Change(topic, f"{name} was {before[name]} and is {after[name]}")
            if name == "number of samples" or name.startswith("output of layer"):
                # Other samples are read then: a layer gets what the one before it returns.
                return


def _are_like(before: Any, after: Any, rounding: float) -> bool:
    """Return whether two facts are equal; numbers of a sketch, after its type, up to rounding of the first of them."""
    if before == after or not (isinstance(before, Sequence) and isinstance(after, Sequence)):
        return bool(before == after)
    if isinstance(before, str) or before[0] != after[0] or len(before) != len(after):
        return False
    # The type comes before the shape.
    if "16 " in str(before[0]):
        rounding = max(rounding, _COARSE)
    numbers = zip(before[1:], after[1:], strict=True)
    return all(
        isinstance(one, float | int) and isinstance(other, float | int) and _is_near(one, other, rounding * before[1])
        for one, other in numbers
    )


def _is_near(one: float, other: float, distance: float) -> bool:
    return abs(one - other) <= distance or (math.isnan(one) and math.isnan(other)) or one == other
