"""Errors that the job's own code raises in a step: its layers, its loss, its data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction

from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.observe.evidence import place_of
from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime.communicators import CommunicationError

_LONGEST_ERROR: Final = 240


class JobError(ChameleonError):
    """The job's own code has failed in a step; this rank still holds the state before it."""


@contextmanager
def as_job_errors() -> Iterator[None]:
    """Raise JobError for any error inside the block, except those of messages and of a device that is lost with it."""
    try:
        yield
    except (CommunicationError, ControlError, torch.AcceleratorError):
        raise
    except (Exception, SystemExit) as error:  # code of the job may call sys.exit
        raise JobError(describe_error(error)) from error


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Add to an error inside the block what has failed."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def describe_error(error: BaseException) -> str:
    """Return an error in one line, shortened, and where it was raised; the log has all of it, with its traceback."""
    first = (str(error).strip().splitlines() or [""])[0]
    if len(first) > _LONGEST_ERROR and not isinstance(error, ChameleonError):
        # That of a full device lists all processes that use it.
        first = f"{first[:_LONGEST_ERROR]} ..."
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    place = None if isinstance(error, ChameleonError) else place_of(error)
    where = () if place is None else (f"at {place}",)
    return ", ".join((text, *where, *getattr(error, "__notes__", ())))


@contextmanager
def naming_layer(layers: LayerRange, ends: Sequence[Any]) -> Iterator[None]:
    """Add to an error of a backward inside the block the layer whose function of autograd has failed, if one has.

    Args:
        ends: the last node of the graph of each layer.
    """
    try:
        yield
    except Exception as error:
        own = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        failed = {each for each in own if isinstance(each, BackwardCFunction)}
        seen: set[Any] = set()
        for layer, end in zip(layers, ends, strict=False):
            nodes = {end}
            while nodes:
                seen |= nodes
                nodes = {before for node in nodes if node is not None for before, _ in node.next_functions} - seen
            if failed & seen:
                error.add_note(f"in layer {layer}")
                break
        raise
