"""Policies of equal pipelines: begin anew from a checkpoint, or compute everything twice."""

from __future__ import annotations

import math

from chameleon_ft.simulate.fleet import Fleet
from chameleon_ft.simulate.planner import Option, Outlook
from chameleon_ft.simulate.policies.standing import as_it_is
from chameleon_ft.simulate.world import World

__all__ = ["overhead", "redundant", "restart"]


def restart(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """The fastest equal pipelines, from the last checkpoint; where nobody who matters is lost, only if that pays.

    More than the runtime's policy of this name does, which takes the layout with the most workers.
    """
    options = [] if outlook.lost & fleet.used or fleet.has_gaps else as_it_is(world, fleet, outlook, "as-it-is")
    fastest = world.equal_fleet(Fleet(()), outlook.speeds)
    step_s = None if fastest is None else world.step_s(fastest, outlook.speeds)
    if fastest is not None and step_s is not None:
        options.append(world.from_checkpoint("restart", fastest, step_s, outlook))
    return options


def redundant(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """The fastest equal pipelines, each stage with its neighbour's state and forwards; nothing has to move."""
    options: list[Option] = []
    fleets = [world.equal_fleet(fleet, outlook.speeds)]
    if not (outlook.lost & fleet.used or fleet.has_gaps):
        fleets.insert(0, fleet)
    for each in fleets:
        step_s = None if each is None else world.step_s(each, outlook.speeds)
        if each is not None and step_s is not None:
            goes_on = each is fleet
            options.append(
                Option(
                    kind="as-it-is" if goes_on else "redundant",
                    plan=each,
                    step_s=step_s * (1 + overhead(world, each, step_s)),
                    stall_s=0.0 if goes_on else world.phases(outlook).total_s,
                    again_s=0.0 if goes_on else outlook.repeat_s,
                )
            )
    return options


def overhead(world: World, fleet: Fleet, step_s: float) -> float:
    """By which share steps are longer: forwards once more, as far as they do not fit into the bubbles."""
    layers = world.costs.workload.layers
    forward_s = math.fsum(layer.forward_s for layer in layers) * world.times.micro_batches
    work_s = forward_s + math.fsum(layer.backward_s for layer in layers) * world.times.micro_batches
    idle_s = max(0.0, len(fleet.used) * step_s - work_s)
    again_s = world.parameters.redundant_forward * forward_s
    return max(0.0, again_s - idle_s) / (len(fleet.used) * step_s)
