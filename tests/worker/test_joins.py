"""Real runs that workers come to while they run: they take part, and the losses are those of the plain loop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from chameleon_ft.config import Batch, Checkpoint, FailurePhase, LlamaConfig, Optimizer, Parallel, Recovery, TrainConfig
from chameleon_ft.events.decisions import Migration
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.launch.live_run import request
from chameleon_ft.protocol.messages import Inject
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import (
    Command,
    Ended,
    assert_as_the_plain_loop,
    fails,
    small_config,
)
from tests.histories import StoppingView, train_until

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step


def _recovery(**changes: Any) -> Recovery:
    """Workers come back at once. Failures are rare, so that taking in a worker pays even if stalls are long."""
    fields = {"policy": "chameleon", "respawn": True, "respawn_delay_s": 0.0, "worker_mtbf_hours": 1e6}
    return Recovery.model_validate({**fields, **changes})


def endless(directory: Path, **changes: Any) -> TrainConfig:
    """Two pipelines of three stages whose lost workers come back; the run trains until it is ended.

    Its first workers leave the processors to the search for plans, and to newcomers that load the job.
    """
    fields: dict[str, Any] = {
        "steps": 100_000,
        "workers": 6,
        "parallel": Parallel(dp=2, pp=3),
        "batch": Batch(micro_batches=8, micro_batch_size=1),
        "model": LlamaConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32),
        # Small updates: a run may take some hundred steps, in which rounding must not grow.
        "optimizer": Optimizer(lr=2e-4, min_lr=1e-4, warmup_steps=2),
        "recovery": _recovery(),
    }
    fields |= changes
    fields["failures"] = (*unhurried(fields["workers"], speed=0.25), *fields.get("failures", ()))
    return small_config(directory, **fields)


def assert_nothing_was_lost(ended: Ended, *, repeated_steps: int) -> None:
    summary = ended.summary
    how = {
        130: "interrupted by the user, with a checkpoint",
        os.EX_TEMPFAIL: "terminated by SIGTERM, with a checkpoint",
    }
    assert summary["reason"] == how[ended.code]
    assert summary["samples_lost"] == 0
    assert summary["samples_repeated"] == repeated_steps * ended.run.config().batch.samples
    assert_as_the_plain_loop(ended)


def workers_of_last_plan(ended: Ended) -> set[int]:
    return {int(worker) for route in ended.plans()[-1]["routes"] for worker, *_ in route}


def joined(ended: Ended) -> list[int]:
    """The workers that came to take part, in the order they did."""
    return [worker for record in ended.events("join") for worker in record["workers"]]


@pytest.mark.parametrize("redundancy", ["all", pytest.param(2, marks=pytest.mark.each_kind)])
def test_a_lost_worker_comes_back(tmp_path: Path, redundancy: Literal["all"] | int) -> None:
    parallel = Parallel(dp=2, pp=3, optimizer_redundancy=redundancy)
    config = endless(tmp_path, parallel=parallel, failures=(fails(3, step=4),))
    ended = train_until(config, tmp_path / "run", joined)
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert ended.lost == {3}
    (respawn,) = ended.events("respawn")
    assert (respawn["worker"], respawn["incarnation"]) == (3, 2)
    assert [event["worker"] for event in ended.events("joined")] == [3]
    assert joined(ended) == [3]
    triggers = [event["trigger"] for event in ended.events("decision")]
    # The worker may be back before a better plan without it is found.
    assert triggers in (["loss", "review", "join"], ["loss", "join"])
    assert workers_of_last_plan(ended) == set(range(6))
    assert ended.run.steps()[-1].workers == 6
    assert not ended.events("refused")
    assert not ended.events("messages_failed")
    # Slices of optimizer state move during training, like layers.
    assert all(record["transfer_s"] == 0 for record in ended.events("join"))
    assert any(moved["slices"] for moved in ended.events("migration")) == (redundancy != "all")


@pytest.mark.parametrize("phase", ["preparation", "switch"])
def test_a_worker_that_came_back_is_lost_on_its_way_into_the_plan_or_soon_after(
    tmp_path: Path, phase: FailurePhase
) -> None:
    failures = (fails(3, step=4), fails(3, step=4, phase=phase))
    ended = train_until(
        endless(tmp_path, failures=failures),
        tmp_path / "run",
        lambda ended: len(ended.failures) > 1 and ended.events("join") and 3 in workers_of_last_plan(ended),
    )
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert ended.lost == {3}
    assert [event["incarnation"] for event in ended.events("respawn")] == [2, 3]


def test_a_worker_is_lost_while_another_joins(tmp_path: Path) -> None:
    ended = train_until(
        endless(tmp_path, failures=(fails(3, step=4), fails(3, step=4, phase="transfer"))),
        tmp_path / "run",
        lambda ended: len(ended.failures) > 2 and workers_of_last_plan(ended) == set(range(6)),
        # In the first transfer after worker 3 was lost in one.
        injected={("respawn", 2): Inject(worker=2, kind="kill", phase="transfer")},
    )
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert ended.lost == {2, 3}


class KillsDuringMigration(StoppingView):
    """Kills a worker after the first step in which layers moved; ends the run once it has changed its plan again."""

    def __init__(self, run: RunDirectory, worker: int) -> None:
        super().__init__(run, lambda ended: any(e["generation"] > self.generation for e in ended.events("decision")))
        self.worker = worker
        self.generation = sys.maxsize

    def show(self, record: Record) -> None:
        super().show(record)
        if not isinstance(record, StepRecord) or self.generation != sys.maxsize:
            return
        if record.generation in [event.generation for event in self.run.events() if isinstance(event, Migration)]:
            self.generation = record.generation
            kill = partial(request, self.run, Inject(worker=self.worker, kind="kill"))
            threading.Thread(target=kill, daemon=True).start()


def test_a_worker_is_lost_after_layers_have_arrived_at_others(tmp_path: Path) -> None:
    config = endless(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=12, micro_batch_size=1),
        model=LlamaConfig(dim=64, num_layers=8, num_heads=2, num_kv_heads=1, ffn_dim=256, seq_len=64),
        failures=(fails(3, step=4),),
    )
    run = RunDirectory(tmp_path / "run")
    view = KillsDuringMigration(run, worker=0)
    ended = train_until(config, tmp_path / "run", view.is_over, view=view)
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert ended.lost == {0, 3}
    assert not ended.events("crashed")
    (failure,) = (event for event in ended.events("failure") if event["worker"] == 0)
    assert failure["generation"] <= view.generation + 2, "what was to follow the migration had not begun"


@pytest.mark.each_kind
def test_workers_are_drained_without_a_failure(tmp_path: Path) -> None:
    path = write_config(endless(tmp_path), tmp_path)
    run = RunDirectory(tmp_path / "run")
    with Command("train", path, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with Command("drain", run.path, "--worker", "1", "--worker", "4", "--wait") as drain:
            assert drain.wait() == 0, drain.printed
        training.read_until(STEP.format(r"\d+"))
        with Command("drain", run.path, "--worker", "1") as refused:
            assert refused.wait() == 1
            assert "worker 1" in refused.printed
        training.interrupt_all()
        code = training.wait()
    ended = Ended(code, run)
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert ended.failures == []
    assert ended.events("respawn") == []
    assert {event["worker"] for event in ended.events("drained")} == {1, 4}
    assert workers_of_last_plan(ended).isdisjoint({1, 4})
    assert ended.events("join")[-1]["drained"] == [1, 4]


@contextmanager
def two_workers(directory: Path, run: RunDirectory) -> Iterator[Command]:
    """Train on two workers, until the run is ended; enter once they have trained some steps."""
    path = write_config(endless(directory, workers=2, parallel=Parallel(dp=1, pp=2)), directory)
    with Command("train", path, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        yield training


def test_training_continues_without_the_workers_of_its_own_host(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with two_workers(tmp_path, run) as training, Command("agent", "--run", run.path, "--workers", "2") as late:
        training.read_until(r"workers? .* joined before step \d+")
        with Command("drain", run.path, "--worker", "0", "--worker", "1", "--wait") as drain:
            assert drain.wait() == 0, drain.printed
        training.read_until("host_drained")
        training.read_until(STEP.format(r"\d+"))
        late.signal(signal.SIGTERM)  # no worker would be left, so the run ends with a checkpoint
        code = training.wait()
        assert late.wait() == code == os.EX_TEMPFAIL, late.printed
    ended = Ended(code, run)
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert (ended.failures, ended.events("host_lost")) == ([], [])
    assert workers_of_last_plan(ended) == {2, 3}


def test_a_host_leaves_while_its_workers_load(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with two_workers(tmp_path, run) as training:
        with Command("agent", "--run", run.path, "--workers", "2") as late:
            training.read_until("host_joined")
            late.signal(signal.SIGTERM)
            assert late.wait() == 0, late.printed
        training.read_until("host_drained")
        training.read_until(STEP.format(r"\d+"))
        training.interrupt_all()
        code = training.wait()
    ended = Ended(code, run)
    assert_nothing_was_lost(ended, repeated_steps=0)
    assert {event["worker"] for event in ended.events("drained")} == {2, 3}
    assert (ended.failures, ended.events("join_failed"), ended.events("respawn")) == ([], [], [])


def test_a_second_host_joins_later_and_is_lost_again(tmp_path: Path) -> None:
    # The new host may come to have all copies of a layer, and all go back to a checkpoint then.
    config = endless(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        recovery=Recovery(policy="chameleon"),
        checkpoint=Checkpoint(every=3),
    )
    path = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with Command("train", path, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with Command("agent", "--run", run.path, "--workers", "2") as late:
            training.read_until("worker 4 has joined as a spare")
            training.read_until(r"workers? .* joined before step \d+")
            training.read_until(STEP.format(r"\d+"))
            for process in late.session():
                process.kill()
            late.wait()
        training.read_until("worker [45] lost")
        with Command("agent", "--run", run.path, "--workers", "2") as again:
            training.read_until(r"workers? .* joined before step \d+")
            training.read_until(STEP.format(r"\d+"))
            again.signal(signal.SIGTERM)
            assert again.wait() == 0, again.printed
        training.read_until(STEP.format(r"\d+"))
        training.interrupt_all()
        code = training.wait()
    ended = Ended(code, run)
    assert {event["worker"] for event in ended.events("drained")} == {4, 5}
    assert_nothing_was_lost(ended, repeated_steps=len(ended.steps) - len(set(ended.steps)))
    first, second = ended.events("host_joined")
    assert first["workers"] == [4, 5]
    assert second["workers"] == [4, 5], "their host was gone"
    with Command("report", run.path, "--trace", tmp_path / "trace.json", "--picture", tmp_path / "a.svg") as report:
        assert report.wait() == 0, report.printed
