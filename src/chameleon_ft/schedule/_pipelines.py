"""The best schedule of one pipeline, without making more of it than numbers: most of them are only looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.plan.plan import Hop
from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._local_search import is_too_large, shortened
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._part import REPLAY, RULES, Part
from chameleon_ft.schedule._records import Floats, Integers, Records
from chameleon_ft.schedule._trials import ROUNDING, Trials, plain_trials
from chameleon_ft.schedule.limits import InFlightLimit

# More runs than there are rules.
_ALL: Final = 1_000_000
# Rules that together come near to what all do, whatever there is room for.
_FEW: Final = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSchedule:
    """What the workers of a pipeline run, and how long it takes.

    Attributes:
        builder, hops, micro_batches, ceiling: what is scheduled, as for `pipeline_schedule`.
        codes, ends_s, step_s: as in `Schedule`.
    """

    builder: NetworkBuilder
    hops: tuple[Hop, ...]
    micro_batches: int
    ceiling: Integers
    codes: Integers
    ends_s: Floats
    step_s: float

    @property
    def last_s(self) -> tuple[float, ...]:
        """By stage, the end of its last operation."""
        last = self.codes.reshape(len(self.hops), -1)[:, -1]
        return tuple(self.ends_s[last].tolist())

    @property
    def orders(self) -> list[Integers]:
        """Codes of operations by stage, in order."""
        return list(self.codes.reshape(len(self.hops), -1))

    def schedule(self) -> Schedule:
        """With its network."""
        network = self.builder.part(tuple(hop.worker for hop in self.hops)).network(
            [self.hops], [0] * self.micro_batches
        )
        return Schedule(network=network, codes=self.codes, ends_s=self.ends_s, step_s=self.step_s)

    def replayed(self, hops: tuple[Hop, ...]) -> PipelineSchedule:
        """The same orders, run by workers that are linked in another way."""
        # Here, as below, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.schedule._kernels.pipeline_replays import replay

        stages, ends_s = _stages(hops, self.builder), np.empty_like(self.ends_s)
        replay(stages, self.codes, self.micro_batches, np.empty(len(hops), np.int64), np.empty(len(hops)), ends_s)
        return replace(self, hops=hops, ends_s=ends_s, step_s=float(ends_s.max()))


def pipeline_schedule(
    hops: tuple[Hop, ...],
    micro_batches: int,
    builder: NetworkBuilder,
    *,
    ceiling: Integers,
    effort: float,
    slack: float = ROUNDING,
) -> PipelineSchedule:
    """The schedule of `best_program` for a plan of one pipeline, with a worker for each stage.

    Args:
        hops: the way of all micro-batches.
        micro_batches: their number.
        builder: for these costs.
        ceiling: by stage, how many micro-batches it may have in flight, and keep; int64 [2, stages].
        effort: as for `best_program`.
        slack: which share above the lower bound is good enough.
    """
    operations = (3 if builder.split_backward else 2) * len(hops) * micro_batches
    most = max(1, math.ceil(effort * RULES / operations))
    rules, found = _of_rules(hops, micro_batches, builder, ceiling, None, most, slack)
    if found.rules < 0:
        return _of_part(hops, micro_batches, builder, ceiling, effort)
    made = PipelineSchedule(builder, hops, micro_batches, ceiling, found.codes, found.ends_s, found.step_s)
    further = int(effort * (1 - RULES) / REPLAY)
    if found.beyond_limits or found.step_s <= found.enough_s or is_too_large(operations, further):
        return made
    largest = _largest(len(hops), ceiling, rules[found.rules])
    shorter = shortened(made.schedule(), largest, enough_s=found.enough_s, effort=further)
    return _made_of(shorter, made) if shorter.step_s < found.step_s * (1 - ROUNDING) else made


def rough_schedule(
    hops: tuple[Hop, ...],
    micro_batches: int,
    builder: NetworkBuilder,
    *,
    ceiling: Integers,
    slack: float = ROUNDING,
    latest_s: Floats | None = None,
) -> PipelineSchedule | None:
    """The same with little effort: mostly longer by less than a hundredth.

    None where all runs were given up, for some stage would end later than `latest_s` has it, by stage.
    """
    _, found = _of_rules(hops, micro_batches, builder, ceiling, _FEW, _ALL, slack, latest_s)
    if found.step_s == math.inf:
        return None
    if found.rules < 0:
        return _of_part(hops, micro_batches, builder, ceiling, effort=0.0)
    return PipelineSchedule(builder, hops, micro_batches, ceiling, found.codes, found.ends_s, found.step_s)


def _of_rules(
    hops: tuple[Hop, ...],
    micro_batches: int,
    builder: NetworkBuilder,
    ceiling: Integers,
    few: tuple[int, ...] | None,
    most: int,
    slack: float,
    latest_s: Floats | None = None,
) -> tuple[Records, Tried]:
    """Some of the rules, and the best of these after so many runs; all where there are no others."""
    split = builder.split_backward
    rules, in_flight, kept = _rules(split, len(hops), ceiling)
    if few is not None:
        own = [number for number in few if number < len(rules)] or [0]
        rules, in_flight, kept = rules[own], in_flight[own], kept[own]
    stages = _stages(hops, builder)
    found = tried(
        stages,
        rules,
        in_flight,
        kept,
        micro_batches=micro_batches,
        split=split,
        enough_s=0.0,
        most=most,
        slack=slack,
        latest_s=latest_s,
    )
    return rules, found


class PipelinePart(Part):
    """The same as a `Part` of a single way that comes to each of its workers once, and is found sooner."""

    def __init__(self, trials: Trials, hops: tuple[Hop, ...], micro_batches: int) -> None:
        self._is_dead_end = False
        super().__init__(trials, [hops], [0] * micro_batches)

    def try_rules(self, effort: float = math.inf, *, enough_s: float = 0.0) -> None:
        """See `Part.try_rules`."""
        operations = len(self._network.operations)
        # One has been tried.
        if not self._is_dead_end and operations < effort:
            self._try(min(effort / operations, _ALL), max(enough_s, self._enough_s))
        if self._is_dead_end:
            super().try_rules(effort, enough_s=enough_s)
        self.finished = True

    def _try_next(self) -> bool:
        # The first rules: by those it is known which parts are worth more of them.
        if not self._is_dead_end:
            self._try(1, math.inf)
        return super()._try_next() if self._is_dead_end else True

    def _try(self, most: float, enough_s: float) -> None:
        from chameleon_ft.schedule._kernels.pipeline_runs import STAGE

        network, (hops,) = self._network, self._ways
        split, depth = network.split_backward, len(hops)
        stages = np.zeros(depth, STAGE)
        for name in ("forward_s", "backward_s", "weight_s", "down_s", "up_s"):
            stages[name] = network.slots[name][:depth]
        rules, in_flight, kept = _rules(split, depth, self._trials.ceiling_of([hop.worker for hop in hops]))
        found = tried(
            stages,
            rules,
            in_flight,
            kept,
            micro_batches=len(network.ways),
            split=split,
            enough_s=enough_s,
            most=math.ceil(most),
        )
        self._is_dead_end = found.rules < 0
        if not self._is_dead_end:
            own = rules[found.rules]
            made = Rules(
                in_flight=tuple(in_flight[found.rules].tolist()),
                kept=tuple(kept[found.rules].tolist()),
                forward_first=bool(own["forward_first"]),
                patience=float(own["patience"]),
                gradients_only=found.gradients_only,
            )
            schedule = Schedule(
                network=network,
                codes=found.codes,
                ends_s=found.ends_s,
                step_s=found.step_s,
                beyond_limits=found.beyond_limits,
            )
            self.tried = [(made, schedule)]


def _of_part(
    hops: tuple[Hop, ...],
    micro_batches: int,
    builder: NetworkBuilder,
    ceiling: Integers,
    effort: float,
) -> PipelineSchedule:
    """As any plan's, with ways out of dead ends."""
    workers = tuple(hop.worker for hop in hops)
    limits = dict(zip(workers, map(InFlightLimit, *ceiling.tolist()), strict=True))
    part = Part(Trials(builder, workers, limits), [hops], [0] * micro_batches)
    part.finish(effort)
    found = part.best[1]
    return PipelineSchedule(builder, hops, micro_batches, ceiling, found.codes, found.ends_s, found.step_s)


