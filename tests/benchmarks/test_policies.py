"""Results, report and settings of a comparison of policies."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from benchmarks import policies
from benchmarks._common import ROOT
from benchmarks._policies_observed import Change, Commit, Observed, Outage, Outcome, mean_size
from benchmarks._policies_picture import draw
from benchmarks._policies_report import Found, bars, markdown, rows
from benchmarks._policies_scenarios import SCENARIOS
from chameleon_ft.config import Recovery, RunConfig, config_to_toml
from chameleon_ft.plan import Plan
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.profiles import read_profile


def observed(**changes: Any) -> Observed:
    """Steps of 2 s with 8 samples; a loss at 5 s, training goes on at 6 s with steps of 4 s."""
    run = Observed(
        run="here",
        duration_s=20.0,
        workers=4,
        commits=(
            Commit(-2.0, 0, 1, 8, 3.0),
            Commit(0.0, 1, 1, 8, 1.99),
            Commit(2.0, 2, 1, 8, 1.99),
            Commit(4.0, 3, 1, 8, 1.99),
            Commit(10.0, 4, 2, 8, 4.0),
            Commit(14.0, 5, 2, 8, 4.0),
            Commit(18.0, 6, 2, 8, 4.0),
            Commit(22.0, 7, 2, 8, 4.0),
        ),
        changes=(Change(5.0, 1, -1),),
        skipped=(),
        outages=(Outage(6.0, 2, "repair", 1.0, 10**9, 0.0),),
        outcomes=(Outcome(2, 3, 4.2, 4.0, 0.9, 1.0),),
        ended=None,
        others_share=0.01,
    )
    return replace(run, **changes)


def test_throughput_counts_what_was_committed_and_of_the_last_step_what_is_inside() -> None:
    # Steps 2 and 3, 4 to 6, and half of 7.
    assert observed().samples_per_s == pytest.approx(8 * 5.5 / 20)
    assert [stretch.begin_s for stretch in observed().stretches] == pytest.approx([-5, -2, 0, 2, 6, 10, 14, 18])


@drawn(st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 3)), min_size=1, max_size=8), st.floats(0.1, 60))
def test_stretches_do_not_overlap_and_hold_all_samples(steps: list[tuple[float, float]], duration_s: float) -> None:
    commits, at_s = [], 0.0
    for number, (step_s, gap_s) in enumerate(steps):
        at_s += gap_s + step_s
        commits.append(Commit(at_s, number, number // 2, 8, step_s))
    run = observed(commits=tuple(commits), duration_s=duration_s)
    stretches = run.stretches
    assert all(after.begin_s >= before.end_s - 1e-9 for before, after in itertools.pairwise(stretches))
    assert sum(stretch.within(at_s) for stretch in stretches) == pytest.approx(8 * len(steps))
    assert run.samples_per_s * duration_s <= 8 * len(steps) * (1 + 1e-9)


def test_errors_are_those_of_the_decisions() -> None:
    run = observed(
        outcomes=(*observed().outcomes, Outcome(3, 2, 0.99, 1.0, 0.9, 1.0), Outcome(4, 1, 9.0, 1.0, 9.0, 1.0))
    )
    assert run.steps_s() == {1: [2.0, 2.0, 2.0], 2: [4.0, 4.0, 4.0]}
    assert run.step_errors == pytest.approx([0.05, -0.01]), "where only the first step was made, it is like no other"
    assert run.stall_errors == pytest.approx([-0.1])
    assert mean_size(run.step_errors) == pytest.approx(0.03)
    restart = observed(outages=(Outage(6.0, 2, "restart", 1.0, 0, 0.8),))
    assert restart.stall_errors == pytest.approx([-0.5])
    assert observed(outages=()).stall_errors == [], "no worker was lost: the change is for a worker that joined"
    assert (run.last_step_s, observed(commits=run.commits[:4]).last_step_s) == (4.0, None)


def test_who_is_live_is_averaged_over_the_window() -> None:
    assert observed().surviving == 1 - 15 / 80
    assert observed(changes=(Change(5.0, 1, -1), Change(10.0, 1, 1))).surviving == 1 - 5 / 80
    assert observed(changes=(Change(25.0, 1, -1),)).surviving == 1


def test_of_stalls_only_what_is_inside_the_window_counts() -> None:
    restart = Outage(70.0, 3, "restart", 1.0, 0, 59.0)
    assert observed(outages=(Outage(6.0, 2, "repair", 1.0, 0, 0.0), restart)).stall_s == 1 + 10


def test_what_is_written_is_read(tmp_path: Path) -> None:
    observed(skipped=(3,)).write(tmp_path / "run.json")
    assert Observed.read(tmp_path / "run.json") == observed(skipped=(3,))


def test_what_an_earlier_version_wrote_is_read_with_the_events_of_its_run(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    observed(run="run").write(file)
    data = json.loads(file.read_text())
    del data["outcomes"]
    file.write_text(json.dumps({**data, "predicted_s": {"1": 2}, "outcomes": [{"generation": 2, "predicted_s": 0.9}]}))
    with pytest.raises(SystemExit, match="its events are gone"):
        Observed.read(file)
    run = RunDirectory.create(tmp_path / "run", RunConfig())
    known = {"generation": 2, "steps": 3, "predicted_step_s": 4.2, "measured_step_s": 4.0}
    event = {"event": "outcome", **known, "predicted_stall_s": 0.9, "measured_stall_s": 1.0, "step_error": 0.0}
    nothing = {**event, "generation": 3, "predicted_step_s": None, "predicted_stall_s": None}
    later = {**event, "generation": 4}
    run.events_file.write_text("".join(json.dumps(each) + "\n" for each in (nothing, event, later)))
    assert Observed.read(file) == observed(run="run")


def test_bytes_that_an_earlier_version_did_not_record_are_read_from_the_events(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    observed(run="run").write(file)
    data = json.loads(file.read_text())
    del data["switched_bytes"]
    file.write_text(json.dumps(data))
    assert Observed.read(file).moved_bytes == 10**9, "its events are gone"
    run = RunDirectory.create(tmp_path / "run", RunConfig())
    joins = [{"event": "join", "generation": 3 + moved, "moved_bytes": moved} for moved in (5, 30)]
    # Newcomers that a decision on a loss has taken in: the bytes are those of the outage.
    both = [{"event": event, "generation": 2, "moved_bytes": 10**9} for event in ("failure", "join")]
    run.events_file.write_text("".join(json.dumps(each) + "\n" for each in [*both, *joins, {"event": "joined"}]))
    assert Observed.read(file).moved_bytes == 10**9 + 35


# --- the report ------------------------------------------------------------------------------------------------------


def scaled(factor: float) -> Observed:
    """A run with so many times as many samples in the steps after the loss, in a window that begins with them."""
    run = observed()
    commits = tuple(
        replace(commit, samples=round(1000 * factor)) if commit.generation == 2 else replace(commit, samples=1000)
        for commit in run.commits
    )
    return replace(run, commits=commits)


def verdicts(scenario: str, runs: Mapping[str, Observed]) -> dict[str, bool]:
    return {bar.name.partition(" (")[0]: bar.reached for bar in bars([Found(SCENARIOS[scenario], runs)])}


def test_chameleon_has_to_be_first_or_nearly() -> None:
    name = "chameleon by another policy, least"
    assert verdicts("medium", {"chameleon": scaled(1.0), "repair": scaled(1.005)})[name]
    assert not verdicts("medium", {"chameleon": scaled(1.0), "repair": scaled(1.05)})[name]
    assert name not in verdicts("medium", {"chameleon": scaled(1.0)})


def test_both_published_ratios_have_to_be_reached_in_one_realistic_scenario() -> None:
    name = "share reached of 1.229 of oobleck and 1.355 of recycle"
    slow, slower = scaled(0.6), scaled(0.3)
    assert verdicts("half-host", {"chameleon": scaled(1.0), "oobleck": slow, "recycle": slower})[name]
    assert not verdicts("half-host", {"chameleon": scaled(1.0), "oobleck": scaled(0.95), "recycle": slower})[name]
    assert name not in verdicts("medium", {"chameleon": scaled(1.0), "oobleck": slow, "recycle": slower})
    assert name not in verdicts("half-host", {"chameleon": scaled(1.0), "oobleck": slow})
    ended = replace(slower, ended="exit code 1")
    assert name not in verdicts("half-host", {"chameleon": scaled(1.0), "oobleck": slow, "recycle": ended})


def test_after_one_loss_throughput_is_that_of_the_last_generation() -> None:
    found = Found(SCENARIOS["one-loss-0"], {"chameleon": observed()})
    assert found.kept("chameleon") == 0.5
    values = {bar.name.partition(",")[0]: bar.value for bar in bars([found])}
    assert values["after one loss by failure-free"] == 0.5
    assert values["after one loss by surviving capacity"] == pytest.approx(0.5 * 4 / 3)
    assert values["mean |error| of the step time"] == pytest.approx(0.05)
    assert values["mean |error| of the stall"] == pytest.approx(0.1)


def test_a_row_is_in_the_time_of_the_devices() -> None:
    ((*_, samples, share, _, after, ahead, lost, stalls, moved, _, _),) = rows(
        [Found(SCENARIOS["medium"], {"chameleon": observed()})], 4.0
    )
    assert (samples, share, after, ahead, lost, stalls, moved) == ("8.8", "55.0%", "50.0%", "1.000", "1", "0.25", "1")


def test_the_table_for_the_docs_has_our_throughput_and_ours_by_theirs() -> None:
    runs = {"chameleon": scaled(1.0), "recycle": scaled(0.5)}
    alone = {"chameleon": observed()}
    header, _, medium, rare = markdown([Found(SCENARIOS["medium"], runs), Found(SCENARIOS["rare"], alone)]).splitlines()
    assert header == "| scenario | `chameleon` | after recovery | by `recycle` |"
    ratio = scaled(1.0).samples_per_s / scaled(0.5).samples_per_s
    assert medium.startswith("| `medium`: 3 single losses | ")
    assert medium.endswith(f" | {ratio:.3f} |")
    assert rare == "| `rare`: 1 single loss | 55.0% | 50.0% |  |"


def test_the_picture_names_every_policy(tmp_path: Path) -> None:
    runs = {"chameleon": observed(), "drop-replica": observed(ended="exit code 1", commits=())}
    draw(tmp_path / "a.svg", title="what $it$ is", about="in words", runs=runs, undisturbed_per_s=4.0, scale=4.0)
    text = "".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "a.svg").read_text(encoding="utf-8")))
    for words in ("chameleon", "drop-replica", "55.0%", "ended early", "what $it$ is", "in words"):
        assert words in text


def settings(**changes: Any) -> argparse.Namespace:
    given = {
        "workers": 8,
        "share": 2,
        "optimizer_redundancy": "all",
        "duration_s": 40.0,
        "time_scale": 2.0,
        "restart_s": 300.0,
        "seed": 0,
        "profile": ROOT / "profiles" / "llama2-7b-h100-80g.json",
        "report_only": False,
    }
    return argparse.Namespace(**given | changes)


@pytest.mark.parametrize("name", ["medium", "rare-bursts", "one-loss-2"])
def test_a_run_knows_the_truth_of_its_scenario(name: str, tmp_path: Path) -> None:
    files = {"profile": tmp_path / "profile.json", "plan": tmp_path / "plan.json"}
    config = policies.configured(SCENARIOS[name], "restart", given=settings(), **files)
    truth_s = SCENARIOS[name].worker_mtbf_s(workers=8, duration_s=40.0)
    assert config.recovery.worker_mtbf_hours * 3600 == pytest.approx(truth_s or 5000 * 3600)
    assert (config.recovery.policy, config.recovery.restart_cost_s, config.recovery.host_failure_fraction) == (
        "restart",
        600,
        0,
    )
    assert config.checkpoint.every not in (0, "auto")
    assert type(config).model_validate(config.model_dump()) == config
    plan = Plan.from_json(files["plan"].read_text(encoding="utf-8"))
    assert (plan.micro_batches, plan.split_backward, len(plan.workers)) == (4, True, 8)


@pytest.mark.skipif("respawn" not in Recovery.model_fields, reason="workers do not come back yet")
def test_half_a_host_comes_back_has_slower_links_and_holds_a_stage(tmp_path: Path) -> None:
    files = {"profile": tmp_path / "profile.json", "plan": tmp_path / "plan.json"}
    config = policies.configured(SCENARIOS["half-host-returning"], "chameleon", given=settings(workers=32), **files)
    assert config_to_toml(config).count("respawn") >= 2
    assert config.checkpoint.every == 0
    assert read_profile(files["profile"]).inter_host.bytes_per_s == 12.5e9  # type: ignore[union-attr]
    plan = Plan.from_json(files["plan"].read_text(encoding="utf-8"))
    assert len({plan.placement.ranges_of(worker) for worker in range(8)}) == 1


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    policies._same_settings(settings(), tmp_path)
    policies._same_settings(settings(), tmp_path)
    with pytest.raises(SystemExit, match=r"'seed': 0"):
        policies._same_settings(settings(seed=1), tmp_path)
    given = settings(seed=1, report_only=True)
    policies._same_settings(given, tmp_path)
    assert given.seed == 0


def test_a_run_that_was_given_up_stays_where_it_is(tmp_path: Path) -> None:
    assert policies._free(tmp_path, "paper").name == "paper"
    (tmp_path / "paper").mkdir()
    assert policies._free(tmp_path, "paper").name == "paper-2"
    (tmp_path / "paper-2").mkdir()
    assert policies._free(tmp_path, "paper").name == "paper-3"


def test_what_is_there_is_found_in_the_order_of_the_table(tmp_path: Path) -> None:
    for scenario, policy in (("rare", "reroute"), ("rare", "recycle"), ("rare", "chameleon"), ("one-loss-1", "paper")):
        (tmp_path / scenario).mkdir(exist_ok=True)
        observed().write(tmp_path / scenario / f"{policy}.json")
    found = [(each.scenario.name, list(each.runs)) for each in policies._found(tmp_path)]
    assert found == [("one-loss-1", ["paper"]), ("rare", ["chameleon", "recycle", "reroute"])]
