"""Sources of messages, against a complete search over the holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import LayerRange
from chameleon_ft.transfer import Holding, Message, choose_sources
from chameleon_ft.transfer.sources import Loads
from tests.transfer.instances import held_by, holdings, layers_of


def largest_send(sends: Iterable[tuple[int, int]]) -> int:
    """The most bytes of a sender, from pairs of sender and bytes."""
    sent: Counter[int] = Counter()
    for source, num_bytes in sends:
        sent[source] += num_bytes
    return max(sent.values(), default=0)


def min_largest_send(demands: list[int], holders: dict[int, list[int]], sizes: list[int]) -> int:
    """The best there is; each entry of `demands` is a layer to be sent once."""
    choices = product(*(holders[number] for number in demands))
    return min(largest_send(zip(chosen, (sizes[n] for n in demands), strict=True)) for chosen in choices)


@st.composite
def demands(draw: st.DrawFn) -> tuple[dict[int, Holding], dict[int, list[int]]]:
    """Draw holdings, and layers that receivers lack and some worker holds: eight layers at most."""
    live = dict(enumerate(draw(st.lists(holdings(5, kinds=1), min_size=1, max_size=5))))
    held = set().union(*map(held_by, live.values()))
    missing: dict[int, list[int]] = {}
    room = 8
    for worker, holding in live.items():
        candidates = sorted(held - held_by(holding))
        if candidates and room:
            missing[worker] = sorted(draw(st.sets(st.sampled_from(candidates), max_size=room)))
            room -= len(missing[worker])
    return live, missing


def holders_of(live: dict[int, Holding]) -> dict[int, list[int]]:
    return {number: [worker for worker, each in live.items() if number in held_by(each)] for number in range(5)}


@given(demands(), st.one_of(st.just([3] * 5), st.lists(st.sampled_from([0, 1, 2, 5]), min_size=5, max_size=5)))
def test_every_missing_layer_arrives_once_from_a_holder(
    demand: tuple[dict[int, Holding], dict[int, list[int]]], sizes: list[int]
) -> None:
    live, missing = demand
    found = choose_sources(live, missing, layers_of(sizes))

    arrived = [(message.destination, number) for message in found for number in message.layers]
    assert sorted(arrived) == [(worker, number) for worker in missing for number in missing[worker]]
    for message in found:
        assert set(message.layers) <= held_by(live[message.source])
        assert message.num_bytes == sum(sizes[number] for number in message.layers)
    sent = largest_send((message.source, message.num_bytes) for message in found)
    least = min_largest_send([n for each in missing.values() for n in each], holders_of(live), sizes)
    assert least <= sent
    if len(set(sizes)) == 1:
        assert least == sent
    # Neighbours from the same source are one message.
    ends = {(m.source, m.destination, m.layers.stop) for m in found}
    assert not any((m.source, m.destination, m.layers.start) in ends for m in found)


@given(st.lists(holdings(5, kinds=1), min_size=1, max_size=5), st.lists(st.integers(0, 4), max_size=7))
def test_whatever_was_chosen_first_equal_layers_are_evened_out_to_the_least(
    have: list[Holding], wanted: list[int]
) -> None:
    holders = holders_of(dict(enumerate(have)))
    assume(all(holders[number] for number in wanted))
    groups_of = {number: holders[number] for number in range(5)}
    loads = Loads([[worker] for worker in range(len(have))], groups_of, dict.fromkeys(range(5), 2))
    for number in wanted:
        loads.spread(number, 1)

    loads.even_out()

    senders = loads.senders()
    assert {number: sum(copies.values()) for number, copies in senders.items()} == Counter(wanted)
    sent = largest_send((worker, 2 * n) for copies in senders.values() for worker, n in copies.items())
    assert sent == min_largest_send(wanted, holders, [2] * 5)


def test_a_chain_over_two_holders_makes_the_largest_send_less() -> None:
    # Worker 0 sends layers 0 and 1; only worker 1, which sends layer 2 already, can take one; worker 2 frees it.
    loads = Loads([[0], [1], [2]], {0: [0], 1: [0, 1], 2: [1, 2]}, {0: 1, 1: 1, 2: 1})
    for number in (2, 1, 0):
        loads.spread(number, 1)

    loads.even_out()

    assert loads.senders() == {0: {0: 1}, 1: {1: 1}, 2: {2: 1}}


def test_a_chain_may_lead_through_a_worker_that_sends_as_much() -> None:
    # Workers 0 and 1 send two layers each. Worker 0 can only give one to worker 1, which gives another to worker 2.
    holders = {0: [0], 1: [0, 1], 2: [1, 2], 3: [1, 3], 4: [3, 4]}
    loads = Loads([[worker] for worker in range(5)], holders, dict.fromkeys(holders, 1))
    for number in (1, 0, 4, 2, 3):
        loads.spread(number, 1)
    assert loads.senders()[3] == {1: 1}

    loads.even_out()

    assert loads.senders() == {0: {0: 1}, 1: {1: 1}, 2: {2: 1}, 3: {3: 1}, 4: {4: 1}}


def test_layers_of_several_sizes_may_be_passed_on_too() -> None:
    sizes = {0: 2, 1: 3, 2: 1}
    loads = Loads([[0], [1]], {0: [0, 1], 1: [0], 2: [0, 1]}, sizes)
    for number in (0, 1, 2):
        loads.spread(number, 1)

    loads.even_out()

    senders = loads.senders()
    assert senders[0] == {1: 1}
    assert largest_send((worker, sizes[layer] * n) for layer, own in senders.items() for worker, n in own.items()) == 3


def test_neighbouring_layers_from_one_source_are_one_message() -> None:
    live = {0: Holding((LayerRange(0, 4),)), 1: Holding(())}

    found = choose_sources(live, {1: [0, 1, 3]}, layers_of([1, 2, 4, 8]))

    assert found == (Message(0, 1, LayerRange(0, 2), 3), Message(0, 1, LayerRange(3, 4), 8))


def test_layers_that_no_worker_holds_are_named() -> None:
    with pytest.raises(NoHolderError) as caught:
        choose_sources({0: Holding((LayerRange(1, 2),)), 1: Holding(())}, {1: [0, 1, 2]}, layers_of([1] * 3))

    assert caught.value.layers == (0, 2)
