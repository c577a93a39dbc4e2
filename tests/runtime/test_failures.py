"""Real runs through failures: whatever fails when, the losses are those of a run in which nothing failed."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.config import (
    Batch,
    Checkpoint,
    FailureKind,
    FailurePhase,
    Health,
    LlamaConfig,
    Parallel,
    Recovery,
    RunConfig,
    Timeouts,
)
from chameleon_ft.control.fault_injection import inject
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.observe import FailureRecord, RunDirectory, complete_checkpoints, read_recorded_steps
from tests.harness import (
    PATIENT,
    Ended,
    ScriptedView,
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    create_run,
    fails,
    in_thread,
    resume_here,
    small_config,
    train_here,
)

pytestmark = pytest.mark.multiprocess

PHASES_OF_A_STEP: list[FailurePhase] = ["forward", "backward", "sync", "vote", "optimizer"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
WATCHFUL = Timeouts(
    heartbeat_timeout_s=2.0, watchdog_min_s=3.0, watchdog_factor=20.0, collective_timeout_s=60.0, rendezvous_s=90.0
)


def the_failure(ended: Ended) -> FailureRecord:
    """The only failure of a run, its times in order."""
    (failure,) = ended.failures
    assert min(failure.stop_s, failure.decide_s, failure.regroup_s) >= 0
    assert failure.stall_s >= failure.stop_s + failure.decide_s + failure.regroup_s - 1e-6
    return failure


# --- one failure, in every phase -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES_OF_A_STEP)
def test_a_kill(tmp_path: Path, phase: FailurePhase) -> None:
    ended = train_here(small_config(tmp_path, failures=(fails(3, step=4, phase=phase),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert (failure.worker, failure.cause, failure.policy) == (3, "SIGKILL", "reroute")
    assert failure.noticed_by in ("child", "connection", "peer")
    assert failure.detect_s is not None
    # The vote of step 4 may have reached others: then they apply that step, and training goes on with the next.
    assert (failure.step, failure.resume_step) in {(4, 4), (4, 5), (5, 5)}
    # If it was applied, another may have been begun and is completed.
    assert failure.is_salvaged or failure.resume_step == 5
    if phase == "backward":
        recorded = read_recorded_steps(ended.run.timelines)
        for part in ("interrupted", "rest"):
            found = [each for each in recorded if each.part == part]
            assert [(each.step, each.worker) for each in found] == [(4, worker) for worker in (0, 1, 2, 4, 5)]
            assert all(len(each.kinds) == len(each.operations) for each in found)
    assert [record.workers for record in ended.run.steps()] == [6] * failure.resume_step + [5] * (
        10 - failure.resume_step
    )


def test_a_kill_in_the_optimizer_is_rolled_forward(tmp_path: Path) -> None:
    # Its vote was complete, so no worker may run that step again.
    ended = train_here(small_config(tmp_path, failures=(fails(0, step=4, phase="optimizer"),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert the_failure(ended).resume_step == 5


def test_a_kill_in_the_first_step(tmp_path: Path) -> None:
    ended = train_here(small_config(tmp_path, failures=(fails(2, step=0, phase="backward"),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert the_failure(ended).resume_step == 0


def test_a_kill_in_the_last_step(tmp_path: Path) -> None:
    ended = train_here(small_config(tmp_path, failures=(fails(5, step=9, phase="vote"),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {5}


def test_a_kill_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config = small_config(tmp_path, checkpoint=Checkpoint(every=3), failures=(fails(1, step=3, phase="checkpoint"),))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {1}
    # Worker 1 wrote nothing of checkpoint 3, so it never became complete; the ones after it did, unless a slow disk
    # was still at the one before.
    written = [event["step"] for event in ended.events("checkpoint")]
    left_out = {event["step"] for event in ended.events("checkpoint_failed")}
    assert sorted({*written, *left_out}) == [6, 9, 10]
    assert written[-1] == 10
    assert complete_checkpoints(ended.run.checkpoints) == written[-2:]


def test_a_kill_while_the_last_checkpoint_is_written(tmp_path: Path) -> None:
    config = small_config(tmp_path, checkpoint=Checkpoint(every=100), failures=(fails(4, step=9, phase="checkpoint"),))
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert complete_checkpoints(ended.run.checkpoints) == [10], (
        "another worker wrote the layers that the lost one had not"
    )


@pytest.mark.parametrize("phase", ["forward", "vote"])
def test_a_hang(tmp_path: Path, phase: FailurePhase) -> None:
    config = small_config(tmp_path, timeouts=WATCHFUL, failures=(fails(3, step=4, phase=phase, kind="hang"),))
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
@pytest.mark.parametrize("phase", ["forward", "sync"])
def test_a_disconnect(tmp_path: Path, phase: FailurePhase) -> None:
    config = small_config(tmp_path, failures=(fails(2, step=4, phase=phase, kind="disconnect"),))
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


def test_one_after_another_down_to_one_holder_of_each_stage(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        steps=14,
        failures=(
            fails(1, step=2, phase="forward"),
            fails(4, step=4, phase="sync"),
            fails(0, step=6, phase="backward"),
            fails(5, step=8, phase="vote"),
        ),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert [failure.worker for failure in ended.failures] == [1, 4, 0, 5]
    assert [record.workers for record in ended.run.steps()][-1] == 2


@pytest.mark.usefixtures("attentive_coordinator")
@pytest.mark.parametrize("kind", ["kill", "hang", "disconnect"])
def test_a_failure_during_a_recovery(tmp_path: Path, kind: str) -> None:
    config = small_config(
        tmp_path,
        timeouts=WATCHFUL,
        failures=(fails(0, step=4, phase="sync"), fails(5, step=4, phase="recovery", kind=kind)),  # type: ignore[arg-type]
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 5}
    assert {failure.resume_step for failure in ended.failures} == {ended.failures[0].resume_step}, "it was one outage"


@pytest.mark.parametrize("first", ["forward", "sync"])
@pytest.mark.parametrize("kind", ["kill", "hang"])
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


# --- the last holder is lost -----------------------------------------------------------------------------------------


def test_without_a_last_holder_training_returns_to_the_newest_checkpoint(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=6, micro_batch_size=1),
        checkpoint=Checkpoint(every=3),
        failures=(fails(1, step=7), fails(3, step=8, phase="sync")),
    )
    ended = train_here(config, tmp_path / "run")
    back_at = the_fall_back(ended).resume_step
    assert back_at in (3, 6), "checkpoint 6 may not be complete yet when step 8 is interrupted"
    assert_trained_as_if_nothing_failed(ended, repeated_steps=8 - back_at)
    assert ended.steps == [*range(8), *range(back_at, 10)]
    assert the_fall_back(ended).lost_layers == (2, 3)
    assert f"back to the checkpoint of step {back_at}" in the_fall_back(ended).action
    # Workers 0 and 2 are left; both held stage 0.
    assert [len(route) for route in ended.plans()[-1]["routes"]] == [2] * 6


def the_fall_back(ended: Ended) -> FailureRecord:
    (failure,) = [failure for failure in ended.failures if failure.policy == "checkpoint"]
    return failure


def test_a_loss_while_the_checkpoint_is_read(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        checkpoint=Checkpoint(every=3, keep=1),
        failures=(
            fails(1, step=7),
            fails(3, step=7),
            fails(5, step=7),  # the last holder of stage 1
            fails(2, step=3, phase="recovery"),
        ),
    )
    ended = train_here(config, tmp_path / "run")
    back_at = ended.failures[-1].resume_step
    assert back_at in (3, 6)
    assert_trained_as_if_nothing_failed(ended, repeated_steps=7 - back_at)
    assert ended.lost == {1, 2, 3, 5}


def test_without_a_checkpoint_the_run_ends_and_says_why(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=2,
        parallel=Parallel(dp=1, pp=2),
        failures=(fails(1, step=4),),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 1
    assert ended.summary["status"] == "failed"
    assert ended.summary["reason"].startswith("no live worker holds layers 2-3;")
    assert "set checkpoint.every" in ended.summary["reason"]
    assert (the_failure(ended).worker, the_failure(ended).policy) == (1, "stop")
    assert ended.steps == [0, 1, 2, 3]
    assert_as_the_plain_loop(ended)
    assert not ended.run.control_file.exists()
    recorded = [each for each in read_recorded_steps(ended.run.timelines) if each.part == "interrupted"]
    assert [(each.worker, each.step) for each in recorded] == [(0, 4)], "although no other step follows it"


def test_a_failed_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    # Everybody is lost, so that even a checkpoint does not help; what is on disk does.
    config = small_config(
        tmp_path,
        workers=2,
        parallel=Parallel(dp=1, pp=2),
        checkpoint=Checkpoint(every=2),
        failures=(fails(0, step=7), fails(1, step=7)),
    )
    failed = train_here(config, tmp_path / "run")
    assert (failed.code, failed.summary["status"]) == (1, "failed")
    newest = complete_checkpoints(failed.run.checkpoints)[-1]
    resumed = resume_here(failed, workers=3, parallel=Parallel(dp=3, pp=1))
    assert_trained_as_if_nothing_failed(resumed, repeated_steps=7 - newest)
    assert resumed.steps == [*range(7), *range(newest, 10)]


# --- what a plan may be ----------------------------------------------------------------------------------------------


def test_dropout_is_the_same_wherever_a_layer_runs(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        model=LlamaConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32, dropout=0.2),
        failures=(fails(2, step=3, phase="backward"), fails(5, step=6, phase="sync")),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    hops = [hop for route in ended.plans()[-1]["routes"] for hop in route]
    assert {hop[0] for hop in hops} == {0, 1, 3, 4}


def test_a_split_backward_through_a_kill(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        parallel=Parallel(dp=3, pp=2, split_backward=True),
        failures=(fails(1, step=3, phase="backward"), fails(4, step=6)),
    )
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {1, 4}
    assert ended.plans()[-1]["split_backward"] is True


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


# --- errors of the job itself ----------------------------------------------------------------------------------------

BROKEN_JOB = """
import os
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job

