"""`chameleon explain`: the story of a run that was made by hand, word by word, and of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cli.commands.explain import describe_reason
from chameleon_ft.config import Batch, LlamaConfig, Parallel, Recovery, RunConfig
from chameleon_ft.events.decisions import DecisionEvent
from chameleon_ft.storage.files import RunDirectory
from tests.golden import message
from tests.harness import assert_trained_as_if_nothing_failed, fails, small_config, train_here
from tests.report.test_decisions import came, decided, lost, planned, started, weighed

STORY = """\

Decision 1 of 1: in step 40, 2026-01-01 12:00:00 UTC
lost       worker 5: SIGKILL, detected by the end of its process
in force   4 pipelines of 2 stages; 7 workers are left
expected   the next failure in 16.7 min, by 1 failure in 240.0 s of work by all workers together, 7 of which are live;
           expected beforehand: one per worker in 3.8 h, which counts as 1 failure; 25% of failures take a whole host
stall      0.500 s = repeat 0.250 + detect 0.125 + stop 0.025 + decide 0.050 + regroup 0.050; transfers on top
corrected  operations x 3.50, worker 3 at 0.50 of the speed of others, link 2-3 at 0.40 of its bandwidth
scored in 20 ms
+---------------------------------------------------------------------------------------+
|             |   step |  stall |   moves | samples until then |                        |
|-------------+--------+--------+---------+--------------------+------------------------|
| reroute     | 500 ms | 500 ms |     0 B |            199,900 |                        |
| repair      |      - |      - |       - |                  - | the plan has [detours] |
| repartition | 400 ms | 750 ms | 47.1 MB |            249,812 | chosen                 |
+---------------------------------------------------------------------------------------+
why        25.0% more samples than reroute: it moves 47.1 MB, and its steps are 20.0% shorter, which makes up for 250 ms
           more of stall after 1.750 s; the next failure is expected in 16.7 min
action     repartition: micro-batches 2, 3 of worker 3 go to worker 1
predicted  step 400 ms, stall 750 ms, 250 ms of it transfer
actual     step 410 ms (+2.5%), stall 900 ms (+20.0%), after 10 steps
           stall = repeat 0.767 + detect 0.010 + stop 0.020 + decide 0.003 + regroup 0.100
warning    prediction not to be trusted: stall 20.0% off, 15% is tolerated. To do: measure a new profile while the
           machine does nothing else (`chameleon profile CONFIG --out FILE`), and give it by --profile FILE; if workers
           share processors, expect no better
