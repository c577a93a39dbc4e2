"""`chameleon plan`: what it predicts, draws and refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.lab import paper
from chameleon_ft.plan import Plan
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.schedule.network import pipeline_times
from chameleon_ft.session.plan_case import PlanRequest, plan_cases
from chameleon_ft.storage.profiles import write_profile
from tests.cli.planning import PRESET, ROOT, plan, predicted


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


def test_the_table_names_every_worker_and_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    printed = plan(capsys, *PRESET, "--failed", "5")
    assert "llama2-7b on h100-80g (derived), 2 x 4 workers, 32 micro-batches of 1, without worker 5" in printed
    assert re.search(r"of the throughput before the loss \(.* s, fused backward\), with 87\.5% of the workers", printed)
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")][1:]
    named = {int(worker) for row in rows for part in row.split(", ") for worker in _range(part)}
    assert named == set(range(8))
    assert re.search(r"\| 5 +\| lost", printed)


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_the_split_backward_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    fused, split = predicted(capsys, *PRESET), predicted(capsys, *PRESET, "--split-backward")
    assert split["plan"]["split_backward"]
    assert not fused["plan"]["split_backward"]
    assert split["program_s"] < fused["program_s"]


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


def test_where_nothing_fits_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "llama3-405b", "--device", "a100-80g", "--dp", "2", "--pp", "2")
    printed = plan(capsys, *case, code=1)
    assert re.search(
        r", 0\.03\d+ samples a second\n(?s:.*)no layout of these workers fits; the nearest is --dp 1 --pp 4, "
        r"which lacks [\d.]+ TB; take more workers",
        printed,
    )


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
            plan_cases(
                parse_arguments(PlanRequest, [*map(str, given), *precision], command="plan", positional=["config"])
            )[0]
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
    found = predicted(capsys, "--model", tmp_path, "--device", "h100-80g", "--dp", "1", "--pp", "2")
    assert found["plan"]["num_layers"] == 8
    assert found["plan"]["placement"].keys() == {"0", "1"}


def test_a_layout_of_a_profile_needs_no_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=2), profile)
    by_name = predicted(capsys, *PRESET, "--micro-batch-size", "2", "--failed", "5")
    assert predicted(capsys, "--profile", profile, "--dp", "2", "--pp", "4", "--failed", "5") == by_name
    short = [argument.replace("h100-80g", "h100") for argument in PRESET]
    assert predicted(capsys, *short, "--micro-batch-size", "2", "--failed", "5") == by_name


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


def test_each_stage_of_a_batch_that_grows_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = (ROOT / "examples" / "emulated.toml").read_text().replace('profile = "', f'profile = "{ROOT}/')
    config = tmp_path / "config.toml"
    config.write_text(example.replace("[batch]", "[batch]\nramp = [{ micro_batches = 4, until_step = 7 }]"))
    found = predicted(capsys, config)
    assert len(found["plan"]["routes"]) == 16
    config.write_text(example.replace("micro_batches = 16", "micro_batches = 4"))
    assert found["ramp"] == [
        {"first_step": 0, "micro_batches": 4, "step_s": pytest.approx(predicted(capsys, config)["step_s"])}
    ]
