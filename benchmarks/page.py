"""How much does serving a run's page cost, and how fast does the page load?

Three parts; --parts picks some.

  steps   the quick start without failures, with its page. Windows in which three browsers watch alternate with windows
          in which none does; a step is timed from one commit to the next.
  scrape  seconds of a GET of /metrics, of a run of 32 workers whose records grow; each answer is read by the strict
          parser of prometheus-client.
  large   a run of 1,024 ranks, whose records come from the real coordinator with simulated ranks (`control_plane`),
          and then go on at 20 steps a second, with an incident every half minute: processor time of the page's process
          a second, and what it sends to a browser a minute; the coordinator's own process has no part in it. And
          seconds until a headless Chromium on this machine has painted the page for the first time.

Browsers are clients that ask for what the page's scripts ask for, except for the first paint, so that they take little
processor time from the run, as on another machine.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import psutil
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks._browser import chromium
from benchmarks._chameleon import event_lines
from benchmarks._common import (
    Bar,
    Report,
    Spread,
    add_most_others,
    arguments,
    base_config,
    child,
    new_folder,
    write_config,
)
from benchmarks._live_run import Tail, end
from benchmarks._neighbours import Neighbours, progress
from benchmarks._page_reader import fetch, readers
from benchmarks.control_plane import measure
from chameleon_ft.storage.files import RunDirectory

_PARTS: Final = ("steps", "scrape", "large")
_BROWSERS: Final = 3
_SETTLED_S: Final = 1.0  # after browsers have come or gone
_SCRAPED, _LARGE = 32, 1024  # ranks
_SCRAPES: Final = 40
_STEPS_PER_S: Final = 20
_INCIDENT_EVERY_S: Final = 30.0
_LOADS: Final = 5
_LISTENS_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A measured quantity, its limit, and the unit of both."""

    name: str
    spread: Spread
    limit: float
    unit: str

    def bar(self) -> Bar:
        return Bar(name=f"{self.name}, {self.unit}", value=self.spread.median, limit=self.limit)


