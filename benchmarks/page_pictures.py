"""Takes the pictures of docs/watching.md: `python -m benchmarks.page_pictures`.

The quick start trains, with its two failures, and is watched in a headless Chromium, on a wide screen and on a phone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page, ViewportSize

from benchmarks._browser import PHONE, chromium
from benchmarks._common import ROOT, child
from benchmarks._live_run import Tail, end

_FOLDER: Final = ROOT / "docs" / "pictures"
_CONFIG: Final = ROOT / "examples" / "quickstart.toml"
_WIDE: Final = ViewportSize(width=1200, height=1000)
_STEP: Final = 100  # after both failures and their outcomes
_SECTIONS: Final = ("workers", "incidents", "schedule", "events", "control")
_DRAWN_MS: Final = 1_500  # within which the page has its first news


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=_FOLDER, help="folder of the pictures")
    folder: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        run, log = Path(scratch) / "quickstart", Path(scratch) / "log.txt"
        command = [sys.executable, "-m", "chameleon_ft", "train", str(_CONFIG), "--output-dir", str(run)]
        with child([*command, "--page", "127.0.0.1:0"], log=log) as training:
            tail = Tail(run / "metrics.jsonl")
            while all(line["step"] < _STEP for line in tail.new()):
                if training.poll() is not None:
                    raise SystemExit(f"the run has ended too early:\n{log.read_text()}")
                time.sleep(0.2)
            address = json.loads((run / "page.json").read_text())["address"]
            with chromium() as browser:
                _take(browser, f"http://{address}/", folder)
            end(training)
    return 0


def _take(browser: Browser, url: str, folder: Path) -> None:
    wide = _opened(browser, url, screen=_WIDE)
    wide.screenshot(path=folder / "page.png")
    wide.locator("details.incident:not([open])", has_text="lost").first.locator("summary").click()
    wide.click("#schedule-load")
    wide.wait_for_selector("#schedule-legend span")
    wide.add_style_tag(content="header { position: static !important }")  # or it covers the top of each section
    for section in _SECTIONS:
        wide.locator(f"#{section}").screenshot(path=folder / f"page-{section}.png")
    phone = _opened(browser, url, screen=PHONE, is_phone=True)
    phone.screenshot(path=folder / "page-phone.png")
    phone.evaluate("document.querySelector('#incidents').scrollIntoView()")
    phone.screenshot(path=folder / "page-phone-incidents.png")


def _opened(browser: Browser, url: str, *, screen: ViewportSize, is_phone: bool = False) -> Page:
    page = browser.new_context(
        viewport=screen,
        is_mobile=is_phone,
        color_scheme="dark" if is_phone else "light",
        device_scale_factor=2 if is_phone else 1,
    ).new_page()
    page.goto(url)
    page.wait_for_selector("details.incident")
    page.wait_for_timeout(_DRAWN_MS)
    return page


if __name__ == "__main__":
    sys.exit(main())
