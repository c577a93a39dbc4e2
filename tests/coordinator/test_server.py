"""The coordinator's server, over real connections: accepted and rejected connections, and lost ones."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode

from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.protocol.address import bearer, generate_certificates, split_address, tls_context, websocket_url
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.connection import control_connection, heartbeat_interval_s
from chameleon_ft.protocol.messages import Exit, Finish, Message, Refused
from chameleon_ft.protocol.server import Peer, control_server, listening_socket
from tests.golden import refused

TOKEN = "open sesame"


@dataclass
class Listener:
    """Keeps what the server hands on; it refuses `Exit` and stumbles over `Finish`."""

    address: str = ""
    heard: list[Message] = field(default_factory=list)
    turned_away: list[str] = field(default_factory=list)
    mistakes: list[Exception] = field(default_factory=list)
    departures: asyncio.Queue[Peer] = field(default_factory=asyncio.Queue)
    silences: asyncio.Queue[tuple[Peer, float]] = field(default_factory=asyncio.Queue)
    peers: list[Peer] = field(default_factory=list)

    def message(self, peer: Peer, message: Message) -> None:
        self.peers.append(peer)
        if isinstance(message, Exit):
            raise ControlError("that message is not allowed here")
        if isinstance(message, Finish):
            raise ZeroDivisionError
        self.heard.append(message)
        peer.send(message)

    def departed(self, peer: Peer) -> None:
        self.departures.put_nowait(peer)

    def silent(self, peer: Peer, since_s: float) -> None:
        self.silences.put_nowait((peer, since_s))

    def answered(self) -> None:
        raise AssertionError("all peers are on this host")

    def refused(self, address: str, reason: str) -> None:
        assert address.startswith("127.0.0.1:")
        self.turned_away.append(reason)

    def broken(self, error: Exception) -> None:
        self.mistakes.append(error)


HELLO: Message = Refused(reason="any message will do")


def serving(
    body: Callable[[Listener], Coroutine[Any, Any, None]],
    *,
    heartbeat_timeout_s: float = 30.0,
    tls: Path | None = None,
) -> None:
    """Run `body` beside a server."""

    async def whole() -> None:
        listener = Listener()
        sock = listening_socket("127.0.0.1", 0)
        async with control_server(
            listener, listener=sock, token=TOKEN, heartbeat_timeout_s=heartbeat_timeout_s, tls=tls
        ):
            listener.address = f"127.0.0.1:{sock.getsockname()[1]}"
            await body(listener)

    asyncio.run(whole())


@asynccontextmanager
async def joined(listener: Listener, tls: Path | None = None) -> AsyncIterator[ClientConnection]:
    async with control_connection(listener.address, TOKEN, tls=tls) as connection:
        yield connection


async def echoed(connection: ClientConnection) -> Message:
    await connection.send(encode(HELLO))
    return decode(await connection.recv())


def test_messages_go_both_ways() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as connection:
            assert await echoed(connection) == HELLO
        await listener.departures.get()
        assert listener.turned_away == []

    serving(body)


@pytest.mark.parametrize(
    "headers", [{}, bearer("open barley"), {"Authorization": TOKEN}, {"Authorization": "Bearer ü"}]
)
def test_without_the_token_no_peer_is_accepted(headers: dict[str, str]) -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as member:
            with pytest.raises(InvalidStatus) as caught:
                await connect(websocket_url(listener.address), additional_headers=headers, proxy=None)
            assert caught.value.response.status_code == 401
            assert listener.turned_away == ["wrong join token"]
            assert await echoed(member) == HELLO

    serving(body)


def test_what_does_not_speak_the_protocol_at_all_disturbs_no_other() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as member:
            for noise in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n" * 100):
                reader, writer = await asyncio.open_connection(*split_address(listener.address))
                writer.write(noise)
                writer.write_eof()
                await reader.read()
                writer.close()
            assert await echoed(member) == HELLO
            assert listener.mistakes == []
            noise_said, request_said, empty_said = listener.turned_away
            assert noise_said.startswith("does not speak this protocol: ")
            assert request_said == "wrong join token"
            assert empty_said.startswith("does not speak this protocol: ")

    serving(body)


def test_what_connects_and_sends_nothing_is_not_reported() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as member:
            reader, writer = await asyncio.open_connection(*split_address(listener.address))
            writer.write_eof()
            await reader.read()
            writer.close()
            assert await echoed(member) == HELLO
            assert listener.turned_away == []

    serving(body)


@pytest.mark.parametrize("noise", ["", "hello", "{}", '{"type": "sudo"}', b"\xff\xfe", '{"type": "finish", "more": 1}'])
def test_a_message_that_is_not_ours_is_refused_and_its_sender_told(noise: str | bytes) -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as member, joined(listener) as stranger:
            await stranger.send(noise)
            answer = decode(await stranger.recv())
            assert isinstance(answer, Refused)
            assert answer.reason.startswith("not a message of this protocol")
            with pytest.raises(ConnectionClosed):
                await stranger.recv()
            assert listener.turned_away == [answer.reason]
            await listener.departures.get()
            assert await echoed(member) == HELLO

    serving(body)


def test_a_message_that_may_not_be_said_is_refused_and_its_sender_told() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as member, joined(listener) as stranger:
            await stranger.send(encode(Exit(reason="")))
            assert decode(await stranger.recv()) == Refused(reason="that message is not allowed here")
            await listener.departures.get()
            assert listener.turned_away == ["that message is not allowed here"]
            assert await echoed(member) == HELLO

    serving(body)


def test_a_mistake_of_the_handler_is_reported_and_not_blamed_on_the_peer() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as connection:
            await connection.send(encode(Finish()))
            await listener.departures.get()
        assert [type(error) for error in listener.mistakes] == [ZeroDivisionError]
        assert listener.turned_away == []

    serving(body)


def test_a_dropped_peer_is_gone_at_once() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as connection:
            await echoed(connection)
            (peer,) = listener.peers
            peer.drop()
            assert await listener.departures.get() is peer
            with pytest.raises(ConnectionClosed):
                await connection.recv()
            peer.send(HELLO)  # goes nowhere, and that is no error

    serving(body)


def test_a_peer_that_answers_no_ping_is_reported_until_it_leaves() -> None:
    async def body(listener: Listener) -> None:
        reader, writer = await asyncio.open_connection(*split_address(listener.address))
        key = base64.b64encode(b"sixteen bytes...").decode()
        writer.write(
            f"GET / HTTP/1.1\r\nHost: {listener.address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        assert b"101" in await reader.readline()
        peer, first_s = await listener.silences.get()
        again, second_s = await listener.silences.get()
        assert again is peer
        assert second_s > first_s
        assert listener.departures.empty()
        writer.close()
        assert await listener.departures.get() is peer

    serving(body, heartbeat_timeout_s=0.2)


def test_a_peer_that_sends_is_not_pinged() -> None:
    async def body(listener: Listener) -> None:
        async with joined(listener) as connection:
            pings: list[Frame] = []
            received = connection.protocol.recv_frame

            def receive(frame: Frame) -> None:
                if frame.opcode is Opcode.PING:
                    pings.append(frame)
                received(frame)

            connection.protocol.recv_frame = receive  # type: ignore[method-assign]
            while len(pings) < 2:  # a silent one is
                await asyncio.sleep(0.01)
            before, until_s = len(pings), asyncio.get_running_loop().time() + 1.0
            sent = 0
            while asyncio.get_running_loop().time() < until_s:
                await echoed(connection)
                sent += 1
            # A busy machine may hold up a message for as long as the interval.
            assert len(pings) - before < sent / 2

    serving(body, heartbeat_timeout_s=0.4)


@pytest.mark.parametrize(("peers", "seconds"), [(0, 1.25), (512, 1.25), (6000, 10.0)])
def test_very_many_peers_are_pinged_less_often(peers: int, seconds: float) -> None:
    assert heartbeat_interval_s(5.0, peers) == seconds


def test_a_large_message_comes_through() -> None:
    # The orders of a worker in a large plan are a few megabytes.
    async def body(listener: Listener) -> None:
        async with joined(listener) as connection:
            large = Refused(reason="x" * 5_000_000)
            await connection.send(encode(large))
            assert decode(await connection.recv()) == large

    serving(body)


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories, of two authorities."""
    made = [tmp_path_factory.mktemp("tls") / name for name in ("own", "other")]
    for directory in made:
        generate_certificates(directory)
    return made