class Trap(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += not x.is_meta
        {trap}
        return self.weights(x)

def job():
    data = [(torch.full((4,), i / 64), torch.zeros(4)) for i in range(64)]
    return Job(layers=[Trap, Trap], loss=nn.MSELoss(reduction="sum"), dataset=data, optimizer={optimizer})
"""


def broken_job(
    directory: Path, *, trap: str = "pass", optimizer: str = "partial(torch.optim.SGD, lr=1e-3)"
) -> RunConfig:
    path = directory / "broken.py"
    path.write_text(BROKEN_JOB.format(trap=trap, optimizer=optimizer))
    return RunConfig(
        job=str(path),
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        steps=6,
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=PATIENT,
    )


def test_an_error_that_everybody_would_meet_ends_the_run(tmp_path: Path) -> None:
    ended = train_here(
        broken_job(tmp_path, trap="if self.calls > 7: raise ValueError('a bug of mine')"), tmp_path / "run"
    )
    assert ended.code == 1
    assert re.search(
        rf"ValueError: a bug of mine, at {tmp_path}/broken.py:\d+ in forward; see",
        ended.summary["reason"],
    )
    log = ended.summary["reason"].rpartition("; see ")[2]
    assert "raise ValueError('a bug of mine')" in Path(log).read_text()


def test_an_error_in_the_first_step_ends_the_run(tmp_path: Path) -> None:
    trap = "if self.calls > 1: raise ValueError('the second time')"  # the first time is before training
    ended = train_here(broken_job(tmp_path, trap=trap), tmp_path / "run")
    assert (ended.code, ended.steps) == (1, [])
    assert "failed in step 0: ValueError: the second time" in ended.summary["reason"]


def test_a_layer_that_cannot_be_run_at_all_is_named_before_a_worker_starts(tmp_path: Path) -> None:
    config = broken_job(tmp_path, trap="if self.calls: raise ValueError('always')")
    with pytest.raises(ConfigError, match=r"layer 0 \(Trap\) cannot be run on .* \(ValueError: always\)"):
        train_here(config, tmp_path / "run")


def test_an_error_of_one_worker_is_its_loss(tmp_path: Path) -> None:
    flag = tmp_path / "taken"
    trap = (
        f"if self.calls == 8:\n            try: os.close(os.open({str(flag)!r}, os.O_CREAT | os.O_EXCL))\n"
        "            except FileExistsError: pass\n            else: raise ValueError('cosmic ray')"
    )
    ended = train_here(broken_job(tmp_path, trap=trap), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    failure = the_failure(ended)
    assert failure.cause.startswith(f"ValueError: cosmic ray, at {tmp_path}/broken.py:")
    assert failure.noticed_by == "self"


def test_a_loss_that_is_no_number_ends_the_run_if_so_configured(tmp_path: Path) -> None:
    config = broken_job(tmp_path, optimizer="partial(torch.optim.SGD, lr=1e18)")
    stopping = config.model_copy(update={"health": Health(detect_slow=False, on_bad_step="stop")})
    ended = train_here(stopping, tmp_path / "run")
    assert ended.code == 1
    assert "also when it was computed again, first in the forward of micro-batch" in ended.summary["reason"]
    assert complete_checkpoints(ended.run.checkpoints)


# --- resuming, and being interrupted ---------------------------------------------------------------------------------


def test_a_run_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    first = train_here(small_config(tmp_path, steps=4), tmp_path / "run")
    assert complete_checkpoints(first.run.checkpoints) == [4]
    resumed = resume_here(first, steps=8, workers=2, parallel=Parallel(dp=1, pp=2))
    assert resumed.steps == list(range(8))
    again = resume_here(resumed, steps=12, workers=8, parallel=Parallel(dp=2, pp=4))
    assert_trained_as_if_nothing_failed(again)
    assert [record.workers for record in again.run.steps()] == [6] * 4 + [2] * 4 + [8] * 4
    assert [record.generation for record in again.run.steps()] == [1] * 4 + [2] * 4 + [3] * 4


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    ended = train_here(small_config(tmp_path, steps=200), tmp_path / "run", view=ScriptedView(at_step={3: interrupt}))
    assert ended.code == 130
    assert ended.summary["status"] == "interrupted"
    done = len(ended.steps)
    assert complete_checkpoints(ended.run.checkpoints) == [done]
    resumed = resume_here(ended, steps=done + 3)
    assert resumed.code == 0
    assert_trained_as_if_nothing_failed(replace(resumed))


def test_an_interrupt_in_an_outage_ends_the_run_after_it(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=200, failures=(fails(3, step=4),))
    view = ScriptedView(at_failure=interrupt)
    ended = train_here(config, tmp_path / "run", view=view)
    assert (ended.code, ended.lost) == (130, {3})
    assert complete_checkpoints(ended.run.checkpoints) == [len(ended.steps)]
    assert_as_the_plain_loop(ended)


def test_two_interrupts_end_the_run_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    ended = train_here(small_config(tmp_path, steps=200), tmp_path / "run", view=ScriptedView(at_step={3: twice}))
    assert ended.code == 130
    assert ended.summary["reason"] == "interrupted by the user"
    assert len(ended.steps) < 200
    assert_as_the_plain_loop(ended)


# --- injection into a live run ---------------------------------------------------------------------------------------


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
