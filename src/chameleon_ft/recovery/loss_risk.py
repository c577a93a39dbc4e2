"""The probability that workers or hosts that are lost together are the last with some layer, or its optimizer state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import owners_on_ring


@dataclass(frozen=True, slots=True)
class HolderSets:
    """For each layer the set of groups (workers or hosts) that hold it, counted by size.

    A set that contains another one is left out: losing it loses the other one too.

    Attributes:
        groups: number of groups that can be lost.
        counts: size of a set -> number of different sets of that size.

    Raises:
        PlanError: a set that is empty, or larger than all groups together.
    """

    groups: int
    counts: Mapping[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", FrozenMap(self.counts))
        if any(not 1 <= size <= self.groups or count < 1 for size, count in self.counts.items()):
            raise PlanError(f"sets of 1 to {self.groups} groups hold a layer; got sizes {dict(self.counts)}")

    @classmethod
    def of(cls, layers: Iterable[Iterable[Hashable]], groups: int) -> HolderSets:
        """Return the sets of the groups that hold each layer; `groups` also counts groups that hold nothing."""
        kept: list[frozenset[Hashable]] = []
        for _, same in groupby(sorted({frozenset(layer) for layer in layers}, key=len), key=len):
            # Different sets of one size do not contain each other, and of owners there are thousands.
            kept += [each for each in same if not any(smaller <= each for smaller in kept)]
        return cls(groups, FrozenMap(Counter(map(len, kept))))

    @classmethod
    def of_rows(cls, layers: Iterable[NDArray[np.int64]], groups: int) -> HolderSets:
        """Return the same for arrays of numbers of groups, of which each row is a set and may name a group twice.

        Quick for thousands of rows, which are mostly of one size.
        """
        by_width: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        for layer in layers:
            by_width[layer.shape[1]].append(layer)
        by_size: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        for parts in by_width.values():
            rows = np.sort(np.concatenate(parts), axis=1)
            is_first = np.diff(rows, axis=1, prepend=-1) != 0
            sizes = is_first.sum(axis=1)
            for size in np.flatnonzero(np.bincount(sizes)).tolist():
                of_size = sizes == size
                by_size[size].append(rows[of_size][is_first[of_size]].reshape(-1, size))
        found = {size: _distinct(np.concatenate(parts)) for size, parts in by_size.items()}
        if len(found) == 1:
            return cls(groups, FrozenMap({size: len(rows) for size, rows in found.items()}))
        return cls.of((row for rows in found.values() for row in rows.tolist()), groups)

    @property
    def singles(self) -> int:
        """Return the number of groups that are the only holder of some layer."""
        return self.counts.get(1, 0)

    @property
    def share_per_peer(self) -> float:
        """Return the share of a lost worker's load that each of its peers takes over, if the groups are workers.

        The mean over the places in all sets: 1 / (h - 1) for a set of h workers. A worker that is the only holder of
        some layer has no peers, and is left out.
        """
        shared = {size: count * size for size, count in self.counts.items() if size > 1}
        workers = sum(shared.values())
        return sum(each / (size - 1) for size, each in shared.items()) / workers if workers else 0.0

    def hits(self, most: int) -> list[float]:
        """Return, for 0 to `most` groups lost at random, upper bounds of the probability that they include a set.

        Exact for sets of one group. If none of these is hit, the union bound adds up the others, each with the
        hypergeometric probability that all of its groups are lost:

            P = 1 - a + a min(1, sum over sets of h groups of C(m - h, k - h) / C(m, k)),   a = C(m, k) / C(n, k)

        for k lost of n groups, m of which are no set of their own. Also exact if the sets do not overlap and k is less
        than the size of any two of them together.
        """
        others = self.groups - self.singles
        found, spared = [0.0], 1.0
        for lost in range(1, most + 1):
            if lost > others:
                found.append(1.0 if self.counts else 0.0)
                continue
            spared *= (others - lost + 1) / (self.groups - lost + 1)
            rest = sum(count * _all_lost(size, lost, others) for size, count in self.counts.items() if 1 < size <= lost)
            found.append(1.0 - spared * (1.0 - min(1.0, rest)))
        return found


def _all_lost(size: int, lost: int, groups: int) -> float:
    """Return the probability that `size` given groups are all among `lost` ones, at least as many, drawn at random."""
    probability = 1.0
    for each in range(size):
        probability *= (lost - each) / (groups - each)
    return probability


def _distinct(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the different rows of numbers from zero on."""
    base, width = int(rows.max()) + 1, rows.shape[1]
    if base**width > np.iinfo(np.int64).max:
        return np.unique(rows, axis=0)
    # One number for each row: sorting numbers is quicker than sorting rows, and than the hash table of `unique`.
    places = base ** np.arange(width)
    codes = np.sort(rows @ places)
    distinct: NDArray[np.int64] = codes[np.diff(codes, prepend=-1) != 0, np.newaxis] // places % base
    return distinct


