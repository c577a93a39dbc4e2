"""A learned model of failures: their rate, their number at a time, and the gaps between them.

The model has three parts, each a conjugate estimate that starts from prior knowledge and is updated by the failures of
the run:

- **Rate** of incidents: Gamma-Poisson, with a prior over several orders of magnitude, see `FailureModel.waits`.
- **Size** of an incident, in simultaneous failures: a power law with a learned exponent, `size_shares`. Each failure
  takes one worker or, with probability `host_failure_fraction`, a whole host.
- **Gap** to the next incident: a mixture of bursts and quiet, `gap`. Right after an incident another one of the same
  burst may follow; otherwise the wait is that of a Poisson process of unknown rate.

The prior mean of the exponent lies between two measured values, 3.9 of a production cluster and 2.7 of spot instances;
the prior share of bursts is that of the production cluster (docs/traces.md). `LossRisk` gives the probability that
workers or hosts that are lost together are the last with some layer, or its optimizer state.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.errors import ConfigError, PlanError
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
            owners: The number of owners of a slice of a layer's optimizer state in a new layout; None if each has
                all of it.
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
    """Return the risk of a placement in which every layer has a holder.

    Args:
        placement: The holders of the layers.
        hosts: The host of each live worker, including workers that hold nothing.
        owners: See `LossRisk.of_rings`.
    """
    numbers, num_hosts = host_numbers(hosts), len(set(hosts.values()))
    holders = {placement.holders(layer) for layer in range(placement.num_layers)}
    rings = [by_host(np.array(sorted(layer), dtype=np.int64), numbers) for layer in holders]
    return LossRisk.of_rings(rings, numbers, num_workers=len(hosts), num_hosts=num_hosts, owners=owners)


# Incidents with shorter gaps may belong to one burst.
_BURST_S: Final = 300.0

_LARGEST: Final = 64
_EXPONENTS: Final = tuple(2 + number / 4 for number in range(25))
_EXPONENT_MEAN: Final = 3.3
_EXPONENT_SPREAD: Final = 0.75
_TOTALS: Final = tuple(math.fsum(size**-each for size in range(1, _LARGEST + 1)) for each in _EXPONENTS)
# Components of the prior of the rate: (weight, share of `worker_mtbf_s`).
_PRIORS: Final = ((0.6, 1.0), (0.1, 1e-1), (0.1, 1e-2), (0.1, 1e-3), (0.1, 1e-4))
# Beyond these, products and sums of both leave the range or the precision of a float.
_MIN_PRIOR: Final = 1e-9
_MAX_PRIOR: Final = 1e18
_PRIOR_MEAN: Final = math.fsum(weight * share for weight, share in _PRIORS)
# Share of incidents followed by another of the same burst. In the InfiniteHBD trace an incident has 0.13
# failures beyond the first on average, and 0.35 of these come later than the first.
_PRIOR_BURST_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Wait:
    """A Lomax distribution: the wait for an event whose rate has a Gamma distribution.

    Attributes:
        weight: probability of this component of a mixture.
        shape: above 1, so that the mean is finite.
        scale_s: seconds.
    """

    weight: float
    shape: float
    scale_s: float

    @property
    def mean_s(self) -> float:
        """Return the mean in seconds."""
        return self.scale_s / (self.shape - 1)

    def within(self, seconds: float) -> float:
        """Return P(wait < seconds)."""
        return -math.expm1(-self.shape * math.log1p(seconds / self.scale_s))

    def left_after(self, seconds: float) -> float:
        """Return E[max(0, wait - seconds)], the integral of the survival function from `seconds` on."""
        return self.mean_s * math.exp((1 - self.shape) * math.log1p(seconds / self.scale_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Distribution of the seconds until the next incident: a mixture of an exponential one and of Lomax ones.

    Attributes:
        burst_share: probability that the next incident belongs to the burst of the last one.
        burst_s: mean seconds until the next incident in that case.
        quiet: the wait otherwise; its weights add up to 1.
    """

    burst_share: float
    burst_s: float
    quiet: tuple[Wait, ...]

    def within(self, seconds: float) -> float:
        """Return P(gap < seconds)."""
        quiet = math.fsum(wait.weight * wait.within(seconds) for wait in self.quiet)
        return quiet + self.burst_share * (-math.expm1(-seconds / self.burst_s) - quiet)

    def left_after(self, seconds: float) -> float:
        """Return E[max(0, gap - seconds)], the integral of the survival function from `seconds` on."""
        quiet_s = math.fsum(wait.weight * wait.left_after(seconds) for wait in self.quiet)
        return quiet_s + self.burst_share * (self.burst_s * math.exp(-seconds / self.burst_s) - quiet_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """The failure model as a value; `observed` returns an updated one.

    Attributes:
        worker_mtbf_s: prior mean seconds between failures of one worker.
        prior_failures: weight of the prior, in observed failures; may be fractional.
        prior_host_failure_fraction: prior share of failures that take a whole host; the default is a guess.
        failures: observed failures, including the latest. Workers lost together with their host are one failure.
        host_failures: failures that left no worker on a host.
        worker_s: live time of all workers together, in worker-seconds.
        together: incidents of two or more simultaneous failures: number of failures -> number of incidents. Each
            other failure is an incident of its own.
        bursts: incidents less than 300 s after the previous one.

    Raises:
        ConfigError: a prior is not positive and finite, a share is outside 0 to 1, or counts contradict each other.
    """

    worker_mtbf_s: float
    prior_failures: float
    prior_host_failure_fraction: float = 0.25
    failures: int = 0
    host_failures: int = 0
    worker_s: float = 0.0
    together: Mapping[int, int] = field(default_factory=lambda: FrozenMap({}))
    bursts: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "together", FrozenMap(self.together))
        for name in ("worker_mtbf_s", "prior_failures"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number; got {value}")
            if not _MIN_PRIOR <= value <= _MAX_PRIOR:
                raise ConfigError(f"{name} must be between {_MIN_PRIOR:g} and {_MAX_PRIOR:g}; got {value}")
        if not 0 <= self.prior_host_failure_fraction <= 1:
            raise ConfigError(
                f"prior_host_failure_fraction must be between 0 and 1; got {self.prior_host_failure_fraction}"
            )
        if self.failures < 0:
            raise ConfigError(f"failures must be zero or more; got {self.failures}")
        if not 0 <= self.host_failures <= self.failures:
            limits = f"between 0 and the {self.failures} failures"
            raise ConfigError(f"host_failures must be {limits}; got {self.host_failures}")
        if not (math.isfinite(self.worker_s) and self.worker_s >= 0):
            raise ConfigError(f"worker_s must be zero or a positive number of seconds; got {self.worker_s}")
        if any(size < 2 or count < 1 for size, count in self.together.items()):
            raise ConfigError(f"together must count incidents of two failures or more; got {dict(self.together)}")
        if sum(size * count for size, count in self.together.items()) > self.failures:
            raise ConfigError(f"together {dict(self.together)} has more than the {self.failures} failures")
        if not 0 <= self.bursts <= self.incidents:
            raise ConfigError(f"bursts must be between 0 and the {self.incidents} incidents; got {self.bursts}")

    def observed(
        self, *, failures: int = 0, host_failures: int = 0, worker_s: float = 0.0, gap_s: float = math.inf
    ) -> FailureModel:
        """Return the model after more worker-seconds, and one more incident if there are failures.

        Args:
            failures: failures of the incident; zero if there was none.
            host_failures: the failures among these that took a whole host.
            worker_s: live time of all workers together since the last update, in worker-seconds.
            gap_s: seconds since the previous incident; infinite for the first.
        """
        together = self.together
        if failures > 1:
            together = FrozenMap({**together, failures: together.get(failures, 0) + 1})
        return replace(
            self,
            failures=self.failures + failures,
            host_failures=self.host_failures + host_failures,
            worker_s=self.worker_s + worker_s,
            together=together,
            bursts=self.bursts + (failures > 0 and gap_s < _BURST_S),
        )

    def to_json(self) -> dict[str, object]:
        """Return all fields as JSON values; `from_json` is the inverse."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"together": {str(size): count for size, count in sorted(self.together.items())}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FailureModel:
        """Return the model from the values of `to_json`."""
        return cls(**{**values, "together": {int(size): count for size, count in values["together"].items()}})

    @property
    def incidents(self) -> int:
        """Return the number of incidents; simultaneous failures are one."""
        return self.failures - sum((size - 1) * count for size, count in self.together.items())

    @property
    def host_failure_fraction(self) -> float:
        """Return the expected share of future failures that take a whole host: the mean of a Beta distribution."""
        return (self.prior_failures * self.prior_host_failure_fraction + self.host_failures) / (
            self.prior_failures + self.failures
        )

    def horizon_s(self, workers: int) -> float:
        """Return D, the mean of `waits`: the expected seconds until the next incident among `workers`.

        It is the mean wait, not the wait at the mean rate, because samples are proportional to the wait.
        Before any observation, it is `worker_mtbf_s` / `workers`. Raises ConfigError if there is no worker.
        """
        return math.fsum(wait.weight * wait.mean_s for wait in self.waits(workers))

    def waits(self, workers: int) -> tuple[Wait, ...]:
        """Return the wait for the next incident among so many live workers: a mixture with weights that add up to 1.

        A prior worth w = `prior_failures` incidents in w m worker-seconds is a Gamma distribution of a
        worker's failure rate with shape 1 + w and rate w m. After k incidents in T worker-seconds, the wait for the
        next one among n workers has a Lomax distribution with shape 1 + w + k and scale (w m + T) / n.

        The prior is a mixture of these with m a decade apart, because clusters differ by orders of magnitude: spot
        instances fail a thousand times as often as others. The component of m = `worker_mtbf_s`, times a factor that
        keeps the mean, has most of the weight, and loses it after one or two incidents that come far too soon (a robust
        prior: Schmidli et al., Biometrics 70, 2014).

        Raises ConfigError if there is no worker.
        """
        if workers < 1:
            raise ConfigError(f"there is no worker that could fail; got {workers} workers")
        shape = 1 + self.prior_failures
        logs, scales_s = [], []
        for weight, share in _PRIORS:
            prior_s = self.prior_failures * self.worker_mtbf_s * share / _PRIOR_MEAN
            scales_s.append(prior_s + self.worker_s)
            # The likelihood of the observations: negative binomial, without factors common to all components.
            logs.append(
                math.log(weight) - shape * math.log1p(self.worker_s / prior_s) - self.incidents * math.log(scales_s[-1])
            )
        return tuple(
            Wait(weight, shape + self.incidents, scale_s / workers)
            for weight, scale_s in zip(_normalized(logs), scales_s, strict=True)
        )

    def size_shares(self, most: int) -> tuple[float, ...]:
        """Return the probabilities of 1, 2, ... failures in the next incident, up to `most`.

        They fall as n ** -a up to n = 64, and are means over the posterior of a, whose prior is normal with mean 3.3
        and standard deviation 0.75, on a grid. The heavy tail is inferred, because large incidents cost most and are
        too rare to count. Larger incidents are left out, so the sum may be below 1.
        """
        logs = math.fsum(count * math.log(min(size, _LARGEST)) for size, count in self.together.items())
        return _size_shares(self.incidents, logs)[:most]

    def gap(self, workers: int, *, after_incident: bool) -> Gap:
        """Return the distribution of the seconds until the next incident among so many live workers.

        Right after an incident, the next one belongs to the same burst with probability b. The share of gaps below
        300 s, a Beta estimate, is b plus the share of the other gaps that `waits` explains. The mean of the mixture
        stays D. At any other moment there is no burst.

        Args:
            workers: number of live workers.
            after_incident: True if an incident has just happened.
        """
        horizon_s = self.horizon_s(workers)
        burst_s = min(_BURST_S / 2, horizon_s)
        steady = Gap(burst_share=0.0, burst_s=burst_s, quiet=self.waits(workers))
        if not after_incident:
            return steady
        share = self._burst_share(steady.within(_BURST_S))
        longer = (1 - share * burst_s / horizon_s) / (1 - share)
        quiet = tuple(replace(wait, scale_s=wait.scale_s * longer) for wait in steady.quiet)
        return Gap(burst_share=share, burst_s=burst_s, quiet=quiet)

    def _burst_share(self, by_chance: float) -> float:
        """Return b = 1 - (share of gaps above 300 s) / (1 - `by_chance`), the share of short gaps by chance."""
        if by_chance >= 1:
            return 0.0
        later = (self.incidents - self.bursts) / (1 - by_chance)
        prior = (1 - _PRIOR_BURST_SHARE) * self.prior_failures
        return max(0.0, 1 - (prior + later) / (self.prior_failures + self.incidents))

    def fatal_probability(self, risk: LossRisk) -> float:
        """Return an upper bound of the probability that the next incident takes all holders of some layer.

        Incidents that take all hosts or all workers are excluded, because no plan survives them. The bound is exact for
        layers with one holder; see `LossRisk`.
        """
        of_hosts = 0.0 if risk.hosts is None else self.host_failure_fraction
        total = 0.0
        for sets, part in ((risk.workers, 1 - of_hosts), (risk.hosts, of_hosts)):
            if sets is None or not part:
                continue
            shares = self.size_shares(sets.groups - 1)
            hits = sets.hits(len(shares))[1:]
            total += part * math.fsum(share * hit for share, hit in zip(shares, hits, strict=True))
        return total

    def total_loss_probability(self, risk: LossRisk) -> float:
        """Return the probability that the next incident takes all workers or all hosts, whatever the plan."""
        hosts = 1 if risk.hosts is None else risk.hosts.groups
        # The shares of all sizes sum to 1 up to rounding.
        total = [max(0.0, 1 - math.fsum(self.size_shares(groups - 1))) for groups in (risk.workers.groups, hosts)]
        return (1 - self.host_failure_fraction) * total[0] + self.host_failure_fraction * total[1]


@lru_cache(maxsize=64)
def _size_shares(incidents: int, logs: float) -> tuple[float, ...]:
    """Return the probabilities of each size, given the number of incidents and the sum of the logarithms of sizes."""
    weights = _normalized(
        [
            -0.5 * ((each - _EXPONENT_MEAN) / _EXPONENT_SPREAD) ** 2 - each * logs - incidents * math.log(total)
            for each, total in zip(_EXPONENTS, _TOTALS, strict=True)
        ]
    )
    scaled = [weight / total for weight, total in zip(weights, _TOTALS, strict=True)]
    return tuple(
        math.fsum(weight * size**-each for weight, each in zip(scaled, _EXPONENTS, strict=True))
        for size in range(1, _LARGEST + 1)
    )


def _normalized(logs: list[float]) -> list[float]:
    """Return weights with these logarithms, scaled so that they add up to 1."""
    largest = max(logs)
    weights = [math.exp(each - largest) for each in logs]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]
