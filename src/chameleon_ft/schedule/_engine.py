"""The list scheduler's runs: under which rules, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule._records import Floats, Integers

# With this patience and free messages the split schedule of a plain pipeline under the default limits meets its bound
# for every ratio of F, I and W that the tests try.
_PATIENCE: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How workers decide.

    Attributes:
        in_flight, kept: limits by worker index, as in `InFlightLimit`.
        forward_first: whether a forward goes before a backward when both are ready and the limits allow it.
        patience: a worker puts a weight gradient off when a tensor that it can use arrives before this share of it
            would be done.
        gradients_only: whether only gradients may be run ahead of a full channel. Then workers hold each other back in
            one direction only, which leaves fewer choices but hardly ever a dead end.
    """

    in_flight: tuple[int, ...]
    kept: tuple[int, ...]
    forward_first: bool
    patience: float = _PATIENCE
    gradients_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """What each worker runs, and how long it takes.

    Attributes:
        network: what is scheduled.
        codes: of all operations, worker by worker, in order.
        ends_s: by code, in a replay, where nobody is held back.
        step_s: the latest of these.
        strained: whether some worker was denied an operation, or went beyond a limit because nobody could go on, though
            not only gradients might be run ahead.
        beyond_limits: whether the latter happened.
        dead_end: whether other rules had come to a dead end before.
    """

    network: Network
    codes: Integers
    ends_s: Floats
    step_s: float
    strained: bool = False
    beyond_limits: bool = False
    dead_end: bool = False

    @property
    def orders(self) -> list[Integers]:
        """Codes of operations by worker index, in order."""
        return [self.codes[start:stop] for start, stop in pairwise(self.network.first.tolist())]

    @property
    def last_s(self) -> list[float]:
        """By worker index, the end of its last operation; zero for one that has none."""
        ends = self.network.first
        last = self.ends_s[self.codes[np.maximum(ends[1:], 1) - 1]]
        found: list[float] = np.where(ends[1:] > ends[:-1], last, 0.0).tolist()
        return found


def run(network: Network, rules: Rules, ways: Integers) -> Schedule | None:
    """The schedule under `rules`, or None at a dead end: see the kernel. `ways` says which route goes first."""
    # Here, as everywhere, because to import a kernel loads numba, and most who import this run none.
    from chameleon_ft.schedule._kernels.engine import scheduled

    found = scheduled(
        network.slots,
        network.channels,
        ways,
        in_flight=np.array(rules.in_flight),
        kept=np.array(rules.kept),
        split=network.split_backward,
        forward_first=rules.forward_first,
        patience=rules.patience,
        gradients_only=rules.gradients_only,
    )
    if found is None:
        return None
    return replace(replayed(network, found.codes), strained=found.strained, beyond_limits=found.beyond_limits)


def replayed(network: Network, codes: Integers) -> Schedule:
    """The schedule with these codes of all operations, worker by worker."""
    from chameleon_ft.schedule._kernels.replays import longest_path

    ends_s = longest_path(network.operations, codes, network.first)[1]
    return Schedule(network=network, codes=codes, ends_s=ends_s, step_s=float(ends_s.max()))
