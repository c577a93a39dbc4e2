"""Checksums of tensors, several times as fast as a link carries them.

On a CPU it is XXH3. An accelerator has no such kernel, and to bring all to the host would take longer than sending it
does. There, the bytes are laid out as a table of 64-bit words; words are summed along rows and along columns, modulo
2^64, and the CRC-32 is that of the sums. What goes unnoticed then has to leave every sum as it was, so it changes four
words at the least, at the corners of a rectangle and by the same amount; or it changes the sums to others of the same
CRC, which one change in 2^32 does.
"""

from __future__ import annotations

import zlib
from typing import Final

import torch
import xxhash
from torch import Tensor

__all__ = ["checksum", "checksum_of_sums"]

_COLUMNS: Final = 4096
_ROW_BYTES: Final = 8 * _COLUMNS
_ROWS_AT_ONCE: Final = 1 << 12  # what is worth a launch


def checksum(data: Tensor) -> int:
    """Return a checksum, below 2^63, of contiguous bytes; on a CPU it is another one than on an accelerator."""
    if data.device.type != "cpu":
        return checksum_of_sums(data)
    return xxhash.xxh3_64_intdigest(data.numpy().data) >> 1


def checksum_of_sums(data: Tensor) -> int:
    """Return a checksum, below 2^32, of contiguous bytes, taken on the device that they are on."""
    whole = data.numel() - data.numel() % _ROW_BYTES
    rest = zlib.crc32(data[whole:].cpu().numpy().data)
    if not whole:
        return rest
    table = data[:whole]
    if table.storage_offset() % 8:
        table = table.clone()  # torch takes words only where words begin
    words = table.view(torch.int64).view(-1, _COLUMNS)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=data.device)
    rows = []
    for part in words.split(_ROWS_AT_ONCE):
        rows.append(part.sum(1))
        columns += part.sum(0)
    return zlib.crc32(torch.cat([*rows, columns]).cpu().numpy().data, rest)
