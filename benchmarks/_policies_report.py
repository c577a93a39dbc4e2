"""Results of `benchmarks.policies`: tables, pictures and bars."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import _policies_picture
from benchmarks._common import Bar, markdown_table
from benchmarks._policies_observed import Observed, mean_size
from benchmarks._policies_scenarios import Scenario

OURS: Final = "chameleon"
PUBLISHED: Final = {"oobleck": 1.229, "recycle": 1.355}
"""Largest average speed-up of the paper's system over each baseline."""
COLUMNS: Final = (
    "scenario",
    "policy",
    "samples/s",
    "of failure-free",
    "of surviving",
    "after recovery",
    "chameleon by it",
    "lost",
    "stalls, s",
    "moved, GB",
    "|error| of steps",
    "of stalls",
)
_FIRST, _KEPT, _OF_SURVIVING = 0.99, 0.96, 0.96
_STEP_ERROR, _STALL_ERROR = 0.02, 0.15


@dataclass(frozen=True, slots=True)
class Found:
    """Observations of a scenario, by policy."""

    scenario: Scenario
    runs: Mapping[str, Observed]

    @property
    def undisturbed_s(self) -> float:
        """Median step before the first failure, over all policies, which start with the same plan."""
        steps = [step_s for observed in self.runs.values() for step_s in observed.undisturbed_steps_s]
        if not steps:
            raise SystemExit(f"{self.scenario.name}: no step was measured before the first loss")
        return statistics.median(steps)

    @property
    def undisturbed_per_s(self) -> float:
        """Samples per second of these steps."""
        samples = next(observed.commits[0].samples for observed in self.runs.values() if observed.commits)
        return samples / self.undisturbed_s

    def share(self, policy: str) -> float:
        """Return average throughput / failure-free throughput."""
        return self.runs[policy].samples_per_s / self.undisturbed_per_s

    def ahead_of(self, policy: str) -> float | None:
        """Return our average throughput / another policy's; None if one of them was not run or trained nothing."""
        if not {OURS, policy} <= self.runs.keys() or not self.runs[policy].samples_per_s:
            return None
        return self.runs[OURS].samples_per_s / self.runs[policy].samples_per_s

    def kept(self, policy: str) -> float | None:
        """Return throughput after the last recovery / failure-free throughput; None if it was not measured."""
        step_s = self.runs[policy].last_step_s
        return None if step_s is None else self.undisturbed_s / step_s

    def row(self, policy: str, scale: float) -> tuple[str, ...]:
        observed = self.runs[policy]
        ahead, kept = self.ahead_of(policy), self.kept(policy)
        return (
            self.scenario.name,
            policy + (", ended" if observed.ended else ""),
            f"{observed.samples_per_s * scale:.1f}",
            f"{self.share(policy):.1%}",
            f"{self.share(policy) / observed.surviving:.1%}",
            "-" if kept is None else f"{kept:.1%}",
            "-" if ahead is None else f"{ahead:.3f}",
            f"{observed.lost}",
            f"{observed.stall_s / scale:.2f}",
            f"{observed.moved_bytes / 1e9:.0f}",
            _shown(observed.step_errors),
            _shown(observed.stall_errors),
        )

    def to_json(self, policy: str, scale: float) -> dict[str, Any]:
        """Return all figures; seconds are those of the emulated devices."""
        observed = self.runs[policy]
        return {
            "scenario": self.scenario.name,
            "policy": policy,
            "run": observed.run,
            "samples_per_s": observed.samples_per_s * scale,
            "of_failure_free": self.share(policy),
            "surviving": observed.surviving,
            "chameleon_by_it": self.ahead_of(policy),
            "after_last_recovery_of_failure_free": self.kept(policy),
            "lost": observed.lost,
            "skipped": list(observed.skipped),
            "outages": len(observed.outages),
            "stall_s": observed.stall_s / scale,
            "moved_bytes": observed.moved_bytes,
            "step_errors": observed.step_errors,
            "stall_errors": observed.stall_errors,
            "ended": observed.ended,
            "others_share": observed.others_share,
        }


def rows(found: Iterable[Found], scale: float) -> tuple[tuple[str, ...], ...]:
    """Return the table by scenario and policy; seconds are those of the emulated devices."""
    return tuple(each.row(policy, scale) for each in found for policy in each.runs)


