"""Mixes of pipelines on real workers, and which of them a lost host leaves whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from chameleon_ft.search._placed import PlacedPipeline
from chameleon_ft.search._sync import largest_host
from chameleon_ft.search._timed import Timer


@dataclass(frozen=True, slots=True)
class PlacedMix:
    """A mix on real workers.

    Attributes:
        pipelines: all of it.
        timer: that its pipelines come from.
        step_s: seconds until all operations have ended and all gradients are reduced.
    """

    pipelines: tuple[PlacedPipeline, ...]
    timer: Timer
    step_s: float

    @property
    def survives_hosts(self) -> bool:
        """Whether every layer is left to somebody, whichever host is lost."""
        cluster = self.timer.costs.cluster
        if len(self.pipelines) > largest_host(cluster):
            return True
        by_worker = cluster.hosts
        hosts_of_layers = [set[str]() for _ in self.timer.costs.workload.layers]
        for each in self.pipelines:
            for worker, (start, stop) in zip(each.workers, pairwise((0, *each.timed.stops)), strict=True):
                for layer in range(start, stop):
                    hosts_of_layers[layer].add(by_worker[worker])
        return all(len(hosts) > 1 for hosts in hosts_of_layers)


def with_survivor(chosen: Sequence[PlacedMix], placed: Sequence[PlacedMix]) -> list[PlacedMix]:
    """What was chosen, and if none of it survives the loss of every host, the first of all that does."""
    if any(each.survives_hosts for each in chosen):
        return list(chosen)
    return [*chosen, *islice((each for each in placed if each.survives_hosts), 1)]
