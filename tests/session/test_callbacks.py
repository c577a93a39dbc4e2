"""Callbacks: which records they get, and what their errors do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from chameleon_ft import Callback, ConfigError, EarlyStop, RunConfig, Session, TrainConfig
from chameleon_ft.errors import RunFailedError
from chameleon_ft.events.kinds import CheckpointComplete, Hint
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import Evaluation, FailureRecord, RunStatus, StepRecord
from chameleon_ft.session.callback_process import load_callbacks
from chameleon_ft.session.callbacks import callbacks_beside
from chameleon_ft.session.configuration import with_absolute_paths
from chameleon_ft.session.session import Callbacks
from chameleon_ft.storage.files import RunDirectory
from tests.golden import refused


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
        self.evaluations: list[Evaluation] = []

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
    callbacks.add(step_record(1))
    callbacks.call(run)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"], "once for each kind of record"


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
    for step, loss in enumerate(losses):
        run.evaluations.append(evaluation(loss, step))
        early.on_evaluate(run.session, run.evaluations[-1])
    assert run.stops == stops


def test_evaluations_before_a_resume_count_and_later_ones_than_that_which_is_told_do_not() -> None:
    run = Run()
    run.evaluations = [evaluation(loss, step) for step, loss in enumerate([1.0, 1.1, 1.2, 0.9])]
    for step, stops in ((1, 0), (3, 0), (2, 1)):
        EarlyStop(patience=2).on_evaluate(run.session, run.evaluations[step])
        assert run.stops == stops


def test_a_run_is_stopped_when_a_metric_does_not_rise() -> None:
    run, early = Run(), EarlyStop(patience=2, metric="max accuracy")
    for step, accuracy in enumerate([0.1, 0.5, 0.4, 0.6, 0.6, 0.2]):
        assert not run.stops
        run.evaluations.append(replace(evaluation(1.0 - step / 10, step), metrics={"accuracy": accuracy}))
        early.on_evaluate(run.session, run.evaluations[-1])
    assert run.stops == 1
    with pytest.raises(ConfigError):
        EarlyStop(patience=2, metric="acuracy").on_evaluate(run.session, run.evaluations[-1])


CALLBACKS = """
from pathlib import Path

from chameleon_ft import Callback, EarlyStop


class Noting(Callback):
    def __init__(self, config, name="told"):
        self.file = config.output_dir / name

    def note(self, text):
        with self.file.open("a") as file:
            file.write(text + "\\n")

    def on_step(self, run, step):
        self.note(f"step {step.number}")
        if step.number == 2:
            raise ValueError("not this step")

    def on_end(self, run, status):
        self.note(status)


def callback():
    return [EarlyStop(1), EarlyStop(2)]


def none(config):
    return 3


def wrong():
    raise KeyError("here")
"""


def callbacks_file(folder: Path) -> Path:
    file = folder / "my_callbacks.py"
    file.write_text(CALLBACKS)
    return file


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", TrainConfig(output_dir=tmp_path / "run"))


def test_functions_and_classes_make_callbacks(tmp_path: Path) -> None:
    file = callbacks_file(tmp_path)
    named = (f"{file}", f"{file}:Noting(name='other')", f"{file}:Noting", "chameleon_ft:EarlyStop(patience=2)")
    made = load_callbacks(RunConfig(callbacks=named, output_dir=tmp_path))
    assert [type(each).__name__ for each in made] == ["EarlyStop", "EarlyStop", "Noting", "Noting", "EarlyStop"]
    assert [made[2].file.name, made[3].file.name] == ["other", "told"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["{}:Noting(", "{}:Noting(1)", "{}:Noting(name=open('x'))", "{}:Absent", "{}:none", "{}:wrong", "{}x", "EarlyStop"],
)
def test_wrong_settings_of_callbacks_are_refused(tmp_path: Path, text: str) -> None:
    config = RunConfig(callbacks=(text.format(callbacks_file(tmp_path)),), output_dir=tmp_path)
    with refused(ConfigError):
        load_callbacks(with_absolute_paths(config))


@pytest.mark.multiprocess
def test_a_process_beside_the_run_calls_them_and_an_error_ends_the_run_if_asked_to(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    (file := run.metrics_file).write_text(f"{json.dumps(step_record(0).to_json())}\n")
    named = (f"{callbacks_file(run.path)}:Noting",)
    config = run.config().model_copy(update={"callbacks": named, "on_callback_error": "stop"})
    with pytest.raises(RunFailedError), callbacks_beside(config, run), file.open("a") as metrics:
        metrics.writelines(f"{json.dumps(step_record(step).to_json())}\n" for step in (1, 2, 3))
    assert (run.path / "told").read_text().split("\n")[:2] == ["step 1", "step 2"]
    assert "not this step" in capfd.readouterr().err


def test_wrong_callbacks_are_refused() -> None:
    for wrong in ([print], [Noting]):
        with pytest.raises(ConfigError):
            Session(callbacks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Session(on_callback_error="ignore")  # type: ignore[arg-type]
    for patience, min_delta in ((0, 0.0), (1, -1.0)):
        with pytest.raises(ConfigError):
            EarlyStop(patience, min_delta=min_delta)
