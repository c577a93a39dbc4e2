"""What to do when workers are lost: a pure function from what is known to what everyone does next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from chameleon_ft.control.messages import Parked, Vote
from chameleon_ft.errors import ControlError, NoHolderError
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import largest_symmetric_layout, reroute
from chameleon_ft.schedule import CostModel, InFlightLimit

__all__ = ["Decision", "Situation", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when all survivors have parked.

    Attributes:
        plan: the plan that was running.
        live: workers that can go on, spares included.
        parked: what each of them said it holds.
        committed: steps known to be applied by some worker, alive or not.
        last_vote: the vote of step ``committed - 1``, where a worker has reported it.
        checkpoints: steps that complete checkpoints resume at, ascending.
    """

    plan: Plan
    live: Collection[int]
    parked: Mapping[int, Parked]
    committed: int
    last_vote: Vote | None
    checkpoints: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What everyone does next. `policy` and `action` say it to people."""

    plan: Plan
    first_step: int
    load: Literal["initial", "keep"] | int
    roll_forward: Vote | None
    policy: str
    action: str
    lost_layers: tuple[int, ...] = ()


def decide(
    situation: Situation, costs: CostModel, *, ceiling: Mapping[int, InFlightLimit], preferred_pp: int
) -> Decision:
    """Choose how to go on: the peers of the lost workers do their share, or all return to the newest checkpoint.

    Args:
        ceiling: micro-batches that each worker can keep at most.
        preferred_pp: stages of a pipeline after a return to a checkpoint, if the survivors allow it.

    Raises:
        NoHolderError: layers are held by nobody and there is no checkpoint.
        ControlError: the survivors' states do not fit together, which the commit protocol rules out.
    """
    lost = [worker for worker in situation.plan.workers if worker not in situation.live]
    try:
        plan = reroute(situation.plan, lost, costs, ceiling=ceiling) if lost else situation.plan
    except NoHolderError as error:
        if not situation.checkpoints:
            raise
        return _fall_back(situation, costs, error.layers, preferred_pp=preferred_pp)
    first_step, vote = _resume_point(situation, plan.workers)
    return Decision(
        plan=plan,
        first_step=first_step,
        load="keep",
        roll_forward=vote,
        policy="reroute",
        action=_reroute_in_words(plan, situation.plan, lost, first_step, rolls=vote is not None),
    )


def _resume_point(situation: Situation, members: Sequence[int]) -> tuple[int, Vote | None]:
    """Return (the step to run next, the vote by which workers that have not applied the step before it do so)."""
    states = [situation.parked[worker] for worker in members]
    first_step = max((situation.committed, *(state.committed for state in states)))
    behind = [state for state in states if state.committed < first_step]
    if not behind:
        return first_step, None
    if any(state.committed != first_step - 1 or not state.reduced for state in behind):
        raise ControlError(f"some workers cannot follow the others to step {first_step}: {behind}")
    votes = [state.last_vote for state in states if state.committed == first_step and state.last_vote is not None]
    vote = votes[0] if votes else situation.last_vote
    if vote is None:
        raise ControlError(f"step {first_step - 1} was applied by some worker, but its vote is not known")
    return first_step, vote


def _fall_back(situation: Situation, costs: CostModel, lost_layers: tuple[int, ...], *, preferred_pp: int) -> Decision:
    step = situation.checkpoints[-1]
    plan = largest_symmetric_layout(
        live=sorted(situation.live),
        layer_costs=[cost.forward_s + cost.backward_s for cost in costs.workload.layers],
        micro_batches=costs.workload.micro_batches,
        preferred_pp=preferred_pp,
        split_backward=situation.plan.split_backward,
    )
    pp = len(plan.routes[0].hops)
    dp = len(plan.workers) // pp
    # Not of spares, whose state may be of a time that was given up.
    reached = [situation.parked[worker].committed for worker in situation.plan.workers if worker in situation.parked]
    repeated = max((situation.committed, *reached)) - step
    return Decision(
        plan=plan,
        first_step=step,
        load=step,
        roll_forward=None,
        policy="checkpoint",
        action=(
            f"nobody holds layers {_ranges(lost_layers)} any more: back to the checkpoint of step {step}, "
            f"{dp} pipelines of {pp} stages; {repeated} step{'' if repeated == 1 else 's'} repeated"
        ),
        lost_layers=lost_layers,
    )


def _reroute_in_words(plan: Plan, before: Plan, lost: Sequence[int], first_step: int, *, rolls: bool) -> str:
    moved = sum(1 for new, old in zip(plan.routes, before.routes, strict=True) if new.hops != old.hops)
    helpers = {
        hop.worker
        for new, old in zip(plan.routes, before.routes, strict=True)
        for hop in new.hops
        if hop not in old.hops
    }
    how = "applied" if rolls else "kept"
    what = f"step {first_step - 1} {how}, " if rolls else ""
    if not moved:
        return f"{what}on with step {first_step} and the same routes"
    names = ", ".join(map(str, sorted(helpers)))
    return (
        f"{what}{moved} micro-batches of worker{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} "
        f"go through worker{'s' if len(helpers) > 1 else ''} {names}; no weights move; on with step {first_step}"
    )


def _ranges(layers: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
