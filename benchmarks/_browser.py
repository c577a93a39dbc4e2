"""A headless Chromium, of the system or of playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, ViewportSize, sync_playwright

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")

PHONE: Final = ViewportSize(width=390, height=844)
"""Width and height of the screen of a usual phone, in CSS pixels."""


class NoBrowserError(Exception):
    """There is no Chromium; the message says how to install one."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a headless Chromium. Raises NoBrowserError if there is none."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    with sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).exists():
            raise NoBrowserError("no Chromium: `apt install chromium`, or `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()
