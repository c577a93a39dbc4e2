"""The losses and the cluster of each scenario of `benchmarks.policies`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

PP: Final = 4
_HOST: Final = 8
_BACK_AFTER: Final = 0.1  # of the window
_LOADED_AFTER: Final = 0.15  # of the window, when it is sure to be there again
_FIXED_AT: Final = 0.1  # of the window
_LOSSES_UNTIL: Final = 0.8  # of the window: what follows the last one is to be seen
_RATES: Final = {"rare": 1, "medium": 3, "frequent": 7}
_BURSTS: Final = {"rare": 1, "medium": 2, "frequent": 4}


@dataclass(frozen=True, slots=True)
class Loss:
    """Workers that are killed at once, in seconds after the start of the window."""

    at_s: float
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Frequency and kind of losses, and the cluster.

    Attributes:
        about: description.
        events: losses in a window, at times drawn uniformly from its first four fifths: a Poisson process, given the
            number of its events.
        burst: workers of one host that are lost in each of them.
        returns: whether a lost worker is restarted, a tenth of the window later.
        fixed: the workers that are lost, all at once after a tenth of the window, if nothing is drawn.
        hosts_hold: the initial placement on a host: all stages of some pipelines, or one stage of all.
        inter_host_bytes_per_s: bandwidth between hosts; that of the profile if None.
        split_backward: whether the run starts with split backward.
        realistic: whether the docs describe and justify it.
    """

    name: str
    about: str
    events: int = 1
    burst: int = 1
    returns: bool = False
    fixed: tuple[int, ...] = ()
    hosts_hold: Literal["pipelines", "stages"] = "pipelines"
    inter_host_bytes_per_s: float | None = None
    split_backward: bool = True
    realistic: bool = False

    def back_after_s(self, duration_s: float) -> float:
        """Return the seconds until a lost worker is restarted, in a window of `duration_s`."""
        return _BACK_AFTER * duration_s

    def worker_mtbf_s(self, *, workers: int, duration_s: float) -> float | None:
        """Return the true seconds between two failures of one worker; None for the default.

        Workers of a host that are lost together are one failure.
        """
        return None if self.fixed else duration_s * workers / self.events


def _matrix() -> list[Scenario]:
    found = []
    for rate, singles in _RATES.items():
        for burst in (1, 3):
            for returns in (False, True):
                events = singles if burst == 1 else _BURSTS[rate]
                what = "single loss" if burst == 1 else f"loss of {burst} workers of a host"
                many = f"1 {what}" if events == 1 else f"{events} {what.replace('loss', 'losses')}"
                words = (rate, *(["bursts"] if burst > 1 else []), *(["returning"] if returns else []))
                found.append(
                    Scenario(
                        name="-".join(words),
                        about=f"{many}{', back after a tenth of the window' if returns else ''}",
                        events=events,
                        burst=burst,
                        returns=returns,
                    )
                )
    return found


def _half_host(*, returns: bool) -> Scenario:
    """Return the scenario in which half of a host is lost: four of its eight workers, behind one socket.

    A host holds one stage if data-parallel ranks have successive numbers, as in Megatron-LM.
    """
    return Scenario(
        name=f"half-host{'-returning' if returns else ''}",
        about="4 workers of one stage lost with half of their host, 100 Gbit/s between hosts"
        + (", back after a tenth of the window" if returns else ""),
        fixed=(8, 9, 10, 11),
        burst=4,
        returns=returns,
        hosts_hold="stages",
        inter_host_bytes_per_s=12.5e9,
        realistic=True,
    )


SCENARIOS: Final = {
    each.name: each
    for each in (
        *(Scenario(name=f"one-loss-{stage}", about=f"1 of stage {stage} lost", fixed=(stage,)) for stage in range(PP)),
        *_matrix(),
        _half_host(returns=False),
        _half_host(returns=True),
    )
}
"""All scenarios by name."""


def pipelines(scenario: Scenario, workers: int) -> list[int]:
    """Return the workers by pipeline and stage; workers of a host have successive numbers."""
    dp = workers // PP
    if scenario.hosts_hold == "pipelines":
        return list(range(workers))
    return [stage * dp + pipeline for pipeline in range(dp) for stage in range(PP)]


def schedule(scenario: Scenario, *, workers: int, duration_s: float, seed: int) -> tuple[Loss, ...]:
    """Draw workers and times of the losses, deterministically.

    At most half of the workers are lost at a time; further losses are omitted.
    """
    if scenario.fixed:
        return (Loss(_FIXED_AT * duration_s, tuple(worker % workers for worker in scenario.fixed)),)
    draw = random.Random(f"{seed} {scenario.name.removesuffix('-returning')}")
    losses: list[Loss] = []
    gone: dict[int, float] = {}
    for at_s in sorted(draw.uniform(0, _LOSSES_UNTIL * duration_s) for _ in range(scenario.events)):
        up = [worker for worker in range(workers) if gone.get(worker, 0.0) <= at_s]
        lost = _of_one_host(draw, up, min(scenario.burst, len(up) - workers // 2))
        for worker in lost:
            gone[worker] = at_s + _LOADED_AFTER * duration_s if scenario.returns else float("inf")
        if lost:
            losses.append(Loss(at_s, lost))
    return tuple(losses)


def _of_one_host(draw: random.Random, up: Sequence[int], count: int) -> tuple[int, ...]:
    if count < 1:
        return ()
    first = draw.choice(up)
    others = [worker for worker in up if worker // _HOST == first // _HOST and worker != first]
    return tuple(sorted([first, *draw.sample(others, min(count - 1, len(others)))]))
