"""Micro-batches in memory, which a loader reads for all loaders of its host.

The tensors of a micro-batch come in its message if they are small, otherwise in a file in memory whose descriptor is
passed to the rank; the kernel frees it with its last user, whoever ends first.

The fork server of a host imports this module, so all loaders that come from it share a board, a file in memory with a
place for each micro-batch. A loader locks the place while it reads the micro-batch, and writes there where it holds it.
The others open that file through /proc. Nothing is left if a loader ends: the kernel releases its locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import struct
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

_NUMBER: Final = struct.Struct("<q")
_ALIGNMENT: Final = 64
# To make and to map a file takes longer than to copy so many bytes twice.
_MAX_INLINE: Final = 1 << 14

_PLACES: Final = 1 << 16
# The run, the step and the micro-batch. Then on the board: the process that holds it, and the descriptor there, or -1
# while it is read. At the end of a file that is held: bytes of the message before it, and of the tensors before that.
_ENTRY: Final = struct.Struct("<5q")
_NOWHERE: Final = -1
_MAX_HELD: Final = 64
_MAX_HELD_BYTES: Final = 1 << 27

_BOARD: Final = os.memfd_create("chameleon samples")
os.ftruncate(_BOARD, _PLACES * _ENTRY.size)


@dataclass(frozen=True, slots=True)
class Packed:
    """An object with tensors: a message, and the descriptor of the file with its tensors unless they are in that."""

    message: bytes
    files: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the file."""
        for file in self.files:
            os.close(file)


def pack(value: Any) -> Packed:
    """Return an object with tensors as a message."""
    pickler = _Pickler(head := BytesIO())
    pickler.dump(value)
    message = _NUMBER.pack(head.tell()) + head.getvalue()
    if pickler.num_bytes <= _MAX_INLINE:
        pickler.write_to(content := bytearray(pickler.num_bytes))
        return Packed(message + content)
    descriptor = os.memfd_create("samples")
    os.ftruncate(descriptor, pickler.num_bytes)
    with mmap.mmap(descriptor, pickler.num_bytes) as memory:
        pickler.write_to(memory)
    return Packed(message, (descriptor,))


def unpack(message: bytes, files: Iterable[int]) -> Any:
    """Return the object of a message; close the files. Its tensors may be written to, which no other process sees."""
    head = message[_NUMBER.size :][: _NUMBER.unpack_from(message)[0]]
    memory: mmap.mmap | bytearray = bytearray(message[_NUMBER.size + len(head) :])
    for descriptor in files:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        os.close(descriptor)
    return _Unpickler(head, memory).load()


class SharedReads:
    """The micro-batches that a loader holds for the others of its host, and those that they hold for it.

    The newest are held: 64, of at most 128 MiB. A micro-batch that is no longer held is read again.

    Args:
        run: bytes that are equal in all loaders of a run, and differ between runs.
    """

    def __init__(self, run: bytes) -> None:
        self._run = xxhash.xxh3_64_intdigest(run) >> 1
        # (place, descriptor of the file, its bytes), from the oldest on.
        self._held: deque[tuple[int, int, int]] = deque()
        self._claim: tuple[int, int] | None = None
        # Whether the system keeps this process from opening the files of others.
        self._is_alone = False

    def find(self, key: tuple[int, int]) -> Packed | None:
        """Return a micro-batch that a loader holds, or None."""
        *found, process, descriptor = self._entry(key)
        wanted = [self._run, *key]
        if found != wanted or descriptor == _NOWHERE:
            return None
        try:
            file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._is_alone |= isinstance(error, PermissionError)
            return None
        packed = None
        # The descriptor may be another file's by now.
        with suppress(OSError, struct.error):
            size = os.fstat(file).st_size - _ENTRY.size
            *found, length, num_bytes = _ENTRY.unpack(os.pread(file, _ENTRY.size, size))
            if found == wanted:
                packed = Packed(os.pread(file, length, size - length), (file,) if num_bytes else ())
        if packed is None or not packed.files:
            os.close(file)
        return packed

    def claim(self, key: tuple[int, int]) -> bool:
        """Return whether this loader is to read a micro-batch: no other one reads it, or holds it for this one."""
        place = self._place(key)
        try:
            fcntl.lockf(_BOARD, fcntl.LOCK_EX | fcntl.LOCK_NB, _ENTRY.size, place)
        except OSError:
            # The place may be that of another micro-batch; then this one is not held. Empty, it is just being claimed.
            return self._is_alone or self._entry(key)[:3] not in ((self._run, *key), (0, 0, 0))
        for entry in [entry for entry in self._held if entry[0] == place]:
            self._held.remove(entry)
            os.close(entry[1])
        self._claim = key
        os.pwrite(_BOARD, _ENTRY.pack(self._run, *key, os.getpid(), _NOWHERE), place)
        return True

    def hold(self, packed: Packed) -> None:
        """Hold the micro-batch that was claimed for the others, if one was."""
        if self._claim is None:
            return
        key, self._claim = self._claim, None
        file = os.dup(packed.files[0]) if packed.files else os.memfd_create("samples")
        num_bytes = os.fstat(file).st_size
        end = packed.message + _ENTRY.pack(self._run, *key, len(packed.message), num_bytes)
        os.pwrite(file, end, num_bytes)
        place = self._place(key)
        os.pwrite(_BOARD, _ENTRY.pack(self._run, *key, os.getpid(), file), place)
        self._held.append((place, file, num_bytes + len(end)))
        while len(self._held) > _MAX_HELD or sum(size for _, _, size in self._held) > _MAX_HELD_BYTES:
            place, file, _ = self._held.popleft()
            self._clear(place)
            os.close(file)

    def give_up(self) -> None:
        """Leave the micro-batch that was claimed to other loaders, if one was."""
        if self._claim is not None:
            self._clear(self._place(self._claim))
            self._claim = None

    def _entry(self, key: tuple[int, int]) -> tuple[int, ...]:
        return _ENTRY.unpack(os.pread(_BOARD, _ENTRY.size, self._place(key)))

    def _place(self, key: tuple[int, int]) -> int:
        """Return where the place of a micro-batch begins; others have the same."""
        return xxhash.xxh3_64_intdigest(_ENTRY.pack(self._run, *key, 0, 0)) % _PLACES * _ENTRY.size

    def _clear(self, place: int) -> None:
        os.pwrite(_BOARD, bytes(_ENTRY.size), place)
        fcntl.lockf(_BOARD, fcntl.LOCK_UN, _ENTRY.size, place)


class _Pickler(pickle.Pickler):
    """Pickles the places of tensors in a memory of their own instead of their elements."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._tensors: list[tuple[int, Tensor]] = []
        self.num_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        """Return the place of a tensor, its type and its shape."""
        if not isinstance(value, Tensor):
            return None
        begin = self.num_bytes
        self._tensors.append((begin, value))
        self.num_bytes += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        return begin, value.dtype, tuple(value.shape)

    def write_to(self, memory: mmap.mmap | bytearray) -> None:
        """Write the elements to their places."""
        for begin, tensor in self._tensors:
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            memory[begin : begin + tensor.nbytes] = content


class _Unpickler(pickle.Unpickler):
    """Makes tensors of the places in a memory."""

    def __init__(self, head: bytes, memory: mmap.mmap | bytearray) -> None:
        super().__init__(BytesIO(head))
        self._memory = memory

    def persistent_load(self, place: Any) -> Tensor:
        """Return the tensor of a place."""
        begin, dtype, shape = place
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=begin).view(shape)
