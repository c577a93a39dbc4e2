"""The accuracy that predictions are held to, and the warning for one that is further off."""

from __future__ import annotations

from typing import Final

__all__ = ["STALL_TOLERANCE", "STEP_TOLERANCE", "describe_untrusted"]

STEP_TOLERANCE: Final = 0.06
"""The largest relative error of a step time that the benchmarks allow (docs/benchmarks.md). Candidates often differ by
less than that, so a larger error can change which of them is chosen."""

STALL_TOLERANCE: Final = 0.15
"""The relative error of a stall that the benchmarks allow, which is larger because stalls are short and vary more."""

_REPROFILE: Final = (
    "measure a new profile while the machine does nothing else (`chameleon profile CONFIG --out FILE`), and give it by "
    "--profile FILE"
)
_SET_RESTART: Final = "set recovery.restart_cost_s to what a return to a checkpoint takes here"


def describe_untrusted(
    *, step_error: float | None, stall_error: float | None = None, stall_is_restart: bool = False
) -> str | None:
    """Warn of errors beyond their tolerance, with what to do; None if there are none.

    Args:
        step_error: relative error of the step time; None if it was not predicted.
        stall_error: relative error of the stall; None if it was not predicted.
        stall_is_restart: whether the stall that was predicted is the configured one of a return to a checkpoint.
    """
    off, remedies = [], []
    for name, error, tolerance, remedy in (
        ("step time", step_error, STEP_TOLERANCE, _REPROFILE),
        ("stall", stall_error, STALL_TOLERANCE, _SET_RESTART if stall_is_restart else _REPROFILE),
    ):
        if error is not None and abs(error) > tolerance:
            off.append(f"{name} {abs(error):.1%} off, {tolerance:.0%} is tolerated")
            remedies.append(remedy)
    if not off:
        return None
    return f"prediction not to be trusted: {'; '.join(off)}. To do: {', and '.join(dict.fromkeys(remedies))}"
