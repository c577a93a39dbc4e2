"""The memory of a coordinator does not grow with the number of losses."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.state.members import Respawns
from tests.coordinator.histories import History, new_state

RECOVERY = Recovery(respawn=True, respawn_delay_s=0.1)


def test_the_state_after_hundreds_of_losses_is_no_larger_than_after_the_first_ones() -> None:
    history, sizes = History(new_state(recovery=RECOVERY, steps=100_000)), []
    history.train()
    for _ in range(90):
        history.reap(3)
        history.quiesce()
        history.start()
        history.commit()
        history.wait(0.3)
        history.come_back(3)
        history.wait(0.7)
        history.consider(0, 1, 2, 3)
        history.switch()
        history.commit()
        assert history.live() == (0, 1, 2, 3)
        # It would wait longer before each restart, as after losses without a hundred steps between them.
        history.state = replace(history.state, respawns=Respawns(RECOVERY))
        history.commands.clear()
        # Numbers of connections that are over stay.
        members = replace(history.state.members, fenced=frozenset())
        sizes.append(len(replace(history.state, members=members).to_json()))
    assert max(sizes[80:]) < 1.05 * max(sizes[65:70])
