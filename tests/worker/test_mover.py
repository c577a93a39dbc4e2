"""The threads of a rank beside its training thread: how they hand over, fail and end."""

from __future__ import annotations

import threading

import pytest
import torch

from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.mover import Mover
from tests.worker.switchboard import Line, Switchboard

PATIENCE_S = 20.0


def waits_for_a_message(mover: Mover) -> None:
    mover.communicators.receive(torch.empty(1), peer=1, tag=0).wait()


def test_what_is_delivered_is_done_by_the_training_thread_in_order() -> None:
    mover, found = Mover(Line(0, Switchboard())), list[tuple[str, int]]()

    def deliver() -> str:
        for name in ("first", "second"):
            mover.deliver(lambda name=name: found.append((name, threading.get_ident())))  # type: ignore[misc]
        return "done"

    assert mover.start(deliver).result(timeout=PATIENCE_S) == "done"
    assert found == []
    mover.carry_out_deliveries()
    assert found == [("first", threading.get_ident()), ("second", threading.get_ident())]


@pytest.mark.parametrize("error", [CommunicationError(1, "it is gone"), ValueError("no such layer")], ids=str)
def test_the_first_error_of_a_task_ends_all_waits(error: Exception) -> None:
    line = Line(0, Switchboard())
    mover, may_fail = Mover(line), threading.Event()

    def fails() -> None:
        assert may_fail.wait(PATIENCE_S)
        raise error

    def waits() -> None:
        with mover.changed:
            mover.wait_for(lambda: False)

    waiting, failing = mover.start(waits), mover.start(fails)
    may_fail.set()
    with mover.changed, pytest.raises(type(error)):
        mover.wait_for(lambda: False, PATIENCE_S)
    for future in (waiting, failing, mover.start(waits)):
        assert future.exception(timeout=PATIENCE_S) is error
    # Others wait for the messages of a task that has failed by itself.
    assert line.board.cut.is_set() is not isinstance(error, CommunicationError)


def test_a_generation_that_is_over_ends_its_tasks() -> None:
    mover = Mover(Line(0, Switchboard()))
    receiving = mover.start(waits_for_a_message, mover)
    mover.deliver(lambda: pytest.fail("its results do not count any more"))
    mover.close()
    assert isinstance(receiving.exception(timeout=0), CommunicationError)
    mover.carry_out_deliveries()
    with pytest.raises(CommunicationError):
        mover.check()


def test_messages_that_others_may_need_go_on_until_they_have_left() -> None:
    line = Line(0, Switchboard())
    mover = Mover(line)
    receiving = mover.start(waits_for_a_message, mover)
    mover.abandon()
    line.board.queue((1, 0, 0)).put(torch.ones(1))
    assert receiving.result(timeout=PATIENCE_S) is None
    assert not line.board.cut.is_set()
    mover.close()
