"""Times, sizes and numbers: how they are shown to people, and when two of them are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

ROUNDING: Final = 1e-9
"""Relative difference up to which two computed times, or numbers of samples, count as equal."""
SUM_ROUNDING: Final = 1e-12
"""Relative difference that comes from adding the same few terms in another order."""

# (unit, its seconds, seconds from which on it reads better than the next)
_LONG_UNITS = (("days", 86_400.0, 172_800.0), ("h", 3_600.0, 7_200.0), ("min", 60.0, 1_000.0))
# (unit, how many are a second)
_SHORT_UNITS = (("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
_BYTE_UNITS = ("kB", "MB", "GB", "TB", "PB")


def duration(seconds: float) -> str:
    """Write a time in the unit that reads best: "37.6 µs", "325 ms", "1.204 s", "16.7 min", "14.9 days"; none is "0 s".

    Times in seconds have four digits, shorter ones three, longer ones one after the point.
    """
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for unit, size_s, min_s in _LONG_UNITS:
        if seconds >= min_s:
            return f"{seconds / size_s:,.1f} {unit}"
    # Times that round to 1,000 ms are 1 s.
    rounded = float(f"{seconds:.3g}")
    if rounded >= 1:
        return f"{seconds:.{3 if seconds < 10 else 2 if seconds < 100 else 1}f} s"
    for unit, per_s in _SHORT_UNITS:
        if rounded * per_s >= 1:
            return f"{rounded * per_s:.3g} {unit}"
    return "0 s"


def counted(number: int, noun: str) -> str:
    """Write how many there are of something: "1 step", "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Write things by their numbers: "worker 3", "workers 3, 5", "no worker"."""
    if not numbers:
        return f"no {noun}"
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def in_ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers in ascending order, those without a gap as one range: 0, 1, 2 and 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def data_size(num_bytes: float) -> str:
    """Write a size in the unit that reads best, of powers of 1,000: "512 B", "11.5 MB", "174.5 GB"."""
    if abs(num_bytes) < 1_000:
        return f"{num_bytes:.0f} B"
    value = num_bytes / 1_000
    for unit in _BYTE_UNITS[:-1]:
        if abs(round(value, 1)) < 1_000:
            return f"{value:.1f} {unit}"
        value /= 1_000
    return f"{value:,.1f} {_BYTE_UNITS[-1]}"


def rate(per_s: float) -> str:
    """Write how many there are in a second: "0.03325", "49.00", "1,204.5"."""
    return f"{per_s:,.1f}" if per_s >= 100 else f"{per_s:#.4g}"
