"""Pictures of schedules, read back from SVG."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from chameleon_ft.errors import ConfigError
from chameleon_ft.quantities import duration
from chameleon_ft.report.picture import Lane, fit_title
from chameleon_ft.report.schedule_picture import draw_schedule
from chameleon_ft.schedule import OperationKind, Timeline
from tests.golden import refused
from tests.report.schedules import Scheduled, scheduled, slowed
from tests.strategies import Shape

PLAIN = scheduled(Shape(dp=1, pp=2, share=2), latency_s=0.0)
LOST = scheduled(Shape(dp=3, pp=3, share=4), lost=(4,))
SPLIT = scheduled(Shape(dp=2, pp=3, share=4), lost=(1,), split_backward=True)


@dataclass(frozen=True)
class Box:
    left: float
    right: float
    top: float
    bottom: float
    style: str


@dataclass(frozen=True)
class Picture:
    """The content of a picture: its boxes by name, in pixels, and its texts."""

    boxes: dict[str, list[Box]]
    texts: list[str]

    def operations(self) -> dict[str, list[Box]]:
        return {name: boxes for name, boxes in self.boxes.items() if name.startswith(("forward", "backward"))}


def draw(folder: Path, case: Scheduled, *more: Lane) -> Picture:
    path = folder / "picture.svg"
    draw_schedule(path, title="a title", plan=case.plan, pipelines=case.pipelines, lanes=[case.lane, *more])
    text = path.read_text(encoding="utf-8")
    svg = "{http://www.w3.org/2000/svg}"
    boxes: dict[str, list[Box]] = {}
    for group in ElementTree.fromstring(text).iter(f"{svg}g"):
        name = group.get("id", "")
        if re.match("step|idle|lost|forward|backward|gradient", name):
            boxes[name] = [box(path.get("d", ""), path.get("style", "")) for path in group.findall(f"{svg}path")]
    return Picture(boxes, re.findall("<!-- (.*?) -->", text))


def box(path: str, style: str) -> Box:
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    return Box(min(numbers[::2]), max(numbers[::2]), min(numbers[1::2]), max(numbers[1::2]), style)


def luminance(box: Box) -> float:
    """Return the luminance of the filling, from 0 to 1 (ITU-R BT.709)."""
    found = re.search("fill: #(..)(..)(..)", box.style)
    assert found, box.style
    red, green, blue = (int(part, 16) / 255 for part in found.groups())
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_boxes_lie_where_the_timeline_says(tmp_path: Path) -> None:
    picture = draw(tmp_path, LOST)
    ground = picture.boxes["idle"][0]
    pixels_per_s = (ground.right - ground.left) / LOST.lane.timeline.step_s

    found = sorted((box.left, box.right) for boxes in picture.operations().values() for box in boxes)
    expected = sorted(
        (ground.left + timed.start_s * pixels_per_s, ground.left + timed.end_s * pixels_per_s)
        for timed in LOST.lane.timeline.operations
    )
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=0.01)


def test_a_worker_has_its_own_row(tmp_path: Path) -> None:
    picture = draw(tmp_path, LOST)
    rows = Counter(box.top for boxes in picture.operations().values() for box in boxes)
    per_worker = Counter(timed.worker for timed in LOST.lane.timeline.operations)
    assert [rows[top] for top in sorted(rows)] == [per_worker[worker] for worker in sorted(per_worker)]
    assert sorted(rows) == sorted(box.top for box in picture.boxes["idle"])


def test_the_row_of_a_lost_worker_is_named_and_empty(tmp_path: Path) -> None:
    picture = draw(tmp_path, LOST)
    (lost,) = picture.boxes["lost"]
    assert "worker 4, lost" in picture.texts
    assert "lost worker" in picture.texts
    others = [box for name, boxes in picture.boxes.items() if name != "lost" for box in boxes]
    assert all(box.bottom <= lost.top or lost.bottom <= box.top for box in others)
    above = {box.top for box in picture.boxes["idle"] if box.top < lost.top}
    assert len(above) == 4


def test_lost_workers_that_a_repartition_left_without_a_pipeline_have_rows(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    case = PLAIN
    draw_schedule(path, title="a title", plan=case.plan, pipelines=case.pipelines, lanes=[case.lane], lost=(5, 2))
    texts = re.findall("<!-- (.*?) -->", path.read_text(encoding="utf-8"))
    named = [text for text in texts if re.match("no pipeline|worker", text)]
    assert named == ["worker 0", "worker 1", "no pipeline", "worker 2, lost", "worker 5, lost"]


def test_a_lost_worker_of_a_pipeline_has_one_row_only(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw_schedule(path, title="a title", plan=LOST.plan, pipelines=LOST.pipelines, lanes=[LOST.lane], lost=(4,))
    assert path.read_text(encoding="utf-8").count("<!-- worker 4, lost -->") == 1


@pytest.mark.parametrize("words", [10, 30, 40, 400])
def test_a_title_of_any_length_fits_between_the_margins(words: int) -> None:
    width = 600.0
    fitted, size = fit_title("a word and more " * (words // 4) + "x" * 5, width=width, size=13)
    font = FontProperties(size=size, weight="bold")
    lines = fitted.splitlines()
    assert len(lines) <= 2
    assert all(
        text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] <= width + 1e-6 for line in lines
    )
    assert fitted.endswith("…") == (words == 400)


def test_a_title_without_a_space_is_broken() -> None:
    fitted, _ = fit_title("x" * 80, width=400, size=13)
    assert fitted.replace("\n", "") == "x" * 80
    assert len(fitted.splitlines()) == 2


def test_a_short_title_keeps_its_size() -> None:
    assert fit_title("short", width=600, size=13) == ("short", 13)
    assert fit_title("", width=600, size=13) == ("", 13)


def test_detours_are_marked_and_explained(tmp_path: Path) -> None:
    picture = draw(tmp_path, LOST)
    assert {name: len(boxes) for name, boxes in picture.operations().items() if "detour" in name} == {
        "forward-detour": 4,
        "backward-detour": 4,
    }
    assert all("url(#" in box.style for box in picture.boxes["forward-detour"])
    assert not any("url(#" in box.style for box in picture.boxes["forward"])
    assert "detour" in picture.texts


def test_the_legend_names_exactly_the_drawn_kinds(tmp_path: Path) -> None:
    fused, split = draw(tmp_path, PLAIN).texts, draw(tmp_path, SPLIT).texts
    assert {"F  forward", "B  backward", "idle"} <= set(fused)
    assert not {"detour", "lost worker", "gradient all-reduce"} & set(fused)
    assert not any(text.startswith(("I ", "W ")) for text in fused)
    assert {"F  forward", "I  backward, input gradient", "W  backward, weight gradient"} <= set(split)
    assert {"detour", "lost worker", "gradient all-reduce", "idle"} <= set(split)
    assert not any(text.startswith("B ") for text in split)


def test_kinds_and_idle_time_are_distinct_in_grey(tmp_path: Path) -> None:
    boxes = draw(tmp_path, SPLIT).boxes
    names = ["idle", "forward", "backward-weight-gradient", "backward-input-gradient", "gradient-all-reduce"]
    found = [luminance(boxes[name][0]) for name in names]
    assert all(lighter - darker > 0.1 for lighter, darker in pairwise(found))


def test_the_shares_are_those_of_1f1b(tmp_path: Path) -> None:
    # Two micro-batches through two stages take (2 + 2 - 1) (1 + 2) s; each stage computes for 2 (1 + 2) s of them.
    texts = draw(tmp_path, PLAIN).texts
    assert texts.count("67%") == 2
    assert "predicted: step time 9.000 s, bubble 33.3%" in texts


def test_gradient_reductions_are_drawn_apart_from_operations(tmp_path: Path) -> None:
    picture = draw(tmp_path, SPLIT)
    reductions = picture.boxes["gradient-all-reduce"]
    assert len(reductions) == len(SPLIT.lane.reductions) == 4
    operations = [box for boxes in picture.operations().values() for box in boxes]
    assert all(one.bottom <= other.top + 0.01 or other.bottom <= one.top for one in operations for other in reductions)


def test_the_step_includes_gradient_sync_after_the_program(tmp_path: Path) -> None:
    # Three workers reduce in four messages of 0.25 s; those of the first stage begin when the program ends.
    program_s = LOST.lane.timeline.step_s
    picture = draw(tmp_path, LOST)
    (line,) = [text for text in picture.texts if text.startswith("predicted:")]
    assert line.startswith(
        f"predicted: step time {duration(program_s + 1)}, the last 1.000 s of it gradient all-reduce alone, "
    )
    ground, step = picture.boxes["idle"][0], picture.boxes["step"][0]
    assert (step.right - step.left) / (ground.right - ground.left) == pytest.approx((program_s + 1) / program_s)
    assert max(box.right for box in picture.boxes["gradient-all-reduce"]) == pytest.approx(step.right)


def test_two_timelines_share_a_worker_s_row(tmp_path: Path) -> None:
    picture = draw(tmp_path, LOST, slowed(LOST.lane, by=1.1))
    assert sum(map(len, picture.operations().values())) == 2 * len(LOST.lane.timeline.operations)
    tops = sorted(box.top for box in picture.boxes["idle"])
    assert len(set(tops)) == 2 * len(LOST.plan.workers)
    assert {box.top for boxes in picture.operations().values() for box in boxes} == set(tops)
    assert picture.texts.count("predicted") == picture.texts.count("measured") == len(LOST.plan.workers)
    grounds = {box.top: box.right - box.left for box in picture.boxes["idle"]}
    for predicted, measured in zip(tops[::2], tops[1::2], strict=True):
        assert grounds[measured] == pytest.approx(1.1 * grounds[predicted], rel=1e-4)


def test_a_second_timeline_is_compared_with_the_first(tmp_path: Path) -> None:
    texts = draw(tmp_path, PLAIN, slowed(PLAIN.lane, by=1.1)).texts
    assert "measured: step time 9.900 s (+10.0%), bubble 33.3%" in texts

    # By the whole step, to which gradient sync adds a second in the first of these and nothing in the other.
    program_s = LOST.lane.timeline.step_s
    change = 1.1 * program_s / (program_s + 1) - 1
    texts = draw(tmp_path, LOST, slowed(LOST.lane, by=1.1)).texts
    assert any(
        text.startswith(f"measured: step time {duration(1.1 * program_s)} ({change:+.1%}), bubble") for text in texts
    )


@pytest.mark.parametrize(("by", "unit", "step"), [(1.0, "s", "9.000 s"), (1e-3, "ms", "9 ms"), (1e-6, "µs", "9 µs")])
def test_times_are_in_a_unit_that_is_easy_to_read(tmp_path: Path, by: float, unit: str, step: str) -> None:
    short = Scheduled(PLAIN.plan, PLAIN.pipelines, slowed(PLAIN.lane, by=by))
    texts = draw(tmp_path, short).texts
    assert f"time since the start of the step ({unit})" in texts
    assert f"measured: step time {step}, bubble 33.3%" in texts


def test_pipelines_are_named_and_workers_in_none_come_last(tmp_path: Path) -> None:
    texts = draw(tmp_path, Scheduled(LOST.plan, LOST.pipelines[:2], LOST.lane)).texts
    named = [text for text in texts if re.match("(pipeline|no pipeline|worker)", text)]
    first, second = LOST.pipelines[:2]
    assert named == [
        *("pipeline 0", *(f"worker {worker}" for worker in first)),
        *("pipeline 1", f"worker {second[0]}", f"worker {second[1]}, lost", f"worker {second[2]}"),
        *("no pipeline", "worker 6", "worker 7", "worker 8"),
    ]


def test_micro_batches_are_written_where_there_is_room(tmp_path: Path) -> None:
    picture = draw(tmp_path, LOST)
    # Of each of three hops a forward and a backward.
    assert picture.texts.count("11") == 2 * 3
    crowded = scheduled(Shape(dp=1, pp=1, share=400))
    assert not {"111", "399"} & set(draw(tmp_path, crowded).texts)


def test_operations_that_take_no_time_are_left_out(tmp_path: Path) -> None:
    picture = draw(tmp_path, SPLIT)
    lasting = Counter(timed.operation.kind for timed in SPLIT.lane.timeline.operations if timed.end_s > timed.start_s)
    drawn = sum(len(boxes) for name, boxes in picture.boxes.items() if name.startswith("backward-input-gradient"))
    assert drawn == lasting[OperationKind.INPUT_GRAD]
    assert drawn < lasting[OperationKind.WEIGHT_GRAD]


def test_a_timeline_in_which_nothing_happened_can_be_drawn(tmp_path: Path) -> None:
    picture = draw(tmp_path, Scheduled(LOST.plan, LOST.pipelines, Lane("measured", Timeline(()))))
    assert not picture.operations()
    assert picture.texts.count("0%") == len(LOST.plan.workers)


def test_a_title_is_written_verbatim(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw_schedule(path, title="$5_{ & <more>", plan=PLAIN.plan, pipelines=PLAIN.pipelines, lanes=[PLAIN.lane])
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "<!-- $5_{ &amp; &lt;more&gt; -->" in text


@pytest.mark.parametrize(
    ("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.PNG", b"\x89PNG")]
)
def test_the_suffix_determines_the_file_format(tmp_path: Path, name: str, begins: bytes) -> None:
    path = tmp_path / name
    draw_schedule(path, title="a title", plan=PLAIN.plan, pipelines=PLAIN.pipelines, lanes=[PLAIN.lane])
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize("name", ["a.gif", "a"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with refused(ConfigError):
        draw_schedule(path, title="a title", plan=PLAIN.plan, pipelines=PLAIN.pipelines, lanes=[PLAIN.lane])
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.svg"
    with refused(ConfigError):
        draw_schedule(path, title="a title", plan=PLAIN.plan, pipelines=PLAIN.pipelines, lanes=[PLAIN.lane])


def test_without_matplotlib_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with refused(ConfigError):
        draw_schedule(
            tmp_path / "a.svg", title="a title", plan=PLAIN.plan, pipelines=PLAIN.pipelines, lanes=[PLAIN.lane]
        )


def test_nothing_global_is_changed(tmp_path: Path) -> None:
    # dict() would ask for the backend, and that alone loads pyplot.
    before = matplotlib.rcParams.copy()
    draw(tmp_path, SPLIT)
    assert matplotlib.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = "import sys, chameleon_ft.report.picture; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
