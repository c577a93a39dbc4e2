"""Agreement about the state that workers hold: when the holders last agreed, and which of them make a majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.wire.messages import BadStep
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap, without
from chameleon_ft.quantities import in_ranges, listed


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Holders of layers have different states after `step` updates.

    Attributes:
        odd: worker -> the layers in which it differs from a majority of the witnesses.
        undecided: layers without a majority, among the workers that are not `odd` -> their holders.
    """

    step: int
    odd: Mapping[int, tuple[int, ...]]
    undecided: Mapping[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "odd", FrozenMap(self.odd))
        object.__setattr__(self, "undecided", FrozenMap(self.undecided))

    @property
    def doubted(self) -> frozenset[int]:
        """The workers of which some have a wrong state, but it is not known which."""
        return frozenset(worker for holders in self.undecided.values() for worker in holders)

    def __str__(self) -> str:
        """Return "the state of layers 0-2 after 20 updates differs between workers 0 and 2"."""
        layers = "layer" if len(self.undecided) == 1 else "layers"
        workers = listed("worker", sorted(self.doubted))
        return f"the state of {layers} {in_ranges(self.undecided)} after {self.step} updates differs between {workers}"


@dataclass(frozen=True, slots=True)
class Health:
    """The agreement of the holders of each layer.

    A holder that got its copy of a layer from another one since they last agreed proves nothing: it would have received
    the wrong state, too. So only `witnesses` make up a majority: the holders that have had the layer since then. A
    newcomer that alone differs from the only witness is at fault. There are no witnesses if owners of slices update the
    layer, because they send it to the other holders after every step.

    Attributes:
        agreed: updates after which all holders agreed, or after which the state was loaded.
        witnesses: layer -> the workers that held it then, and still do.
        disagreement: the one for which all workers return to a checkpoint.
        doubted: workers that differed before the last return, since which holders have not agreed.
        skipped: bad steps, whose samples are left out.
        reports: worker -> its reports of bad steps that not all workers have reported yet, oldest first.
        reporting: such a step -> the workers that trained it.
        ending: why the run ends after the present step; empty if it does not.
    """

    agreed: int = 0
    witnesses: Mapping[int, tuple[int, ...]] = FrozenMap({})
    disagreement: Disagreement | None = None
    doubted: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    reports: Mapping[int, tuple[BadStep, ...]] = FrozenMap({})
    reporting: Mapping[int, frozenset[int]] = FrozenMap({})
    ending: str = ""

    def __post_init__(self) -> None:
        for name in ("witnesses", "reports", "reporting"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    def loaded(self, step: int, placement: Placement | None) -> Self:
        """Note that all workers begin with the state after `step` updates, which they have read.

        `placement` is as `ActivePlan.witnesses`.
        """
        return replace(self, agreed=step, witnesses=_holders(placement), disagreement=None)

    def found_equal(self, step: int, placement: Placement | None) -> Self:
        """Note that the holders of all layers agreed after `step` updates; `placement` is as for `loaded`."""
        return replace(self, agreed=step, witnesses=_holders(placement), doubted=frozenset())

    def held_by(self, placement: Placement) -> Self:
        """Note another placement: a worker that gives a layer up proves nothing when it holds it again."""
        holders = _holders(placement)
        return self._with(
            {
                layer: tuple(worker for worker in known if worker in holders.get(layer, ()))
                for layer, known in self.witnesses.items()
            }
        )

    def without(self, worker: int) -> Self:
        """Note that a worker is lost; another process may take its number."""
        return self._with(
            {layer: tuple(each for each in known if each != worker) for layer, known in self.witnesses.items()}
        )

    def reported(self, worker: int, report: BadStep, workers: Collection[int]) -> Self:
        """Note the report of a bad step, which `workers` train. Some of them may report the next one before others."""
        reports = {**self.reports, worker: (*self.reports.get(worker, ()), report)}
        return replace(self, reports=reports, reporting={report.step: frozenset(workers), **self.reporting})

    def reports_of(self, step: int) -> dict[int, BadStep]:
        """Return the reports of a step, by worker."""
        return {worker: each for worker, reports in self.reports.items() for each in reports if each.step == step}

    def without_reports_of(self, step: int) -> Self:
        """Forget a step that is recorded."""
        left = {worker: tuple(each for each in own if each.step != step) for worker, own in self.reports.items()}
        reports = {worker: own for worker, own in left.items() if own}
        return replace(self, reports=reports, reporting=without(self.reporting, step))

    def differs(self, step: int, checksums: Mapping[int, Mapping[int, int]]) -> Disagreement:
        """Find the workers whose state is wrong; `checksums`: of each layer that differs, those of its holders."""
        odd: dict[int, list[int]] = {}
        for layer, found in checksums.items():
            right = self._majority(layer, found)
            for worker, checksum in found.items():
                if right is not None and checksum != right:
                    odd.setdefault(worker, []).append(layer)
        left = {
            layer: {worker: each for worker, each in found.items() if worker not in odd}
            for layer, found in checksums.items()
        }
        undecided = {layer: tuple(sorted(found)) for layer, found in left.items() if len(set(found.values())) > 1}
        return Disagreement(step, {worker: tuple(sorted(odd[worker])) for worker in sorted(odd)}, undecided)

    def _majority(self, layer: int, found: Mapping[int, int]) -> int | None:
        """Return the checksum of more than half of the witnesses of a layer, of two or more or of a single one.

        A single one counts only if no two newcomers agree: these may have a copy from before its state became wrong.
        """
        known = self.witnesses.get(layer, ())
        witnesses = Counter(found[worker] for worker in known if worker in found)
        newcomers = Counter(checksum for worker, checksum in found.items() if worker not in known)
        for checksum, count in witnesses.items():
            least = 1 if set(newcomers.values()) == {1} else 2
            if count >= least and 2 * count > witnesses.total():
                return checksum
        return None

    def _with(self, witnesses: Mapping[int, tuple[int, ...]]) -> Self:
        return self if witnesses == self.witnesses else replace(self, witnesses=witnesses)


def _holders(placement: Placement | None) -> dict[int, tuple[int, ...]]:
    if placement is None:
        return {}
    return {layer: placement.holders(layer) for layer in range(placement.num_layers)}
