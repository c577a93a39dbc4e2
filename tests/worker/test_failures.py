"""Real runs through failures: whatever fails when, the losses are those of a run in which nothing failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chameleon_ft.config import (
    Batch,
    Checkpoint,
    FailureKind,
    FailurePhase,
    LlamaConfig,
    Parallel,
    Recovery,
    RunConfig,
    Timeouts,
)
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.launch.live_run import inject
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.timelines import read_recorded_steps
from tests.harness import (
    PATIENT,
    ScriptedView,
    assert_trained_as_if_nothing_failed,
    create_run,
    fails,
    in_thread,
    small_config,
    train_here,
)
from tests.worker.failures import the_failure

pytestmark = pytest.mark.multiprocess

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
WATCHFUL = Timeouts(
    heartbeat_timeout_s=2.0, watchdog_min_s=3.0, watchdog_factor=20.0, collective_timeout_s=60.0, rendezvous_s=90.0
)


# --- failures in every phase ------------------------------------------------------------------------------------------


@pytest.mark.each_kind
def test_a_kill_in_every_phase_down_to_one_holder_of_each_stage(tmp_path: Path) -> None:
    kills: dict[int, tuple[int, FailurePhase]] = {2: (1, "forward"), 4: (4, "sync"), 6: (0, "backward"), 8: (5, "vote")}
    failures = tuple(fails(worker, step=step, phase=phase) for step, (worker, phase) in kills.items())
    ended = train_here(small_config(tmp_path, steps=14, failures=failures), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    for number, (failure, (step, (worker, _))) in enumerate(zip(ended.failures, kills.items(), strict=True), start=1):
        assert_recovered(failure, worker=worker, step=step)
        assert [each.workers for each in ended.run.steps()][failure.resume_step] == 6 - number
    assert ended.run.steps()[-1].workers == 2
    recorded = read_recorded_steps(ended.run.timelines)
    for part in ("interrupted", "rest"):
        found = [each for each in recorded if each.part == part and each.step == 6]
        assert [each.worker for each in found] == [2, 3, 5]
        assert all(len(each.kinds) == len(each.operations) for each in found)


def assert_recovered(failure: FailureRecord, *, worker: int, step: int) -> None:
    """Check the record of a kill in a step from which training went on."""
    assert (failure.worker, failure.cause, failure.policy) == (worker, "SIGKILL", "reroute")
    assert failure.noticed_by in ("child", "connection", "peer")
    assert failure.detect_s is not None
    # The vote of the step may have reached others: then they apply that step, and training goes on with the next.
    assert (failure.step, failure.resume_step) in {(step, step), (step, step + 1), (step + 1, step + 1)}
    # If it was applied, another may have been begun and is completed.
    assert failure.is_salvaged or failure.resume_step == step + 1


def test_a_kill_in_the_optimizer_is_rolled_forward(tmp_path: Path) -> None:
    # Its vote was complete, so no worker may run that step again.
    ended = train_here(small_config(tmp_path, failures=(fails(0, step=4, phase="optimizer"),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert_recovered(failure, worker=0, step=4)
    assert failure.resume_step == 5
    assert [record.workers for record in ended.run.steps()] == [6] * 5 + [5] * 5


def test_a_kill_in_the_first_and_in_the_last_step(tmp_path: Path) -> None:
    failures = (fails(2, step=0, phase="backward"), fails(5, step=9, phase="vote"))
    ended = train_here(small_config(tmp_path, failures=failures), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {2, 5}
    assert ended.failures[0].resume_step == 0


def test_kills_while_checkpoints_are_written(tmp_path: Path) -> None:
    failures = (fails(1, step=3, phase="checkpoint"), fails(4, step=9, phase="checkpoint"))
    config = small_config(tmp_path, checkpoint=Checkpoint(every=3), failures=failures)
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {1, 4}
    # Worker 1 wrote nothing of checkpoint 3, so it never became complete; the ones after it did, unless a slow disk
    # was still at the one before. Of the last one, other workers wrote the layers that worker 4 had not.
    # A step that is repeated writes its own once more, which is recorded again.
    written = [*dict.fromkeys(event["step"] for event in ended.events("checkpoint"))]
    assert 3 not in written
    assert written[-1] == 10
    assert complete_checkpoints(ended.run.checkpoints) == written[-2:]


def test_a_hang(tmp_path: Path) -> None:
    config = small_config(tmp_path, timeouts=WATCHFUL, failures=(fails(3, step=4, phase="vote", kind="hang"),))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert (failure.worker, failure.noticed_by) == (3, "watchdog")
    assert failure.cause.startswith("hung: its process is stopped")
    (hang,) = ended.events("hang")
    assert hang["process"].startswith("state T")
    assert re.search(r"fault_injection.py:\d+ in fail$", hang["place"]), "it writes its stacks once it continues"


def test_a_hang_in_the_first_step_is_found_by_its_heartbeat(tmp_path: Path) -> None:
    # No step time is known yet that silence could be measured by, but its agent sees that its process is stopped.
    config = small_config(tmp_path, timeouts=WATCHFUL, failures=(fails(4, step=0, phase="backward", kind="hang"),))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert (failure.worker, failure.noticed_by) == (4, "heartbeat")
    assert failure.cause.startswith("no heartbeat, because its process is stopped")


@pytest.mark.usefixtures("attentive_coordinator")
def test_a_disconnect(tmp_path: Path) -> None:
    config = small_config(tmp_path, failures=(fails(2, step=4, phase="forward", kind="disconnect"),))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert (failure.worker, failure.noticed_by) == (2, "connection")
    assert failure.cause == "control connection closed"


# --- several failures ------------------------------------------------------------------------------------------------


def test_two_workers_at_the_same_moment(tmp_path: Path) -> None:
    # Of different stages and different pipelines: neither pipeline is whole afterwards.
    config = small_config(tmp_path, failures=(fails(0, step=4), fails(3, step=4)))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 3}


@pytest.mark.usefixtures("attentive_coordinator")
@pytest.mark.parametrize("kind", ["hang", "disconnect"])
def test_a_failure_during_a_recovery(tmp_path: Path, kind: FailureKind) -> None:
    config = small_config(
        tmp_path,
        timeouts=WATCHFUL,
        failures=(fails(0, step=4, phase="sync"), fails(5, step=4, phase="recovery", kind=kind)),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 5}
    assert {failure.resume_step for failure in ended.failures} == {ended.failures[0].resume_step}, "it was one outage"


@pytest.mark.parametrize(("first", "kind"), [("forward", "hang"), ("sync", "kill")])
def test_a_failure_in_the_rest_of_a_step(tmp_path: Path, first: FailurePhase, kind: FailureKind) -> None:
    config = small_config(
        tmp_path,
        timeouts=WATCHFUL,
        failures=(fails(0, step=4, phase=first), fails(5, step=4, phase="rest", kind=kind)),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 5}
    assert all(failure.is_salvaged and failure.resume_step == 4 for failure in ended.failures)
    (cost,) = ended.events("failure_cost")
    assert cost["incident_generations"] == [failure.generation for failure in ended.failures]


def test_a_step_is_repeated_without_salvage(tmp_path: Path) -> None:
    recovery = Recovery(policy="reroute", salvage=False)
    config = small_config(tmp_path, recovery=recovery, failures=(fails(3, step=4, phase="backward"),))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert not the_failure(ended).is_salvaged


def test_failures_during_the_recovery_of_a_failure_in_a_recovery(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=8,
        parallel=Parallel(dp=4, pp=2),
        batch=Batch(micro_batches=8, micro_batch_size=1),
        failures=(
            fails(0, step=4, phase="optimizer"),
            fails(3, step=4, phase="recovery"),
            fails(6, step=5, phase="recovery"),
        ),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 3, 6}


# --- what a plan may be -----------------------------------------------------------------------------------------------


def test_dropout_is_the_same_wherever_a_layer_runs_also_with_a_split_backward(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        model=LlamaConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32, dropout=0.2),
        parallel=Parallel(dp=3, pp=2, split_backward=True),
        failures=(fails(2, step=3, phase="backward"), fails(5, step=6, phase="sync")),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    plan = ended.plans()[-1]
    assert plan["split_backward"] is True
    assert {hop[0] for route in plan["routes"] for hop in route} == {0, 1, 3, 4}


def test_one_worker_is_enough(tmp_path: Path) -> None:
    config = small_config(tmp_path, workers=1, parallel=Parallel(dp=1, pp=1), steps=4)
    assert_trained_as_if_nothing_failed(train_here(config, tmp_path / "run"))


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    config = RunConfig(
        job=f"{EXAMPLE}:job",
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        steps=8,
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=PATIENT,
        failures=(fails(3, step=3, phase="backward"),),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert the_failure(ended).worker == 3


# --- injection into a live run ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("attentive_coordinator")
def test_failures_injected_into_a_live_run(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=8,
        steps=24,
        timeouts=WATCHFUL,
        parallel=Parallel(dp=4, pp=2),
        batch=Batch(micro_batches=8, micro_batch_size=1),
    )
    run = RunDirectory(tmp_path / "run")
    refused: list[str] = []

    def again() -> None:
        with pytest.raises(ControlError) as caught:
            inject(run, worker=0, kind="kill", phase=None, step=None)
        refused.append(str(caught.value))

    view = ScriptedView(
        at_step={
            2: in_thread(lambda: inject(run, worker=0, kind="kill", phase=None, step=None)),
            5: in_thread(lambda: inject(run, worker=3, kind="hang", phase=None, step=None)),
            8: in_thread(lambda: inject(run, worker=4, kind="disconnect", phase="sync", step=None)),
            11: in_thread(lambda: inject(run, worker=7, kind="kill", phase=None, step=15)),
            12: in_thread(again),
        }
    )
    ended = train_here(config, tmp_path / "run", view=view)
    assert_trained_as_if_nothing_failed(ended)
    assert [(failure.worker, failure.cause.partition(":")[0]) for failure in ended.failures] == [
        (0, "SIGKILL"),
        (3, "hung"),
        (4, "control connection closed"),
        (7, "SIGKILL"),
    ]
    assert ended.failures[-1].step == 15
    assert refused == ["--worker 0: worker 0 is not live; live are [1, 2, 5, 6, 7]"]


def test_a_run_that_has_ended_takes_no_injection(tmp_path: Path) -> None:
    run = create_run(small_config(tmp_path), tmp_path / "run")
    with pytest.raises(ConfigError, match="not live"):
        inject(run, worker=0, kind="kill", phase=None, step=None)