class Tried(NamedTuple):
    """The best of the rules that were tried, and what came of them.

    Attributes:
        rules: its number; -1 where there is a dead end even with only gradients ahead, or all take too long.
        gradients_only: whether it was run with only gradients ahead.
        codes, ends_s, step_s, beyond_limits: as in `Schedule`; seconds are infinite where all take too long.
        enough_s: what was enough: as asked for, or the lower bound with the slack.
    """

    rules: int
    gradients_only: bool
    codes: Integers
    ends_s: Floats
    step_s: float
    beyond_limits: bool
    enough_s: float


def tried(
    stages: Records,
    rules: Records,
    in_flight: Integers,
    kept: Integers,
    *,
    micro_batches: int,
    split: bool,
    enough_s: float,
    most: int,
    slack: float = ROUNDING,
    latest_s: Floats | None = None,
) -> Tried:
    """Try rules until one takes `enough_s` or meets the lower bound, there are no more, or so many runs have been made.

    Those that lead to a dead end are tried once more with only gradients ahead; those that leave someone denied an
    operation too, at the end.

    Args:
        stages: with seconds; the rest is filled in.
        rules: `RULES`.
        in_flight, kept: limits by rules and worker.
        micro_batches: to schedule.
        split: whether backward is split.
        enough_s: see above.
        most: runs; the first is always made.
        slack: up to which share above the lower bound that is met.
        latest_s: by stage, when it must have ended; None where no run is to end early. Else one ends as soon as it is
            too late for that, or to be the best. So it is seldom, but may be, that it is not known of rules that they
            would have led to a dead end, and to others with only gradients ahead.
    """
    from chameleon_ft.schedule._kernels.pipeline_runs import STATE
    from chameleon_ft.schedule._kernels.pipelines import try_rules

    hops = len(stages) * micro_batches
    operations = (3 if split else 2) * hops
    stages["limit_s"] = math.inf if latest_s is None else latest_s
    # Those of the best run and of the present one.
    codes, ends_s = np.empty((2, operations), np.int64), np.empty((2, operations))
    best, place, gradients_only, step_s, beyond_limits, enough_s = try_rules(
        stages,
        rules,
        in_flight,
        kept,
        codes,
        ends_s,
        np.empty(hops),
        np.empty(hops),
        np.empty(len(stages)),
        np.empty(2 * len(rules), np.int64),
        np.zeros(len(rules), np.int64),
        np.zeros(1, STATE),
        micro_batches,
        split,
        enough_s,
        slack,
        most,
        latest_s is not None,
    )
    return Tried(best, gradients_only, codes[place], ends_s[place], step_s, beyond_limits, enough_s)


