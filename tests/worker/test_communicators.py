"""Waiting that can be cancelled, and telling a library's connections from others."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from chameleon_ft.worker.communicators.gloo import SocketTracker, WaitCancelledError, Waiter
from tests.golden import refused
from tests.worker.ranks import open_descriptors

# --- waiter ----------------------------------------------------------------------------------------------------------


class Work:
    """An operation that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()
        self._error = error

    def wait(self) -> None:
        self.begun.set()
        self.end.wait()
        if self._error is not None:
            raise self._error


@contextmanager
def waiter() -> Iterator[Waiter]:
    made = Waiter()
    yield made
    made.stop()
    assert made.join(10)


def ended(error: Exception | None = None) -> Work:
    work = Work(error)
    work.end.set()
    return work


def cancel_in(work: Work, waiting: Waiter) -> None:
    """Call the waits off once this operation is waited for."""

    def cancel() -> None:
        work.begun.wait()
        waiting.cancel()

    threading.Thread(target=cancel).start()


def test_a_wait_lasts_until_the_operation_is_done() -> None:
    with waiter() as waiting:
        for _ in range(100):
            waiting.wait(ended())
        work = Work()
        done = threading.Thread(target=waiting.wait, args=(work,))
        done.start()
        work.begun.wait()
        assert done.is_alive()
        work.end.set()
        done.join()


def test_the_error_of_an_operation_is_raised_and_the_next_one_is_waited_for() -> None:
    with waiter() as waiting:
        with refused(ValueError):
            waiting.wait(ended(ValueError("reset by peer")))
        waiting.wait(ended())


def test_a_wait_is_called_off_while_its_operation_sleeps_on() -> None:
    with waiter() as waiting:
        work = Work()
        cancel_in(work, waiting)
        with pytest.raises(WaitCancelledError):
            waiting.wait(work)
        with pytest.raises(WaitCancelledError):
            waiting.wait(ended())
        waiting.stop()
        assert not waiting.join(0), "it sleeps"
        work.end.set()


def test_an_operation_that_ends_after_it_was_called_off_disturbs_no_worker() -> None:
    with waiter() as waiting:
        work = Work(ValueError("too late"))
        cancel_in(work, waiting)
        with pytest.raises(WaitCancelledError):
            waiting.wait(work)
        work.end.set()
        for _ in range(3):
            with pytest.raises(WaitCancelledError):
                waiting.wait(ended())


def test_calling_off_races_with_the_end_and_with_the_beginning() -> None:
    for _ in range(300):
        with waiter() as waiting:
            work = Work()
            outcomes: list[str] = []

            def wait(waiting: Waiter = waiting, work: Work = work, outcomes: list[str] = outcomes) -> None:
                try:
                    waiting.wait(work)
                    outcomes.append("done")
                except WaitCancelledError:
                    outcomes.append("cancelled")

            threads = [threading.Thread(target=target) for target in (wait, work.end.set, waiting.cancel)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert outcomes in (["done"], ["cancelled"])


# --- sockets ---------------------------------------------------------------------------------------------------------


@contextmanager
def connection(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect to a listener; both ends are given."""
    with socket.create_connection(listener.getsockname()[:2]) as one:
        other, _ = listener.accept()
        with other:
            yield one, other


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        yield listener


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    one, other = pair
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


def test_only_what_was_connected_between_start_and_settle_is_shut_down() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        tracker = SocketTracker()
        before = stack.enter_context(connection(listener))
        tracker.start()
        between = [stack.enter_context(connection(listener)) for _ in range(3)]
        tracker.settle()
        after = stack.enter_context(connection(listener))
        tracker.shut_down()
        assert is_open(before)
        assert is_open(after)
        assert not any(is_open(pair) for pair in between)
        tracker.close()


def test_listening_and_other_sockets_are_left_alone() -> None:
    with ExitStack() as stack:
        tracker = SocketTracker()
        tracker.start()
        listener = stack.enter_context(listening())
        local = socket.socketpair()
        for end in local:
            stack.enter_context(end)
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", 0))
        tracker.settle()
        tracker.shut_down()
        with connection(listener) as pair:
            assert is_open(pair)
        assert is_open(local)
        datagrams.sendto(b"x", datagrams.getsockname())
        assert datagrams.recv(1) == b"x"
        tracker.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_connections_with_an_address_that_was_published_are_shut_down(host: str) -> None:
    """Not one of the job's own, or one to another coordinator that leads meanwhile."""
    with ExitStack() as stack:
        theirs = stack.enter_context(listening(host))
        own = stack.enter_context(listening(host))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        published: list[bytes] = []
        tracker = SocketTracker()
        tracker.start()
        tracker.narrow(lambda: published)
        jobs = stack.enter_context(connection(own))
        members = stack.enter_context(connection(theirs))
        tracker.shut_down()
        assert is_open(jobs)
        assert is_open(members)
        address = struct.pack(">H", theirs.getsockname()[1]) + bytes(4 if ":" in host else 0)
        published.append(b"a host" + bytes(100) + address + socket.inet_pton(family, host) + bytes(100))
        tracker.settle()
        published.clear()
        tracker.shut_down()
        assert is_open(jobs)
        assert not is_open(members)
        tracker.close()
        assert is_open(jobs)


def test_a_blocked_read_ends_before_settling_too() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        tracker = SocketTracker()
        tracker.start()
        one, _ = stack.enter_context(connection(listener))
        reading = threading.Thread(target=one.recv, args=(1,))
        reading.start()
        tracker.shut_down()
        reading.join()
        tracker.close()


def test_a_reused_descriptor_is_left_alone() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        tracker = SocketTracker()
        tracker.start()
        tracked = socket.create_connection(listener.getsockname())
        stack.enter_context(listener.accept()[0])
        tracker.settle()
        number = tracked.fileno()
        tracked.close()
        reused = stack.enter_context(connection(listener))
        assert number in (reused[0].fileno(), reused[1].fileno())
        tracker.shut_down()
        assert is_open(reused)
        tracker.close()


def test_a_connection_stays_tracked_when_the_library_renames_it() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        tracker = SocketTracker()
        tracker.start()
        one, other = stack.enter_context(connection(listener))
        tracker.settle()
        renamed = one.dup()
        stack.enter_context(renamed)
        one.close()
        tracker.shut_down()
        assert not is_open((renamed, other))
        tracker.close()


def test_closing_forgets_everything_and_leaks_nothing() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        count = open_descriptors()
        for _ in range(50):
            tracker = SocketTracker()
            tracker.start()
            with connection(listener):
                tracker.shut_down()
                tracker.settle()
                tracker.shut_down()
                tracker.close()
                tracker.close()
        assert open_descriptors() == count