"""


def write(folder: Path, *events: dict[str, Any]) -> str:
    """Make a run of these events, and return where it is."""
    run = RunDirectory.create(folder / "run", RunConfig(workers=8, parallel=Parallel(dp=4, pp=2)))
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(run.path)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def one(generation: int = 2) -> list[dict[str, Any]]:
    """The events of a decision and what belongs to it."""
    return [decided(generation, 5), planned(generation, "repartition"), lost(5, generation), came(generation)]


def test_the_story_of_a_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, started(), *one())
    assert told(capsys, run) == f"{run}\n{STORY}"


def test_one_decision_of_several_in_several_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, started(), *one(2), started(), *one(4))
    assert told(capsys, run).count("Decision ") == 2
    second = told(capsys, run, "--decision", "2")
    assert "Decision 2 of 2: in step 40, 2026-01-01 12:00:00 UTC, start 2 of the run\n" in second
    assert "Decision 1" not in second
    (story,) = json.loads(told(capsys, run, "--decision", "2", "--json"))["decisions"]
    assert (story["generation"], story["session"], story["outcome"]["steps"]) == (4, 2, 10)
    assert story["why"].startswith("25.0% more samples than reroute: ")
    assert main(["explain", run, "--decision", "3"]) == 2
    assert "--decision 3: there is no such decision; this run has 1 to 2" in capsys.readouterr().err


def test_what_is_not_known_yet_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, started(), decided(2, 5, prepared=True), planned(2, "repartition"))
    text = told(capsys, run)
    assert "scored before the loss, looked up in 20 ms\n" in text
    assert "lost       worker 5\n" in text
    assert "action     repartition\n" in text
    assert "actual     not measured: no whole step was trained under it alone\n" in text


def test_a_decision_to_go_on_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stay = decided(2, trigger="join", prepared=True, chosen="stay", live=8, candidates=[weighed("stay", 0.4, 0.0, 0)])
    run = write(tmp_path, started(), *one(2), stay)
    text = told(capsys, run, "--decision", "2")
    assert "joined     new workers\n" in text
    assert "4 pipelines of 2 stages; 8 workers are there, newcomers included\n" in text
    assert "scored while training continued, in 20 ms\n" in text
    assert "action     stay\n" in text
    assert "actual     no worker stopped for it\n" in text


@pytest.mark.parametrize("trigger", ["drain", "review", "slow"])
def test_the_trigger_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], trigger: str) -> None:
    leaving = [3, 4] if trigger == "drain" else []
    event = decided(2, trigger=trigger, leaving=leaving, candidates=[weighed("a", 0.4, 0.0, 0)], chosen="a")
    message(told(capsys, write(tmp_path, started(), event, planned(2, "a"), came(2))))


def test_a_decision_without_a_stall_has_no_parts_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = decided(2, trigger="review", candidates=[weighed("a", 0.4, 0.0, 0)], chosen="a")
    event["stall"] |= dict.fromkeys(("repeat_s", "detect_s", "stop_s", "decide_s", "regroup_s"), 0.0)
    text = told(capsys, write(tmp_path, started(), event, planned(2, "a"), came(2)))
    assert "stall      none, because no worker stops; transfers on top\n" in text


def test_the_cost_of_the_next_failure_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [weighed("a", 0.5, 0.0, 0, shared_s=0.25, return_s=1.0), weighed("b", None, None, None, reason="none")]
    text = told(capsys, write(tmp_path, decided(2, 5, candidates=candidates, chosen="a"), planned(2, "a"), came(2)))
    head, a, b = (line.split("|") for line in text.splitlines() if line.startswith(("|   ", "| a", "| b")))
    column = [cell.strip() for cell in head].index("next failure costs")
    assert (a[column].strip(), b[column].strip()) == ("1.250 s", "-")


def test_the_stall_of_a_restart_has_parts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restart = decided(2, 5, chosen="restart", candidates=[weighed("restart", 0.4, 300.0, 47_056_120)])
    restart["candidates"][0]["transfer_s"] = 0.0
    loss = {**lost(5, 2), "policy": "restart", "resume_step": 38}
    outcome = {**came(2), "policy": "restart", "predicted_stall_s": 300.0, "measured_stall_s": 1.5}
    text = told(capsys, write(tmp_path, started(), restart, planned(2, "restart"), loss, outcome))
    assert "predicted  step 400 ms, stall 300.0 s: recovery.restart_cost_s and the steps since the checkpoint\n" in text
    assert "actual     step 410 ms (+2.5%), stall 1.500 s (-99.5%), after 10 steps\n" in text
    assert (
        "stall = repeat 1.367 (2 steps repeated) + detect 0.010 + stop 0.020 + decide 0.003 + regroup 0.100\n" in text
    )


def test_what_was_recorded_by_an_earlier_version_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = decided(2, 5)
    del event["stall"]["restart_cost_s"]
    for candidate in event["candidates"]:
        del candidate["transfer_s"]
    text = told(capsys, write(tmp_path, started(), event, planned(2, "repartition")))
    assert "predicted  step 400 ms, stall 750 ms\n" in text


def test_a_run_without_decisions_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, started())
    assert told(capsys, run) == f"{run}: there was nothing to decide; no worker was lost\n"
    assert json.loads(told(capsys, run, "--json")) == {"decisions": [], "damaged_lines": []}
    assert main(["explain", run, "--decision", "1"]) == 2
    assert "there is no such decision; this run has none" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_decisions_of_another_version_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = decided(2, 5)
    del event["stall"]
    run = write(tmp_path, started(), event)
    text = told(capsys, run)
    assert text.startswith(f"{run}: no line that can be read is a decision\na line cannot be read, and is left out: ")
    assert "events.jsonl, line 2: stall: Field required" in text
    assert "another version of chameleon" in " ".join(text.split())


@pytest.mark.parametrize(
    ("candidates", "chosen", "words"),
    [
        ([weighed("a", 0.5, 0.5, 0)], "a", "no other candidate was possible"),
        ([weighed("a", 0.5, 0.5, 0, reason="no")], None, "no candidate was possible"),
        ([weighed("a", 0.5, 0.5, 0), weighed("b", 0.5, 0.5, 0)], "a", "as many samples as b; it was proposed first"),
        (
            [weighed("a", 0.5, 0.5, 5_000_000), weighed("b", 0.5, 0.5, 1_000_000)],
            "b",
            "as many samples as a; it moves 1.0 MB, not 5.0 MB",
        ),
        (
            [weighed("a", 0.5, 0.5, 0), weighed("b", 0.625, 0.5, 0)],
            "a",
            "25.0% more samples than b: its steps are 20.0% shorter, and its stall is not longer",
        ),
        (
            [weighed("a", 0.5, 0.5, 0), weighed("b", 0.5, 200.4, 0)],
            "a",
            "25.0% more samples than b: its stall is 199.9 s shorter",
        ),
        (
            # (t - 1) / 0.5 = (t - 900) / 0.25 at t = 1799 s.
            [weighed("a", 0.5, 1.0, 0), weighed("b", 0.25, 900.0, 9)],
            "a",
            "399.5% more samples than b: its stall is 899.0 s shorter, which the steps of b, 50.0% shorter, make up "
            "for only after 30.0 min; the next failure is expected in 16.7 min",
        ),
        (
            [weighed("a", 0.5, 1.0, 0), weighed("b", 0.25, 1000.0, 9)],
            "a",
            "more samples than b: its stall is 999.0 s shorter, which the steps of b, 50.0% shorter, make up "
            "for only after 33.3 min; the next failure is expected in 16.7 min",
        ),
        (
            [
                weighed("a", 0.5, 0.5, 0),
                weighed("b", 0.4, 0.5, 0, host_single_points_of_failure=2, worker_single_points_of_failure=1),
            ],
            "a",
            "b would train 25.0% more samples, but for 2 hosts with all holders of a layer and 1 worker with the only "
            "copy of one: there is no checkpoint",
        ),
        (
            # (t - 1) / 0.5 = (t - 501) / 0.4 at t = 2501 s.
            [weighed("a", 0.5, 1.0, 0), weighed("b", 0.4, 1.0, 0, return_s=500.0, samples=124_750)],
            "a",
            "60.2% more samples than b: the next failure costs 500.0 s less, which the steps of "
            "b, 20.0% shorter, make up for only after 41.7 min; the next failure is expected in 16.7 min",
        ),
        (
            [weighed("a", 0.5, 0.5, 0), weighed("b", 0.4, 0.5, 0)],
            "a",
            "b would train 25.0% more samples by what is known now, but it had been decided before",
        ),
    ],
)
def test_why_one_was_better_than_the_second(candidates: list[dict[str, Any]], chosen: str | None, words: str) -> None:
    assert describe_reason(DecisionEvent.of(decided(2, 5, chosen=chosen, candidates=candidates))) == words


def test_who_must_not_be_lost_is_said_where_candidates_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = told(capsys, write(tmp_path / "all", decided(2, 5, candidates=_ON_HOSTS), planned(2, "a"), came(2)))
    assert "4 hosts with all holders of a layer" in story
    same = [{**each, "host_single_points_of_failure": 1} for each in _ON_HOSTS]
    story = told(capsys, write(tmp_path / "one", decided(2, 5, candidates=same), planned(2, "a"), came(2)))
    assert "all holders" not in story


_ON_HOSTS = [weighed("repartition", 0.4, 0.5, 0), weighed("reroute", 0.5, 0.5, 0, host_single_points_of_failure=4)]


@pytest.mark.multiprocess
def test_the_story_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(
        tmp_path,
        workers=8,
        steps=24,
        parallel=Parallel(dp=2, pp=4),
        batch=Batch(micro_batches=8, micro_batch_size=1),
        model=LlamaConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=16),
        recovery=Recovery(policy="repartition"),
        # In a backward: a forward may begin before the coordinator has heard of the commit, from which it measures.
        failures=(fails(3, step=4, phase="backward"), fails(0, step=20, phase="backward")),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    first, second = json.loads(told(capsys, str(ended.run.path), "--json"))["decisions"]
    assert (first["lost"], first["live"], first["step"], first["plan"]) == ([3], 7, 4, "2 pipelines of 4 stages")
    assert (second["lost"], second["live"], second["step"]) == ([0], 6, 20)
    assert (first["outcome"]["steps"], second["outcome"]["steps"]) == (10, 4)
    for story, failure in zip((first, second), ended.failures, strict=True):
        outcome = story["outcome"]
        assert story["policy"] == story["chosen"] == outcome["policy"] == failure.policy
        assert story["losses"] == [failure.values() | {"lost_layers": []}]
        chosen = next(each for each in story["candidates"] if each["policy"] == story["chosen"])
        assert (outcome["predicted_step_s"], outcome["predicted_stall_s"]) == (chosen["step_s"], chosen["stall_s"])
        steps = [step for step in ended.run.steps() if step.generation == story["generation"]]
        measured = sorted(step.step_s - step.data_wait_s for step in steps[1 : outcome["steps"]])
        assert measured[0] <= outcome["measured_step_s"] <= measured[-1]
        # The banner's stall, and before it what the interrupted step had done.
        assert outcome["measured_stall_s"] >= failure.stall_s - 1e-3
    assert ended.summary["outcomes"] == [first["outcome"], second["outcome"]]
    assert second["corrections"]["transfer"] > 0
    assert told(capsys, str(ended.run.path)).count("\nwhy ") == 2
