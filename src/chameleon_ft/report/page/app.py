"""The page of a run as an ASGI application.

One reader follows the files of the run, whatever the number of browsers. Actions need a token, which cannot be guessed
by trying many.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chameleon_ft.errors import ChameleonError, ConfigError
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.report.page import content
from chameleon_ft.report.page.metrics import exposition
from chameleon_ft.report.view import RunReport

_logger = logging.getLogger(__name__)

_MAX_WRONG_TOKENS: Final = 5
_LOCKED_S: Final = 30.0
_MAX_ADDRESSES: Final = 1_000


class TokenGate:
    """Checks tokens. Five wrong ones lock an address out for half a minute, but for the right one; each is logged.

    Behind a proxy, the one who knows the token may have the address of one who guesses.
    """

    def __init__(self, token: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._expected = f"Bearer {token}".encode()
        self._clock = clock
        # By address: the number of wrong tokens, and the time of the last.
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def check(self, address: str, authorization: str) -> Literal["open", "wrong", "locked"]:
        """Return whether a request with this header may act."""
        number, last = self._wrong.get(address, (0, 0.0))
        now = self._clock()
        if now - last > _LOCKED_S:
            number = 0
        if hmac.compare_digest(authorization.encode(errors="replace"), self._expected):
            return "open"
        if number >= _MAX_WRONG_TOKENS:
            return "locked"
        self._wrong.pop(address, None)
        self._wrong[address] = (number + 1, now)
        if len(self._wrong) > _MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        locked = f"; it is locked out for {_LOCKED_S:.0f} s" if number + 1 == _MAX_WRONG_TOKENS else ""
        _logger.warning("the page was sent a wrong token from %s%s", address, locked)
        return "wrong"


_EVERY_S: Final = 1.0
_MAX_NEWS: Final = 300


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

                def read() -> RunReport:
                    self._watcher.update_readable()
                    return self._watcher.report()

                self._report = await asyncio.to_thread(read)
                self._read_at = now
            return self._report

    async def whole(self) -> dict[str, Any]:
        """Return all that the page shows when it is opened."""
        report = await self.report()
        view = self._watcher.view
        return {
            "report": content.overview(report, self._watcher.damaged),
            "grid": content.grid(view, report),
            "series": view.steps.series(content.MAX_POINTS).columns,
            "news": content.news(view.events[-_MAX_NEWS:]),
            "what_if": content.what_if(view, report),
            "evaluations": content.evaluations(view),
            "next": {"steps": len(view.steps), "events": len(view.events)},
        }

    async def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of the run."""
        await self.report()
        number = len(self._watcher.view.events)
        if self._incidents[0] != number:
            self._incidents = number, await asyncio.to_thread(content.incidents, self._watcher.view)
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
        view = self._watcher.view
        found: dict[str, Any] = {"report": content.overview(report, self._watcher.damaged)}
        if sent.steps < len(view.steps):
            # As many points as come in a second to one that follows; fewer for one that was away.
            found["steps"] = dict(view.steps.series(content.MAX_POINTS // 10, since=sent.steps).columns)
            sent.steps = len(view.steps)
        if sent.events < len(view.events):
            new = view.events[max(sent.events, len(view.events) - _MAX_NEWS) :]
            found["news"] = {"told": content.news(new), "number": len(view.events)}
            sent.events = len(view.events)
            for name, value in (
                ("grid", content.grid(view, report)),
                ("what_if", content.what_if(view, report)),
                ("evaluations", content.evaluations(view)),
            ):
                text = as_json(value)
                if sent.texts.get(name) != text:
                    sent.texts[name], found[name] = text, value
        return found

    @property
    def cursor(self) -> dict[str, int]:
        """The number of steps and events that have been read."""
        return {"steps": len(self._watcher.view.steps), "events": len(self._watcher.view.events)}


def as_json(value: object) -> str:
    """Return JSON for a browser: what is not a number, such as the loss of a bad step, is null."""
    return to_json(value, inf_nan_mode="null").decode()


STATIC: Final = Path(__file__).parent / "static"
_MAX_FOLLOWERS: Final = 100
_MAX_BODY_BYTES: Final = 10_000
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_HEADERS: Final = {
    # Nothing of another origin is loaded, and no other page may show this one in a frame.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Actions(Protocol):
    """Carries out requests of the page; each returns what has been agreed, and raises ChameleonError if it is not."""

    def inject(self, *, worker: int, kind: str, factor: float | None) -> str:
        """Make a worker fail."""

    def drain(self, *, workers: tuple[int, ...], host: str | None) -> str:
        """Take workers out of the run."""

    def checkpoint(self) -> str:
        """Write a checkpoint now."""

    def finish(self) -> str:
        """End the run with a checkpoint."""


def page_app(
    watcher: RunWatcher, *, token: str, actions: Actions, host: str, scraped: Callable[[bool], object] = bool
) -> Starlette:
    """Return the application for the page of a run.

    Args:
        watcher: follows the run.
        token: needed for actions; all may look.
        actions: what they do.
        host: on which it listens.
        scraped: told at each scrape whether it was of a run that is over.
    """
    endpoints = _Endpoints(watcher, TokenGate(token), actions, scraped)
    middleware = [Middleware(_SafeHeaders)]
    if host in _LOOPBACK:
        middleware.append(Middleware(_LocalNames))
    return Starlette(
        routes=[
            Route("/", endpoints.index),
            Route("/metrics", endpoints.metrics),
            Route("/api/state", endpoints.state),
            Route("/api/events", endpoints.events),
            Route("/api/incidents", endpoints.incidents),
            Route("/api/schedule", endpoints.schedule),
            Route("/api/actions/{name}", endpoints.act, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=middleware,
        exception_handlers={ConfigError: _unreadable},
    )


async def _unreadable(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=500)


class _RefusedError(Exception):
    """A request that is not carried out."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Endpoints:
    def __init__(
        self, watcher: RunWatcher, gate: TokenGate, actions: Actions, scraped: Callable[[bool], object]
    ) -> None:
        self._scraped_the_end = scraped
        self._watcher = watcher
        self._gate = gate
        self._actions = actions
        self._feed_or_none: Feed | None = None
        self._followers = 0

    @property
    def _feed(self) -> Feed:
        # It is made in the event loop.
        if self._feed_or_none is None:
            self._feed_or_none = Feed(self._watcher)
        return self._feed_or_none

    async def index(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def metrics(self, request: Request) -> Response:
        report = await self._feed.report(newest_s=0.1)
        content, kind = exposition(self._watcher.view, report, accept=request.headers.get("Accept", ""))
        self._scraped_the_end(report.is_over)
        return Response(content, headers={"Content-Type": kind})

    async def state(self, _: Request) -> Response:
        return _json(await self._feed.whole())

    async def incidents(self, _: Request) -> Response:
        return _json(await self._feed.incidents())

    async def schedule(self, _: Request) -> Response:
        return _json(await self._feed.schedule())

    async def events(self, request: Request) -> Response:
        if self._followers >= _MAX_FOLLOWERS:
            return JSONResponse({"error": f"{_MAX_FOLLOWERS} browsers follow the run already"}, status_code=503)
        await self._feed.report(newest_s=1.0)
        begin = {**self._feed.cursor}
        for name in begin:
            if (text := request.query_params.get(name, "")).isdecimal():
                begin[name] = min(int(text), begin[name])

        async def lines() -> AsyncIterator[str]:
            self._followers += 1
            try:
                async for text in self._feed.news(**begin):
                    yield text
            finally:
                self._followers -= 1

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        try:
            self._authorize(request)
            order = _order(request.path_params["name"], await _body(request), self._actions)
            return JSONResponse({"done": await asyncio.to_thread(order)})
        except _RefusedError as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status)
        except ChameleonError as error:
            return JSONResponse({"error": str(error)}, status_code=409)

    def _authorize(self, request: Request) -> None:
        address = "an unknown address" if request.client is None else request.client.host
        match self._gate.check(address, request.headers.get("Authorization", "")):
            case "wrong":
                raise _RefusedError(401, "wrong token; the page's address with the token is printed when it starts")
            case "locked":
                raise _RefusedError(429, "too many wrong tokens from your address; wait half a minute")


async def _body(request: Request) -> Mapping[str, Any]:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise _RefusedError(413, "the request is too long")
    try:
        values = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        raise _RefusedError(400, "the request is not JSON, or nested too deeply") from None
    if not isinstance(values, dict):
        raise _RefusedError(400, "the request should be a JSON object")
    return values


def _order(name: str, values: Mapping[str, Any], actions: Actions) -> Callable[[], str]:
    """Return what a request asks for. Raises _RefusedError if it is malformed."""
    match name, values:
        case "checkpoint", {}:
            return actions.checkpoint
        case "finish", {}:
            return actions.finish
        case "drain", {"host": str(host)}:
            return lambda: actions.drain(workers=(), host=host)
        case "drain", {"workers": [int(), *_] as workers} if all(isinstance(worker, int) for worker in workers):
            return lambda: actions.drain(workers=tuple(workers), host=None)
        case "inject", {"worker": int(worker), "kind": str(kind)}:
            factor = values.get("factor")
            if factor is None or isinstance(factor, int | float):
                return lambda: actions.inject(worker=worker, kind=kind, factor=factor)
    raise _RefusedError(400, f"{name}: is not an action, or not with such arguments")


def _json(value: object) -> Response:
    return Response(as_json(value), media_type="application/json")


class _SafeHeaders:
    """Adds headers to every response. Not a `BaseHTTPMiddleware`, which would hold up a stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class _LocalNames:
    """Refuses requests for another host name: a foreign page may have its own name point to this address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name.strip("[]") not in _LOOPBACK:
                response = JSONResponse(
                    {"error": "this page is for this machine; open it as localhost"}, status_code=421
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