def test_only_their_owner_can_read_generated_keys(certificates: list[Path]) -> None:
    assert [path.stat().st_mode & 0o777 for path in (certificates[0], certificates[0] / "key.pem")] == [0o700, 0o600]


def test_messages_go_both_ways_over_tls(certificates: list[Path]) -> None:
    own, _ = certificates

    async def body(listener: Listener) -> None:
        async with joined(listener, own) as connection:
            assert await echoed(connection) == HELLO
            transport = connection.transport
            assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        await listener.departures.get()

    serving(body, tls=own)


def test_the_address_of_a_peer_is_known_when_it_has_left(certificates: list[Path]) -> None:
    """A message may be handled, and refused, after its peer has left."""
    own, _ = certificates

    async def body(listener: Listener) -> None:
        async with joined(listener, own) as connection:
            assert await echoed(connection) == HELLO
            connection.transport.abort()
        peer = await listener.departures.get()
        assert peer.address.startswith("127.0.0.1:")

    serving(body, tls=own)


def test_a_peer_of_another_authority_or_without_tls_is_not_accepted(certificates: list[Path]) -> None:
    own, other = certificates
    no_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    no_certificate.check_hostname = False
    no_certificate.load_verify_locations(own / "ca.pem")
    with_another = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with_another.check_hostname = False
    with_another.verify_mode = ssl.CERT_NONE
    with_another.load_cert_chain(other / "cert.pem", other / "key.pem")

    async def body(listener: Listener) -> None:
        async with joined(listener, own) as member:
            for tls in (other, None):
                with pytest.raises((OSError, InvalidHandshake)):
                    await control_connection(listener.address, TOKEN, tls=tls)
            for context in (no_certificate, with_another):
                with pytest.raises((OSError, InvalidHandshake)):
                    await connect(
                        websocket_url(listener.address, tls=True),
                        ssl=context,
                        additional_headers=bearer(TOKEN),
                        proxy=None,
                    )
            silent = await asyncio.open_connection(*split_address(listener.address))
            assert await echoed(member) == HELLO
            silent[1].close()
        assert listener.peers == listener.peers[:1] * len(listener.peers), "only the member was heard"

    serving(body, tls=own)


def test_a_worker_does_not_talk_to_a_coordinator_of_another_authority(certificates: list[Path]) -> None:
    own, other = certificates

    async def body(listener: Listener) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await control_connection(listener.address, TOKEN, tls=own)
        assert listener.heard == []

    serving(body, tls=other)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda directory: (directory / "ca.pem").unlink(), r"No such file or directory; it must hold ca\.pem"),
        (lambda directory: (directory / "key.pem").write_text("no key"), "it must hold ca.pem, cert.pem, key.pem"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    generate_certificates(tmp_path / "tls")
    spoil(tmp_path / "tls")
    with refused(ConfigError):
        tls_context(tmp_path / "tls")


def test_without_openssl_there_is_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(ConfigError):
        generate_certificates(tmp_path / "tls")
