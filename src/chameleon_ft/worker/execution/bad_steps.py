"""Steps whose loss or gradient is not finite, or far above those before; and errors of the job's own code in a step.

A bad step is computed once more. A fault of the hardware does not come again; then the workers are named whose
contributions have changed. Otherwise the data or the model are at fault; then the operations are named in which the
first values that are not finite appeared.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.events.evidence import place_of
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.vote import Vote
from chameleon_ft.worker.communicators.base import CommunicationError

_REMEMBERED: Final = 64
_MIN_REMEMBERED: Final = 16
# The standard deviation of a normal distribution, over its median absolute deviation.
_DEVIATION: Final = 1.4826
_MIN_RELATIVE_DEVIATION: Final = 0.01

Contributions = Mapping[str, float]
"""Sums of a worker's own contributions to the loss and to the gradients, by their place."""

Origin = tuple[int, int, int, str]
"""(micro-batch, first layer, layer after the last, "data", "forward" or "backward")"""


class BadStepError(ChameleonError):
    """The loss or the gradient of a step is bad, because `why`. All workers find it, and none has changed anything."""

    def __init__(self, vote: Vote, why: str, contributions: Contributions) -> None:
        self.vote = vote
        self.why = why
        self.contributions = contributions
        super().__init__(why)

    def changed(self, later: Contributions) -> bool:
        """Return whether a worker's contributions to the same step were other ones when it was computed again.

        If the sums of all workers were not finite, only contributions that were not count, either. Last bits of others
        may differ without a fault, because kernels of an accelerator may add in any order.
        """
        before = self.contributions
        if before.keys() != later.keys():
            return True
        if not (math.isfinite(self.vote.loss_sum) and math.isfinite(self.vote.grad_square_sum)):
            return any(not math.isfinite(value) and math.isfinite(later[place]) for place, value in before.items())
        return any(value != later[place] for place, value in before.items())


@dataclass(slots=True)
class RecentSteps:
    """The loss and the gradient norm of the last steps, by which a spike is noticed.

    Workers that have joined lately know fewer of them. So each adds its bounds to the vote, if it has some; the mean
    over these, which all workers see, counts.

    Attributes:
        factor: a value is a spike if it is above the median by more than so many standard deviations, which are
            estimated by the median absolute deviation; 0: none is.
    """

    factor: float
    known: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, loss: float, grad_norm: float) -> None:
        """Note a step that was applied."""
        self.known.append((loss, grad_norm))

    def ballot(self) -> list[float]:
        """Return this worker's part of the vote."""
        if not self.factor:
            return []
        if len(self.known) < _MIN_REMEMBERED:
            return [0.0, 0.0, 0.0]
        return [*(self._bound(values) for values in zip(*self.known, strict=True)), 1.0]

    def why_bad(self, loss: float, grad_norm: float, sums: Sequence[float]) -> str | None:
        """Return why a step is bad, None if it is not; `sums`: of all ballots."""
        values = {"loss": loss, "gradient norm": grad_norm}
        for name, value in values.items():
            if not math.isfinite(value):
                return f"the {name} is {value}"
        if sums and sums[-1]:
            for (name, value), bound in zip(values.items(), sums, strict=False):
                if value > bound / sums[-1]:
                    return f"the {name} of {value:.4g} is a spike, above {bound / sums[-1]:.4g}"
        return None

    def _bound(self, values: Sequence[float]) -> float:
        median = statistics.median(values)
        deviation = _DEVIATION * statistics.median(abs(value - median) for value in values)
        return median + self.factor * max(deviation, _MIN_RELATIVE_DEVIATION * abs(median))


@dataclass(slots=True)
class Repetition:
    """A bad step that is computed again: finds the operations that make values that are not finite from finite ones.

    It gets the contributions of this worker once they are complete.
    """

    contributions: Contributions = field(default_factory=dict)
    found: list[Origin] = field(default_factory=list)
    _spoilt_micro_batches: set[int] = field(default_factory=set)
    _spoilt_layers: set[int] = field(default_factory=set)

    def forward(
        self,
        micro_batch: int,
        layers: LayerRange,
        *,
        data: Iterable[Tensor],
        received: Iterable[Tensor],
        result: Iterable[Tensor],
    ) -> None:
        """Look at a forward: the data that it used, the tensors that came in, and its result."""
        if all(map(all_finite, result)):
            return
        self._spoilt_micro_batches.add(micro_batch)
        if not all(map(all_finite, data)):
            self.found.append((micro_batch, layers.start, layers.stop, "data"))
        elif all(map(all_finite, received)):
            self.found.append((micro_batch, layers.start, layers.stop, "forward"))

    def backward(
        self,
        micro_batch: int,
        layers: LayerRange,
        *,
        received: Iterable[Tensor],
        result: Iterable[Tensor],
        gradients: Mapping[int, Iterable[Tensor]],
    ) -> None:
        """Look at a backward: the gradients that came in, those that are passed on, and those of its layers."""
        spoilt = {layer for layer, own in gradients.items() if not all(map(all_finite, own))}
        is_new = not spoilt <= self._spoilt_layers or not all(map(all_finite, result))
        self._spoilt_layers |= spoilt
        if is_new and micro_batch not in self._spoilt_micro_batches and all(map(all_finite, received)):
            self.found.append((micro_batch, layers.start, layers.stop, "backward"))


def all_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite; those of an integer type are."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


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
def naming_layer(layers: LayerRange, ends: Sequence[Iterable[Any]]) -> Iterator[None]:
    """Add to an error of a backward inside the block the layer whose function of autograd has failed, if one has.

    Args:
        ends: the last nodes of the graph of each layer.
    """
    try:
        yield
    except Exception as error:
        own = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        failed = {each for each in own if isinstance(each, BackwardCFunction)}
        seen: set[Any] = set()
        for layer, end in zip(layers, ends, strict=False):
            nodes = set(end)
            while nodes:
                seen |= nodes
                nodes = {before for node in nodes if node is not None for before, _ in node.next_functions} - seen
            if failed & seen:
                error.add_note(f"in layer {layer}")
                break
        raise
