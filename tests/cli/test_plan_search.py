"""`chameleon plan` with a search: the best plan, the best micro-batch size, and planners to compare with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from pathlib import Path

import pytest

from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search import SearchResult, find_plan
from chameleon_ft.search.result import DEFAULT_EFFORT
from chameleon_ft.storage.profiles import write_profile
from tests.cli.planning import PRESET, ROOT, plan, predicted
from tests.golden import message


@pytest.fixture(scope="module")
def found() -> dict[object, SearchResult]:
    """The results of all searches, by their arguments."""
    return {}


@pytest.fixture(autouse=True)
def searched_once(monkeypatch: pytest.MonkeyPatch, found: dict[object, SearchResult]) -> None:
    """Search with equal arguments once: most tests compare ways to show the same results."""

    def once(
        costs: CostModel,
        *,
        current: Placement | None = None,
        others: Mapping[str, Plan] | None = None,
        others_in_flight_limits: Mapping[int, InFlightLimit] | None = None,
        effort: int | None = DEFAULT_EFFORT,
    ) -> SearchResult:
        others, limits = others or {}, others_in_flight_limits or {}
        key = (costs, current, tuple(others.items()), tuple(limits.items()), effort)
        if key not in found:
            found[key] = find_plan(costs, current=current, others=others, others_in_flight_limits=limits, effort=effort)
        return found[key]

    for name in ("chameleon_ft.session.prediction", "chameleon_ft.search.find"):
        monkeypatch.setattr(import_module(name), "find_plan", once)


def test_a_slow_worker_is_named_and_so_is_one_that_is_idle(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama2-7b", "--device", "h100-80g", "--workers", "5", "--micro-batches", "16")
    printed = plan(capsys, *case, "--slow", "3=0.01", "--failed", "1")
    assert "16 micro-batches of 1, split backward, worker 3 at speed 0.01, without worker 1" in printed
    assert re.search(r"\| 3 +\| idle", printed)
    assert re.search(r"\| 1 +\| lost", printed)


def test_the_table_says_how_many_layers_are_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--workers", "7", "--micro-batches", "16", "--micro-batch-size", "8")
    arguments = ("--model", "llama2-7b", "--device", "h100-80g", *size, "--planner", "chameleon")
    layout = Plan.from_json(json.dumps(predicted(capsys, *arguments)["plan"]))

    table = plan(capsys, *arguments)

    assert layout.recompute
    for worker, layers in layout.recompute.items():
        (held,) = layout.placement.ranges_of(worker)
        inner = range(1, layout.placement.num_layers - 1)
        in_full, selectively = (sum(layer in inner for layer in own) for own in (layers.full, layers.selective))
        words = f"{in_full or selectively} of {len(held)}"
        words += f", {selectively} selectively" if in_full and selectively else " selectively" if selectively else ""
        assert re.search(rf"\| {held.start}-{held.stop - 1} +\| {words} +\|", table)


def test_the_best_plan_is_searched_for_and_beats_the_detours(capsys: pytest.CaptureFixture[str]) -> None:
    rerouted = predicted(capsys, *PRESET, "--failed", "5")
    found = predicted(capsys, *PRESET, "--failed", "5", "--planner", "chameleon")
    assert (rerouted["planner"], found["planner"]) == ("layout", "chameleon")
    assert found["step_s"] < rerouted["step_s"]
    assert found["search_bound_s"] <= found["step_s"]
    assert "5" not in found["peak_memory_bytes"]
    assert all(found["peak_memory_bytes"][w] <= found["capacity_bytes"][w] for w in found["peak_memory_bytes"])
    assert found["bytes_to_move"] > 0
    listed = [found, *found["alternatives"]]
    for slower, faster in ((b, a) for a, b in combinations(listed, 2)):
        assert (
            slower["bytes_to_move"] < faster["bytes_to_move"]
            or slower["host_single_points_of_failure"] < faster["host_single_points_of_failure"]
        )
    for other in found["alternatives"]:
        Plan.from_json(json.dumps(other["plan"]))


def test_detours_take_what_they_take_beside_what_a_search_finds(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama2-7b", "--device", "h100-80g", "--dp", "4", "--pp", "4", "--micro-batches", "64")
    lost = (*case, "--split-backward", "--failed", "3")
    rerouted = predicted(capsys, *lost)
    found = predicted(capsys, *lost, "--planner", "chameleon")
    listed = {each["name"]: each for each in found["alternatives"]}
    assert listed["reroute"]["step_s"] == rerouted["step_s"]
    assert listed["reroute"]["plan"] == rerouted["plan"]


def test_any_number_of_workers_can_be_planned_for_some_of_them_slow(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama2-7b", "--device", "h100-80g", "--workers", "5", "--micro-batches", "20")
    even = predicted(capsys, *case)
    slow = predicted(capsys, *case, "--slow", "1=0.5,3=0.5")
    printed = plan(capsys, *case, "--slow", "1=0.5,3=0.5")
    assert len(even["plan"]["routes"]) == 20
    assert (even["failure_free_step_s"], even["dead"]) == (None, [])
    assert even["step_s"] < slow["step_s"]
    assert re.search(
        r"^chameleon, in .*: .* above .*, which no plan of the family \w+ can beat$", printed, re.MULTILINE
    )
    assert "| pipelines |" in printed
    assert "to move" not in printed, "nothing is in force that could be moved"
    assert "| to move |" in re.sub(" +", " ", plan(capsys, *PRESET, "--failed", "5", "--planner", "chameleon"))
    assert not re.search(" $", printed, re.MULTILINE)


SIZED = ("--model", "llama2-7b", "--device", "h100-80g", "--global-batch-size", "32", "--micro-batch-size")


def test_the_best_micro_batch_size_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    by_size = {size: predicted(capsys, *SIZED, str(size), "--workers", "8") for size in (1, 2, 4)}
    best = min(by_size, key=lambda size: float(by_size[size]["step_s"]))
    found = predicted(capsys, *SIZED, "4,1,2", "--workers", "8")
    printed = plan(capsys, *SIZED, "auto", "--workers", "8")
    assert (found["micro_batch_size"], len(found["plan"]["routes"])) == (best, 32 // best)
    assert (found["plan"], found["step_s"]) == (by_size[best]["plan"], by_size[best]["step_s"])
    assert found["search_bound_s"] == min(each["search_bound_s"] for each in by_size.values())
    assert [each["micro_batch_size"] for each in found["micro_batch_sizes"]] == [1, 2, 4]
    assert by_size[1]["micro_batch_sizes"] == []
    assert re.search(rf"micro-batches of {best}: [\d.]+ s, chosen\n", printed)
    assert re.search(r"micro-batches of \d+: not searched, takes at least [\d.]+ s", printed)
    assert "which no plan of the family pipelines, of any of these sizes, can beat" in printed
    assert "derived costs grow with the micro-batch" in printed


def test_the_best_size_for_a_layout_is_that_of_the_least_step_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--dp", "2", "--pp", "4")
    alone = {size: predicted(capsys, *SIZED, str(size), *layout, code=int(size > 2)) for size in (1, 2, 16)}
    found = predicted(capsys, *SIZED, "1,2,16", *layout)
    assert found["step_s"] == min(each["step_s"] for each in alone.values() if each["fits"])
    assert [each["step_s"] for each in found["micro_batch_sizes"]] == [
        each["step_s"] if each["fits"] else None for each in alone.values()
    ]
    message(plan(capsys, *SIZED, "1,2,16", *layout))
    sizes = predicted(capsys, *SIZED, "auto", *layout)["micro_batch_sizes"]
    assert [each["micro_batch_size"] for each in sizes] == [1, 2, 4, 8, 16], "32 is none for the second pipeline"


def test_profiles_of_several_sizes_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {size: tmp_path / f"{size}.json" for size in (1, 2, 4)}
    for size, file in files.items():
        derived = derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=size)
        # As on a device that needs two samples for its full rate.
        profile = replace(derived, layers=tuple(layer.slowed(1.0 if size > 1 else 1.5) for layer in derived.layers))
        write_profile(profile, file)
    given = [argument for file in files.values() for argument in ("--profile", file)]
    batch = ("--workers", "8", "--global-batch-size", "32")
    found = predicted(capsys, *given, *batch)
    assert found["micro_batch_size"] == 2
    assert found["plan"] == predicted(capsys, "--profile", files[2], *batch)["plan"]

    config = tmp_path / "run.toml"
    example = (ROOT / "examples" / "emulated.toml").read_text()
    batch_of = "[batch]\nmicro_batches = 32\nmicro_batch_size = 1\n"
    config.write_text(re.sub(r"\[batch\]\n(.+\n)*", batch_of, re.sub(r"profile = .*", "", example)))
    assert predicted(capsys, config, *given, "--workers", "8")["micro_batch_size"] == 2

    error = plan(capsys, *given, *given[:2], *batch, code=2)
    assert "is of micro-batches of 1, as" in error
    error = plan(capsys, *given[:2], "--profile", ROOT / "profiles" / "llama2-7b-h100-80g.json", *batch, code=2)
    assert "give one of each size" in error


@pytest.mark.parametrize("planner", ["paper", "oobleck"])
def test_published_planners_are_there_to_compare_with(planner: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = predicted(capsys, *PRESET, "--failed", "5", "--planner", planner)
    ours = predicted(capsys, *PRESET, "--failed", "5", "--planner", "chameleon")
    assert (theirs["planner"], theirs["found"], theirs["alternatives"]) == (planner, planner, [])
    assert theirs["search_bound_s"] == ours["search_bound_s"] <= ours["step_s"] <= theirs["step_s"]
    assert "5" not in theirs["peak_memory_bytes"]


def test_a_plan_that_was_found_can_be_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan(capsys, *PRESET, "--failed", "1", "--planner", "chameleon", "--picture", tmp_path / "a.svg")
    assert "worker 7" in (tmp_path / "a.svg").read_text()
