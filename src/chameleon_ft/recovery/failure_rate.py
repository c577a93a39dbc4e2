"""How soon the next failure is to be expected, from what was known before the run and what it has seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import ConfigError

__all__ = ["FailureRate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """A Gamma-Poisson estimate of D, the expected time to the next failure.

    Workers are taken to fail independently, all at the same unknown rate. The prior counts like `prior_failures` (w)
    failures seen in w `worker_mtbf_s` worker-seconds; k failures in T worker-seconds come on top. Then

        D = (w worker_mtbf_s + T) / (n (w + k))     for n live workers.

    Which mean this is: with a rate of Gamma(shape 1 + w + k, rate w worker_mtbf_s + T) the wait until the next failure
    has a Lomax distribution, and D is its mean. The mean of the wait is taken, not the wait at the mean rate, because
    samples until the next failure grow in proportion to the wait. (D is also one over the mean rate of a Gamma whose
    shape is smaller by one, so the prior means the same either way: without failures and time, D is worker_mtbf_s / n.)

    Some failures take all workers of a host. Which share of them that is has the mean of a Beta prior, sharpened by the
    h of the k failures that did:

        host_share = (w prior_host_share + h) / (w + k).

    Attributes:
        worker_mtbf_s: mean seconds between failures of one worker, as known beforehand.
        prior_failures: how many failures that knowledge counts like; not necessarily whole.
        prior_host_share: which share of failures takes a whole host, as known beforehand. A quarter is a guess.
        failures: failures seen so far, the latest included. Workers of a host that are lost together are one failure.
        host_failures: those of them that left nobody on a host.
        worker_s: seconds that all workers together have been live.

    Raises:
        ConfigError: a prior that is not positive and finite, a share beyond 0 to 1, or less than nothing seen.
    """

    worker_mtbf_s: float
    prior_failures: float
    prior_host_share: float = 0.25
    failures: int = 0
    host_failures: int = 0
    worker_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("worker_mtbf_s", "prior_failures"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number; got {value}")
        if not 0 <= self.prior_host_share <= 1:
            raise ConfigError(f"prior_host_share must be between 0 and 1; got {self.prior_host_share}")
        if self.failures < 0:
            raise ConfigError(f"failures must be zero or more; got {self.failures}")
        if not 0 <= self.host_failures <= self.failures:
            raise ConfigError(
                f"host_failures must be between 0 and the {self.failures} failures; got {self.host_failures}"
            )
        if not (math.isfinite(self.worker_s) and self.worker_s >= 0):
            raise ConfigError(f"worker_s must be zero or a positive number of seconds; got {self.worker_s}")

    def observed(self, *, failures: int = 0, host_failures: int = 0, worker_s: float = 0.0) -> FailureRate:
        """The estimate after so many more failures, of which so many of whole hosts, and worker-seconds."""
        return replace(
            self,
            failures=self.failures + failures,
            host_failures=self.host_failures + host_failures,
            worker_s=self.worker_s + worker_s,
        )

    @property
    def host_share(self) -> float:
        """Which share of the failures to come takes a whole host, to be expected."""
        return (self.prior_failures * self.prior_host_share + self.host_failures) / (
            self.prior_failures + self.failures
        )

    def fatal_share(self, *, last_holders: int, last_hosts: int, cluster: Cluster) -> float:
        """How probable it is that the next failure takes the last holder of some layer.

        It is taken to be that of any worker or, by `host_share`, of any host. That of the only host is left out: all is
        lost then, whatever the plan.

        Args:
            last_holders: workers that are the only ones to hold some layer; see `Placement.indispensable`.
            last_hosts: hosts whose workers are.
            cluster: the live workers.
        """
        of_a_worker = last_holders / len(cluster.workers)
        hosts = len(set(cluster.hosts.values()))
        if hosts == 1:
            return of_a_worker
        of_a_host = last_hosts / hosts
        return (1 - self.host_share) * of_a_worker + self.host_share * of_a_host

    def horizon_s(self, workers: int) -> float:
        """Seconds until the next failure among so many live workers, to be expected (D).

        Raises ConfigError when there is no worker.
        """
        if workers < 1:
            raise ConfigError(f"somebody must be live to fail; got {workers} workers")
        seen_s = self.prior_failures * self.worker_mtbf_s + self.worker_s
        return seen_s / (workers * (self.prior_failures + self.failures))
