"""A rank's part in a generation, in cases that whole runs rarely reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chameleon_ft.protocol.messages import Position
from chameleon_ft.worker.control_client import Activity
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.step_loop import Outcome
from chameleon_ft.worker.trainer import Trainer


def test_a_worker_that_hangs_before_its_first_operation_does_not_seem_to_wait() -> None:
    """The watchdog gives up only workers that compute, and all others wait for this one."""
    activity, found = Activity(), list[Position]()

    def train(*_: object) -> Outcome:
        found.append(activity.position(1))
        return Outcome.FINISHED

    def nothing(*_: object) -> None: ...

    trainer: Any = SimpleNamespace(
        _rank=SimpleNamespace(activity=activity),
        _has_quiesced=False,
        _state=SimpleNamespace(
            snapshots=SimpleNamespace(keep_only=nothing),
            prepare=nothing,
            restore=nothing,
            gather_again=nothing,
            committer="a committer",
            allocator=None,
        ),
        _train=train,
        _leave=nothing,
        _client=SimpleNamespace(enter=lambda *_: True, rendezvous=nothing),
    )
    generation: Any = SimpleNamespace(
        order=SimpleNamespace(generation=1, first_step=0, snapshot=None, transition=None),
        communicators=None,
        is_open=False,
        open=lambda _: found.append(activity.position(1)),
        interrupt=nothing,
    )
    Trainer._take_part(trainer, generation)
    assert [(each.doing, each.waiting, each.for_message) for each in found] == [
        ("regroup", True, True),
        ("the start of training", False, False),
    ]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_a_generation_that_was_stopped_is_closed_at_once(outcome: Outcome) -> None:
    """After any other, ranks may still wait for messages, and a connection that ends with unread ones loses others."""
    closed = list[str]()
    mover = Mover(SimpleNamespace(interrupt=lambda: None, close=lambda: closed.append("closed")))

    def nothing(*_: object) -> None: ...

    trainer: Any = SimpleNamespace(
        _rank=SimpleNamespace(activity=Activity()),
        _state=SimpleNamespace(committer=None, transfer=SimpleNamespace(end=nothing)),
        _preparations=SimpleNamespace(trained=nothing),
        _client=SimpleNamespace(leave=nothing),
        _former=[],
    )
    generation: Any = SimpleNamespace(number=1)
    Trainer._leave(trainer, generation, mover, outcome)
    assert mover.is_over
    assert closed == (["closed"] if outcome is Outcome.OVER else [])
    Trainer._close_former(trainer)
    assert closed == ["closed"]