def _stages(hops: Sequence[Hop], builder: NetworkBuilder) -> Records:
    from chameleon_ft.schedule._kernels.pipeline_runs import STAGE

    stages = np.zeros(len(hops), STAGE)
    forward_s, backward_s, weight_s, message_s = builder.seconds(hops)
    stages["forward_s"], stages["backward_s"], stages["weight_s"] = forward_s, backward_s, weight_s
    stages["down_s"], stages["up_s"] = [*message_s, 0.0], [0.0, *message_s]
    return stages


def _rules(split: bool, depth: int, ceiling: Integers) -> tuple[Records, Integers, Integers]:
    """The rules of `Trials.rules_to_try`, and limits by rules and stage: what is in flight, and kept."""
    return _limited(split, depth, np.ascontiguousarray(ceiling, np.int64).tobytes())


# Most ceilings are those of pipelines that have room for all that is tried.
@lru_cache(maxsize=256)
def _limited(split: bool, depth: int, ceiling: bytes) -> tuple[Records, Integers, Integers]:
    in_flight_most, kept_most = np.frombuffer(ceiling, np.int64).reshape(2, depth)
    rules, wished, wished_kept = _wishes(split, depth)
    kept = np.minimum(wished_kept, kept_most)
    in_flight = np.minimum(np.minimum(wished, in_flight_most), kept)
    rows = [(own.tobytes(), a.tobytes(), b.tobytes()) for own, a, b in zip(rules, in_flight, kept, strict=True)]
    first = [rows.index(row) == place for place, row in enumerate(rows)]
    return rules[first], in_flight[first], kept[first]


@lru_cache(maxsize=256)
def _wishes(split: bool, depth: int) -> tuple[Records, Integers, Integers]:
    """The same without a ceiling, and without looking for equal ones."""
    from chameleon_ft.schedule._kernels.pipeline_runs import RULES as RECORD

    trials = plain_trials(depth, split_backward=split)
    rules = np.zeros(len(trials), RECORD)
    rules["forward_first"] = [trial.forward_first for trial in trials]
    rules["patience"] = [trial.patience for trial in trials]
    shares = np.array([(trial.in_flight, trial.kept) for trial in trials])
    extra = np.array([trial.extra for trial in trials])[:, np.newaxis]
    base = np.arange(depth, 0, -1)
    more = np.minimum(depth, np.ceil(shares[:, :1] * base).astype(np.int64) + extra)
    more_kept = np.minimum(depth, np.ceil(shares[:, 1:] * depth).astype(np.int64) + extra)
    kept = depth + np.maximum(more, more_kept)
    return rules, np.minimum(base + more, kept), kept


def _largest(depth: int, ceiling: Integers, own: np.void) -> Rules:
    """As `Trials.largest`."""
    wished = np.stack([np.arange(2 * depth, depth, -1), np.full(depth, 2 * depth)])
    limits = np.minimum(wished, ceiling)
    return Rules(
        in_flight=tuple(limits.min(axis=0).tolist()),
        kept=tuple(limits[1].tolist()),
        forward_first=bool(own["forward_first"]),
        patience=float(own["patience"]),
    )


def _made_of(found: Schedule, before: PipelineSchedule) -> PipelineSchedule:
    return replace(before, codes=found.codes, ends_s=found.ends_s, step_s=found.step_s)
