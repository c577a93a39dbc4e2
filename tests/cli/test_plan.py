"""`chameleon plan`: what it predicts, draws and refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.cli.plan_arguments import PlanArguments
from chameleon_ft.cli.plan_case import plan_cases
from chameleon_ft.estimate import estimate_step, paper, pipeline_times
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.presets import derive_workload, device, model_shape
from chameleon_ft.profiles import derived_profile, write_profile
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search import SearchResult, find_plan
from chameleon_ft.search.options import DEFAULT_EFFORT

ROOT = Path(__file__).parent.parent.parent
PRESET = ("--model", "llama2-7b", "--device", "h100-80g", "--dp", "2", "--pp", "4")


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

    for name in ("chameleon_ft.cli.prediction", "chameleon_ft.search.find"):
        monkeypatch.setattr(import_module(name), "find_plan", once)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    """Run `chameleon plan` and return what it prints on standard output, or the error where that is expected."""
    found = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.err if code == 2 else captured.out


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *arguments, "--json", code=code))
    return found


def test_a_preset_is_predicted_as_the_estimates_say(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, *PRESET, "--micro-batches", "32")

    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=32)
    costs = CostModel(workload, rates.cluster(8))
    layout = Plan.from_json(json.dumps(found["plan"]))
    estimate = estimate_step(layout, best_program(layout, costs).program, costs)
    assert found["step_s"] == pytest.approx(estimate.step_s)
    assert found["bound_s"] == pytest.approx(estimate.bound_s)
    assert found["bound_s"] <= found["program_s"] * (1 + 1e-12)  # they add the same times in another order
    assert found["program_s"] <= found["step_s"]
    assert found["total_work_bound_s"] <= found["program_s"]
    assert found["samples_per_s"] == pytest.approx(32 / found["step_s"])
    assert found["peak_memory_bytes"] == {str(w): m.peak_bytes for w, m in estimate.memory.items()}
    assert set(found["capacity_bytes"].values()) == {rates.memory_bytes}
    assert (found["fits"], found["dead"]) == (True, [])
    # An oracle that is not the replay: the slowest stage of 1F1B, by the paper's recursion with free messages.
    times = pipeline_times(layout.routes[0].hops, costs)
    one_pipeline_s = paper.pipeline_step_s(forward_s=times.forward_s, backward_s=times.backward_s, micro_batches=16)
    assert one_pipeline_s <= found["program_s"] <= 1.02 * one_pipeline_s


@pytest.mark.parametrize(
    ("precision", "owners", "per_parameter"), [("fp32", "all", 16), ("bf16", "all", 18), ("bf16", "1", 12)]
)
def test_memory_is_shown_by_purpose(
    capsys: pytest.CaptureFixture[str], precision: str, owners: str, per_parameter: int
) -> None:
    case = (*PRESET, "--micro-batches", "32", "--precision", precision, "--optimizer-redundancy", owners)
    found = predicted(capsys, *case)
    assert {w: sum(parts.values()) for w, parts in found["peak_memory_parts"].items()} == found["peak_memory_bytes"]
    for parts in found["peak_memory_parts"].values():
        parameters = parts["param_bytes"] / (2 if precision == "bf16" else 4)
        state_bytes = parts["param_bytes"] + parts["gradient_bytes"] + parts["optimizer_bytes"]
        assert state_bytes == pytest.approx(per_parameter * parameters)
    shown = " ".join(plan(capsys, *case).split())
    most, parts = re.findall(r"memory ([\d.]+) GB at most, on worker \d+: (.*?) bubble", shown)[0]
    assert float(most) == pytest.approx(max(found["peak_memory_bytes"].values()) / 1e9, abs=0.06)
    sizes = [
        float(size) / (1 if unit == "GB" else 1000)
        for size, unit in re.findall(r"([\d.]+) ([GM]B)", parts.split(" snapshots ")[0])
    ]
    assert sum(sizes) == pytest.approx(float(most), abs=0.3)
    assert "of optimizer state" in parts
    assert "samples" not in parts, "a preset has none"


def test_lost_workers_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    whole = predicted(capsys, *PRESET, "--micro-batches", "32")
    found = predicted(capsys, *PRESET, "--micro-batches", "32", "--failed", "5,2")
    assert found["dead"] == [2, 5]
    assert {hop[0] for route in found["plan"]["routes"] for hop in route} == {0, 1, 3, 4, 6, 7}
    assert found["failure_free_step_s"] == pytest.approx(whole["step_s"])
    assert found["step_s"] > whole["step_s"]
    assert set(found["peak_memory_bytes"]) == {"0", "1", "3", "4", "6", "7"}


@pytest.mark.parametrize("old", [("--dead", "5,2"), ("--dead=5,2",)])
def test_the_old_name_of_failed_still_works_and_warns(
    capsys: pytest.CaptureFixture[str], old: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert predicted(capsys, *PRESET, "--micro-batches", "4", *old)["dead"] == [2, 5]
    assert "chameleon plan: --dead is deprecated, and gone in the next release; use --failed" in caplog.text


def test_the_table_names_every_worker_and_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    printed = plan(capsys, *PRESET, "--failed", "5")
    assert "llama2-7b on h100-80g (derived), 2 x 4 workers, 32 micro-batches of 1, without worker 5" in printed
    assert re.search(r"of the throughput before the loss \(.* s, fused backward\), with 87\.5% of the workers", printed)
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")][1:]
    named = {int(worker) for row in rows for part in row.split(", ") for worker in _range(part)}
    assert named == set(range(8))
    assert re.search(r"\| 5 +\| lost", printed)


def test_a_slow_worker_is_named_and_so_is_one_that_is_idle(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama2-7b", "--device", "h100-80g", "--workers", "5", "--micro-batches", "16")
    printed = plan(capsys, *case, "--slow", "3=0.01", "--failed", "1")
    assert "16 micro-batches of 1, split backward, worker 3 at speed 0.01, without worker 1" in printed
    assert re.search(r"\| 3 +\| idle", printed)
    assert re.search(r"\| 1 +\| lost", printed)


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_the_split_backward_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    fused, split = predicted(capsys, *PRESET), predicted(capsys, *PRESET, "--split-backward")
    assert split["plan"]["split_backward"]
    assert not fused["plan"]["split_backward"]
    assert split["program_s"] < fused["program_s"]


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


def test_picture_and_trace_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--picture", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    told = f"picture written to {tmp_path / 'a.svg'}\ntrace written to {tmp_path / 'a.json'}\n"
    assert plan(capsys, *PRESET, "--failed", "1", *files).endswith(told)
    assert main([*map(str, ("plan", *PRESET, "--failed", "1", *files)), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == told
    assert json.loads(printed.out)["dead"] == [1], "nothing but JSON"
    assert "worker 1, lost" in (tmp_path / "a.svg").read_text()
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["name"].startswith("F") for event in events) == 32 * 4


def test_what_does_not_fit_says_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama2-13b", "--device", "h100-80g", "--dp", "8", "--pp", "1", "--micro-batches", "32")
    printed = plan(capsys, *case, code=1)
    found = predicted(capsys, *case, code=1)
    missing = max(found["peak_memory_bytes"].values()) - 80 * 10**9
    assert not found["fits"]
    assert f"needs {missing / 1e9:.1f} GB more than its 80.0 GB, and 7 others lack memory too" in printed
    assert "what would fit: --dp 1 --pp 8 (" in printed
    fitting = predicted(capsys, *case[:4], "--dp", "1", "--pp", "8", "--micro-batches", "32")
    assert fitting["fits"]


@pytest.mark.parametrize("picture", ["a.bmp", "no folder/a.svg"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_predicted(
    picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert picture in plan(capsys, "--picture", picture, code=2), "not that nothing is given to plan for"


def test_where_nothing_fits_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama3-405b", "--device", "a100-80g", "--dp", "2", "--pp", "2")
    printed = plan(capsys, *case, code=1)
    assert re.search(
        r", 0\.03\d+ samples a second\n(?s:.*)no layout of these workers fits; the nearest is --dp 1 --pp 4, "
        r"which lacks [\d.]+ TB; take more workers",
        printed,
    )


@pytest.mark.parametrize("command", [("--dp", "2"), ("--micro-batch-size", "1,2")])
def test_a_section_that_is_none_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("parallel = 3\nbatch = 4\n")
    printed = plan(capsys, config, *command, code=2)
    assert f"{config}: 2 errors:" in printed
    assert "parallel = 3: should be" in printed


def test_a_run_is_predicted_by_the_profile_that_it_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example = (ROOT / "examples" / "emulated.toml").read_text()
    profile = tmp_path / "profile.json"
    write_profile(derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1), profile)
    config = tmp_path / "run.toml"
    config.write_text(re.sub(r'profile = ".*"', f'profile = "{profile}"', example))

    found = predicted(capsys, config, "--failed", "5")
    wider = predicted(capsys, config, "--dp", "4", "--micro-batches", "32")

    assert found["dead"] == [5]
    assert len(wider["peak_memory_bytes"]) == 16
    # Where devices are emulated, messages take what the configuration says at least.
    assert found["failure_free_step_s"] > predicted(capsys, *PRESET, "--micro-batches", "16")["step_s"]


def test_a_llama_of_a_configuration_can_be_derived_for_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, ROOT / "examples" / "quickstart.toml", "--device", "a100-80g")
    assert len(found["peak_memory_bytes"]) == 8
    assert found["profile"] == "derived"


def test_the_precision_of_a_run_says_what_is_held() -> None:
    config = ROOT / "examples" / "quickstart.toml"
    for given in ((config, "--device", "a100-80g"), PRESET):
        cases = [
            plan_cases(parse_arguments(PlanArguments, [*map(str, given), *precision], command="plan"))[0]
            for precision in (["--precision", "fp32"], ["--precision", "bf16"])
        ]
        full, half = ([layer.held_bytes for layer in case.costs.workload.layers] for case in cases)
        assert [18 * each for each in full] == [16 * each for each in half]


def test_a_shape_may_come_from_hugging_face(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    shape = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6}
    file.write_text(
        json.dumps({**shape, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 256})
    )
    found = predicted(capsys, "--model", file, "--device", "h100-80g", "--dp", "1", "--pp", "2")
    assert found["plan"]["num_layers"] == 8
    assert found["plan"]["placement"].keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a CONFIG, or a published --model and its --device, or a --profile"),
        (("--model", "llama2-7c", "--device", "h100-80g", "--dp", "1", "--pp", "1"), "llama2-7b"),
        (("--model", "llama2-7b", "--device", "h100-81g", "--dp", "1", "--pp", "1"), "h100-80g"),
        (("--model", "llama2-7b", "--dp", "1", "--pp", "1"), "needs the --device that it runs on"),
        (("--model", "lama2-7b", "--dp", "1", "--pp", "1"), "did you mean 'llama2-7b'"),
        (("--model", "llama2-7b", "--device", "h100-80g"), "needs --dp and --pp"),
        ((*PRESET[:-1], "35"), "has 34 layers; take as many stages at most"),
        ((*PRESET, "--micro-batches", "33"), "must divide evenly over parallel.dp = 2 pipelines; take 32 or 34"),
        ((*PRESET, "--state", "bf17"), "bf16"),
        ((*PRESET, "--recompute", "all"), "should be one of none, selective, full"),
        ((*PRESET, "--failed", "8"), "there is no worker 8; they are numbered 0 to 7"),
        ((*PRESET, "--failed", "one"), "should be numbers of workers with commas between them"),
        ((*PRESET, "--failed", "0,1,2,3,4,5,6,7"), "leaves no worker"),
        ((*PRESET, "--failed", "1,5"), "no live worker holds layers 9-16; a run then returns to its newest checkpoint"),
        ((*PRESET, "--workers-per-host", "0"), "should be 1 or more"),
        ((*PRESET, "--micro-batches", "0"), "--micro-batches 0: should be 1 or more"),
        ((*PRESET, "--micro-batches", "9" * 12), "batch.micro_batches = 999999999999: should be less than or equal"),
        ((*PRESET, "--dp", "9" * 12), "workers = 3999999999996: should be less than or equal to 100000"),
        (
            ("--model", "llama2-7b", "--device", "h100", "--workers", "9" * 9, "--micro-batches", "8"),
            "--workers 999999999: should be 100000 at most",
        ),
        (
            ("--model", "llama2-7b", "--device", "h100", "--workers", "8", "--micro-batches", "9" * 9),
            "micro_batches must be at most 1000000; got 999999999",
        ),
        ((*PRESET, "--dp", "0"), "--dp 0: should be 1 or more"),
        ((*PRESET, "--micro-batch-size", "0"), "--micro-batch-size 0: should be a whole number of 1 or more"),
        ((*PRESET, "--micro-batch-size", "two"), "--micro-batch-size two: should be a whole number of 1 or more"),
        (
            (*PRESET, "--micro-batch-size", "1,x"),
            "--micro-batch-size x of a list such as 1,2,4: should be a whole number of 1 or more",
        ),
        ((*PRESET, "--micro-batch-size", "1,1"), "--micro-batch-size 1,1: has a size twice"),
        ((*PRESET, "--micro-batch-size", "1,2"), "say how many by --global-batch-size"),
        (
            (*PRESET, "--global-batch-size", "32", "--micro-batches", "32"),
            "--micro-batches 32: follow from the samples",
        ),
        (
            (*PRESET, "--global-batch-size", "32", "--micro-batch-size", "1,3"),
            "a micro-batch size of 3 does not divide",
        ),
        ((*PRESET, "--global-batch-size", "32", "--micro-batch-size", "64"), "take 32, or another number of samples"),
        ((*PRESET, "--global-batch-size", "4", "--micro-batch-size", "2,4"), "must divide evenly over parallel.dp = 2"),
        (
            (*PRESET, "--global-batch-size", "8", "--micro-batch-size", "1,2", "--failed", "1"),
            "keeps its micro-batch size",
        ),
        (
            (*PRESET, "--global-batch-size", "8", "--micro-batch-size", "auto", "--planner", "paper"),
            "--planner paper: a micro-batch size is chosen for a layout",
        ),
        ((*PRESET, "--precision", "bf16", "--state", "bf16"), "--precision bf16: --state bf16 says this already"),
        ((*PRESET, "--precision", "fp16"), "--precision fp16: should be one of fp32, bf16"),
        (("--state", "bf16", "--dp", "1", "--pp", "1"), "--state bf16: is for a published --model; name one"),
        (
            (ROOT / "examples" / "quickstart.toml", "--device", "h100", "--state", "bf16"),
            "--state bf16: .*quickstart.toml says what is trained; leave one of them out",
        ),
        ((*PRESET, "--picture", "schedule.bmp"), r"\.svg"),
        ((*PRESET, "--trace", "no folder/trace.json"), "the trace cannot be written there; give a file in a folder"),
        (
            (*PRESET, "--profile", "profile.json"),
            "--profile profile.json determines this already; leave one of them out",
        ),
        (("nothing.toml",), "there is no such file"),
        ((ROOT / "examples" / "quickstart.toml", "--profile", "none.json"), "profile .*none.json: cannot be read"),
        ((ROOT / "examples" / "quickstart.toml", "--model", "llama2-7b"), "leave one of them out"),
        (("--model", "none.json", "--device", "h100-80g", "--dp", "1", "--pp", "1"), "none.json: cannot be read"),
        (("--model", "empty.json", "--device", "h100-80g", "--dp", "1", "--pp", "1"), "--model empty.json: model_type"),
        (("--profile", "empty.json", "--dp", "1", "--pp", "1"), "empty.json: profile: is missing; give a file of"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str | Path, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}")
    error = plan(capsys, *arguments, code=2)
    assert error.startswith("chameleon plan: ")
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_profile_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=2), profile)
    error = plan(capsys, ROOT / "examples" / "quickstart.toml", "--profile", profile, code=2)
    assert "the profile of llama2-7b is of another model" in error


def test_a_layout_of_a_profile_needs_no_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=2), profile)
    by_name = predicted(capsys, *PRESET, "--micro-batch-size", "2", "--failed", "5")
    assert predicted(capsys, "--profile", profile, "--dp", "2", "--pp", "4", "--failed", "5") == by_name
    short = [argument.replace("h100-80g", "h100") for argument in PRESET]
    assert predicted(capsys, *short, "--micro-batch-size", "2", "--failed", "5") == by_name


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
    assert "micro-batches of 16: does not fit into memory" in plan(capsys, *SIZED, "1,2,16", *layout)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0", "--micro-batches", "8"), "--workers 0: should be 1 or more"),
        (("--workers", "8"), "needs --micro-batches, how many a step has"),
        (("--workers", "8", "--dp", "2"), "searches for a layout, and --dp and --pp give one; choose"),
        (("--workers", "8", "--micro-batches", "8", "--planner", "layout"), "leaves the layout open; give --dp"),
        (("--workers", "8", "--micro-batches", "8", "--failed", "8"), "there is no worker 8"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "9=0.5"), "there is no worker 9"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "1:0.5"), "should be WORKER=SPEED, such as 7=0.6"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "1=.5,1=.7"), "names worker 1 twice"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "1=0"), "speed of worker 1 must be positive"),
        (("--workers", "1", "--micro-batches", "8"), "does not fit the memory of 1 worker: .* workers .* would do"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", "--model", "llama2-7b", "--device", "h100-80g", *arguments])
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert error.startswith("chameleon plan: ")
    assert re.search(message, error), error


def test_a_job_is_planned_by_the_configuration_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("not read before the configuration is")
    (tmp_path / "mine.toml").write_text("workers = 5\n")
    assert main(["plan", str(tmp_path / "mine.py")]) == 2
    assert "workers = 5" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_a_configuration_without_a_profile_is_measured_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "small.toml"
    config.write_text(
        "workers = 2\n[parallel]\ndp = 1\npp = 2\n[batch]\nmicro_batches = 2\nmicro_batch_size = 1\n"
        "[model]\ndim = 16\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 1\nffn_dim = 16\nseq_len = 8\n"
    )
    assert main(["plan", str(config), "--json"]) == 0
    first = capsys.readouterr()
    (kept,) = (tmp_path / "cache" / "chameleon-ft" / "profiles").iterdir()
    assert f"{config} has no profile: measuring the costs of its layers and links" in first.err
    assert f"profile kept in {kept}: measured on " in first.err
    assert json.loads(first.out)["profile"] == "measured"
    assert main(["plan", str(config), "--json"]) == 0
    second = capsys.readouterr()
    assert "has no profile" not in second.err
    assert f"profile taken from {kept}: " in second.err
    assert second.out == first.out


def test_the_memory_of_snapshots_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def memory(*more: str) -> int:
        found: int = max(predicted(capsys, *PRESET, *more)["snapshot_bytes"].values(), default=0)
        return found

    copies, parity = memory("--snapshots", "copy"), memory("--snapshots", "parity", "--workers-per-host", "1")
    assert memory("--snapshots", "none") == 0 < parity < copies == memory(), "a run takes copies by default"
    text = plan(capsys, *PRESET)
    found = re.search(
        r"snapshots +([\d.]+) GB of host memory for a worker at most: two, each of [\d.]+ GB of its own", text
    )
    assert found is not None
    needed = re.search(r"taken if ([\d.]+) (GB|TB) are available on the host that needs most", text)
    assert needed is not None
    assert float(needed[1]) * (1000 if needed[2] == "TB" else 1) > 2 * float(found[1]), "a host has several workers"
    assert "snapshots " not in plan(capsys, *PRESET, "--snapshots", "none")


def test_it_says_why_no_snapshots_are_taken_on_hosts_of_little_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def off(*more: str) -> object:
        return predicted(capsys, *PRESET, *more)["snapshots_off"]

    sizes = predicted(capsys, *PRESET)["snapshot_bytes"].values()
    enough_gb = math.ceil(2 * sum(sizes) / 1e9)
    assert off("--host-memory", str(enough_gb)) is None
    reason = off("--host-memory", "1")
    assert re.fullmatch(r"those of the workers on host\d would take .* that were available there", str(reason))
    assert f"none are taken: {reason}"[:40] in plan(capsys, *PRESET, "--host-memory", "1")
    with_none = plan(capsys, *PRESET, "--host-memory", "1", "--snapshots", "none")
    assert "snapshots " not in with_none
    assert main(["plan", *PRESET, "--host-memory", "0"]) == 2
    assert "--host-memory 0: should be" in capsys.readouterr().err
