"""Real runs whose placement changes while they train: whatever fails, the losses are those of the plain loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import (
    Batch,
    Checkpoint,
    FailureKind,
    FailurePhase,
    LlamaConfig,
    Parallel,
    Recovery,
    TrainConfig,
)
from chameleon_ft.launch.live_run import inject
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.harness import (
    ScriptedView,
    assert_trained_as_if_nothing_failed,
    fails,
    in_thread,
    resume_here,
    small_config,
    train_here,
)
from tests.stored import event_lines
from tests.worker.emulated import emulated_config

pytestmark = pytest.mark.multiprocess


def eight_workers(directory: Path, **changes: Any) -> TrainConfig:
    """Two pipelines of four stages; six layers to be moved about."""
    fields: dict[str, Any] = {
        "workers": 8,
        "parallel": Parallel(dp=2, pp=4),
        "batch": Batch(micro_batches=8, micro_batch_size=1),
        "model": LlamaConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=16),
        "recovery": Recovery(policy="repartition"),
    }
    return small_config(directory, **{**fields, **changes})


@pytest.mark.each_kind
def test_one_worker_of_eight(tmp_path: Path) -> None:
    ended = train_here(eight_workers(tmp_path, failures=(fails(3, step=4),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    (transition,) = ended.events("transition")
    (failure,) = ended.failures
    assert failure.policy.startswith("repartition")
    assert failure.moved_bytes == transition["moved_bytes"] > 0
    assert failure.rounds == transition["rounds"] > 0
    # Not only parameters: of each, AdamW keeps two more numbers and a counter.
    assert transition["moved_bytes"] == transition["planned_bytes"] > 0
    assert failure.stall_s >= failure.transfer_s > 0


def test_a_decision_that_was_made_before_the_loss(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")

    def kill_once_it_is_prepared() -> None:
        while not any(event["event"] == "prepared" for event in event_lines(run)):
            time.sleep(0.05)
        inject(run, worker=3, kind="kill", phase=None, step=None)

    # On emulated devices, whose steps take what they took so far, whatever else the machine does.
    view = ScriptedView(at_step={5: in_thread(kill_once_it_is_prepared)})
    config = emulated_config(tmp_path, steps=40, recovery=Recovery(policy="reroute", salvage=False))
    ended = train_here(config, run.path, view=view)
    assert_trained_as_if_nothing_failed(ended)
    assert ended.events("prepared")[0]["losses"] == 4
    # On a busy machine a worker may seem slow, too.
    (decision,) = [event for event in ended.events("decision") if event["trigger"] == "loss"]
    assert decision["prepared"]
    (failure,) = ended.failures
    assert (failure.worker, failure.policy) == (3, decision["chosen"])


@pytest.mark.parametrize("phase", ["optimizer", "backward"])  # it is rolled forward, and completed
def test_two_in_a_row(tmp_path: Path, phase: FailurePhase) -> None:
    failures = (fails(3, step=3, phase=phase), fails(0, step=6, phase="backward"))
    ended = train_here(eight_workers(tmp_path, failures=failures), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 3}
    assert len(ended.events("transition")) == 2


@pytest.mark.parametrize(("phase", "worker"), [("transfer", 2), ("confirm", 2), ("switch", 7)])
def test_a_kill_in_every_phase_of_a_transition(tmp_path: Path, phase: FailurePhase, worker: int) -> None:
    failures = (fails(0, step=4, phase="vote"), fails(worker, step=4, phase=phase))
    ended = train_here(eight_workers(tmp_path, failures=failures), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, worker}


def test_kills_in_the_transition_after_a_transition_that_was_cut_short(tmp_path: Path) -> None:
    failures = (
        fails(0, step=4, phase="backward"),
        fails(6, step=4, phase="transfer"),
        fails(3, step=4, phase="switch"),
        fails(1, step=7, phase="forward"),
        fails(5, step=7, phase="confirm"),
    )
    config = eight_workers(
        tmp_path, workers=12, parallel=Parallel(dp=4, pp=3), steps=12, checkpoint=Checkpoint(every=1), failures=failures
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.lost == {0, 1, 3, 5, 6}
    assert_trained_as_if_nothing_failed(ended)


@pytest.mark.usefixtures("attentive_coordinator")
@pytest.mark.parametrize(("phase", "kind"), [("transfer", "hang"), ("confirm", "disconnect")])
def test_a_hang_or_a_cut_in_a_transition(tmp_path: Path, phase: FailurePhase, kind: FailureKind) -> None:
    failures = (fails(0, step=4), fails(6, step=4, phase=phase, kind=kind))
    ended = train_here(eight_workers(tmp_path, failures=failures), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 6}


def test_dropout_and_checkpoints(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    config = eight_workers(
        tmp_path,
        steps=40,
        model=LlamaConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=16, dropout=0.2),
        checkpoint=Checkpoint(every=4, keep=100),
        failures=(fails(2, step=3, phase="optimizer"),),
    )
    # The second loss waits for a checkpoint by the receivers of the first transition; steps do not.
    kill = in_thread(lambda: inject(run, worker=5, kind="kill", phase="backward", step=None))
    ended = train_here(config, run.path, view=ScriptedView(at_first_checkpoint=kill))
    assert_trained_as_if_nothing_failed(ended)
    first, second = ended.failures
    assert (first.worker, first.resume_step, second.worker) == (2, 4, 5)
    complete = complete_checkpoints(run.checkpoints)
    assert 4 <= complete[0] <= second.step
    assert complete[-1] == 40
    # Missing is at most what the second loss spoiled, and what a slow disk had no time for, which is said.
    left_out = {event["step"] for event in ended.events("checkpoint_failed")}
    spoiled = set(range(complete[0] + 4, second.step + 1, 4))
    assert {*range(4, 41, 4)} - {*complete} <= left_out | spoiled
    resumed = resume_here(ended, steps=44, workers=4, parallel=Parallel(dp=2, pp=2))
    assert_trained_as_if_nothing_failed(resumed)


def test_workers_that_are_left_over_come_back(tmp_path: Path) -> None:
    # After the first loss worker 0 is left over, after the second worker 3 too: together they make a pipeline again.
    config = small_config(
        tmp_path,
        recovery=Recovery(policy="drop-replica"),
        failures=(fails(1, step=3, phase="vote"), fails(2, step=6, phase="backward")),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert {record.workers for record in ended.run.steps()} == {6, 4}
    assert {hop[0] for route in ended.plans()[-1]["routes"] for hop in route} == {0, 3, 4, 5}
