"""The protocol: every message comes back as it was sent, and nothing else is taken for one."""

from __future__ import annotations

import json
import re
import typing
import zlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from chameleon_ft.errors import ControlError
from chameleon_ft.plan import Hop, LayerRange, Route, frames
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.plan.shards import UNITS, LayerShards, Slice
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import Message, Prepare, Quiesced, StartGeneration
from chameleon_ft.protocol.parts import MessagePart
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.recovery.transition import TransitionOrders
from chameleon_ft.schedule import Operation, OperationKind, Program, list_schedule
from chameleon_ft.sync import Segment, gradient_segments
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


ranges = st.builds(lambda start, size: LayerRange(start, start + size), st.integers(0, 99), st.integers(1, 9))


def owned(parts: list[int]) -> LayerShards:
    """The slices of a layer with as many owners as there are parts, in these proportions."""
    ends = [0, *(UNITS * sum(parts[: number + 1]) // sum(parts) for number in range(len(parts)))]
    return LayerShards(tuple(range(len(parts))), tuple(Slice(a, b, (i,)) for i, (a, b) in enumerate(pairwise(ends))))


operations = st.builds(
    Operation.of, st.sampled_from(OperationKind), st.just(Route(3, (Hop(0, LayerRange(0, 4)),))), st.just(0)
)
OF_TYPES: dict[Any, st.SearchStrategy[Any]] = {
    LayerRange: ranges,
    LayerShards: st.lists(st.integers(1, 9), min_size=1, max_size=3).map(owned),
    Program: st.dictionaries(st.integers(0, 99), st.lists(operations, max_size=3), max_size=3).map(Program),
}
"""Values of types that check their fields."""


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field by its annotation, for all annotations that messages use."""
    if annotation in OF_TYPES:
        return OF_TYPES[annotation]
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
    if origin is frozenset:
        return st.frozensets(values(arguments[0]), max_size=3)
    if arguments:
        return st.one_of(*map(values, arguments))
    return {
        int: numbers,
        float: reals,
        str: names,
        bytes: st.binary(max_size=9),
        bool: st.booleans(),
        type(None): st.none(),
    }[annotation]


def built(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a kind, or the values that they hold."""
    return st.builds(kind, **{name: values(field.annotation) for name, field in kind.model_fields.items()})


@given(st.data())
def test_every_message_comes_back_as_it_was_sent(data: st.DataObject) -> None:
    message = data.draw(built(data.draw(st.sampled_from(KINDS))))
    frame = encode(message)
    if isinstance(frame, str):
        assert "\n" not in frame
        assert decode(frame.encode()) == message
    assert decode(frame) == message


MEMBERS = tuple(range(100, 4096))
SEGMENTS = (Segment(LayerRange(0, 2), MEMBERS),)
ORDERS = [
    WorkerOrders(
        generation=7,
        worker=worker,
        members=MEMBERS,
        first_step=0,
        program=Program({worker: ()}),
        segments=SEGMENTS,
        transition=TransitionOrders(participants=MEMBERS, keep=(worker,), moves=()),
    )
    for worker in range(3)
]


@pytest.mark.parametrize("kind", [StartGeneration, Prepare])
def test_what_orders_share_is_compressed_once(
    kind: type[StartGeneration | Prepare], monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed: list[bytes] = []

    def compress(text: bytes) -> bytes:
        compressed.append(text)
        return zlib.compress(text)

    stand_in = SimpleNamespace(compress=compress, decompress=zlib.decompress, error=zlib.error)
    monkeypatch.setattr(frames, "zlib", stand_in)
    shared: dict[int, tuple[object, Any]] = {}
    messages = [kind(orders=orders) for orders in ORDERS]
    found = [encode(message, shared) for message in messages]
    assert len(compressed) == 2, "the members, which are the participants, and the segments"
    assert [decode(frame) for frame in found] == messages
    for frame in found:
        assert len(frame) < len(str(MEMBERS))


def frame_of(message: Message) -> bytes:
    frame = encode(message)
    return frame if isinstance(frame, bytes) else frame.encode()


@pytest.mark.parametrize("place", ["[0, 9]", "[-1, 1]", "[0]", "[0, 4]", '"a"'])
def test_a_frame_without_the_bytes_that_it_refers_to_is_no_message(place: str) -> None:
    text, _, _ = frame_of(StartGeneration(orders=ORDERS[0])).partition(b"\n")
    broken = re.sub(rb'"members":\{"at":[^}]*\}', f'"members":{{"at":{place}}}'.encode(), text)
    assert broken != text
    with pytest.raises(ControlError):
        decode(broken + b"\nwhat")


@pytest.mark.parametrize(
    ("valid", "invalid"), [(b'"program":[[0],[0]', b'"program":[[0],[1]'), (b'"start":2', b'"start":3')]
)
def test_a_value_that_breaks_its_rules_is_refused(valid: bytes, invalid: bytes) -> None:
    progress = StepProgress(saved=frozenset({(0, LayerRange(2, 3))}))
    quiesced = Quiesced(
        generation=1, committed=1, reduced=False, last_vote=None, placed=0, layers=(), progress=progress
    )
    (frame,) = (each for each in map(frame_of, (quiesced, StartGeneration(orders=ORDERS[0]))) if valid in each)
    with pytest.raises(ControlError):
        decode(frame.replace(valid, invalid))


@given(planned(), st.booleans())
def test_a_program_comes_back_as_it_was_sent(planned: Planned, recompute: bool) -> None:
    plan = recomputing(planned.plan, planned.plan.workers if recompute else ())
    program = list_schedule(plan, planned.costs)
    segments = gradient_segments(planned.plan.placement)
    for worker in program.workers:
        own = program.only(worker)
        orders = replace(ORDERS[0], worker=worker, program=own, segments=segments)
        received = decode(encode(StartGeneration(orders=orders)))
        assert isinstance(received, StartGeneration)
        assert received.orders == orders
        assert received.orders.operations == program.of(worker)
        assert TypeAdapter(Program).validate_json(TypeAdapter(Program).dump_json(own)) == own, "in a file"


@given(st.one_of(st.text(), st.binary(), json_values.map(json.dumps)))
def test_what_is_not_a_message_is_refused(text: str | bytes) -> None:
    with pytest.raises(ControlError, match="not a message of this protocol"):
        decode(text)


@given(st.data(), json_values)
def test_a_message_with_a_wrong_field_is_refused_and_the_field_named(data: st.DataObject, value: Any) -> None:
    sent = json.loads(data.draw(built(data.draw(st.sampled_from(KINDS)))).model_dump_json())
    with pytest.raises(ControlError, match="more"):
        decode(json.dumps({**sent, "more": value}))


@given(st.data())
def test_a_message_with_a_missing_field_is_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    needed = [name for name, field in kind.model_fields.items() if field.is_required()]
    if needed:
        sent = json.loads(data.draw(built(kind)).model_dump_json())
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
