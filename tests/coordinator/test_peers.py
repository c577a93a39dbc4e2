"""The connected peers of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from chameleon_ft.coordinator import peers as peers_module
from chameleon_ft.coordinator.peers import Peers
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import Kill, Message, Stop
from chameleon_ft.protocol.server import Peer


@dataclass
class _Heard:
    number: int
    texts: list[str | bytes] = field(default_factory=list)

    def send(self, message: Message, text: str | bytes) -> None:
        self.texts.append(text)


def test_what_all_are_sent_is_encoded_once_whatever_each_is_sent_between(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Message] = []

    def noting(message: Message) -> str | bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(peers_module, "encode", noting)
    peers, heard, to_all = Peers(), [_Heard(number) for number in range(3)], Stop(generation=7)
    for each in heard:
        peers.add(cast("Peer", each))
    for each in heard:
        peers.send(each.number, Kill(worker=each.number))
        peers.send(each.number, to_all)
    peers.send(0, Stop(generation=7))
    assert encoded.count(to_all) == 2, "an equal message is another one"
    assert [[decode(text) for text in each.texts[:2]] for each in heard] == [
        [Kill(worker=each.number), to_all] for each in heard
    ]
