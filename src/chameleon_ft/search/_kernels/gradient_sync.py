"""Gradient sync of pipelines side by side where no parameters are tied.

This is `sync.gradient_rounds` for one stage on each worker: the layers between two neighbouring stops of any pipelines
are a segment, and a worker that holds two segments holds all segments between them.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Floats, Integers


class Classes(NamedTuple):
    """Pipelines with equal programs form a class.

    Attributes:
        depths: stages of each class, int64 [classes].
        members: pipelines of each class, int64 [classes].
        stops: where the stages stop, one class after the other, int64 [sum of depths].
        ends_s: when the stages have ended their last operation; likewise, float64.
        hosts: host of each worker, one class after the other, by stage and then by member, int64.
    """

    depths: Integers
    members: Integers
    stops: Integers
    ends_s: Floats
    hosts: Integers


class Links(NamedTuple):
    """Latency in seconds, and seconds for each byte, of links inside a host and between hosts."""

    near_s: float
    near_byte_s: float
    far_s: float
    far_byte_s: float


class Room(NamedTuple):
    """Arrays to work in.

    Attributes:
        place: the stage of each class, counted through all classes, that holds the present segment; int64 [classes].
        seen: one more than the last segment that was reduced on each host, zeros at first; int64 [hosts].
        last, rounds: where each segment stops, and its round; int64 [L].
        taken: one more than the last segment that found each round taken, zeros at first; int64 [L].
    """

    place: Integers
    seen: Integers
    last: Integers
    rounds: Integers
    taken: Integers


@lean_kernel
def last_reduced_s(classes: Classes, gradient_bytes: Floats, links: Links, room: Room) -> float:
    """Seconds until the last gradients have been reduced.

    Args:
        classes: at least two pipelines; `ends_s` is overwritten with when stages have reduced their gradients.
        gradient_bytes: bytes of all layers up to each, float64 [L + 1].
        links: of the cluster.
        room: to work in.
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
    """Fill in where segments stop; return how many there are."""
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
    """Give each segment the first free round, the highest layers first; return how many rounds there are."""
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
    """Whether a worker holds a segment and a later one: in some class, no stage stops between them."""
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
    """Reduce a segment; return when that is done."""
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
