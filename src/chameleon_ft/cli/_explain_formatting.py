"""The figures of a decision, and the reason for it, as text."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.observe import FailureRecord, OutcomeRecord
from chameleon_ft.observe.decisions import DecisionEvent, ObservedRate, ScoredCandidate, StallParts, UsedCorrections
from chameleon_ft.quantities import data_size, duration

__all__ = [
    "describe_corrections",
    "describe_failure_rate",
    "describe_measured_stall",
    "describe_predicted_stall",
    "describe_sole_holders",
    "describe_stall",
    "why",
]

_EQUAL = 1e-9  # relative; samples that differ by less are equal to the decision
_NOTICEABLE_S = 5e-4  # of a stall


def why(decision: DecisionEvent) -> str:
    """Say by what the chosen candidate beat the second."""
    best, second = decision.best, decision.second
    if best is None:
        return "nothing that was weighed could be done"
    if second is None:
        return "nothing else could be done"
    if best.samples < second.samples * (1 - _EQUAL):
        more = f"{second.samples / best.samples - 1:.1%} more" if best.samples else "more"
        if (second.last_holders, second.last_hosts) > (best.last_holders, best.last_hosts):
            holders = describe_sole_holders(second)
            return f"{second.policy} would train {more} samples, but for {holders}: there is no checkpoint"
        return f"{second.policy} would train {more} samples by what is known now, but it had been decided before"
    if best.samples <= second.samples * (1 + _EQUAL):
        bytes_ = (best.moved_bytes or 0, second.moved_bytes or 0)
        closer = f"it moves {data_size(bytes_[0])}, not {data_size(bytes_[1])}" if bytes_[0] < bytes_[1] else ""
        return f"as many samples as {second.policy}; {closer or 'it was proposed first'}"
    gain = f"{best.samples / second.samples - 1:.1%} more" if second.samples else "more"
    return f"{gain} samples than {second.policy}: {_difference(best, second, decision.horizon_s)}"


def _difference(best: ScoredCandidate, second: ScoredCandidate, horizon_s: float) -> str:
    assert best.step_s is not None
    assert second.step_s is not None
    more_stall_s = _lost_s(best) - _lost_s(second)
    what, is_ = "stall", "is"
    if abs(best.return_s - second.return_s) >= _NOTICEABLE_S:
        what, is_ = "stall and expected returns to a checkpoint", "are"
    expected = f"the next failure is expected in {duration(horizon_s)}"
    if best.step_s < second.step_s:
        shorter = f"its steps are {1 - best.step_s / second.step_s:.1%} shorter"
        if more_stall_s < _NOTICEABLE_S:
            return f"{shorter}, and its {what} {is_} not longer"
        moves = f"it moves {data_size(best.moved_bytes)}, and " if best.moved_bytes else ""
        return (
            f"{moves}{shorter}, which makes up for {duration(more_stall_s)} more of {what} "
            f"{duration(_even_s(best, second))} after the loss; {expected}"
        )
    less = f"its {what} {is_} {duration(-more_stall_s)} shorter"
    if best.step_s == second.step_s:
        return less
    return (
        f"{less}, which the steps of {second.policy}, {1 - second.step_s / best.step_s:.1%} shorter, make up for only "
        f"{duration(_even_s(best, second))} after the loss; {expected}"
    )


def _even_s(one: ScoredCandidate, other: ScoredCandidate) -> float:
    """Seconds t after the loss when both have trained as much: (t - a) / s = (t - b) / r, steps s, r, lost a, b."""
    assert one.step_s is not None
    assert other.step_s is not None
    return (_lost_s(one) * other.step_s - _lost_s(other) * one.step_s) / (other.step_s - one.step_s)


def _lost_s(each: ScoredCandidate) -> float:
    assert each.stall_s is not None
    return each.stall_s + each.return_s


def describe_sole_holders(each: ScoredCandidate) -> str:
    """Count the hosts and workers that would hold some layer alone; empty if there are none."""
    hosts = f"{each.last_hosts} host{'' if each.last_hosts == 1 else 's'} with all holders of a layer"
    workers = f"{each.last_holders} worker{'' if each.last_holders == 1 else 's'} with the only copy of one"
    return " and ".join(words for words, count in ((hosts, each.last_hosts), (workers, each.last_holders)) if count)


def describe_failure_rate(rate: ObservedRate, *, live: int, horizon_s: float) -> str:
    """Say when the next failure is expected, and from what; see `FailureModel.waits` for the formula."""
    incidents = rate.failures if rate.incidents is None else rate.incidents
    several = f", {incidents} incident{'' if incidents == 1 else 's'}" if incidents < rate.failures else ""
    of_hosts = "" if rate.host_share is None else f"; {rate.host_share:.0%} of failures take a whole host"
    return (
        f"the next failure in {duration(horizon_s)}, by {rate.failures} failure{'' if rate.failures == 1 else 's'}"
        f"{several} in {duration(rate.worker_s)} of work by all workers together, {live} of which are live; expected "
        f"beforehand: one per worker in {duration(rate.worker_mtbf_s)}, which counts like {rate.prior_failures:g}"
        f"{of_hosts}"
    )


def describe_stall(stall: StallParts) -> str:
    """Say what the stall was taken to be, transfers left out."""
    total_s = stall.repeat_s + stall.detect_s + stall.stop_s + stall.decide_s + stall.regroup_s
    return (
        f"{total_s:.3f} s = repeat {stall.repeat_s:.3f} + detect {stall.detect_s:.3f} + stop {stall.stop_s:.3f} + "
        f"decide {stall.decide_s:.3f} + regroup {stall.regroup_s:.3f}; transfers on top"
    )


def describe_predicted_stall(chosen: ScoredCandidate, stall: StallParts) -> str:
    """Say what the stall of the chosen candidate was predicted to be, and of what."""
    assert chosen.stall_s is not None
    words = f"stall {duration(chosen.stall_s)}"
    if stall.restart_s is not None and chosen.stall_s == stall.restart_s:
        return f"{words}: recovery.restart_cost_s and the steps since the checkpoint"
    return f"{words}, {duration(chosen.transfer_s)} of it transfer" if chosen.transfer_s else words


def describe_measured_stall(outcome: OutcomeRecord, losses: Sequence[FailureRecord]) -> str:
    """Say what a measured stall was made of, by the loss that was detected last; empty if no worker was lost.

    What lies before the phases is work that was done again: of the interrupted step, and steps since a checkpoint.
    """
    own = [loss for loss in losses if loss.generation == outcome.generation]
    if not own:
        return ""
    last = min(own, key=lambda loss: loss.stall_s)
    phases = {
        "detect": last.detect_s or 0.0,
        "stop": last.stop_s,
        "decide": last.decide_s,
        "transfer": last.transfer_s,
        "regroup": last.regroup_s,
    }
    again_s = max(0.0, outcome.measured_stall_s - sum(phases.values()))
    steps = last.step - last.resume_step
    repeated = f" ({steps} step{'' if steps == 1 else 's'} repeated)" if steps > 0 else ""
    parts = " + ".join(f"{name} {part_s:.3f}" for name, part_s in phases.items() if part_s or name != "transfer")
    return f"stall = repeat {again_s:.3f}{repeated} + {parts}"


def describe_corrections(corrections: UsedCorrections) -> str:
    """Say by what predictions had been corrected."""
    words = [
        f"{name} x {factor:.2f}"
        for name, factor in (
            ("operations", corrections.operations),
            ("steps", corrections.step),
            ("transfers", corrections.transfer),
        )
        if f"{factor:.2f}" != "1.00"
    ]
    words += [
        f"worker {worker} at {speed:.2f} of the speed of others" for worker, speed in sorted(corrections.slow.items())
    ]
    return ", ".join(words) or "none"
