"""The checkpoints of a run: what ranks report about them, and when the next one is written.

When the next checkpoint is written, if the run chooses that itself.

The snapshots in the memory of workers: the complete one, and the one that is being taken.

Agreement about the state that workers hold: when the holders last agreed, and which of them make a majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap, without
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.snapshots import Restoration, SnapshotLayout
from chameleon_ft.protocol.messages import LEFT_OUT, BadStep, CheckpointSaved, SlowIO
from chameleon_ft.quantities import in_ranges, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSchedule:
    """The coordinator requests a checkpoint, which ranks begin after the first step at whose vote all know the request.

    The first one is requested at once, because it measures the cost; later ones after `interval_s`.

    Attributes:
        request: number of the newest request.
        is_requested: True while ranks have not begun the checkpoint of that request.
        is_wanted: True if a user has asked for a checkpoint that ranks have not begun.
        writing: resume step of the checkpoint that is being written; None if there is none.
        since_s: seconds of steps since the newest checkpoint, that one included.
        unsaved_s: seconds of steps since the newest complete checkpoint.
        slowed_s: seconds by which steps took longer while the checkpoint was written.
        cost_s: seconds that the newest checkpoint cost training; None before the first.
        interval_s: seconds of steps between two checkpoints; None until it is computed from the cost.
        is_warned: whether it was considered to warn that the run writes none.
    """

    request: int = 0
    is_requested: bool = False
    is_wanted: bool = False
    writing: int | None = None
    since_s: float = 0.0
    unsaved_s: float = 0.0
    slowed_s: float = 0.0
    cost_s: float | None = None
    interval_s: float | None = None
    is_warned: bool = False

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is to be requested now."""
        if self.is_requested or self.is_wanted:
            return not self.is_requested
        if self.interval_s is None:
            return self.cost_s is None and self.writing is None
        return self.since_s >= self.interval_s

    def requested(self) -> Self:
        """Note that a checkpoint is requested."""
        return replace(self, request=self.request + 1, is_requested=True)

    def committed(self, step_s: float, *, usual_s: float, begun: int | None) -> Self:
        """Note a committed step.

        Args:
            step_s: its seconds.
            usual_s: seconds of recent steps.
            begun: resume step of the checkpoint that ranks begin after it, if they do.
        """
        after = replace(self, since_s=self.since_s + step_s, unsaved_s=self.unsaved_s + step_s)
        if begun is not None:
            return replace(after.begun(), writing=begun, since_s=0.0, slowed_s=0.0)
        return after if self.writing is None else replace(after, slowed_s=self.slowed_s + step_s - usual_s)

    def begun(self) -> Self:
        """Note that ranks have begun a checkpoint, which every request before it asked for."""
        return replace(self, is_requested=False, is_wanted=False)

    def ended(self, step: int, *, copy_s: float, is_complete: bool) -> Self:
        """Note that the checkpoint of a step is complete, or could not be written.

        `copy_s`: seconds for which training stopped to copy layers.
        """
        unsaved_s = self.since_s if is_complete else self.unsaved_s
        if step != self.writing:
            return replace(self, unsaved_s=unsaved_s)
        cost_s = copy_s + max(0.0, self.slowed_s)
        return replace(self, writing=None, unsaved_s=unsaved_s, cost_s=cost_s, interval_s=None)

    def interrupted(self) -> Self:
        """Note a loss: what was requested is void, and a checkpoint that was being written may never be complete."""
        since_s = self.since_s if self.writing is None else self.unsaved_s
        return replace(self, is_requested=False, writing=None, since_s=since_s, interval_s=None)

    def returned(self) -> Self:
        """Note a return to a checkpoint."""
        return replace(self.interrupted(), since_s=0.0, unsaved_s=0.0)


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """The layers of a checkpoint that are on disk."""

    layers: frozenset[int] = frozenset()
    # (layer, first unit, unit after the last)
    slices: frozenset[tuple[int, int, int]] = frozenset()
    # The name of each layer's and slice's folder -> the digest of its content.
    seals: Mapping[str, str] = FrozenMap({})
    # For this time training paused: the longest that a rank took to copy its layers.
    copy_s: float = 0.0
    # The slowest rank took this time to write its copy in the background.
    write_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seals", FrozenMap(self.seals))

    def covers_all(self, num_layers: int) -> bool:
        """Return whether the slices leave nothing out of any layer; they may overlap after a change of owners."""
        ends = dict.fromkeys(range(num_layers), 0)
        for layer, start, stop in sorted(self.slices):
            if start <= ends[layer]:
                ends[layer] = max(ends[layer], stop)
        return all(end == UNITS for end in ends.values())


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Assembles checkpoints from the parts that ranks write, and remembers failures that were recorded."""

    # By the step with which an incomplete checkpoint resumes.
    parts: Mapping[int, CheckpointParts] = FrozenMap({})
    # Parts of earlier generations are ignored: their state was discarded.
    first_generation: int = 0
    # The step of a checkpoint that could not be written -> why.
    failed: Mapping[int, str] = FrozenMap({})
    # Reports of slow disks.
    slow: frozenset[SlowIO] = frozenset()
    # The step of a complete checkpoint that is not read again -> why.
    unreadable: Mapping[int, str] = FrozenMap({})
    # The last generation that began by loading a state.
    loads: int = 0
    # Whether workers are to load a checkpoint, because their state is wrong or could not be read.
    is_reread: bool = False
    # The step of the newest complete checkpoint of this run.
    newest: int | None = None
    # How many since then could not be written.
    missed: int = 0
    schedule: CheckpointSchedule = field(default_factory=CheckpointSchedule)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", FrozenMap(self.parts))
        object.__setattr__(self, "failed", FrozenMap(self.failed))
        object.__setattr__(self, "unreadable", FrozenMap(self.unreadable))

    def saved(
        self, part: CheckpointSaved, *, num_layers: int, has_slices: bool = False
    ) -> tuple[Self, CheckpointParts | None]:
        """Add a written part; also return the checkpoint if this part completes it."""
        old = self.parts.get(part.step, CheckpointParts())
        new = CheckpointParts(
            old.layers.union(part.layers),
            old.slices.union(part.slices),
            {**old.seals, **dict(part.seals)},
            max(old.copy_s, part.copy_s),
            max(old.write_s, part.write_s),
        )
        if len(new.layers) < num_layers or (has_slices and not new.covers_all(num_layers)):
            return replace(self, parts={**self.parts, part.step: new}), None
        written = replace(
            self,
            parts=without(self.parts, part.step),
            unreadable=without(self.unreadable, part.step),
            newest=part.step,
            missed=0,
            schedule=self.schedule.ended(part.step, copy_s=new.copy_s, is_complete=True),
        )
        return written, new

    def not_written(self, step: int, why: str) -> Self:
        """Note that a checkpoint could not be written; the first reason counts."""
        is_new = step not in self.failed and why != LEFT_OUT
        return replace(self, failed={step: why, **self.failed}, missed=self.missed + is_new)

    def describe_newest(self) -> str:
        """Return since when no checkpoint is complete."""
        return "no checkpoint of this run is complete" + ("" if self.newest is None else f" since step {self.newest}")

    def repeated(self, step: int) -> Self:
        """Note that training has reached a step again, whose checkpoint may be written after all."""
        return replace(self, failed=without(self.failed, step))

    def without_parts_before(self, generation: int) -> Self:
        """Discard incomplete checkpoints and ignore late parts, because `generation` begins from different state."""
        return replace(self, parts={}, first_generation=generation, is_reread=False)

    def loaded(self, generation: int) -> Self:
        """Note that `generation` begins by loading a state, and repeats all steps after it."""
        return replace(
            self.without_parts_before(generation), failed={}, loads=generation, schedule=self.schedule.returned()
        )

    def interrupted(self) -> Self:
        """Note a loss after which workers keep their state."""
        return replace(self, schedule=self.schedule.interrupted())

    def rejected(self, step: int, why: str) -> Self:
        """Note that workers cannot read the checkpoint of a step."""
        return replace(self, unreadable={**self.unreadable, step: why}, is_reread=True)


def describe_unreadable(step: int, why: str) -> str:
    """Return the line for the user about a checkpoint that cannot be read."""
    return f"that of step {step} cannot be read and is not used again: {why}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `step` updates, and what live workers have of it."""

    step: int
    layout: SnapshotLayout

    @property
    def restoration(self) -> Restoration | None:
        """How the state comes back; None if too many workers are lost."""
        return self.layout.restoration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Counts what workers report. Only a snapshot that all workers of its generation have confirmed is ever used.

    Attributes:
        complete: the newest complete one.
        taking: the one that is being taken.
        unconfirmed: workers that have not reported their part of it.
        held_up_s: longest time for which training on some worker has waited for it.
        begun_at_s: when it was begun, in monotonic seconds.
        is_fresh: whether the run has begun with fresh weights, and no snapshot has been complete yet; false once it
            has trained under a plan without snapshots.
        schedule: when the next one is requested, if the run chooses that itself.
    """

    complete: Snapshot | None = None
    taking: Snapshot | None = None
    unconfirmed: frozenset[int] = frozenset()
    held_up_s: float = 0.0
    begun_at_s: float = 0.0
    is_fresh: bool = False
    schedule: CheckpointSchedule = field(default_factory=CheckpointSchedule)

    @property
    def restorable(self) -> Snapshot | None:
        """The newest complete snapshot, if live workers still have all of it."""
        complete = self.complete
        return None if complete is None or complete.restoration is None else complete

    def begun(self, step: int, layout: SnapshotLayout, workers: Collection[int], *, now_s: float) -> Self:
        """Note that these workers take a snapshot."""
        return replace(
            self,
            taking=Snapshot(step, layout),
            unconfirmed=frozenset(workers),
            held_up_s=0.0,
            begun_at_s=now_s,
        )

    def confirmed(self, worker: int, held_up_s: float) -> Self:
        """Note that a worker has its part of the snapshot that is being taken; the last one makes it complete."""
        unconfirmed, held_up_s = self.unconfirmed - {worker}, max(self.held_up_s, held_up_s)
        if unconfirmed:
            return replace(self, unconfirmed=unconfirmed, held_up_s=held_up_s)
        return replace(
            self, complete=self.taking, taking=None, unconfirmed=frozenset(), held_up_s=held_up_s, is_fresh=False
        )

    def given_up(self) -> Self:
        """Note that the snapshot that is being taken will not be complete."""
        return replace(self, taking=None, unconfirmed=frozenset(), schedule=self.schedule.interrupted())

    def without(self, worker: int) -> Self:
        """Note that a worker is lost, with what it had in memory."""
        if self.complete is None:
            return self
        left = replace(self.complete, layout=self.complete.layout.without(worker))
        return replace(self, complete=left)

    def loaded(self, step: int, *, is_fresh: bool) -> Self:
        """Note that all workers begin with the state after `step` updates: later snapshots are void."""
        complete = self.complete if self.complete is not None and self.complete.step <= step else None
        return replace(self.given_up(), complete=complete, is_fresh=is_fresh, schedule=self.schedule.returned())

    def distrusted(self, after: int) -> Self:
        """Note that the state may have been wrong for more than `after` updates."""
        keeps = self.complete is not None and self.complete.step <= after
        return replace(self.given_up(), complete=self.complete if keeps else None)


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
        left_out: (step, epoch, sample) of the samples that some worker could not read.
        reports: worker -> its reports of bad steps that not all workers have reported yet, oldest first.
        reporting: such a step -> the workers that trained it.
        ending: why the run ends after the present step; empty if it does not.
    """

    agreed: int = 0
    witnesses: Mapping[int, tuple[int, ...]] = FrozenMap({})
    disagreement: Disagreement | None = None
    doubted: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    left_out: frozenset[tuple[int, int, int]] = frozenset()
    reports: Mapping[int, tuple[BadStep, ...]] = FrozenMap({})
    reporting: Mapping[int, frozenset[int]] = FrozenMap({})
    ending: str = ""

    def __post_init__(self) -> None:
        for name in ("witnesses", "reports", "reporting"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    def loaded(self, step: int, placement: Placement | None) -> Self:
        """Note that all workers begin with the state after `step` updates, which they have read.

        `placement` is as `GenerationSpec.witnesses`.
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
