"""Descriptions of layers: every state of an optimizer survives, and nothing that is sent is run."""

from __future__ import annotations

import json
import math
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.state_transfer.description import decode_description, encode_description
from chameleon_ft.worker.state_transfer.layer_messages import IncomingLayers, checksum
from tests.worker.switchboard import Line, Switchboard

SOURCE = Path(__file__).parents[2] / "src" / "chameleon_ft"
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
PLAIN = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.q", "torch.bits"))]


def can_be_made(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(2, 0, dtype=dtype).view(torch.uint8)
    except (RuntimeError, NotImplementedError, UserWarning):  # warnings are errors here
        return False
    return True


dtypes = st.sampled_from([dtype for dtype in PLAIN if can_be_made(dtype)])
shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(shapes), draw(dtypes)
    num_bytes = math.prod(shape) * dtype.itemsize
    flat = torch.tensor([*draw(st.binary(min_size=num_bytes, max_size=num_bytes))], dtype=torch.uint8)
    return flat.view(dtype).view(shape)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from(DTYPES)
)
values = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=12,
)
states = st.dictionaries(st.text(), values, max_size=5)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case Tensor():
            return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
        case float() | complex():
            return repr(one) == repr(other)  # NaN and the sign of zero count
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return bool(one == other)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(st.lists(states, max_size=3))
def test_every_value_survives_and_tensors_are_announced(before: list[dict[str, Any]]) -> None:
    after = decode_description(encode_description(before))

    assert [list(state) for state in after] == [list(state) for state in before]
    for one, other in zip(before, after, strict=True):
        for key, value in one.items():
            if isinstance(value, Tensor):
                assert other[key].is_meta
                assert (other[key].dtype, other[key].shape) == (value.dtype, value.shape)
            else:
                assert same(value, other[key])


class Kind(Enum):
    ADAM = 1


@pytest.mark.parametrize("value", [Kind.ADAM, object(), [{1: {2, 3}}]])
def test_a_value_that_cannot_be_sent_is_named_with_a_remedy(value: Any) -> None:
    with pytest.raises(ConfigError):
        encode_description([{"optimizer/w/kind": value}])


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("what came from the network was run",)


CRAFTED = [
    pickle.dumps([{"module/w": Trap()}]),
    pickle.dumps([{"module/w": (1,)}], protocol=0),
    b"",
    b"null",
    b"[1]",
    b'[{"a": [1]}]',
    b'[{"a": {}}]',
    b'[{"a": {"tensor": ["float32", [-1]]}}]',
    b'[{"a": {"tensor": ["float32", [1e300]]}}]',
    b'[{"a": {"tensor": ["float32", [999999999999, 999999999999, 999999999999]]}}]',
    b'[{"a": {"tensor": ["load", [1]]}}]',
    b'[{"a": {"tensor": ["no such type", [1]]}}]',
    b'[{"a": {"data": ["float32", [7], "AAAA"]}}]',
    b'[{"a": {"data": ["float32", [1], "!"]}}]',
    b'[{"a": {"eval": "1"}}]',
    b'[{"a": {"dict": [[{"list": []}, 1]]}}]',
    b'[{"a": ' + b'{"list": [' * 100_000,
]


@pytest.mark.parametrize("crafted", CRAFTED, ids=range(len(CRAFTED)))
def test_what_is_no_description_is_refused(crafted: bytes) -> None:
    with pytest.raises(ControlError):
        decode_description(crafted)


@given(st.binary() | st.recursive(scalars, lambda inner: st.lists(inner)).map(lambda value: pickle.dumps(value)))
def test_any_bytes_are_refused_in_the_same_way(text: bytes) -> None:
    try:
        decode_description(text)
    except ControlError:
        return
    assert isinstance(json.loads(text), list)


@pytest.mark.parametrize("crafted", [CRAFTED[0], CRAFTED[5]])
def test_a_crafted_message_names_its_sender(crafted: bytes) -> None:
    board, description = Switchboard(), torch.frombuffer(bytearray(crafted), dtype=torch.uint8)
    sender = Line(0, board)
    sender.send(torch.tensor([len(crafted), checksum(description)]), peer=1, tag=2)
    sender.send(description, peer=1, tag=2)

    incoming = IncomingLayers(Line(1, board), peer=0, tag=2, device=torch.device("cpu"))
    with pytest.raises(CommunicationError, match="worker 0 failed: not a description of layers") as caught:
        incoming.describe()
    assert caught.value.peer == 0


def test_nothing_in_the_package_unpickles_what_comes_through_a_socket() -> None:
    """Multiprocessing, the fork server, loaders and the reader of a stream pickle, but only between child and parent.

    The position of a stream is read by torch without running code.
    """
    unpickling = ("pickle.load", "torch.load(", "_object_list(", "multiprocessing.managers", "shelve")
    found = {
        str(path.relative_to(SOURCE)): [name for name in unpickling if name in path.read_text(encoding="utf-8")]
        for path in SOURCE.rglob("*.py")
        if path.name not in ("fork_server.py", "loaders.py", "streams.py")
    }
    text = (SOURCE / "data" / "streams.py").read_text(encoding="utf-8")
    assert text.count("torch.load(") == text.count("weights_only=True") == 1
    assert {path: names for path, names in found.items() if names} == {}
