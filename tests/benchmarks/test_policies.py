"""Schedules of failures, what follows from what was observed, and the clock of a run."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from benchmarks import _policies_run, policies
from benchmarks._common import ROOT
from benchmarks._policies_observed import Change, Commit, Observed, Outage, Outcome, mean_size
from benchmarks._policies_picture import draw
from benchmarks._policies_report import Found, bars, markdown, rows
from benchmarks._policies_run import _Watch
from benchmarks._policies_scenarios import PP, SCENARIOS, Loss, Scenario, pipelines, schedule
from chameleon_ft.config import Recovery, RunConfig, config_to_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import read_profile

ANY_SCENARIO = st.sampled_from(sorted(SCENARIOS))
WORKERS = st.sampled_from([8, 16, 32])

# --- schedules -------------------------------------------------------------------------------------------------------


@drawn(ANY_SCENARIO, WORKERS, st.integers(0, 1000))
def test_a_schedule_keeps_to_its_scenario(name: str, workers: int, seed: int) -> None:
    scenario = SCENARIOS[name]
    losses = schedule(scenario, workers=workers, duration_s=100.0, seed=seed)
    assert losses == schedule(scenario, workers=workers, duration_s=100.0, seed=seed)
    assert len(losses) <= scenario.events
    assert [loss.at_s for loss in losses] == sorted(loss.at_s for loss in losses)
    assert all(0 <= loss.at_s <= 80 for loss in losses)
    assert all(1 <= len(set(loss.workers)) <= scenario.burst for loss in losses)
    assert all(len({worker // 8 for worker in loss.workers}) == 1 for loss in losses), "of one host"


@drawn(ANY_SCENARIO, WORKERS, st.integers(0, 1000))
def test_no_worker_is_lost_twice_without_having_been_back_and_half_are_always_left(
    name: str, workers: int, seed: int
) -> None:
    scenario = SCENARIOS[name]
    gone: dict[int, float] = {}
    for loss in schedule(scenario, workers=workers, duration_s=100.0, seed=seed):
        for worker in loss.workers:
            assert scenario.returns or worker not in gone
            assert loss.at_s >= gone.get(worker, 0.0) + scenario.back_after_s(100.0) or worker not in gone
            gone[worker] = loss.at_s
        if not scenario.returns:
            assert len(gone) <= workers // 2


def test_with_and_without_returning_workers_losses_come_at_the_same_times() -> None:
    for name in ("medium", "frequent", "rare-bursts"):
        once, back = (
            [loss.at_s for loss in schedule(SCENARIOS[each], workers=32, duration_s=100.0, seed=3)]
            for each in (name, f"{name}-returning")
        )
        assert once == back


@pytest.mark.parametrize("stage", range(PP))
def test_one_loss_is_of_its_stage(stage: int) -> None:
    (loss,) = schedule(SCENARIOS[f"one-loss-{stage}"], workers=32, duration_s=100.0, seed=0)
    assert (loss.at_s, [worker % PP for worker in loss.workers]) == (10.0, [stage])


@pytest.mark.parametrize("workers", [8, 32])
def test_half_a_host_is_of_one_stage_as_long_as_there_are_enough(workers: int) -> None:
    scenario = SCENARIOS["half-host"]
    (loss,) = schedule(scenario, workers=workers, duration_s=100.0, seed=0)
    order = pipelines(scenario, workers)
    assert len({order.index(worker) % PP for worker in loss.workers}) == (1 if workers == 32 else 2)


def test_hosts_hold_pipelines_or_stages() -> None:
    assert pipelines(Scenario(name="", about=""), 32) == list(range(32))
    order = pipelines(Scenario(name="", about="", hosts_hold="stages"), 32)
    assert sorted(order) == list(range(32))
    assert [order[stage::PP] for stage in range(PP)] == [list(range(8 * stage, 8 * stage + 8)) for stage in range(PP)]


def test_the_truth_counts_workers_that_are_lost_together_once() -> None:
    assert SCENARIOS["medium-bursts"].worker_mtbf_s(workers=30, duration_s=100.0) == 100 * 30 / 2
    assert SCENARIOS["one-loss-1"].worker_mtbf_s(workers=30, duration_s=100.0) is None


# --- what was observed -----------------------------------------------------------------------------------------------


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


# --- following a run -------------------------------------------------------------------------------------------------


class Script:
    """A run directory whose files grow as the test says, and the watch that reads them."""

    def __init__(self, path: Path, losses: list[Loss], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.killed: list[int] = []
        self.live = set(range(8))
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(_policies_run, "inject", self._inject)
        self.run = RunDirectory(path)
        self.watch = _Watch(run=self.run, losses=losses, duration_s=100.0, restart_s=50.0)

    def _inject(self, run: RunDirectory, *, worker: int, **_: object) -> None:
        if worker not in self.live:
            raise ConfigError(f"worker {worker} is not live")
        self.live.discard(worker)
        self.killed.append(worker)

    def step(self, number: int, *, generation: int = 1, after_s: float = 2.0) -> float:
        self.now += after_s
        self._append(self.run.metrics_file, step=number, generation=generation, samples=8, step_s=after_s)
        return self.watch.look()

    def event(self, name: str, **fields: Any) -> None:
        self._append(self.run.events_file, time=self.now, event=name, **fields)

    def failure(self, policy: str, worker: int = 5) -> None:
        self.event("failure", generation=2, policy=policy, worker=worker, stall_s=1.5, moved_bytes=7)

    def _append(self, path: Path, **fields: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def test_the_window_begins_with_the_third_step_and_losses_come_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, [Loss(1.0, (5,)), Loss(3.0, (5, 6))], monkeypatch)
    assert [script.step(number) for number in range(3)] == [-1.0, -1.0, 0.0]
    assert [commit.at_s for commit in script.watch.commits] == [-4.0, -2.0, 0.0]
    assert script.killed == []
    script.step(3)
    assert script.killed == [5]
    script.step(4)
    assert script.killed == [5, 6]
    assert script.watch.skipped == [5]
    assert [(change.at_s, change.worker) for change in script.watch.changes] == [(2.0, 5), (4.0, 6)]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, [], monkeypatch)
    line = json.dumps({"step": 0, "generation": 1, "samples": 8, "step_s": 2.0}) + "\n"
    for piece in (line[:9], line[9:] + line, line):
        with script.run.metrics_file.open("a", encoding="utf-8") as file:
            file.write(piece)
        script.watch.look()
    assert len(script.watch.commits) == 3


@pytest.mark.parametrize(("policy", "charged_s"), [("restart", 48.5), ("checkpoint", 48.5), ("repair", 0.0)])
def test_a_return_to_a_checkpoint_is_charged_once(
    policy: str, charged_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, [Loss(10.0, (6,))], monkeypatch)
    for number in range(3):
        script.step(number)
    script.failure(policy)
    script.failure(policy, worker=4)
    script.step(2, generation=2)
    assert script.watch.commits[-1].at_s == pytest.approx(2 + charged_s)
    assert [outage.charged_s for outage in script.watch.outages] == [charged_s]
    assert script.killed == ([6] if charged_s else []), "what was to happen meanwhile happens when it goes on"


def test_no_worker_is_killed_after_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, [Loss(10.0, (5,)), Loss(90.0, (6,))], monkeypatch)
    for number in range(3):
        script.step(number)
    assert script.step(3, after_s=200.0) == 200.0
    assert script.killed == []


def test_joins_and_outcomes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, [], monkeypatch)
    for number in range(3):
        script.step(number)
    script.now += 1.0
    script.event("joined", worker=5)
    came = {"steps": 9, "measured_step_s": 2.5, "measured_stall_s": 1.25}
    script.event("outcome", generation=2, predicted_step_s=2.0, predicted_stall_s=1.0, **came)
    script.event("outcome", generation=3, predicted_step_s=None, predicted_stall_s=None, **came)
    script.watch.look()
    assert script.watch.changes == [Change(1.0, 5, 1)]
    assert script.watch.outcomes == [Outcome(2, 9, 2.0, 2.5, 1.0, 1.25)]


# --- the suite -------------------------------------------------------------------------------------------------------


def settings(**changes: Any) -> argparse.Namespace:
    given = {
        "workers": 8,
        "share": 2,
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
