"""The watched run as browsers follow it: one reader of its files, whatever the number of browsers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from chameleon_ft.observe.live.report import RunReport
from chameleon_ft.observe.live.watcher import RunWatcher
from chameleon_ft.observe.page import content

_EVERY_S: Final = 1.0
_MOST_NEWS: Final = 300  # events that are sent at once, the newest


@dataclass(slots=True)
class _Sent:
    """The content of a browser: so many steps and events, and the texts of what is sent as a whole."""

    steps: int
    events: int
    texts: dict[str, str]


class Feed:
    """Reads what a run adds to its files, while a browser follows it, and tells each browser what is new for it.

    A browser that reads slowly, or not at all, holds up only itself: it is sent the newest state when it is ready.
    """

    def __init__(self, watcher: RunWatcher) -> None:
        self._watcher = watcher
        self._reading = asyncio.Lock()
        self._report: RunReport | None = None
        self._read_at = -_EVERY_S
        self._incidents: tuple[int, list[dict[str, Any]]] = (-1, [])

    async def report(self, *, newest_s: float = 0.0) -> RunReport:
        """Return the state of the run, read from its files unless that was done in the last `newest_s` seconds."""
        async with self._reading:
            now = asyncio.get_running_loop().time()
            if self._report is None or now - self._read_at >= newest_s:
                self._report = await asyncio.to_thread(self._read)
                self._read_at = now
            return self._report

    def _read(self) -> RunReport:
        self._watcher.update_readable()
        return self._watcher.report()

    async def whole(self) -> dict[str, Any]:
        """Return all that the page shows when it is opened."""
        report = await self.report()
        state = self._watcher.state
        return {
            "report": content.overview(report, self._watcher.damaged),
            "grid": content.grid(state, report),
            "series": state.steps.series(content.MOST_POINTS).columns,
            "news": content.news(state.events[-_MOST_NEWS:]),
            "what_if": content.what_if(state, report),
            "next": {"steps": len(state.steps), "events": len(state.events)},
        }

    async def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of the run."""
        await self.report()
        number = len(self._watcher.state.events)
        if self._incidents[0] != number:
            self._incidents = number, await asyncio.to_thread(content.incidents, self._watcher.state)
        return self._incidents[1]

    async def schedule(self) -> dict[str, Any] | None:
        """Return the newest recorded step. Raises ConfigError if none can be read."""
        return await asyncio.to_thread(content.schedule, self._watcher.run)

    async def news(self, *, steps: int, events: int) -> AsyncIterator[str]:
        """Yield what is new, as server-sent events, for a browser that has so many steps and events of the run."""
        sent = _Sent(steps, events, {})
        while True:
            report = await self.report(newest_s=_EVERY_S / 2)
            for name, value in self._new(sent, report).items():
                yield f"event: {name}\ndata: {as_json(value)}\n\n"
            await asyncio.sleep(_EVERY_S)

    def _new(self, sent: _Sent, report: RunReport) -> Mapping[str, Any]:
        state = self._watcher.state
        found: dict[str, Any] = {"report": content.overview(report, self._watcher.damaged)}
        if sent.steps < len(state.steps):
            # As many points as come in a second to one that follows; fewer for one that was away.
            found["steps"] = dict(state.steps.series(content.MOST_POINTS // 10, since=sent.steps).columns)
            sent.steps = len(state.steps)
        if sent.events < len(state.events):
            new = state.events[max(sent.events, len(state.events) - _MOST_NEWS) :]
            found["news"] = {"told": content.news(new), "number": len(state.events)}
            sent.events = len(state.events)
            for name, value in (("grid", content.grid(state, report)), ("what_if", content.what_if(state, report))):
                text = as_json(value)
                if sent.texts.get(name) != text:
                    sent.texts[name], found[name] = text, value
        return found

    @property
    def cursor(self) -> dict[str, int]:
        """The number of steps and events that have been read."""
        return {"steps": len(self._watcher.state.steps), "events": len(self._watcher.state.events)}


def as_json(value: object) -> str:
    """Return JSON for a browser: what is not a number, such as the loss of a bad step, is null."""
    return to_json(value, inf_nan_mode="null").decode()
