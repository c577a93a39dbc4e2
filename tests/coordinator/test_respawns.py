"""How long a lost worker waits for its next incarnation, and when it gets none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.state.members import Respawns

SOON, LATE = 99, 100  # steps that a worker lived for


@given(st.integers(0, 4), st.lists(st.sampled_from([SOON, LATE]), min_size=1, max_size=12))
def test_a_worker_waits_longer_and_longer_unless_it_lived_for_long(most: int, incarnations: list[int]) -> None:
    respawns = Respawns(Recovery(respawn_delay_s=3.0, max_respawns=most))
    in_a_row = 0
    for steps in incarnations:
        in_a_row = in_a_row + 1 if steps == SOON else 1
        respawns = respawns.died(7, steps=steps)
        assert respawns.deaths[7] == in_a_row
        assert respawns.is_blocked(7) == (in_a_row > most)
        assert respawns.delay_s(7) == 3.0 * 2 ** (in_a_row - 1)
        assert not respawns.is_blocked(8), "every worker counts for itself"


def test_before_the_first_loss_there_is_nothing_to_wait_for() -> None:
    respawns = Respawns(Recovery(max_respawns=0))
    assert not respawns.is_blocked(0)
    respawns = respawns.died(0, steps=0)
    assert respawns.is_blocked(0)


def test_a_worker_at_a_link_that_comes_and_goes_is_taken_again_ever_later() -> None:
    respawns = Respawns(Recovery(respawn_delay_s=3.0, max_respawns=1))
    delays_s = []
    for _ in range(12):
        respawns = respawns.died(7, steps=9 * LATE, at_link=True)
        assert not respawns.is_blocked(7), "the link may be healed"
        delays_s.append(respawns.delay_s(7))
    assert delays_s[:3] == [3.0, 6.0, 12.0]
    assert delays_s == sorted(delays_s)
    assert respawns.died(7, steps=10 * LATE, at_link=True).delay_s(7) == 3.0
    assert respawns.died(7, steps=SOON).is_blocked(7), "it died of something else"
