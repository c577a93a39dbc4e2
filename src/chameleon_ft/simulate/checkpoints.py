"""How often to write a checkpoint."""

from __future__ import annotations

import math

from chameleon_ft.errors import ConfigError

__all__ = ["daly_interval_s", "expected_unsaved_s", "young_interval_s"]


def young_interval_s(write_s: float, mtbf_s: float) -> float:
    """sqrt(2 write_s mtbf_s): seconds of work between two checkpoints that lose least (Young, CACM 17, 1974).

    Raises ConfigError where a time is negative or there is no time between failures.
    """
    _check(write_s, mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s)


def daly_interval_s(write_s: float, mtbf_s: float) -> float:
    """The same to a higher order (Daly, Future Generation Computer Systems 22, 2006, Eq. 37).

    sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + (d / 2 M) / 9) - d for d = `write_s` below 2 M = 2 `mtbf_s`, else M.
    """
    _check(write_s, mtbf_s)
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def expected_unsaved_s(unsaved_s: float, interval_s: float, mean_gap_s: float) -> float:
    """Return the expected seconds of work since the last checkpoint at the moment of the next incident.

    The wait G is exponential, and a checkpoint is written whenever `interval_s` seconds of work have come together:

        E[(u + G) mod I] = u + D - I exp(-(I - u) / D) / (1 - exp(-I / D)).

    Args:
        unsaved_s: seconds of work since the last checkpoint now (u).
        interval_s: seconds of work between two checkpoints (I).
        mean_gap_s: mean seconds until the next incident (D).
    """
    now_s = min(unsaved_s, interval_s)
    written = math.exp(-(interval_s - now_s) / mean_gap_s) / -math.expm1(-interval_s / mean_gap_s)
    # The difference of two large numbers where checkpoints are much more frequent than incidents.
    return min(interval_s, max(0.0, now_s + mean_gap_s - interval_s * written))


def _check(write_s: float, mtbf_s: float) -> None:
    if not (write_s >= 0 and mtbf_s > 0):
        raise ConfigError(
            f"a checkpoint takes zero or more seconds and failures have some between them; got {write_s} and {mtbf_s}"
        )
