"""The rendezvous store: a value reaches whoever looks it up, before or after it is published, in its generation."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.coordinator import peers as rendezvous
from chameleon_ft.coordinator.peers import RendezvousStore
from chameleon_ft.protocol.messages import LookUp, Publish, Published

generations, names = st.integers(1, 2), st.integers(0, 3)
actions = st.lists(
    st.tuples(st.just("publish"), generations, names) | st.tuples(st.just("look up"), generations, names), max_size=30
)


@given(actions)
def test_each_look_up_is_answered_once_as_soon_as_the_key_is_there(actions: list[tuple[str, int, int]]) -> None:
    store, published = RendezvousStore(), defaultdict[int, dict[str, bytes]](dict)
    waiting: list[tuple[int, int, str]] = []
    for connection, (action, generation, name) in enumerate(actions):
        key = f"group-{name % 2}/{name}"
        if action == "publish":
            published[generation][key] = str(connection).encode()
            answers = store.publish(connection, Publish(generation=generation, key=key, value=str(connection).encode()))
        else:
            waiting.append((connection, generation, key))
            answers = store.look_up(connection, LookUp(generation=generation, key=key))
        expected = [each for each in waiting if each[2] in published[each[1]]]
        waiting = [each for each in waiting if each not in expected]
        found = dict(answers)
        assert sorted(found) == [to for to, _, _ in expected]
        for to, number, wanted in expected:
            values = dict(found[to].values)
            assert found[to].generation == number
            assert wanted in values
            folder = wanted.partition("/")[0]
            assert values == {k: v for k, v in published[number].items() if k.startswith(folder)}


def test_earlier_generations_are_forgotten() -> None:
    store = RendezvousStore()
    for generation in (1, 2):
        assert not list(store.publish(6, Publish(generation=generation, key="a/0", value=b"x")))
        assert not list(store.look_up(7, LookUp(generation=generation, key="a/1")))
    store.forget_before(2)

    assert not list(store.look_up(8, LookUp(generation=1, key="a/0")))
    assert list(store.publish(6, Publish(generation=2, key="a/1", value=b"y"))) == [
        (7, Published(generation=2, values=(("a/0", b"x"), ("a/1", b"y"))))
    ]


def test_all_members_of_a_group_are_sent_all_its_values_once_the_last_is_there() -> None:
    store = RendezvousStore()
    values = tuple((f"group-0/{rank}", f"at {rank}".encode()) for rank in range(3))
    published = [
        list(store.publish(10 + rank, Publish(generation=1, key=key, value=value, members=3)))
        for rank, (key, value) in enumerate(values)
    ]
    assert published == [[], [], [(10 + rank, Published(generation=1, values=values)) for rank in range(3)]]
    # One whose connection was lost asks, and is told at once.
    assert list(store.look_up(20, LookUp(generation=1, key="group-0/2"))) == [
        (20, Published(generation=1, values=values))
    ]


def test_an_answer_takes_no_look_at_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []

    def folder_of(key: str) -> str:
        folders.append(key)
        return key.partition("/")[0]

    monkeypatch.setattr(rendezvous, "folder_of", folder_of)
    store, groups, members = RendezvousStore(), 50, 4
    keys = [f"group-{group}/{rank}" for group in range(groups) for rank in range(members)]
    answers = [
        answer
        for connection, key in enumerate(keys)
        for answer in store.publish(connection, Publish(generation=1, key=key, value=b"x", members=members))
    ]
    assert [to for to, _ in answers] == list(range(len(keys)))
    assert len(folders) == len(keys)
