"""The stall that a decision predicts, by a clock that the test advances."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Parallel, Recovery
from chameleon_ft.protocol.messages import PeerFailed
from tests.coordinator.stage import Stage, play

SIX: dict[str, Any] = {
    "workers": 6,
    "parallel": Parallel(dp=3, pp=2),
    "recovery": Recovery(policy="reroute", salvage=False),
}


def after_s(live: int) -> float:
    """The expected end of the first stall: to send the orders, and to regroup."""
    return 0.01 + 0.02 + 0.003 * live


class Clock:
    """Unix time for everything that asks."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


def timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Callable[[Stage, Clock], Coroutine[Any, Any, None]]
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "clock_gettime", lambda _: clock())

    async def whole(stage: Stage) -> None:
        await scene(stage, clock)

    play(tmp_path, whole, steps=40, **SIX)


def slow_search(stage: Stage, clock: Clock, seconds: float) -> None:
    """From here on it takes so long to decide."""
    planner: Any = stage.coordinator._commands.planner
    recover = type(planner).recover

    def slowly(*arguments: Any, **named: Any) -> Any:
        clock.now += seconds
        return recover(planner, *arguments, **named)

    planner.recover = slowly


def test_a_search_is_predicted_as_long_as_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage, clock: Clock) -> None:
        stage.train(workers=6)
        slow_search(stage, clock, 1.5)
        clock.now += 0.75  # into the step
        stage.reap(1)
        clock.now += 0.25
        stage.quiesce(2, 3)
        clock.now += after_s(5)
        stage.start()
        for step in range(3, 13):
            stage.commit(step)
        (decision,) = stage.events("decision")
        assert decision["stall"]["decide_s"] == pytest.approx(1.5 + 0.01)
        assert decision["search_s"] == pytest.approx(1.5)
        (outcome,) = stage.events("outcome")
        assert outcome["measured_stall_s"] == pytest.approx(0.75 + 0.25 + 1.5 + after_s(5))
        assert outcome["predicted_stall_s"] == pytest.approx(outcome["measured_stall_s"])
        history = stage.coordinator.state.history
        assert history.phases(looked_up=False).decide_s == pytest.approx(1.5)
        assert history.phases(looked_up=True).decide_s < 0.1, "nothing has been looked up yet"

    timed(tmp_path, monkeypatch, scene)


@pytest.mark.parametrize("when", ["in the stop", "while it was decided", "in the recovery"])
def test_of_several_losses_in_one_outage_as_much_is_predicted_as_comes(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage, clock: Clock) -> None:
        stage.train(workers=6)
        slow_search(stage, clock, 1.5)
        clock.now += 0.75
        stage.reap(1)
        clock.now += 0.25
        if when == "in the stop":
            stage.quiesce(2, 3, 0, 2, 3, 5)
            stage.reap(4)
        else:
            stage.quiesce(2, 3)
            # It has failed in the search, and is heard of when that is over; or it fails later.
            clock.now += 0.0 if when == "while it was decided" else 0.05
            stage.reap(4)
            clock.now += 0.125
            stage.quiesce(3, 3)
        clock.now += after_s(4)
        stage.start()
        for step in range(3, 13):
            stage.commit(step)
        (outcome,) = stage.events("outcome")
        assert outcome["predicted_stall_s"] == pytest.approx(outcome["measured_stall_s"])
        last = stage.events("decision")[-1]
        assert last["lost"] == ([1, 4] if when == "in the stop" else [4])
        assert len(stage.events("decision")) == (1 if when == "in the stop" else 2)

    timed(tmp_path, monkeypatch, scene)


def test_a_look_up_does_not_count_as_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage, clock: Clock) -> None:
        stage.train(workers=6)
        history = stage.coordinator.state.history
        history = history.decided(looked_up=False, decide_s=5.0, hand_out_s=4.0)
        history = history.decided(looked_up=True, decide_s=0.5, hand_out_s=0.25)
        stage.become(replace(stage.coordinator.state, history=history))
        (asked,) = _asked(stage.coordinator._commands.decisions, stage)
        assert asked.phases.decide_s == 0.5, "what is prepared will be looked up"
        stage.reap(1)
        stage.quiesce(2, 4)
        (decision,) = stage.events("decision")
        assert not decision["prepared"]
        assert decision["stall"]["decide_s"] == pytest.approx(4.0)

    timed(tmp_path, monkeypatch, scene)


def test_without_a_choice_nothing_is_learnt_about_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage, clock: Clock) -> None:
        stage.train(workers=6)
        stage.say(stage.ranks[0], PeerFailed(generation=1, peer=None, error="a collective failed"))
        stage.quiesce(2, 3)
        stage.start()
        stage.commit(3)
        assert not stage.events("decision")
        history = stage.coordinator.state.history
        assert history.hand_out_s(looked_up=True) == 0.01

    timed(tmp_path, monkeypatch, scene)


def _asked(decisions: Any, stage: Stage) -> list[Any]:
    """The losses that decisions are prepared for."""
    asked: list[Any] = []

    class RecordingCache:
        def expect(self, ask: Callable[[], tuple[Any, Any]]) -> None:
            asked.append(ask()[0])

        def look_up(self, *_: Any) -> None:
            return None

        def drop(self) -> None:
            pass

    decisions._cache = RecordingCache()
    stage.commit(3, 0)
    return asked