def markdown(found: Sequence[Found]) -> str:
    """Return a row per scenario: our average throughput, that of our last plan, and ours / each other policy's."""
    others = list(dict.fromkeys(policy for each in found for policy in each.runs if policy != OURS))
    return markdown_table(
        ["scenario", f"`{OURS}`", "after recovery", *(f"by `{policy}`" for policy in others)],
        [_summary(each, others) for each in found if OURS in each.runs],
    )


def _summary(each: Found, others: Iterable[str]) -> list[str]:
    kept = each.kept(OURS)
    ahead = [each.ahead_of(policy) for policy in others]
    return [
        f"`{each.scenario.name}`: {each.scenario.about}",
        f"{each.share(OURS):.1%}",
        "" if kept is None else f"{kept:.1%}",
        *("" if ratio is None else f"{ratio:.3f}" for ratio in ahead),
    ]


def results(found: Sequence[Found], scale: float) -> dict[str, Any]:
    """Return all figures of the table, and the descriptions of the scenarios."""
    return {
        "emulated": True,
        "published_up_to": PUBLISHED,
        "scenarios": {each.scenario.name: each.scenario.about for each in found},
        "runs": [each.to_json(policy, scale) for each in found for policy in each.runs],
    }


def draw(found: Iterable[Found], folder: Path, scale: float) -> None:
    """Draw each scenario beside its raw data."""
    for each in found:
        _policies_picture.draw(
            folder / f"{each.scenario.name}.svg",
            title=each.scenario.name,
            about=each.scenario.about,
            runs=each.runs,
            undisturbed_per_s=each.undisturbed_per_s,
            scale=scale,
        )


def bars(found: Sequence[Found]) -> tuple[Bar, ...]:
    """Return the bars for which there are runs."""
    ours = [each for each in found if OURS in each.runs]
    return (*_against_others(ours), *_after_one_loss(ours), *_published(ours), *_predictions(ours))


def _against_others(ours: Sequence[Found]) -> Iterable[Bar]:
    worst = {
        f"{each.scenario.name}, {policy}": ahead
        for each in ours
        for policy in each.runs
        if policy != OURS and (ahead := each.ahead_of(policy)) is not None
    }
    if worst:
        where = min(worst, key=lambda name: worst[name])
        yield Bar(name=f"chameleon by another policy, least ({where})", value=worst[where], limit=_FIRST, at_least=True)


def _after_one_loss(ours: Sequence[Found]) -> Iterable[Bar]:
    single = [each for each in ours if len(each.scenario.fixed) == 1]
    kept = [(kept, each.runs[OURS].workers) for each in single if (kept := each.kept(OURS)) is not None]
    if kept:
        yield Bar(
            name="after one loss by failure-free, least of the stages",
            value=min(share for share, _ in kept),
            limit=_KEPT,
            at_least=True,
        )
        yield Bar(
            name="after one loss by surviving capacity, mean of the stages",
            value=statistics.fmean(share * workers / (workers - 1) for share, workers in kept),
            limit=_OF_SURVIVING,
            at_least=True,
        )


def _published(ours: Sequence[Found]) -> Iterable[Bar]:
    """Return the bar for both baselines: the smaller advantage over the two, in the best realistic scenario.

    Runs that could not continue do not count, because the systems that they stand for would have restarted.
    """
    reached = []
    for each in ours:
        ahead = {policy: each.ahead_of(policy) for policy in PUBLISHED}
        known = [
            value / PUBLISHED[policy]
            for policy, value in ahead.items()
            if value is not None and not each.runs[policy].ended
        ]
        if each.scenario.realistic and len(known) == len(PUBLISHED):
            reached.append((min(known), each.scenario.name))
    if reached:
        value, name = max(reached)
        wanted = " and ".join(f"{value:g} of {policy}" for policy, value in PUBLISHED.items())
        yield Bar(name=f"share reached of {wanted} ({name})", value=value, limit=1.0, at_least=True)


def _predictions(ours: Sequence[Found]) -> Iterable[Bar]:
    for name, limit, errors in (
        ("step time", _STEP_ERROR, [each.runs[OURS].step_errors for each in ours]),
        ("stall", _STALL_ERROR, [each.runs[OURS].stall_errors for each in ours]),
    ):
        all_errors = list(itertools.chain.from_iterable(errors))
        if all_errors:
            yield Bar(
                name=f"mean |error| of the {name}, {len(all_errors)} times", value=mean_size(all_errors), limit=limit
            )


def _shown(errors: Sequence[float]) -> str:
    return f"{mean_size(errors):.1%} of {len(errors)}" if errors else "-"
