"""Every error that Chameleon raises on purpose.

    ChameleonError
      ConfigError            a value the user gave: configuration, command line, environment
        DataError            training data that is missing, too short or does not fit the model
        ProfileError         a profile that cannot be read, or is of another model, device or version
      PlanError              a placement, route or plan that breaks a rule
        NoHolderError        layers that no live worker holds any more
      ProgramError           operations out of order, missing or stuck
      CheckpointError        a checkpoint that is missing, incomplete, unreadable or of another model
        DamagedCheckpointError  files of a checkpoint that are not as they were written
      ControlError           the control plane: membership, messages, joining
        LiveRunError         a run that is to be started runs already
        DeposedError         another coordinator leads the run
        LeaseError           the place where coordinators claim leadership cannot be reached or refuses
      RunFailedError         a run that a session has started and that has ended by an error
      StoreError             an object store that does not answer, refuses or has failed; an OSError, too

The message of each names the input, what was expected and what to try next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Self

from chameleon_ft.quantities import in_ranges

__all__ = [
    "ChameleonError",
    "CheckpointError",
    "ConfigError",
    "ControlError",
    "DamagedCheckpointError",
    "DataError",
    "DeposedError",
    "LeaseError",
    "LiveRunError",
    "NoHolderError",
    "PlanError",
    "ProfileError",
    "ProgramError",
    "RunFailedError",
    "StoreError",
]


class ChameleonError(Exception):
    """Base of every error raised on purpose; catching it catches them all."""


class ConfigError(ChameleonError):
    """A value that the user gave cannot be used."""

    @classmethod
    def unknown_name(cls, kind: str, name: str, known: Collection[str]) -> Self:
        """Return the error for a name that is not one of the known ones, with the nearest of these if one is near."""
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        return cls(f"there is no {kind} {name!r}; {hint} are {', '.join(known)}")


class DataError(ConfigError):
    """The training data is missing, too short or does not fit the model."""


class ProfileError(ConfigError):
    """A profile cannot be read, or does not match what it is to be used for."""


class PlanError(ChameleonError):
    """A placement, route or plan breaks one of the rules that make it runnable."""


class NoHolderError(PlanError):
    """Layers that no live worker holds: their parameters exist nowhere but in a checkpoint.

    `layers` are the numbers of those layers in ascending order.
    """

    layers: tuple[int, ...]

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(layers))
        noun = "layer" if len(self.layers) == 1 else "layers"
        super().__init__(
            f"no live worker holds {noun} {in_ranges(self.layers)}; "
            "go back to a snapshot or a checkpoint, or place these layers on more workers, by more pipelines "
            "(parallel.dp)"
        )

    def __reduce__(self) -> tuple[type[NoHolderError], tuple[tuple[int, ...]]]:
        # The default would hand the message to __init__ when the error crosses a process boundary.
        return type(self), (self.layers,)


class NoOwnerError(NoHolderError):
    """Layers of whose optimizer state no live worker owns some slice, though their parameters may be there."""

    def __init__(self, layers: Iterable[int]) -> None:
        super().__init__(layers)
        noun = "layer" if len(self.layers) == 1 else "layers"
        self.args = (
            f"no live worker has all of the optimizer's state of {noun} {in_ranges(self.layers)}; "
            "go back to a snapshot or a checkpoint, or raise parallel.optimizer_redundancy",
        )


class ProgramError(ChameleonError):
    """A program has operations missing, out of order, or that wait for each other for ever."""


class CheckpointError(ChameleonError):
    """A checkpoint is missing, incomplete, cannot be read, or was written by another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not as they were written."""


class ControlError(ChameleonError):
    """The control plane refused or lost a member, or got a message it cannot accept."""


class DeposedError(ControlError):
    """Another coordinator leads the run, so this one may not act any more."""

    def __init__(self, term: int, leader: str | None = None) -> None:
        """Describe the coordinator that leads, if it is known, and the term of the one that does not any more."""
        who = "another coordinator" if leader is None else f"the coordinator at {leader}"
        super().__init__(f"{who} leads the run; this one, of term {term}, ends and leaves the run to it")
        self._fields = term, leader

    def __reduce__(self) -> tuple[type[DeposedError], tuple[int, str | None]]:
        return type(self), self._fields  # another process prints it, too


class LiveRunError(ControlError):
    """A run that is to be started or resumed runs already."""

    def __init__(self, run: object, holder: str) -> None:
        """Name the run and the process, or the coordinator, that it has."""
        super().__init__(f"{run}: this run is still live in {holder}; wait for it to end, or end it first")
        self._fields = run, holder

    def __reduce__(self) -> tuple[type[LiveRunError], tuple[object, str]]:
        return type(self), self._fields


class LeaseError(ControlError):
    """The place where coordinators claim leadership cannot be reached, refuses, or holds what cannot be read."""


class RunFailedError(ChameleonError):
    """A run has ended by an error; the message has the reason that it has recorded."""


class StoreError(ChameleonError, OSError):
    """An object store does not answer, refuses, or has failed a request."""


def describe_invalid(error: ValidationError) -> str:
    """Return the place and the message of the first error in validated JSON."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
