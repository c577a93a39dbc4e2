"""Connections that are turned away are recorded, and of very many not all."""

from __future__ import annotations

from chameleon_ft.control.commands import OtherRecord, Record
from chameleon_ft.control.events import Moment, Rejected
from chameleon_ft.control.state_machine import step
from tests.control.histories import new_state


def test_of_very_many_ever_fewer_are_recorded() -> None:
    state, found = new_state(), []
    for number in range(300):
        event = Rejected(at=Moment(0.0, 0.0), address=f"10.0.0.{number}", reason="the token is wrong")
        state, commands = step(state, event)
        for command in commands:
            assert isinstance(command, Record)
            assert isinstance(command.record, OtherRecord)
            assert command.record.event == "refused"
            found.append(command.record.fields)
    assert [fields["count"] for fields in found] == [*range(1, 101), 128, 256]
    assert (found[0]["address"], found[0]["reason"]) == ("10.0.0.0", "the token is wrong")
