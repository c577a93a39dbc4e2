"""Drawn cases of slow workers, with the noise of recorded operations, and how the detector does on them."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.coordinator.detectors.base import OperationsMeasured, Recovered, Slow
from chameleon_ft.coordinator.detectors.slowness import SlownessDetector
from chameleon_ft.schedule import OperationKind
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.timelines import read_recorded_steps

STEPS: Final = 200
NOTICED_WITHIN: Final = 10  # steps


@dataclass(frozen=True, slots=True)
class Spell:
    """A worker computes at `factor` of its speed in the steps from `first` to before `end`."""

    worker: int
    factor: float
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Case:
    """A run whose workers are slow at times; no spell is shorter than the steps in which it has to be noticed."""

    spells: tuple[Spell, ...]

    def speed(self, worker: int, step: int) -> float:
        return min((each.factor for each in self.spells if self._is_in(each, worker, step)), default=1.0)

    def was_slow(self, worker: int, step: int) -> bool:
        """Return whether a worker is slow at a step, or was shortly before."""
        return any(
            self._is_in(each, worker, at) for each in self.spells for at in range(step - NOTICED_WITHIN, step + 1)
        )

    def _is_in(self, spell: Spell, worker: int, step: int) -> bool:
        return spell.worker == worker and spell.first <= step < spell.end


@dataclass(frozen=True, slots=True)
class Detection:
    """Counts over a case: reports of slow workers, those that were right, spells, and those noticed in time."""

    reports: int
    right: int
    spells: int
    noticed: int
    delays: tuple[int, ...]  # steps from the first slow one to the report
    errors: tuple[float, ...]  # reported by true speed, less 1


def draw_case(rng: random.Random, *, workers: int) -> Case:
    """Draw which workers are slow: none, one or two, at 0.5 to 0.9 of their speed, constantly or at times."""
    spells: list[Spell] = []
    for worker in rng.sample(range(workers), rng.choice((0, 1, 1, 2, 2))):
        factor, first = rng.uniform(0.5, 0.9), rng.randint(20, 60)
        if rng.random() < 0.5:
            spells.append(Spell(worker, factor, first, STEPS))
            continue
        while first < STEPS - 2 * NOTICED_WITHIN:
            end = first + rng.randint(2 * NOTICED_WITHIN, 6 * NOTICED_WITHIN)
            spells.append(Spell(worker, factor, first, min(STEPS, end)))
            first = end + rng.randint(2 * NOTICED_WITHIN, 6 * NOTICED_WITHIN)
    return Case(tuple(spells))


def noise_of(run: RunDirectory) -> list[list[float]]:
    """Return for each worker of a recorded run, step by step, what its operations took over their usual time.

    As in a worker's report, forwards and backwards count by their medians of the step. Whatever delays all workers of
    the recorded run in a step, such as other processes that begin, is left out: drawn workers have the noise of
    different steps, so that some of them would seem slow for as long as the recorded run was.
    """
    plans = read_generation_plans(run.plans)
    by_kind: dict[int, dict[bool, list[float]]] = defaultdict(lambda: {True: [], False: []})
    for step in read_recorded_steps(run.timelines):
        if step.part != "whole" or step.step == 0:
            continue
        times: dict[bool, list[float]] = {True: [], False: []}
        program = plans[step.generation].program.of(step.worker)
        for operation, (start, end) in zip(program, step.operations, strict=True):
            times[operation.kind is OperationKind.FORWARD].append(end - start)
        for kind, own in times.items():
            by_kind[step.worker][kind].append(statistics.median(own))
    noise = []
    for kinds in by_kind.values():
        usual_s = {kind: statistics.median(own) for kind, own in kinds.items()}
        noise.append([sum(times) / sum(usual_s.values()) for times in zip(*kinds.values(), strict=True)])
    common = [statistics.median(step) for step in zip(*noise, strict=True)]
    return [[each / usual for each, usual in zip(own, common, strict=True)] for own in noise]


def observe(case: Case, noise: Sequence[Sequence[float]], rng: random.Random, *, workers: int) -> Detection:
    """Run the detector over a case; each worker has the noise of a recorded one, from some step on."""
    series = [rng.choice(noise) for _ in range(workers)]
    offsets = [rng.randrange(len(own)) for own in series]
    detector, known = SlownessDetector(), {}
    reports, right, errors = 0, 0, []
    slow_at: dict[int, Mapping[int, float]] = {}
    for step in range(STEPS + 1):
        for worker in range(workers):
            own = series[worker]
            ratio = own[(offsets[worker] + step) % len(own)] / case.speed(worker, step)
            detector, found = detector.observe(OperationsMeasured(worker, 1, step, ratio, None))
            for finding in found:
                if isinstance(finding, Slow):
                    reports += 1
                    is_right = case.was_slow(finding.worker, step - 1)
                    right += is_right
                    if is_right and case.speed(finding.worker, step - 1) < 1:
                        errors.append(finding.speed / case.speed(finding.worker, step - 1) - 1)
                    known[finding.worker] = finding.speed
                elif isinstance(finding, Recovered):
                    known.pop(finding.worker, None)
        slow_at[step - 1] = dict(known)
    delays = [
        next((step - spell.first for step in range(spell.first, spell.end) if spell.worker in slow_at[step]), STEPS)
        for spell in case.spells
    ]
    noticed = [delay for delay in delays if delay < NOTICED_WITHIN]
    return Detection(reports, right, len(delays), len(noticed), tuple(delays), tuple(errors))