@dataclass(frozen=True, slots=True)
class LossRisk:
    """The workers and hosts with which layers, or slices of their optimizer state, are lost under a plan.

    Attributes:
        workers: sets of workers that keep some layer, or some slice.
        hosts: sets of hosts that do; None if all workers are on one host, whose loss no plan survives.
        share_per_peer: see `HolderSets.share_per_peer`; of the holders of layers.
    """

    workers: HolderSets
    hosts: HolderSets | None
    share_per_peer: float = 0.0

    @classmethod
    def of(cls, holders: Collection[Collection[int]], hosts: Mapping[int, str], owners: int | None = None) -> LossRisk:
        """Return the risk of layers.

        Args:
            holders: for each layer, the workers that hold it.
            hosts: the host of each live worker, including workers that hold nothing.
            owners: of a slice of a layer's optimizer state, in a new layout of slices; None: each holder has all of it.
        """
        numbers = host_numbers(hosts)
        rings = [by_host(np.array(sorted(layer), dtype=np.int64), numbers) for layer in holders]
        num_hosts = len(set(hosts.values()))
        return cls.of_rings(rings, numbers, num_workers=len(hosts), num_hosts=num_hosts, owners=owners)

    @classmethod
    def of_rings(
        cls,
        rings: Sequence[NDArray[np.int64]],
        numbers: NDArray[np.int64],
        *,
        num_workers: int,
        num_hosts: int,
        owners: int | None,
    ) -> LossRisk:
        """Return the risk of layers whose holders are arrays, as `by_host` orders them.

        Quick for thousands of workers.

        Args:
            rings: for each layer, the workers that hold it.
            numbers: `host_numbers` of these workers, and maybe of others.
            num_workers, num_hosts: that can be lost.
            owners: see `of`.
        """
        own = HolderSets.of((ring.tolist() for ring in rings), num_workers)
        of_workers, on_hosts = own, None
        if owners is not None:
            owned = [owners_on_ring(ring, owners) for ring in rings]
            of_workers = HolderSets.of_rows(owned, num_workers)
            if num_hosts > 1:
                on_hosts = HolderSets.of_rows((numbers[each] for each in owned), num_hosts)
        elif num_hosts > 1:
            on_hosts = HolderSets.of((numbers[ring].tolist() for ring in rings), num_hosts)
        return cls(workers=of_workers, hosts=on_hosts, share_per_peer=own.share_per_peer)


def host_numbers(hosts: Mapping[int, str]) -> NDArray[np.int64]:
    """Return, by worker, the number of its host: its position among the sorted names. Of other workers, zero."""
    number_of = {name: number for number, name in enumerate(sorted(set(hosts.values())))}
    found = np.zeros(max(hosts, default=-1) + 1, dtype=np.int64)
    found[list(hosts)] = [number_of[host] for host in hosts.values()]
    return found


def by_host(workers: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ascending workers in the order of their hosts, as `owners_on_ring` takes them."""
    return workers[np.argsort(numbers[workers], kind="stable")]


def risk_of(placement: Placement, hosts: Mapping[int, str], owners: int | None = None) -> LossRisk:
    """Return the risk of a placement in which every layer has a holder; see `LossRisk.of`."""
    return LossRisk.of({placement.holders(layer) for layer in range(placement.num_layers)}, hosts, owners)
