"""Does what a browser does that has the page of a run open, and counts what it is sent."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

_TIMEOUT_S: Final = 60.0
_ASSETS: Final = (
    "/",
    "/static/page.css",
    "/static/page.js",
    "/static/drawings.js",
    "/static/incidents.js",
    "/static/words.js",
    "/static/uplot/uPlot.min.css",
    "/static/uplot/uPlot.iife.min.js",
)


def fetch(url: str, path: str) -> bytes:
    """Return what is served at a path. Raises OSError if it is an error."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Accept": "application/openmetrics-text; version=1.0.0, */*"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.client.OK:
            raise OSError(f"{path}: {answer.status}")
        return content
    finally:
        connection.close()


class PageReader:
    """A browser that follows a run in a thread.

    Attributes:
        opening_bytes: the page and all that it loads to be drawn.
        following_bytes: what it has been sent since.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
        self._is_open = True
        self.opening_bytes = sum(len(fetch(url, path)) for path in _ASSETS)
        whole = fetch(url, "/api/state")
        self.opening_bytes += len(whole) + len(fetch(url, "/api/incidents"))
        self.following_bytes = 0
        cursor = json.loads(whole)["next"]
        self._connection.request("GET", f"/api/events?steps={cursor['steps']}&events={cursor['events']}")
        self._answer = self._connection.getresponse()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            while line := self._answer.readline():
                self.following_bytes += len(line)
                if line == b"event: news\n":
                    self.following_bytes += len(fetch(self._url, "/api/incidents"))
        except (OSError, ValueError, AttributeError):  # the connection is closed while it is read
            if self._is_open:
                raise

    def close(self) -> None:
        """Leave the page."""
        self._is_open = False
        if self._connection.sock is not None:
            self._connection.sock.close()
        self._answer.close()
        self._thread.join()


@contextmanager
def readers(url: str, number: int) -> Iterator[list[PageReader]]:
    """Have the page open in so many browsers inside the block."""
    opened = [PageReader(url) for _ in range(number)]
    try:
        yield opened
    finally:
        for each in opened:
            each.close()
