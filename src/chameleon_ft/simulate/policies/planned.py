"""Policies that cut pipelines anew."""

from __future__ import annotations

from collections import Counter

from chameleon_ft.simulate.fleet import Fleet, arranged
from chameleon_ft.simulate.pipelines import PipelineClass
from chameleon_ft.simulate.planner import Option, Outlook
from chameleon_ft.simulate.policies.standing import as_it_is, idle_workers
from chameleon_ft.simulate.world import World

__all__ = ["chameleon", "mend", "repartition"]


def chameleon(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """Detours, broken pipelines cut anew, or all of them."""
    return [*as_it_is(world, fleet, outlook, "reroute"), *mend(world, fleet, outlook), *_anew(world, fleet, outlook)]


def repartition(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """The fastest pipelines of all live workers, where that is better than to go on as it is after nobody was lost."""
    going_on = [] if outlook.lost & fleet.used or fleet.has_gaps else as_it_is(world, fleet, outlook, "as-it-is")
    return [*going_on, *_anew(world, fleet, outlook)]


def mend(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """Whole pipelines stay; what is left of broken ones, and idle workers, are made into about equally deep ones.

    Pipelines that are shorter than others are made anew as well where there are idle workers for them.
    """
    whole = [pipeline for pipeline in fleet.pipelines if pipeline.whole]
    if not whole:
        return []
    depth = max(pipeline.cut.depth for pipeline in whole)
    idle = len(idle_workers(fleet, outlook))
    broken = sum(len(pipeline.live) for pipeline in fleet.pipelines if not pipeline.whole)
    while idle > -broken % depth and len(whole) > 1:
        shortest = min(whole, key=lambda pipeline: pipeline.cut.depth)
        if shortest.cut.depth == depth:
            break
        whole.remove(shortest)
        broken += shortest.cut.depth
    left = idle_workers(Fleet(tuple(whole)), outlook)
    cuts = [pipeline.cut for pipeline in whole]
    counts = Counter(cuts)
    average = sum(cut.depth for cut in cuts) / len(cuts)
    number = max(1, round(len(left) / average)) if left else 0
    for each in range(number):
        size = min(len(left) // number + (each < len(left) % number), world.pipelines.num_layers)
        share = max(1, world.times.micro_batches * size // len(outlook.speeds))
        fitting = world.pipelines.fitting(PipelineClass(world.pipelines.even_cut(size)), share)
        # What is left may be too little to hold the model.
        if fitting is not None:
            counts[fitting.cut] += 1
    kept = sorted(worker for pipeline in whole for worker in pipeline.workers if worker is not None)
    mended = arranged(counts, sorted({*kept, *left}), Fleet(tuple(whole))) if left else Fleet(tuple(whole))
    if set(mended.pipelines) == set(fleet.pipelines):
        mended = fleet
    option = world.option("mend", mended, fleet, outlook)
    return [] if option is None else [option]


def _anew(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    fastest = world.fastest_fleet(fleet, outlook.speeds)
    if fastest is None:
        return []
    if fastest.pipelines and set(fastest.pipelines) == set(fleet.pipelines):
        fastest = fleet
    option = world.option("repartition", fastest, fleet, outlook)
    return [] if option is None else [option]