@contextmanager
def page_of(run: Path, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the page of a run; yield its address and its process."""
    command = [sys.executable, "-m", "chameleon_ft", "page", str(run), "--listen", "127.0.0.1:0"]
    with child(command, log=log) as process:
        yield _address(log), psutil.Process(process.pid)


def _address(log: Path) -> str:
    until_s = time.monotonic() + _LISTENS_S
    while time.monotonic() < until_s:
        if log.exists() and (found := re.search(r"page: (http://\S+/)", log.read_text())):
            return found[1].rstrip("/")
        time.sleep(0.05)
    raise SystemExit(f"the page is not served; see {log}")


@contextmanager
def growing(run: RunDirectory) -> Iterator[None]:
    """Have the records of a run grow inside the block, like those of one that trains."""
    is_over = threading.Event()
    thread = threading.Thread(target=_grow, args=(run, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _grow(run: RunDirectory, is_over: threading.Event) -> None:
    """Repeat the last step of a run, and its last incident."""
    step = run.steps()[-1].to_json()
    events = event_lines(run)
    first = max(number for number, event in enumerate(events) if event["event"] == "lost")
    incident, next_s = events[first:], time.time() + _INCIDENT_EVERY_S / 2
    for number in count(step["step"] + 1):
        if is_over.wait(1 / _STEPS_PER_S):
            return
        now = time.time()
        _append(run.metrics_file, [{**step, "step": number, "step_s": 1 / _STEPS_PER_S, "time": now}])
        if now > next_s:
            next_s += _INCIDENT_EVERY_S
            _append(run.events_file, [{**event, "time": now} for event in incident])


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


def _steps(folder: Path, *, config: Path, windows: int, window_s: float) -> list[Result]:
    folder.mkdir()
    file = write_config(base_config(config, stamped=False, steps=1_000_000), folder / "config.toml")
    run, log = RunDirectory(folder / "run"), folder / "train.txt"
    command = [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run.path)]
    ratios = []
    with child([*command, "--page", "127.0.0.1:0"], log=log) as training:
        address, tail = _address(log), Tail(run.metrics_file)
        while not any(line["step"] > 20 for line in tail.new()):
            if training.poll() is not None:
                raise SystemExit(f"the run has ended; see {log}")
            time.sleep(0.2)

        def window(browsers: int) -> float:
            with readers(address, browsers):
                time.sleep(_SETTLED_S)
                list(tail.new())
                time.sleep(window_s)
                return statistics.fmean(line["step_s"] for line in tail.new())

        for number in range(windows):
            order = (0, _BROWSERS) if number % 2 else (_BROWSERS, 0)
            step_s = {browsers: window(browsers) for browsers in order}
            ratios.append(step_s[_BROWSERS] / step_s[0])
            progress(f"steps: {ratios[-1]:.3f}")
        end(training)
    return [Result(name="step time, watched / unwatched", spread=Spread(tuple(ratios)), limit=1.01, unit="ratio")]


def _scrape(folder: Path) -> list[Result]:
    seconds = []
    measure(_SCRAPED, folder, losses=1, heartbeats_s=0.5)
    run = RunDirectory(folder / "run")
    with page_of(run.path, folder / "page.txt") as (address, _), growing(run):
        fetch(address, "/metrics")
        for _ in range(_SCRAPES):
            time.sleep(0.2)
            begun_s = time.perf_counter()
            text = fetch(address, "/metrics").decode()
            seconds.append(time.perf_counter() - begun_s)
            assert list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    return [Result(name=f"scrape at {_SCRAPED} workers", spread=Spread(tuple(seconds)), limit=0.02, unit="s")]


def _large(folder: Path, *, minute_s: float) -> list[Result]:
    measure(_LARGE, folder, losses=1, heartbeats_s=0.5)
    run = RunDirectory(folder / "run")
    results = []
    with page_of(run.path, folder / "page.txt") as (address, process), growing(run):
        for browsers in (1, _BROWSERS):
            with readers(address, browsers) as opened:
                time.sleep(_SETTLED_S)
                before_s, sent = _processor_s(process), [each.following_bytes for each in opened]
                time.sleep(minute_s)
                share = (_processor_s(process) - before_s) / minute_s
                sizes = [(each.following_bytes - old) / minute_s * 60 for each, old in zip(opened, sent, strict=True)]
                name = f"{_LARGE} ranks, browsers: {browsers}"
                results += [
                    Result(name=f"{name}; processor time a second", spread=Spread((share,)), limit=0.1, unit="s"),
                    Result(
                        name=f"{name}; sent to each a minute",
                        spread=Spread(tuple(size / 1e6 for size in sizes)),
                        limit=2.0,
                        unit="MB",
                    ),
                ]
                progress(f"large: opening takes {opened[0].opening_bytes / 1e6:.2f} MB")
        paint = Result(name=f"first paint at {_LARGE} ranks", spread=_first_paint(address), limit=1.0, unit="s")
    return [*results, paint]


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _first_paint(address: str) -> Spread:
    seconds = []
    with chromium() as browser:
        for _ in range(_LOADS):
            context = browser.new_context()
            page = context.new_page()
            page.goto(address)
            page.wait_for_selector("#what-if td")
            paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            seconds.append(paint_ms / 1000)
            context.close()
    return Spread(tuple(seconds))


def main() -> int:
    parser = arguments(__doc__, name="page")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="parts to measure")
    parser.add_argument("--windows", type=int, default=10, help="pairs of windows of the part `steps`")
    parser.add_argument("--window-s", type=float, default=10.0, help="seconds of each of them")
    parser.add_argument("--minute-s", type=float, default=60.0, help="seconds for which the part `large` measures")
    add_most_others(parser)
    given = parser.parse_args()
    folder = new_folder(given.out)
    neighbours = Neighbours(most=given.max_others)
    parts: dict[str, Callable[[Path], list[Result]]] = {
        "steps": partial(_steps, config=given.config, windows=given.windows, window_s=given.window_s),
        "scrape": _scrape,
        "large": partial(_large, minute_s=given.minute_s),
    }
    results: list[Result] = []
    for name in given.parts:
        progress(name)
        results += neighbours.undisturbed(parts[name], folder / name)
    report = Report(
        benchmark="page",
        columns=("quantity", "unit", "measured"),
        rows=tuple((each.name, each.unit, each.spread.shown()) for each in results),
        bars=tuple(each.bar() for each in results),
        results={"measured": {each.name: each.spread.to_json() for each in results}},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
