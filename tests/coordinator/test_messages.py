"""The protocol: every message comes back as it was sent, and nothing else is taken for one."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.codec import decode, encode, encode_alike
from chameleon_ft.protocol.messages import Message, Prepare, StartGeneration
from chameleon_ft.protocol.parts import MessagePart, Transition, pack_operations
from chameleon_ft.schedule import list_schedule
from chameleon_ft.sync import gradient_segments
from tests.strategies import Planned, planned, recomputing

KINDS = Message.__subclasses__()

names = st.text(max_size=20)
numbers = st.integers(-(2**53), 2**53)
reals = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=10,
)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field by its annotation, for all annotations that messages use."""
    if isinstance(annotation, type) and issubclass(annotation, MessagePart):
        return built(annotation)
    if fields := getattr(annotation, "__dataclass_fields__", None) or getattr(annotation, "_fields", None):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{name: values(hints[name]) for name in fields})
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if arguments:
        return st.one_of(*map(values, arguments))
    return {int: numbers, float: reals, str: names, bool: st.booleans(), type(None): st.none()}[annotation]


def built(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a kind, or the values that they hold."""
    return st.builds(kind, **{name: values(field.annotation) for name, field in kind.model_fields.items()})


@given(st.data())
def test_every_message_comes_back_as_it_was_sent(data: st.DataObject) -> None:
    message = data.draw(built(data.draw(st.sampled_from(KINDS))))
    text = encode(message)
    assert "\n" not in text
    assert decode(text) == message
    assert decode(text.encode()) == message


@given(st.data())
def test_messages_that_are_alike_come_back_as_they_were_sent(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    first, *others = data.draw(st.lists(built(kind), min_size=1, max_size=3))
    names = data.draw(st.sets(st.sampled_from(sorted(kind.model_fields))))
    shared = {name: getattr(first, name) for name in names}
    messages = [first, *(each.model_copy(update=shared) for each in others)]
    assert list(map(decode, encode_alike(messages))) == messages


def test_what_messages_share_is_written_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def dump(self: MessagePart, **included: Any) -> str:
        written.append(dumped(self, **included))
        return written[-1]

    dumped = MessagePart.model_dump_json
    monkeypatch.setattr(MessagePart, "model_dump_json", dump)
    members = tuple(range(100, 200))
    order = StartGeneration(generation=1, members=members, first_step=0, operations="", segments=())
    orders = [order.model_copy(update={"operations": str(worker)}) for worker in range(3)]
    transition = Transition(participants=members, keep=(), moves=())
    moving = [
        each.model_copy(update={"transition": transition.model_copy(update={"keep": (worker,)})})
        for worker, each in enumerate(orders)
    ]
    for messages, copies in ((orders, 1), (moving, 2), ([Prepare(order=each) for each in moving], 2)):
        written.clear()
        assert list(map(decode, encode_alike(messages))) == messages
        assert sum(text.count("150") for text in written) == copies


def test_long_fields_that_messages_share_are_compressed() -> None:
    members = tuple(range(4096))
    shards = (((0, 1), members, ((0, 1 << 16, (0, 1)),)),)
    order = StartGeneration(generation=7, members=members, first_step=0, operations="", segments=(), shards=shards)
    orders = [order.model_copy(update={"operations": str(worker)}) for worker in range(2)]
    for messages, head in ((orders, ""), ([Prepare(order=each) for each in orders], '{"type":"prepare","order":')):
        for message, text in zip(messages, encode_alike(messages), strict=True):
            assert text.startswith(head + '{"type":"start_generation","generation":7,')
            assert len(text) < len(encode(message)) / 3
            assert decode(text) == decode(text.encode()) == message


@pytest.mark.parametrize("packed", ["", "AAAA", "A", "eJw="])
def test_what_cannot_be_decompressed_is_no_message(packed: str) -> None:
    with pytest.raises(ControlError):
        decode(f'{{"type":"ready","zlib":"{packed}"}}')
    with pytest.raises(ControlError):
        decode(b"\xff")


@given(planned(), st.booleans())
def test_a_program_comes_back_as_it_was_sent(planned: Planned, recompute: bool) -> None:
    plan = recomputing(planned.plan, planned.plan.workers if recompute else ())
    program = list_schedule(plan, planned.costs)
    segments = gradient_segments(planned.plan.placement)
    for worker in program.workers:
        order = StartGeneration(
            generation=2,
            members=planned.plan.workers,
            first_step=3,
            operations=pack_operations(program.records_of(worker)),
            segments=tuple((s.layers.start, s.layers.stop, s.holders, s.tied) for s in segments),
        )
        received = decode(encode(order))
        assert isinstance(received, StartGeneration)
        assert received.unpack_operations() == program.of(worker)
        assert received.unpack_segments() == tuple(segments)


@given(st.one_of(st.text(), st.binary(), json_values.map(json.dumps)))
def test_what_is_not_a_message_is_refused(text: str | bytes) -> None:
    with pytest.raises(ControlError, match="not a message of this protocol"):
        decode(text)


@given(st.data(), json_values)
def test_a_message_with_a_wrong_field_is_refused_and_the_field_named(data: st.DataObject, value: Any) -> None:
    sent = json.loads(encode(data.draw(built(data.draw(st.sampled_from(KINDS))))))
    with pytest.raises(ControlError, match="more"):
        decode(json.dumps({**sent, "more": value}))


@given(st.data())
def test_a_message_with_a_missing_field_is_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    needed = [name for name, field in kind.model_fields.items() if field.is_required()]
    if needed:
        sent = json.loads(encode(data.draw(built(kind))))
        del sent[data.draw(st.sampled_from(needed))]
        with pytest.raises(ControlError):
            decode(json.dumps(sent))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"type": "quiesced"}', "quiesced.generation: Field required"),
        ('{"type": "sudo"}', "'sudo' found using 'type' does not match any of the expected tags"),
        ('{"worker": 1}', "Unable to extract tag"),
        ("[" * 100_000, "Invalid JSON"),
        ('{"type": "kill", "worker": "one"}', "kill.worker"),
        ('{"type": "kill", "worker": ' + "9" * 5000 + "}", "number out of range"),
        ('{"type": "' + "x" * 5000 + '"}', "not a message of this protocol: Input tag 'xxx"),
        ('{"type": "kill", "' + "x" * 5000 + '": 1, "worker": 1}', "not a message of this protocol: kill.xxx"),
    ],
)
def test_a_refusal_says_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(ControlError) as caught:
        decode(text)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 300, "no message may fill the log"
