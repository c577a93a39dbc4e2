"""The inner loop of `search._rings`, compiled by numba: gradient sync of pipelines where no parameters are tied.

What `sync.gradient_rounds` says of one stage to a worker, in numbers: the layers between two neighbouring stops of any
pipelines are reduced together, and whoever has both of two such segments has all between them.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Floats, Integers


class Classes(NamedTuple):
    """Pipelines that do the same at the same time, class by class.

    Attributes:
        depths, members: stages of each, and how many there are of it.
        stops, ends_s: where its stages stop, and when they are done; of one class after the other.
        hosts: of its members, stage by stage; of one class after the other.
    """

    depths: Integers
    members: Integers
    stops: Integers
    ends_s: Floats
    hosts: Integers


class Links(NamedTuple):
    """Seconds of messages inside and between hosts: at the least, and for each byte."""

    near_s: float
    near_byte_s: float
    far_s: float
    far_byte_s: float


class Room(NamedTuple):
    """Room to work in, by class, host and layer.

    Attributes:
        place: the stage, counted through all classes, that holds the segment in hand.
        seen: the last segment that was reduced on a host, plus one.
        last, rounds: where a segment stops, and its round.
        taken: by round, the last segment that found it taken, plus one.
    """

    place: Integers
    seen: Integers
    last: Integers
    rounds: Integers
    taken: Integers


@lean_kernel
def last_reduced_s(classes: Classes, gradient_bytes: Floats, links: Links, room: Room) -> float:
    """When the last gradients have been reduced.

    Args:
        classes: at least two pipelines; `ends_s` becomes when stages have reduced what they hold.
        gradient_bytes: up to each layer.
        links: see above.
        room: `seen` and `taken` of zeros.
    """
    segments = _segments(classes, room)
    rounds = _in_rounds(classes, room, segments)
    last_s = 0.0
    for number in range(rounds):
        for segment in range(segments):
            if room.rounds[segment] == number:
                start = room.last[segment - 1] if segment else 0
                num_bytes = gradient_bytes[room.last[segment]] - gradient_bytes[start]
                if num_bytes > 0:
                    last_s = max(last_s, _reduce(classes, links, room, segment, num_bytes))
    return last_s


@lean_part
def _segments(classes: Classes, room: Room) -> int:
    """Where all stop, each once; returns how many there are."""
    num_layers = len(room.last)
    room.last[:] = 0
    for stop in classes.stops:
        room.last[stop - 1] = 1
    segments = 0
    for layer in range(num_layers):
        if room.last[layer]:
            room.last[segments] = layer + 1
            segments += 1
    return segments


@lean_part
def _in_rounds(classes: Classes, room: Room, segments: int) -> int:
    """The first free round for each, the highest layers first; returns how many rounds there are."""
    rounds = 0
    for segment in range(segments - 1, -1, -1):
        after = segment + 1
        while after < segments and _share_worker(classes, room, segment, after):
            room.taken[room.rounds[after]] = segment + 1
            after += 1
        number = 0
        while number < rounds and room.taken[number] == segment + 1:
            number += 1
        room.rounds[segment] = number
        rounds = max(rounds, number + 1)
    return rounds


@lean_part
def _share_worker(classes: Classes, room: Room, segment: int, after: int) -> bool:
    """Whether a stage goes from one segment to another one after it: in some class, nobody stops between them."""
    first = 0
    for depth in classes.depths:
        stops = False
        for place in range(first, first + depth):
            stops = stops or room.last[segment] <= classes.stops[place] < room.last[after]
        if not stops:
            return True
        first += depth
    return False


@lean_part
def _reduce(classes: Classes, links: Links, room: Room, segment: int, num_bytes: float) -> float:
    """Reduce a segment; returns when that is done."""
    first = first_host = holders = hosts = 0
    start_s = 0.0
    for number in range(len(classes.depths)):
        depth, members = classes.depths[number], classes.members[number]
        place = first
        while classes.stops[place] < room.last[segment]:
            place += 1
        room.place[number] = place
        start_s = max(start_s, classes.ends_s[place])
        own = first_host + (place - first) * members
        for host in classes.hosts[own : own + members]:
            if room.seen[host] != segment + 1:
                room.seen[host] = segment + 1
                hosts += 1
        holders += members
        first += depth
        first_host += depth * members
    part = num_bytes / holders
    slowest_s = links.far_s + part * links.far_byte_s if hosts > 1 else 0.0
    if hosts < holders:
        slowest_s = max(slowest_s, links.near_s + part * links.near_byte_s)
    done_s: float = start_s + 2 * (holders - 1) * slowest_s
    for number in range(len(classes.depths)):
        classes.ends_s[room.place[number]] = done_s
    return done_s
