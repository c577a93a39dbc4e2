"""A run with failures, watched and controlled in a browser from its beginning to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chameleon_ft.config import Checkpoint, Parallel, Timelines
from chameleon_ft.storage.files import RunDirectory
from tests.configs import write_config
from tests.harness import Command, small_config

playwright = pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, BrowserContext, Page, expect  # noqa: E402

from benchmarks._browser import PHONE, NoBrowserError, chromium  # noqa: E402

pytestmark = pytest.mark.multiprocess

PATIENCE_MS = 60_000  # of what waits for a run on a busy machine
TEXTS = """element => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode.data);
  return texts.join(" ");
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with chromium() as browser:
            yield browser
    except NoBrowserError as error:
        pytest.skip(str(error))


class Watched:
    """The page in a tab; what goes wrong in its scripts is kept."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(url)

    def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until an element has this text."""
        expect(self.page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)

    def act(self, action: str) -> int:
        """Click a button; return the status of the answer once it is shown."""
        with self.page.expect_response(f"**/api/actions/{action}") as answer:
            self.page.click(f"button[data-action={action}]")
        status: int = answer.value.status
        self.shows("#answer", re.compile(r"^(?!asked)."))
        return status

    def is_too_wide(self) -> bool:
        """Return whether the page is wider than the screen."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def shows_curves(self) -> bool:
        """Return whether the charts are drawn."""
        return all(box["height"] > 100 for box in map(bounds, self.page.locator(".chart canvas").all()))

    def words(self, selector: str) -> set[str]:
        """Return the words in an element, those that are folded away included."""
        return set(self.page.locator(selector).evaluate(TEXTS).split())


def words_about_incidents(printed: str) -> set[str]:
    """Return the words that a run has printed between its first step and its closing table, but for the steps."""
    steps = re.compile(r"^ +(\d+|step) .*\n", re.MULTILINE)  # with the heads of their columns
    log = re.compile(r"^\d{4}-\d\d-\d\d .*\n", re.MULTILINE)
    begun = printed[steps.search(printed).start() :]  # type: ignore[union-attr]
    told = log.sub("", steps.sub("", begun[: begun.index("+- interrupted -")]))
    return {word for word in told.replace("|", " ").split() if word.strip("+-")}


def bounds(locator: object) -> dict[str, float]:
    found: dict[str, float] = locator.bounding_box()  # type: ignore[attr-defined]
    return found


def test_a_run_is_watched_and_controlled_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    config = small_config(
        tmp_path,
        steps=100_000,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        checkpoint=Checkpoint(every=0),
        timelines=Timelines(every=5),
    )
    start = ("train", write_config(config, tmp_path), "--output-dir", run.path, "--page", "127.0.0.1:0")
    # Both start an interpreter, because Playwright runs an event loop in this thread.
    with Command(*start, own_interpreter=True) as training:
        url = training.read_until(r"page: (http://127\.0\.0\.1:\d+/)")[1]
        token = json.loads((run.path / "page.json").read_text())["token"]
        desk = Watched(browser.new_context(viewport={"width": 1280, "height": 900}), f"{url}#token={token}")
        desk.shows("#condition", "training")
        assert desk.page.url == url, "the token is not left in the address bar"
        assert desk.page.input_value("#token") == token
        assert desk.shows_curves()

        desk.page.fill("#token", "wrong")
        assert desk.act("checkpoint") == 401
        desk.shows("#answer", "not done: wrong token")
        desk.page.fill("#token", token)
        assert desk.act("checkpoint") == 200
        desk.shows("#tiles", re.compile(r"old; step \d+"))

        desk.page.select_option("#drain-what", "worker:1")
        assert desk.act("drain") == 200
        desk.shows("#special", "Has left: workers 1")
        desk.page.select_option("#inject-worker", "2")
        desk.page.select_option("#inject-kind", "kill")
        assert desk.act("inject") == 200
        desk.shows("#incident-list", "worker 2 lost in step")
        desk.shows("#incident-list", "SIGKILL")
        desk.shows("#condition", "training")
        desk.shows("#special", "Lost: workers 2")
        desk.page.click("#schedule-load")
        desk.shows("#schedule-facts", re.compile(r"measured .* predicted"))

        phone = Watched(browser.new_context(viewport=PHONE, is_mobile=True, color_scheme="dark"), url)
        phone.shows("#condition", "training")
        phone.shows("#incident-list", "worker 2 lost in step")
        assert not phone.is_too_wide()
        assert not desk.is_too_wide()
        assert phone.shows_curves()
        assert phone.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 19)"
        assert phone.act("finish") == 401, "a phone without the token only looks"

        assert desk.act("finish") == 200
        assert training.wait() == 130, training.printed

    # The page comes back at its address, and the browsers find it by themselves.
    listen = url.removeprefix("http://").rstrip("/")
    with Command("page", run.path, "--listen", listen, own_interpreter=True) as serving:
        serving.read_until("page: ")
        for watched in (desk, phone):
            watched.shows("#condition", "interrupted")
            watched.shows("#events", "worker 2 lost in step")
            expect(watched.page.locator("button[data-action=finish]")).to_be_disabled(timeout=PATIENCE_MS)
        found = set().union(*(desk.words(part) for part in ("#events", "#incidents", "#facts")))
        printed = words_about_incidents(training.printed)
        assert {"SIGKILL", "reroute:"} <= printed
        assert printed - found == set()
        assert (desk.errors, phone.errors) == ([], [])
