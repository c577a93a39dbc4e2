"""Policies under which pipelines stay as they are: the others do the work of what is lost."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.simulate.fleet import Fleet, FleetPipeline
from chameleon_ft.simulate.planner import Option, Outlook
from chameleon_ft.simulate.world import World

__all__ = ["as_it_is", "drop_replica", "idle_workers", "recycle", "reroute"]


def as_it_is(world: World, fleet: Fleet, outlook: Outlook, kind: str) -> list[Option]:
    """The plan with its gaps, whose micro-batches make detours."""
    option = world.option(kind, fleet, fleet, outlook)
    return [] if option is None else [option]


def idle_workers(fleet: Fleet, outlook: Outlook) -> list[int]:
    """Live workers that are no part of a fleet."""
    return sorted(worker for worker in outlook.speeds if worker not in fleet.used)


def reroute(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """Detours; workers that are back take the places of lost ones, as under `recycle`."""
    return _rejoined(world, fleet, outlook, "reroute")


def recycle(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """ReCycle: detours until a worker is back, which then takes a lost one's place."""
    return _rejoined(world, fleet, outlook, "recycle")


def _rejoined(world: World, fleet: Fleet, outlook: Outlook, kind: str) -> list[Option]:
    options: list[Option] = []
    detours = world.option(kind, fleet, fleet, outlook)
    if detours is not None:
        options.append(detours)
    idle = idle_workers(fleet, outlook)
    if idle and fleet.has_gaps:
        option = world.option(f"{kind}-rejoin", _filled(fleet, idle), fleet, outlook)
        if option is not None:
            options.append(option)
    return options


def _filled(fleet: Fleet, idle: Sequence[int]) -> Fleet:
    """Idle workers in the gaps; pipelines that lack the fewest come first."""
    waiting = list(idle)
    gaps = sorted(
        (index for index, pipeline in enumerate(fleet.pipelines) if not pipeline.whole),
        key=lambda index: (fleet.pipelines[index].workers.count(None), index),
    )
    pipelines = list(fleet.pipelines)
    for index in gaps:
        workers = tuple(waiting.pop(0) if worker is None and waiting else worker for worker in pipelines[index].workers)
        pipelines[index] = FleetPipeline(pipelines[index].cut, workers)
    return Fleet(tuple(pipelines))


def drop_replica(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """Pipelines that have lost a worker stand still; idle workers make new ones as soon as there are enough."""
    whole = [pipeline for pipeline in fleet.pipelines if pipeline.whole]
    if not whole:
        return []
    dropped = Fleet(tuple(whole))
    cut = whole[0].cut
    idle = idle_workers(dropped, outlook)
    made = [FleetPipeline(cut, group) for group in zip(*[iter(idle)] * cut.depth, strict=False)]
    fleets = [fleet if dropped == fleet else dropped]
    if made:
        fleets.append(Fleet((*whole, *made)))
    options = (world.option("drop-replica", each, fleet, outlook) for each in fleets)
    return [option for option in options if option is not None]
