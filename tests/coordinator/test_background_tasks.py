"""Tasks of an event loop that nothing else refers to."""

from __future__ import annotations

import asyncio
import gc

from chameleon_ft.protocol.background_tasks import BackgroundTasks


def test_a_task_is_kept_until_it_ends() -> None:
    async def run() -> None:
        tasks = BackgroundTasks()

        async def work() -> None:
            await asyncio.get_running_loop().create_future()  # nothing but the task refers to it

        task_id = id(tasks.start(work()))
        await asyncio.sleep(0)
        gc.collect()
        assert task_id in map(id, asyncio.all_tasks())
        tasks.cancel()
        await asyncio.sleep(0)

    asyncio.run(run())


def test_errors_of_tasks_are_handled_and_cancellations_are_none() -> None:
    errors: list[Exception] = []

    async def fail() -> None:
        raise ValueError("of the task")

    async def run() -> None:
        tasks = BackgroundTasks(failed=errors.append)
        waiting, failing = tasks.start(asyncio.sleep(3600)), tasks.start(fail())
        await asyncio.wait({failing})
        tasks.cancel()
        await asyncio.wait({waiting})

    asyncio.run(run())
    assert [str(error) for error in errors] == ["of the task"]
