"""Streams: data that is read in order, with a position from which any process can read on."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple, Self

import torch

from chameleon_ft.errors import DataError
from chameleon_ft.keys import Purpose, random_key, seeded

_METHODS: Final = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class Position(NamedTuple):
    """A place in a stream, between two samples.

    Attributes:
        epoch: How many times the stream has ended before.
        samples: Samples of this epoch before the place.
        state: The state of the stream at the place; None at the beginning of an epoch, or if the stream has none.
    """

    epoch: int = 0
    samples: int = 0
    state: Any = None

    def to_bytes(self) -> bytes:
        """Write the position; `from_bytes` reads it back.

        Raises DataError if the state of the stream has a value that could not be read without running code.
        """
        file = io.BytesIO()
        # The newer format of torch takes six times as many bytes for a small value.
        torch.save(tuple(self), file, _use_new_zipfile_serialization=False)
        written = file.getvalue()
        self.from_bytes(written)
        return written

    @classmethod
    def from_bytes(cls, written: bytes) -> Self:
        """Read what `to_bytes` has written. Raises DataError for anything else."""
        try:
            return cls(*torch.load(io.BytesIO(written), weights_only=True))
        except (pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
            raise DataError(
                "the state of `dataset` cannot be read back; let state_dict() return numbers, strings, bytes and "
                f"tensors, in lists, tuples and dicts: {str(error).splitlines()[0]:.200}"
            ) from None


START: Final = Position().to_bytes()
"""The position before the first sample."""

POSITION_KEY: Final = "stream/position"
"""The entry of the state of layer 0 that has the position of the next step, as bytes."""

# The state of each stream of this process before it was iterated, by the identity of the stream, which is kept, too.
_INITIAL: dict[int, tuple[object, Any]] = {}


class _State(NamedTuple):
    """How to get the state of an object, and to set it."""

    save: Callable[[], Any]
    load: Callable[[Any], object]

    @classmethod
    def of(cls, stated: object) -> Self | None:
        for names in _METHODS:
            save, load = (getattr(stated, name, None) for name in names)
            if save is not None and load is not None:
                return cls(save, load)
        return None


class StreamReader:
    """Reads a stream epoch after epoch, each sample as one draw of random numbers.

    Python's, NumPy's and torch's global generators are seeded by (seed, epoch, index) for each read, and by (seed,
    epoch) where iterating begins. So a sample does not depend on the process that reads it, nor on where that began.

    Args:
        left_out: The places, as by `at`, of samples that are passed over, whether they can be read or not.
    """

    def __init__(
        self, stream: Iterable[Any], seed: int, position: bytes = START, *, left_out: Collection[tuple[int, int]] = ()
    ) -> None:
        self._stream = stream
        self._seed = seed
        self._left_out = left_out
        self._has_failed = False
        self._own = _State.of(stream)
        if self._own is not None and id(stream) not in _INITIAL:
            # Without a state, a loader begins an epoch with another order, and has not begun to read.
            initial = {} if hasattr(stream, "collate_fn") else self._own.save()
            _INITIAL[id(stream)] = stream, _copied(initial)
        self._epoch = self._index = 0
        self._state: _State | None = None
        self.seek(position)

    def seek(self, position: bytes) -> None:
        """Read on from a position, which may have been taken by any reader of the stream with this seed."""
        epoch, index, state = Position.from_bytes(position)
        self._begin(epoch, state)
        if self._state is None:
            while self._index < index:
                # A sample that cannot be read any more may have been left out.
                if self._advance(is_left_out=True) is None:
                    raise DataError(
                        f"`dataset` has ended after {self._index} samples of epoch {epoch}, before it came to sample "
                        f"{index}, which it had before; let it give the same samples whenever it is iterated"
                    )
        self._index = index

    def read(self, count: int) -> list[Any]:
        """Return the next samples; an epoch may end between two.

        Raises DataError if the stream gives none, or is over and cannot be iterated again.
        """
        samples: list[Any] = []
        while len(samples) < count:
            if (sample := self._next()) is not None:
                samples.append(sample[0])
                continue
            if not self._index:
                again = f", iterated again after {self._epoch} times" if self._epoch else ""
                raise DataError(
                    f"`dataset` gives no sample{again}, and the run needs more; let iterating it again begin another "
                    "epoch, give a longer stream, or train fewer steps"
                )
            self._begin(self._epoch + 1, None)
        return samples

    @property
    def at(self) -> tuple[int, int]:
        """The epoch and the number in it of the next sample."""
        return self._epoch, self._index

    @property
    def place(self) -> str:
        """The next sample, in words."""
        return f"sample {self._index} of epoch {self._epoch} of the stream"

    def position(self) -> bytes:
        """Return the position of the next sample."""
        state = self._state.save() if self._state is not None and self._index else None
        return Position(self._epoch, self._index, state).to_bytes()

    def _begin(self, epoch: int, state: Any) -> None:
        self._epoch, self._index, self._has_failed = epoch, 0, False
        with seeded(random_key(self._seed, Purpose.EPOCH, epoch)):
            if (set_epoch := getattr(self._stream, "set_epoch", None)) is not None:
                set_epoch(epoch)
            if self._own is not None:
                # Or iterating might go on where it has stopped.
                self._own.load(_copied(_INITIAL[id(self._stream)][1]) if state is None else state)
            self._iterator: Iterator[Any] = iter(self._stream)
            self._state = self._own or _State.of(self._iterator)
            if self._own is None and self._state is not None and state is not None:
                self._state.load(state)

    def _next(self) -> tuple[Any] | None:
        """Return the next sample that is not left out, in a tuple; None at the end of the epoch."""
        while self.at in self._left_out:
            if self._advance(is_left_out=True) is None:
                return None
        return self._advance(is_left_out=False)

    def _advance(self, *, is_left_out: bool) -> tuple[Any] | None:
        """Return the next sample, in a tuple; None at the end of the epoch. One that is left out may raise an error."""
        with seeded(random_key(self._seed, Purpose.SAMPLE, self._epoch, self._index)):
            try:
                sample, has_failed = next(self._iterator), False
            except StopIteration:
                if self._has_failed:
                    raise DataError(
                        f"{self.place} cannot be left out: iterating `dataset` has ended with the error of the sample "
                        "before; let its iterator go on after an error, as an object with __next__ can, and no "
                        "generator"
                    ) from None
                return None
            except Exception:
                if not is_left_out:
                    raise
                sample, has_failed = None, True
        self._has_failed = has_failed
        self._index += 1
        return (sample,)


def _copied(state: Any) -> Any:
    return Position.from_bytes(Position(state=state).to_bytes()).state
