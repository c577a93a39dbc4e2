"""Accounts of time against a count second by second, step by step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.simulate.account import Account, Change, Migration


def begun(step_s: float = 2.0, *, every_s: float = 1e6, write_s: float = 0.0) -> Account:
    account = Account()
    change(account, step_s, every_s=every_s, write_s=write_s)
    return account


def change(
    account: Account,
    step_s: float,
    *,
    stall_s: float = 0.0,
    every_s: float = 1e6,
    write_s: float = 0.0,
    finish_step: bool = False,
    saved: bool = False,
    migration: Migration | None = None,
) -> None:
    account.change(
        Change(cause="lost", stall_s=stall_s, step_s=step_s, checkpoint_every_s=every_s, write_s=write_s, saved=saved),
        finish_step=finish_step,
        migration=migration,
    )


def moving(seconds: float, *, step_s: float = 2.0, needs_switch: bool = False) -> Migration:
    return Migration(seconds=seconds, step_s=step_s, needs_switch=needs_switch)


def accounted_s(account: Account) -> float:
    parts = [account.useful_s, account.checkpoint_s, account.down_s, account.part_s]
    return math.fsum([*parts, *account.stall_by_cause.values(), *account.lost_by_cause.values()])


def test_a_loss_loses_the_step_and_begins_a_stall() -> None:
    account = begun(2.0)
    account.advance(5.0)
    assert (account.steps, account.part_s) == (2, 1.0)
    account.lose_step()
    change(account, 4.0, stall_s=3.0)
    account.advance(17.0)
    assert account.steps == 4
    assert account.useful_s == 12.0
    assert dict(account.stall_by_cause) == {"lost": 3.0}
    assert dict(account.lost_by_cause) == {"step": 1.0}
    assert account.part_s == 1.0


def test_without_a_loss_the_step_is_finished_first() -> None:
    account = begun(2.0)
    account.advance(5.0)
    change(account, 1.0, stall_s=3.0, finish_step=True)
    account.advance(10.0)
    assert account.steps == 4
    assert account.useful_s == 7.0
    assert dict(account.stall_by_cause) == {"lost": 3.0}
    assert not account.lost_by_cause


def test_a_return_to_a_checkpoint_gives_up_the_steps_since() -> None:
    account = begun(2.0, every_s=6.0, write_s=1.0)
    # Two cycles of three steps and a checkpoint, and another step and a half.
    account.advance(17.0)
    assert (account.steps, account.checkpoint_s, account.unsaved_s) == (7, 2.0, 3.0)
    account.lose_step()
    account.return_to_checkpoint()
    assert (account.steps, account.useful_s) == (6, 12.0)
    assert dict(account.lost_by_cause) == {"step": 1.0, "checkpoint": 2.0}


def test_steps_saved_before_a_change_are_not_lost_later() -> None:
    account = begun(2.0)
    account.advance(4.0)
    change(account, 2.0, stall_s=1.0, finish_step=True, saved=True)
    account.advance(7.0)
    account.lose_step()
    account.return_to_checkpoint()
    assert account.steps == 2


def test_a_second_change_comes_instead_of_one_that_has_not_begun() -> None:
    account = begun(2.0)
    account.advance(0.5)
    change(account, 1.0, stall_s=100.0, finish_step=True)
    account.advance(1.0)
    change(account, 4.0, stall_s=2.0, finish_step=True)
    account.advance(8.0)
    assert account.steps == 2
    assert dict(account.stall_by_cause) == {"lost": 2.0}


def test_a_step_that_ends_at_the_moment_of_a_change_counts() -> None:
    account = begun(1.7, every_s=1e6, write_s=0.0)
    account.advance(0.1)
    account.lose_step()
    change(account, 0.3, stall_s=0.7, finish_step=False)
    account.advance(0.1 + 0.7 + 0.3)
    assert account.part_s == pytest.approx(0.3), "it ends just now, but for a rounding"
    change(account, 1.0, stall_s=2.0, finish_step=True)
    account.advance(3.1)
    assert account.steps == 1
    assert accounted_s(account) == pytest.approx(3.1)


@pytest.mark.parametrize(
    ("step_s", "share_s", "lost_s"),
    [
        # The rest takes as long as that of a later step; longer by a half of what was done; longer by all of it.
        (3.0, 1.0, 0.0),
        (3.0, 1.5, 0.5),
        (3.0, 9.0, 1.0),
        # A step of half the length: half of the seconds that were done are as good as the second that they took.
        (1.0, 0.0, 0.5),
        (1.0, 0.25, 0.75),
    ],
)
def test_a_step_is_salvaged(step_s: float, share_s: float, lost_s: float) -> None:
    account = begun(2.0)
    account.advance(5.0)
    assert account.salvage(step_s=step_s, share_s=share_s) == lost_s
    change(account, step_s, stall_s=4.0)
    left_s = step_s - (1.0 - lost_s)
    account.advance(9.0 + left_s - 0.01)
    assert account.steps == 2
    account.advance(9.0 + left_s + 0.01)
    assert account.steps == 3
    assert account.useful_s == pytest.approx(4.0 + step_s)
    assert dict(account.stall_by_cause) == {"lost": 4.0}
    assert account.lost_by_cause.get("step", 0.0) == lost_s
    assert accounted_s(account) == pytest.approx(account.clock_s)


def test_a_migration_ends_with_a_step_and_stops_nothing() -> None:
    account = begun(2.0)
    account.advance(5.0)
    change(account, 1.0, finish_step=True, migration=moving(3.5))
    changing = [account.is_changing]
    # All layers are there at 8.5; the step that is under way then ends at 10.
    assert account.resume_s == 10.0
    account.advance(13.0)
    assert [*changing, account.is_changing] == [True, False]
    assert account.steps == 5 + 3
    assert not account.stall_by_cause


def test_a_migration_waits_for_checkpoints_too() -> None:
    account = begun(2.0, every_s=4.0, write_s=1.5)  # checkpoints from 4 to 5.5 and from 9.5 to 11
    account.advance(3.0)
    change(account, 1.0, finish_step=True, migration=moving(7.0))
    assert account.resume_s == 11.0


def test_steps_are_longer_while_layers_move() -> None:
    account = begun(2.0)
    account.advance(5.0)
    change(account, 1.0, finish_step=True, migration=moving(3.5, step_s=3.0))
    # The present step began at 4 and takes 3 s now, and so does the next one, in which the last layer arrives.
    assert account.resume_s == 10.0
    account.advance(12.0)
    assert (account.steps, account.useful_s) == (2 + 2 + 2, 12.0)


def test_layers_move_to_workers_outside_the_plan_once_a_switch_has_taken_these_in() -> None:
    account = begun(2.0)
    account.advance(5.0)
    change(account, 1.0, stall_s=0.5, finish_step=True, migration=moving(3.5, step_s=3.0, needs_switch=True))
    assert account.is_changing
    account.advance(7.0)
    # From the end of the present step at 6 on, two steps of 3 s.
    assert (account.is_changing, account.resume_s) == (True, 12.5)
    assert (account.steps, account.part_s) == (3, 1.0)
    account.advance(14.5)
    assert (account.is_changing, account.steps) == (False, 3 + 2 + 2)
    assert dict(account.stall_by_cause) == {"lost": 0.5}
    assert account.timeline == [(0.0, 2.0), (6.0, 3.0), (12.0, math.inf), (12.5, 1.0)]


def test_layers_that_move_after_a_checkpoint_do_not_cut_it_short() -> None:
    account = begun(2.0, every_s=4.0, write_s=1.5)  # a checkpoint from 4 to 5.5
    account.advance(5.0)
    change(account, 1.0, every_s=4.0, write_s=1.5, finish_step=True, migration=moving(1.0, step_s=3.0))
    account.advance(5.5)
    assert (account.checkpoint_s, account.resume_s) == (1.5, 8.5)


def test_a_loss_during_a_migration_ends_it() -> None:
    account = begun(2.0)
    account.advance(4.0)
    change(account, 1.0, finish_step=True, migration=moving(10.0))
    account.advance(7.0)
    account.salvage(step_s=4.0, share_s=0.0)
    change(account, 4.0)
    account.advance(10.0)
    assert account.steps == 4  # the last one took one second and three
    assert not account.is_changing


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["loss", "salvage", "change", "migration", "switches", "checkpoint", "wait"]),
        st.floats(0.01, 30.0),
        st.sampled_from([0.3, 1.0, 2.5]),
        st.sampled_from([0.0, 0.7, 5.0]),
    ),
    max_size=12,
)


@given(operations=OPERATIONS, every_s=st.sampled_from([1.0, 7.0, 1e6]), write_s=st.sampled_from([0.0, 0.4]))
def test_every_second_is_counted_once(
    operations: list[tuple[str, float, float, float]], every_s: float, write_s: float
) -> None:
    account = begun(1.7, every_s=every_s, write_s=write_s)
    now_s = 0.0
    for what, seconds, step_s, stall_s in operations:
        now_s += seconds
        account.advance(now_s)
        down = account._training is None
        if what == "salvage" and not down:
            account.salvage(step_s=step_s, share_s=stall_s / 4)
        elif what not in ("change", "migration", "switches"):
            account.lose_step()
        if what == "checkpoint":
            account.return_to_checkpoint()
        if what == "wait":
            account.wait()
        else:
            change(
                account,
                step_s,
                stall_s=stall_s,
                every_s=every_s,
                write_s=write_s,
                finish_step=what in ("change", "migration", "switches"),
                migration={"migration": moving(3.0), "switches": moving(3.0, needs_switch=True)}.get(what),
            )
        assert accounted_s(account) == pytest.approx(now_s, abs=1e-6)
    account.advance(now_s + 100.0)
    assert accounted_s(account) == pytest.approx(now_s + 100.0, abs=1e-6)
    assert account.steps >= 0


@given(
    step_s=st.sampled_from([0.5, 2.0]),
    every=st.integers(1, 5),
    write_s=st.sampled_from([0.25, 1.0]),
    pauses=st.lists(st.integers(1, 40), max_size=8),
)
def test_steps_and_checkpoints_match_a_count_one_by_one(
    step_s: float, every: int, write_s: float, pauses: list[int]
) -> None:
    account = begun(step_s, every_s=every * step_s, write_s=write_s)
    now_s = 0.0
    for pause in pauses:
        now_s += pause * 0.25
        account.advance(now_s)
        steps, written, left_s = 0, 0, now_s
        while left_s >= step_s:
            steps += 1
            left_s -= step_s
            if steps % every == 0:
                writing_s = min(left_s, write_s)
                written += writing_s == write_s
                left_s -= writing_s
                if writing_s < write_s:
                    break
        assert account.steps == steps
        assert account.part_s == pytest.approx(0.0 if steps % every == 0 and steps // every > written else left_s)
