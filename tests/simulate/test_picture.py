"""Pictures of simulations: what is in them, and that no text lies on another."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.figures import binned, live_workers, losses_s, missing
from chameleon_ft.simulate.pictures import draw_results, draw_sweep
from chameleon_ft.simulate.results import Results, Throughput
from chameleon_ft.simulate.run import Point, Scene, Sweep, simulate, sweep
from chameleon_ft.simulate.traces.trace import Event, Trace
from tests.golden import refused
from tests.simulate.clusters import cluster, random_trace, workload

pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 40
POLICIES = ("chameleon", "reroute", "drop-replica", "restart", "redundant", "oracle")


@pytest.fixture(scope="module")
def scene() -> Scene:
    trace = random_trace(1, workers=WORKERS, per_host=4)
    return Scene(trace, workload(micro_batches=80), cluster(WORKERS, per_host=4))


@pytest.fixture(scope="module")
def results(scene: Scene) -> Results:
    return simulate(scene.trace, scene.workload, scene.cluster, POLICIES)


def assert_readable(figure: Figure) -> None:
    """No text overlaps another or leaves the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    # Ticks outside the limits of an axis are objects, but are not drawn.
    hidden = {
        id(label)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    # Of the text alone: that of an annotation has its line in it too.
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    boxes = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in texts if id(t) not in hidden]
    assert len(boxes) > 10
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), f"{one!r} lies on {other!r}"


def test_the_results_are_readable(results: Results, scene: Scene) -> None:
    from chameleon_ft.simulate.figures import figure_of_results

    assert_readable(figure_of_results("a title of some length, 40 workers", results, scene.trace))
    alone = replace(results, policies={"oracle": results.policies["oracle"]})
    assert_readable(figure_of_results("the oracle alone", alone, scene.trace))


def test_live_workers_are_seen_where_none_is_lost(scene: Scene) -> None:
    from chameleon_ft.simulate.figures import figure_of_results

    quiet = Trace(WORKERS, 86_400.0, (), workers_per_host=4)
    found = simulate(quiet, scene.workload, scene.cluster, ("chameleon", "oracle"))
    for results in (found, replace(found, policies={"oracle": found.policies["oracle"]})):
        figure = figure_of_results("a long title, which goes on and on " * 6, results, quiet)
        assert_readable(figure)
        for axes in figure.axes:
            low, high = axes.get_ylim()
            heights = np.concatenate([np.zeros(0), *(np.asarray(line.get_ydata(), float) for line in axes.lines)])
            assert np.all((low < heights) & (heights < high))


@pytest.mark.parametrize(
    ("name", "values", "policies"),
    [("rate", [0.1, 30], POLICIES), ("workers", [36, 40], ("chameleon", "restart", "oracle"))],
)
def test_a_sweep_is_readable(scene: Scene, name: str, values: list[float], policies: tuple[str, ...]) -> None:
    from chameleon_ft.simulate.figures import figure_of_sweep

    assert_readable(figure_of_sweep("a sweep", sweep(scene, name, values, policies)))


def test_pictures_are_files_that_can_be_read(results: Results, scene: Scene, tmp_path: Path) -> None:
    draw_results(tmp_path / "a.svg", title="the title", results=results, trace=scene.trace)
    swept = Sweep("rate", (Point(1.0, results), Point(2.0, None, "too small"), Point(3.0, results)))
    draw_sweep(tmp_path / "b.svg", title="the title", sweep=swept)
    for name in ("a.svg", "b.svg"):
        ElementTree.parse(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "<!-- the title -->" in text
        assert all(f"<!-- {policy} -->" in text for policy in POLICIES if policy != "oracle" or name == "b.svg")


def test_pictures_that_cannot_be_drawn_are_refused(results: Results, scene: Scene, tmp_path: Path) -> None:
    with refused(ConfigError):
        draw_results(tmp_path / "a.bmp", title="", results=results, trace=scene.trace)
    with refused(ConfigError):
        draw_results(tmp_path / "none" / "a.svg", title="", results=results, trace=scene.trace)
    with refused(ConfigError):
        draw_sweep(tmp_path / "a.svg", title="", sweep=Sweep("rate", (Point(1.0, None, "no"),)))


def test_missing_shares_add_up(results: Results) -> None:
    for own in results.policies.values():
        shares = missing(own)
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1 - own.share_of_failure_free, abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(0.01, 50), st.just(0.0) | st.floats(0.001, 9)), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_bins_hold_all_of_the_throughput(changes: list[tuple[float, float]], bins: int) -> None:
    times = list(itertools.accumulate((gap for gap, _ in changes[1:]), initial=0.0))
    timeline = [Throughput(time_s, rate) for time_s, (_, rate) in zip(times, changes, strict=True)]
    duration_s = times[-1] + changes[0][0]
    ends = [*times[1:], duration_s]
    total = math.fsum((end - begin) * rate for begin, end, (_, rate) in zip(times, ends, changes, strict=True))
    found = binned(timeline, duration_s, bins)
    assert len(found) == bins
    assert math.fsum(found) * duration_s / bins == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert max(found) <= max(rate for _, rate in changes) * (1 + 1e-9)


def test_live_workers_and_losses_match_the_trace() -> None:
    events = (
        Event(0.0, (3,), "lost"),
        Event(5.0, (0, 1), "lost"),
        Event(6.0, (2,), "slow", 0.5),
        Event(7.0, (1, 3), "back"),
    )
    trace = Trace(4, 10.0, events)
    assert live_workers(trace) == ([0.0, 0.0, 5.0, 6.0, 7.0, 10.0], [4, 3, 1, 1, 3, 3])
    assert losses_s(trace) == [5.0]
