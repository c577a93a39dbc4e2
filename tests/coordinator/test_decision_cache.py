"""Decisions that are prepared: when they are there, and when they are not used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from chameleon_ft.coordinator.decisions.decisions import DecisionCache
from chameleon_ft.recovery import DecisionContext, FailureModel, decide
from chameleon_ft.schedule import CostModel
from tests.recovery.contexts import after, context, layer, rate_of

NOW = context(dp=2, pp=2, layers=(layer(10),) * 4)
RATE = replace(rate_of(1e4, NOW), failures=0)


class Prepared:
    """A cache of the given context, and what it says when it is through."""

    def __init__(self, executor: Executor) -> None:
        self.said: list[tuple[int, float, str | None]] = []
        self._through = asyncio.Event()
        self.cache = DecisionCache("chameleon", executor, self._say)

    def _say(self, losses: int, seconds: float, error: str | None) -> None:
        self.said.append((losses, seconds, error))
        self._through.set()

    async def on(self, now: DecisionContext, rate: FailureModel) -> DecisionCache:
        self.cache.expect(lambda: (now, rate))
        await self._through.wait()
        return self.cache


def run(scene: Callable[[Prepared], Coroutine[Any, Any, None]], executor: Executor | None = None) -> None:
    async def whole() -> None:
        with executor or ThreadPoolExecutor(1) as pool:
            await scene(Prepared(pool))

    asyncio.run(whole())


def test_every_single_loss_has_the_decision_that_it_would_get() -> None:
    async def scene(prepared: Prepared) -> None:
        cache = await prepared.on(NOW, RATE)
        assert prepared.said[0][::2] == (4, None)
        for worker in range(4):
            found = cache.look_up(after(NOW, worker), RATE.observed(failures=1))
            expected = decide(after(NOW, worker), "chameleon", RATE.observed(failures=1))
            assert found is not None
            assert found.chosen is not None
            assert expected.chosen is not None
            assert (found.chosen.policy, found.chosen.step_s) == (expected.chosen.policy, expected.chosen.step_s)
            assert found.course is not None
            assert worker not in found.course.plan.workers

    run(scene)


def test_every_host_that_others_can_do_without_has_the_decision_that_it_would_get() -> None:
    # Workers 0 to 3, two pipelines, are on the first host; the other has a pipeline and two spares.
    now = context(dp=3, pp=2, share=2, hosts=2, spares=2, layers=(layer(10),) * 4)
    hosts: dict[str, list[int]] = {}
    for worker, host in now.costs.cluster.hosts.items():
        hosts.setdefault(host, []).append(worker)

    async def scene(prepared: Prepared) -> None:
        cache = await prepared.on(now, RATE)
        assert prepared.said[0][::2] == (6, None), "those of hosts come after"
        assert cache._work is not None
        await cache._work
        for lost in hosts.values():
            left = CostModel(now.costs.workload, now.costs.cluster.without(lost))
            rate = RATE.observed(failures=1, host_failures=1)
            found = cache.look_up(replace(now, costs=left), rate)
            expected = decide(replace(now, costs=left), "chameleon", rate)
            assert found is not None
            assert found.chosen is not None
            assert found.course is not None
            assert expected.chosen is not None
            assert (found.chosen.policy, found.chosen.step_s) == (expected.chosen.policy, expected.chosen.step_s)
            assert not set(found.course.plan.workers).intersection(lost)
        some = CostModel(now.costs.workload, now.costs.cluster.without(hosts["host 0"][:2]))
        assert cache.look_up(replace(now, costs=some), RATE.observed(failures=1)) is None

    run(scene)


def _slower(now: DecisionContext, factor: float) -> DecisionContext:
    layers = tuple(each.slowed(factor) for each in now.costs.workload.layers)
    return replace(now, costs=CostModel(replace(now.costs.workload, layers=layers), now.costs.cluster))


def _with_speed(now: DecisionContext, speed: float) -> DecisionContext:
    first, *others = now.costs.cluster.workers
    cluster = replace(now.costs.cluster, workers=(replace(first, speed=speed), *others))
    return replace(now, costs=CostModel(now.costs.workload, cluster))


@pytest.mark.parametrize(
    ("change", "rate", "found"),
    [
        (lambda now: now, RATE.observed(failures=1), True),
        (lambda now: _slower(now, 1.3), RATE.observed(failures=1), True),
        (lambda now: _slower(now, 1.6), RATE.observed(failures=1), False),
        (lambda now: _with_speed(now, 0.8), RATE.observed(failures=1), True),
        (lambda now: _with_speed(now, 0.5), RATE.observed(failures=1), False),
        (lambda now: now, replace(RATE, failures=3), False),
        (lambda now: after(now, 1), RATE.observed(failures=1), False),
        (lambda now: replace(now, plan=replace(now.plan, split_backward=True)), RATE.observed(failures=1), False),
        (lambda now: replace(now, in_flight_limits={}), RATE.observed(failures=1), False),
    ],
    ids=[
        "as expected",
        "a bit slower",
        "much slower",
        "one a bit slower",
        "one much slower",
        "more failures",
        "two lost",
        "another plan",
        "other limits",
    ],
)
def test_what_was_prepared_for_another_context_is_not_used(
    change: Callable[[DecisionContext], DecisionContext], rate: FailureModel, found: bool
) -> None:
    async def scene(prepared: Prepared) -> None:
        cache = await prepared.on(NOW, RATE)
        assert (cache.look_up(change(after(NOW, 0)), rate) is not None) == found

    run(scene)


def test_decisions_are_prepared_anew_when_costs_have_changed() -> None:
    async def scene(prepared: Prepared) -> None:
        cache = await prepared.on(NOW, RATE)
        # Not asked again within a second, however slow the machine is; and what is near is good enough.
        cache._looked_at = float("inf")
        cache.expect(lambda: pytest.fail("asked too soon"))
        cache._looked_at = float("-inf")
        cache.expect(lambda: (_slower(NOW, 1.05), RATE))
        assert cache.look_up(after(NOW, 0), RATE.observed(failures=1)) is not None
        cache._looked_at = float("-inf")
        prepared._through.clear()
        slower = _slower(NOW, 1.2)
        await prepared.on(slower, RATE)
        assert len(prepared.said) == 2
        found = cache.look_up(after(slower, 0), RATE.observed(failures=1))
        assert found == decide(after(slower, 0), "chameleon", RATE.observed(failures=1))

    run(scene)


def test_after_a_change_nothing_is_there_until_it_is_prepared() -> None:
    async def scene(prepared: Prepared) -> None:
        cache = await prepared.on(NOW, RATE)
        cache.drop()
        assert cache.look_up(after(NOW, 0), RATE.observed(failures=1)) is None

    run(scene)


class _Broken(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("the process is gone"))
        return future


def test_where_it_fails_it_says_so_once_and_decisions_are_made_when_needed() -> None:
    async def scene(prepared: Prepared) -> None:
        cache = await prepared.on(NOW, RATE)
        assert prepared.said[0][2] == "RuntimeError: the process is gone"
        assert cache.look_up(after(NOW, 0), RATE.observed(failures=1)) is None
        cache._looked_at = float("-inf")
        cache.expect(lambda: pytest.fail("it is of no use to ask"))

    run(scene, _Broken())


def test_the_loss_of_the_only_worker_has_no_decision() -> None:
    alone = context(dp=1, pp=1, layers=(layer(10),) * 2)

    async def scene(prepared: Prepared) -> None:
        await prepared.on(alone, RATE)
        assert prepared.said[0][::2] == (0, None)

    run(scene)
