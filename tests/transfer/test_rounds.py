"""Rounds of messages."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange
from chameleon_ft.transfer import Message, message_rounds
from tests.golden import refused

# Few workers and layers, so that pairs meet in several messages.
pairs = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1])
messages = st.builds(
    lambda pair, layer, num_bytes: Message(pair[0], pair[1], LayerRange(layer, layer + 1), num_bytes),
    pairs,
    st.integers(0, 9),
    st.integers(0, 100),
)


@given(st.lists(messages, max_size=30))
def test_there_are_as_many_rounds_as_messages_meet_at_a_worker_and_no_worker_is_asked_twice_in_one(
    sent: list[Message],
) -> None:
    rounds = message_rounds(sent)

    busiest = [sum(m.source == worker for m in sent) for worker in range(6)]
    busiest += [sum(m.destination == worker for m in sent) for worker in range(6)]
    assert len(rounds) == max(busiest)
    assert Counter(message for each in rounds for message in each) == Counter(sent)
    for each in rounds:
        assert len({message.source for message in each}) == len({m.destination for m in each}) == len(each) > 0
    largest = [max(message.num_bytes for message in each) for each in rounds]
    assert largest == sorted(largest, reverse=True)


def test_a_message_to_oneself_or_of_negative_size_is_refused() -> None:
    with refused(PlanError):
        Message(1, 1, LayerRange(0, 1), 5)
    with refused(PlanError):
        Message(0, 1, LayerRange(0, 1), -5)
