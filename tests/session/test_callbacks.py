"""Callbacks: which records they get, and what their errors do."""

from __future__ import annotations

from typing import Any, cast

import pytest

from chameleon_ft import Callback, ConfigError, EarlyStop, Session
from chameleon_ft.events.kinds import CheckpointComplete, Hint
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import Evaluation, FailureRecord, RunStatus, StepRecord
from chameleon_ft.session.session import Callbacks


def evaluation(loss: float | None, step: int = 0) -> Evaluation:
    return Evaluation(step=step, loss=loss, samples=1, terms=1.0, seconds=0.1, generation=1)


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1, step_s=0.1, workers=1, generation=1, time=1.0
    )


FAILURE = FailureRecord(
    worker=1,
    step=2,
    cause="killed",
    noticed_by="child",
    detect_s=0.1,
    stop_s=0.1,
    decide_s=0.1,
    regroup_s=0.1,
    stall_s=0.4,
    policy="reroute",
    action="others take over",
    generation=2,
    resume_step=2,
)


class Run:
    """As much of a session as callbacks use here."""

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1

    @property
    def session(self) -> Session:
        return cast("Session", self)


class Noting(Callback):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, run: Session, step: StepRecord) -> None:
        self.told.append(("step", step.number))

    def on_evaluate(self, run: Session, evaluation: Evaluation) -> None:
        self.told.append(("evaluate", evaluation.loss))

    def on_checkpoint(self, run: Session, checkpoint: CheckpointComplete) -> None:
        self.told.append(("checkpoint", checkpoint.step))

    def on_incident(self, run: Session, failure: FailureRecord) -> None:
        self.told.append(("incident", failure.worker))

    def on_end(self, run: Session, status: RunStatus) -> None:
        self.told.append(("end", status))


class Failing(Callback):
    def on_step(self, run: Session, step: StepRecord) -> None:
        raise ValueError("not this step")

    def on_end(self, run: Session, status: RunStatus) -> None:
        raise ValueError("no end")


RECORDS: list[Record] = [step_record(0), evaluation(2.0), CheckpointComplete(step=1), Hint(message="a hint"), FAILURE]


def test_callbacks_get_the_records_in_their_order_and_an_error_of_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noting, run = Noting(), Run().session
    callbacks = Callbacks([Failing(), noting], on_error="warn")
    for record in RECORDS:
        callbacks.add(record)
    callbacks.call(run)
    callbacks.end(run, "finished", raises=True)
    assert noting.told == [("step", 0), ("evaluate", 2.0), ("checkpoint", 1), ("incident", 1), ("end", "finished")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_an_error_of_a_callback_is_raised_if_asked_for_but_replaces_no_other() -> None:
    run = Run().session
    callbacks = Callbacks([Failing()], on_error="stop")
    callbacks.add(step_record(0))
    with pytest.raises(ValueError, match="not this step"):
        callbacks.call(run)
    callbacks.end(run, "failed", raises=False)
    with pytest.raises(ValueError, match="no end"):
        Callbacks([Failing()], on_error="stop").end(run, "finished", raises=True)


def test_a_callback_that_reads_the_run_is_not_called_inside_itself() -> None:
    seen: list[int] = []

    class Reading(Callback):
        def on_step(self, run: Session, step: StepRecord) -> None:
            if step.number == 0:
                callbacks.add(step_record(1))
                callbacks.call(run)
                assert seen == []
            seen.append(step.number)

    callbacks = Callbacks([Reading()], on_error="stop")
    callbacks.add(step_record(0))
    callbacks.call(Run().session)
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([3.0, 2.0, 2.5, 1.9, 2.0, 2.1], 1),
        ([3.0, 2.0, 2.5, 1.9, 2.0], 0),
        ([3.0, 2.95, 2.94], 1),
        ([None, None], 1),
        ([3.0, 3.1, 3.2, 3.3, 3.4], 1),
    ],
)
def test_a_run_is_stopped_once_when_the_loss_does_not_fall(losses: list[float | None], stops: int) -> None:
    run, early = Run(), EarlyStop(patience=2, min_delta=0.1 if losses[1] == 2.95 else 0.0)
    for loss in losses:
        early.on_evaluate(run.session, evaluation(loss))
    assert run.stops == stops


def test_wrong_callbacks_are_refused() -> None:
    for wrong in ([print], [Noting]):
        with pytest.raises(ConfigError):
            Session(callbacks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Session(on_callback_error="ignore")  # type: ignore[arg-type]
    for patience, min_delta in ((0, 0.0), (1, -1.0)):
        with pytest.raises(ConfigError):
            EarlyStop(patience, min_delta=min_delta)
