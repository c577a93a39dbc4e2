"""A worker of a live run becomes slow, as a user would make it: the plan changes, and changes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Emulation, Parallel, Recovery
from chameleon_ft.report.decisions import Decisions
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from tests.configs import write_config
from tests.harness import Command, Ended, assert_as_the_plain_loop
from tests.worker.emulated import emulated_config

pytestmark = pytest.mark.multiprocess


def make_link_slow(run: RunDirectory, factor: str) -> None:
    with Command("inject", run.path, "--worker", 2, "--kind", "slow-link", "--factor", factor) as injecting:
        injecting.read_until(f"worker 2 has {factor} of the bandwidth of its links now")
        assert injecting.wait() == 0


def make_slow(run: RunDirectory, factor: str) -> None:
    with Command("inject", run.path, "--worker", 2, "--kind", "slow", "--factor", factor) as injecting:
        injecting.read_until(f"worker 2 computes at {factor} of its speed now")
        assert injecting.wait() == 0


def test_a_slow_worker_gets_less_to_do_until_it_has_recovered(tmp_path: Path) -> None:
    config = emulated_config(
        tmp_path,
        steps=100_000,
        parallel=Parallel(dp=4, pp=1),
        batch=Batch(micro_batches=16, micro_batch_size=2),
        emulation=Emulation(time_scale=2.0),
        recovery=Recovery(policy="chameleon"),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with Command("train", file, "--output-dir", run.path) as training:
        training.read_until(r"^\s+8\s")
        make_slow(run, "0.5")
        training.read_until(r"slow: worker 2 computes at 0\.\d\d of the speed of others since step \d+; a step takes")
        training.read_until("a better plan from step")
        make_slow(run, "1.0")
        training.read_until("recovered: worker 2 is as fast as the others again")
        training.interrupt_all()
        assert training.wait() == 130
    ended = Ended(130, run)
    assert_as_the_plain_loop(ended)
    assert not ended.lost
    first = next(story for story in Decisions.of(run.events()).stories() if 2 in story.decided.corrections.slow)
    assert first.decided.trigger == "slow"
    assert first.decided.corrections.slow[2] < 0.7
    before, after, *_ = (
        sum(len(hop.layers) for route in each.plan.routes for hop in route.hops if hop.worker == 2)
        for each in read_generation_plans(run.plans).values()
    )
    assert 0 < after < before, "it runs fewer layers, or fewer micro-batches through them"


def test_slow_links_are_noticed_decided_on_and_forgotten(tmp_path: Path) -> None:
    config = emulated_config(
        tmp_path,
        steps=100_000,
        workers=6,
        parallel=Parallel(dp=2, pp=3),
        batch=Batch(micro_batches=12, micro_batch_size=2),
        emulation=Emulation(time_scale=2.0),
        recovery=Recovery(policy="reroute"),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with Command("train", file, "--output-dir", run.path) as training:
        training.read_until(r"^\s+8\s")
        make_link_slow(run, "0.02")
        training.read_until(
            r"slow_link: micro-batches take \d+\.\d\d times as long between workers 1 and 2 as on other links since"
        )
        training.read_until("stay: the plan stays as it is")
        make_link_slow(run, "1.0")
        training.read_until("recovered_link: the link of workers 1 and 2 is as fast as the others again")
        training.interrupt_all()
        assert training.wait() == 130
    ended = Ended(130, run)
    assert_as_the_plain_loop(ended)
    assert not ended.lost
    assert {tuple(event["workers"]) for event in ended.events("slow_link")} == {(1, 2)}
    first = next(story for story in Decisions.of(run.events()).stories() if story.decided.trigger == "slow")
    assert first.decided.corrections.slow_links.keys() == {"1-2"}
    assert first.decided.corrections.slow_links["1-2"] < 0.5
