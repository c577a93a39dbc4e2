"""`chameleon simulate`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.session.simulation import SimulateCase, SimulateRequest, simulate_case
from chameleon_ft.simulate import Trace, load_trace
from chameleon_ft.simulate.by_class.world import plans_found, world_of
from chameleon_ft.simulate.results import Results
from chameleon_ft.simulate.run import SIMULATED_POLICIES
from chameleon_ft.simulate.run import simulate as run_simulation
from chameleon_ft.storage.profiles import read_profile, write_profile
from chameleon_ft.workload import Workload
from tests.cli.simulating import CASE, COMMON, TRACE, simulate, write_inputs
from tests.golden import message
from tests.simulate.runs import decision, failure, finished, recorded, started


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def known() -> dict[object, Results]:
    """The results of all that was simulated, by its arguments; what is removed from it is simulated anew."""
    return {}


@pytest.fixture(autouse=True)
def simulated_once(monkeypatch: pytest.MonkeyPatch, known: dict[object, Results]) -> None:
    """Simulate equal arguments once: most tests compare ways to show the same results."""

    def once(
        trace: Trace,
        workload: Workload,
        cluster: Cluster,
        policies: Sequence[str],
        *,
        progress: Callable[[str, float], None] | None,
        **options: Any,
    ) -> Results:
        key = (trace, workload, cluster, tuple(policies), tuple(sorted(options.items())))
        if key not in known:
            known[key] = run_simulation(trace, workload, cluster, policies, progress=progress, **options)
        return known[key]

    for name in ("chameleon_ft.cli.commands.simulate", "chameleon_ft.simulate.run"):
        monkeypatch.setattr(import_module(name), "simulate", once)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(simulate(capsys, *arguments, "--json"))
    return found


def test_every_policy_is_set_beside_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, *CASE, "--policies", "all")
    assert tuple(found["policies"]) == SIMULATED_POLICIES
    assert (found["workers"], found["duration_s"], found["lost_events"], found["faults"]) == (8, 86_400, 1, 1)
    assert found["availability"] == pytest.approx(1 - 2 * 2 / (8 * 24))
    oracle = found["policies"]["oracle"]
    for own in found["policies"].values():
        assert own["goodput"] <= oracle["goodput"]
        assert own["share_of_oracle"] == pytest.approx(own["goodput"] / oracle["goodput"])
        assert 0 < own["share_of_failure_free"] <= 1
        assert own["goodput"] * found["duration_s"] == pytest.approx(own["samples"])
    restart = found["policies"]["restart"]
    assert restart["stall_s"] >= 300, "a job that is started again takes five minutes"
    assert restart["decisions"] == sum(restart["decisions_by_kind"].values()) > 0


def test_the_same_arguments_give_the_same_results_to_the_bit(
    capsys: pytest.CaptureFixture[str], known: dict[object, Results]
) -> None:
    drawn = (*COMMON, "--workers", "8", "--generate", "spot", "--days", "0.2", "--policies", "drop-replica,restart")
    first = simulate(capsys, *drawn, "--seed", "3", "--json")
    known.clear()
    world_of.cache_clear()
    plans_found.cache_clear()
    assert simulate(capsys, *drawn, "--seed", "3", "--json") == first
    assert simulate(capsys, *drawn, "--seed", "4", "--json") != first


def test_the_table_has_a_row_for_each_policy_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    printed = simulate(capsys, *CASE, "--policies", "restart,chameleon,oracle")
    found = simulated(capsys, *CASE, "--policies", "restart,chameleon,oracle")["policies"]
    rows = re.findall(r"^\| (\w[\w-]*) +\| +([\d,.]+) \| +([\d.]+)% \| +([\d.]+)% \|", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["oracle", "chameleon", "restart"]
    for name, rate, free, oracle in rows:
        assert float(rate.replace(",", "")) == pytest.approx(found[name]["goodput"], rel=1e-3)
        assert float(free) == pytest.approx(100 * found[name]["share_of_failure_free"], abs=0.006)
        assert float(oracle) == pytest.approx(100 * found[name]["share_of_oracle"], abs=0.006)
    assert "1 host failure on 4 hosts, 250.00 per 1,000 host-days; 97.9% of the workers up" in printed
    assert "1.0 days of a day" in printed
    assert re.search(r"^chameleon  stalls  .*\n           work done again  ", printed, re.MULTILINE)


def test_a_ranking_without_any_failure_says_so(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "quiet.jsonl").write_text(TRACE.splitlines(keepends=True)[0])
    quiet = (*COMMON, "--workers", "8", "--trace", "quiet.jsonl", "--policies", "restart,oracle")
    warning = "warning: no worker is lost in the 1.0 days that are simulated"
    printed = simulate(capsys, *quiet)
    assert warning in printed
    assert printed.index(warning) < printed.index("| policy"), "before the ranking"
    assert "give more --days, a higher --rate or a --trace with failures" in printed
    assert main(["simulate", *quiet, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lost_events"] == 0
    assert warning in captured.err
    assert "no worker is lost" not in simulate(capsys, *CASE, "--policies", "restart")
    message(simulate(capsys, *quiet, "--sweep", "workers=4,8"))


def test_a_rate_compresses_a_trace_and_keeps_the_workers_that_are_up(capsys: pytest.CaptureFixture[str]) -> None:
    once = simulated(capsys, *CASE, "--policies", "restart")
    often = simulated(capsys, *CASE, "--policies", "restart", "--rate", "4")
    assert often["duration_s"] == once["duration_s"] / 4
    assert often["faults_per_1000_host_days"] == pytest.approx(4 * once["faults_per_1000_host_days"])
    assert often["availability"] == pytest.approx(once["availability"])
    half = simulated(capsys, *CASE, "--policies", "restart", "--days", "0.5")
    assert half["duration_s"] == 43_200


@pytest.mark.parametrize("repairs", [(), ("--keep-repairs",)])
def test_a_trace_that_is_drawn_is_as_long_as_asked_at_any_rate(
    capsys: pytest.CaptureFixture[str], repairs: tuple[str, ...]
) -> None:
    drawn = (*COMMON, "--workers", "200", "--generate", "bursts", "--days", "40", "--policies", "drop-replica")
    once = simulated(capsys, *drawn, *repairs)
    often = simulated(capsys, *drawn, *repairs, "--rate", "5")
    assert often["duration_s"] == pytest.approx(once["duration_s"]) == 40 * 86_400
    assert often["faults_per_1000_host_days"] > 3 * once["faults_per_1000_host_days"]


def test_a_trace_can_be_kept(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    drawn = (*COMMON, "--workers", "8", "--generate", "spot", "--days", "1", "--policies", "drop-replica")
    first = simulated(capsys, *drawn, "--save-trace", "kept.jsonl")
    assert load_trace(folder / "kept.jsonl").workers == 8
    again = simulated(capsys, *COMMON, "--workers", "8", "--trace", "kept.jsonl", "--policies", "drop-replica")
    assert again == first


def test_a_list_of_failing_nodes_needs_to_know_of_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    few = (*COMMON, "--trace", "faults.json", "--policies", "restart")
    error = simulate(capsys, *few, "--workers", "2", code=2)
    assert "names only nodes that failed, 2 of them, and the cluster has only 1 hosts" in error
    assert "--nodes" in error
    taken = simulate(capsys, *few, "--workers", "8")
    assert "assumed to be measured on 4 nodes" in taken
    assert "assumed to be measured" not in simulate(capsys, *few, "--workers", "8", "--nodes", "8")


def test_assumptions_change_what_comes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    quick = simulated(capsys, *CASE, "--policies", "restart")["policies"]["restart"]
    slow = simulated(capsys, *CASE, "--policies", "restart", "--assume", "exact_up_to=0,restart_cost_s=900")
    assert slow["policies"]["restart"]["stall_s"] > quick["stall_s"]


def test_it_counts_shared_optimizer_state_and_snapshots_as_runs_do(folder: Path) -> None:
    def case(*more: str) -> SimulateCase:
        arguments = [*CASE, *more]
        return simulate_case(parse_arguments(SimulateRequest, arguments, command="simulate"))

    usual = case()
    assert usual.scene.workload.owners == 2 == usual.facts["optimizer_redundancy"]
    assert usual.parameters.snapshot_every is None
    assert usual.parameters.snapshot_cost_s > 0
    assert usual.parameters.host_memory_bytes == math.inf
    other = case("--optimizer-redundancy", "all", "--host-memory", "500", "--assume", "snapshot_every=4")
    assert other.scene.workload.owners is None
    assert other.parameters.host_memory_bytes == 500e9
    assert other.parameters.snapshot_every == 4
    without = case("--assume", "checkpoint_interval_s=inf,salvage=0").parameters
    assert not without.has_checkpoints
    assert not without.salvage


def test_a_measured_profile_takes_the_place_of_model_and_device(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    profile = derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1)
    write_profile(profile, folder / "p.json")
    assert read_profile(folder / "p.json") == profile
    options = ("--workers", "8", "--workers-per-host", "2", "--trace", "day.jsonl", "--policies", "drop-replica",
               "--assume", "exact_up_to=0")  # fmt: skip
    measured = simulated(capsys, "--profile", "p.json", *options)
    derived = simulated(capsys, "--model", "llama2-7b", "--device", "h100-80g", *options)
    assert measured["policies"] == derived["policies"]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_picture_names_every_policy(capsys: pytest.CaptureFixture[str], folder: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    files = ("--picture", f"a.{kind}", "--save-trace", "kept.jsonl")
    printed = simulate(capsys, *CASE, "--policies", "restart,chameleon,oracle", *files)
    assert printed.endswith(f"picture written to a.{kind}\ntrace written to kept.jsonl\n")
    assert (folder / f"a.{kind}").stat().st_size > 1000
    if kind == "svg":
        ElementTree.parse(folder / "a.svg")
        text = (folder / "a.svg").read_text()
        assert all(f"<!-- {name} -->" in text for name in ("chameleon", "restart", "live workers"))


def test_a_sweep_names_the_first_policy_at_each_value(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("matplotlib")
    case = (*CASE, "--policies", "chameleon,reroute,repartition,restart,oracle", "--sweep", "rate=10,1,0.1")
    printed = simulate(capsys, *case, "--picture", "a.svg")
    assert printed.endswith("picture written to a.svg\n")
    found = simulated(capsys, *case)
    assert found["sweep"] == "rate"
    assert [point["value"] for point in found["points"]] == [0.1, 1, 10]
    shares = [point["policies"]["restart"]["share_of_oracle"] for point in found["points"]]
    assert shares == sorted(shares, reverse=True), "the more failures, the more a restart costs"
    assert re.search(r"^\| +\| +0\.1 \| +1 \| +10 \|", printed, re.MULTILINE)
    assert re.search(r"^first: \w+", printed, re.MULTILINE)
    assert re.search(r"^of reroute and repartition: \w+", printed, re.MULTILINE)
    assert "<!-- restart -->" in (folder / "a.svg").read_text()


def test_a_value_at_which_nothing_fits_is_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    case = (*CASE, "--policies", "restart")
    printed = simulate(capsys, *case, "--sweep", "memory=0.001,80")
    assert "memory 0.001: no pipelines of 8 workers fit the memory" in printed
    message(simulate(capsys, *case, "--sweep", "memory=0.001", code=1))


RUN_EVENTS = (
    started(1000.0),
    decision(2, prepared=True),
    failure(1101.0, generation=2, detect_s=0.1, stop_s=0.2, decide_s=0.3, regroup_s=0.4, stall_s=1.0),
    finished(1200.0),
)


def test_a_run_is_lived_through_by_other_policies(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    recorded(folder / "run", RUN_EVENTS, steps_s={1: [3.0] * 10})
    of_run = ("--run", "run", "--policies", "drop-replica,oracle", "--assume", "step_overhead_s=0")
    found = simulated(capsys, *of_run)
    # As in tests/simulate/test_as_in_run.py: its own phases take a second, and step times are those of its profile.
    fast_s, slow_s = 12 * 0.18 + 2 * (1e-5 + 6 * 10**8 / 50e9), 24 * 0.18
    by_hand = 24 * (100.0 // fast_s + 99.0 / slow_s) / 200.0
    assert found["policies"]["drop-replica"]["goodput"] == pytest.approx(by_hand)
    assert found["policies"]["drop-replica"]["stall_s"] == pytest.approx(1.0)
    assert (found["run_policy"], found["run_samples_per_s"]) == ("chameleon", pytest.approx(10 * 24 / 200.0))
    shown = simulate(capsys, *of_run)
    assert "the run run, 2 workers, 24 samples a step, 200 s; it trained 1.2 samples/s under chameleon" in shown


def test_a_checkpoint_of_a_run_costs_what_it_took_and_the_source_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    timed = [{"time": 1050.0, "event": "checkpoint", "step": 5, "copy_s": copy_s} for copy_s in (0.25, 0.5, 3.0)]
    recorded(folder / "old", RUN_EVENTS, steps_s={1: [3.0] * 10})
    recorded(folder / "new", (RUN_EVENTS[0], *timed, *RUN_EVENTS[1:]), steps_s={1: [3.0] * 10})
    for run, assumed, expected_s, words in (
        ("new", (), 0.5, "a checkpoint stops training for 500 ms, the median of 3 in the run"),
        (
            "new",
            ("--assume", "checkpoint_write_s=2"),
            2.0,
            "a checkpoint stops training for 2.000 s, as given by --assume",
        ),
        ("old", (), 1.0, "a checkpoint stops training for 1.000 s: assumed, because the run timed none;"),
    ):
        arguments = ("--run", run, "--policies", "drop-replica", *assumed)
        assert simulated(capsys, *arguments)["checkpoint_write_s"] == expected_s
        assert words in simulate(capsys, *arguments)


def test_what_a_run_says_is_not_said_twice(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    recorded(folder / "run", RUN_EVENTS, steps_s={1: [3.0]})
    for flag in (("--workers", "2"), ("--rate", "2"), ("--sweep", "rate=1,2"), ("--trace", "day.jsonl")):
        error = simulate(capsys, "--run", "run", *flag, code=2)
        assert f"leave out either --run or {flag[0]}" in error
    message(simulate(capsys, *COMMON, "--trace", "day.jsonl", code=2))
    message(simulate(capsys, "--run", "none", code=2))


def test_a_run_in_which_nothing_was_trained_is_refused(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    recorded(folder / "run", RUN_EVENTS)
    message(simulate(capsys, "--run", "run", code=2))


@pytest.mark.parametrize(
    ("file", "number", "changes"),
    [
        ("events", 0, {"time": "noon"}),
        ("events", 2, {"stall_s": "long"}),
        ("events", 2, {"detect_s": [1.0]}),
        ("events", 3, {"event": "joined"}),
        ("events", 3, {"event": "checkpoint", "step": 1, "copy_s": "long"}),
        ("events", 3, {"event": "prepared", "losses": 1}),
        ("metrics", 1, {"samples": "many"}),
        ("metrics", 1, {"step_s": None}),
    ],
)
def test_a_damaged_line_of_a_run_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, file: str, number: int, changes: dict[str, object]
) -> None:
    begun = {**started(1000.0), "pipelines": [[0], [1]], "steps": 10}
    recorded(folder / "run", (begun, *RUN_EVENTS[1:]), steps_s={1: [3.0] * 4})
    path = folder / "run" / f"{file}.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    path.write_text("\n".join(lines) + "\n")
    error = simulate(capsys, "--run", "run", code=2)
    assert f"{file}.jsonl, line {number + 1}: " in error
    assert "give a run whose records are whole" in error


def test_records_of_a_run_that_cannot_be_read_are_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    run = recorded(folder / "run", RUN_EVENTS)
    run.events_file.unlink()
    run.events_file.mkdir()
    message(simulate(capsys, "--run", "run", code=2))
