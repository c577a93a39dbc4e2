"""Checkpoints and records in an object store: a run outlives its machine, and a store that fails stops nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Checkpoint, Health, Optimizer, Parallel, Recovery, Store
from chameleon_ft.events.kinds import CheckpointFailed
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import View
from chameleon_ft.storage.stores import checkpoint_storage
from tests.configs import unhurried, write_config
from tests.harness import (
    Command,
    Ended,
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    fails,
    resume_here,
    small_config,
    train_here,
)
from tests.s3 import BUCKET, S3, s3_server

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+\d+\s"  # the line of a step
TWO: Mapping[str, Any] = {"workers": 2, "parallel": Parallel(dp=1, pp=2)}
UNHURRIED: Mapping[str, Any] = {**TWO, "failures": unhurried(2, speed=0.25)}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


def train_on(training: Command) -> None:
    """Let a run train for some steps, and read their lines."""
    for _ in range(10):
        training.read_until(STEP)


# --- a store that works ----------------------------------------------------------------------------------------------


def test_a_run_goes_back_to_the_checkpoints_in_its_store(tmp_path: Path) -> None:
    store = Store(url=f"file://{tmp_path}/store/run")
    config = small_config(
        tmp_path,
        steps=30,
        store=store,
        checkpoint=Checkpoint(every=5, keep=2),
        recovery=Recovery(policy="restart"),
        health=Health(detect_slow=False, check_every=0),  # so that no more checkpoints are kept
        failures=(fails(5, step=12),),
        workers=6,
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    assert ended.lost == {5}
    (failure,) = ended.failures
    assert failure.resume_step in (5, 10)
    storage = checkpoint_storage(config, ended.run)
    # One that is due while the one before is still being written is left out.
    written = [*dict.fromkeys(event["step"] for event in ended.events("checkpoint"))]
    assert written[-1] == 30
    assert complete_checkpoints(storage) == written[-2:]
    assert list(ended.run.checkpoints.iterdir()) == [], "nothing is kept on this machine"
    assert_as_the_plain_loop(ended)
    copied = RunDirectory(tmp_path / "store" / "run")
    assert copied.metrics_file.read_text() == ended.run.metrics_file.read_text()
    assert '"finished"' in copied.summary_file.read_text()
    resumed = resume_here(ended, steps=35, workers=4, parallel=Parallel(dp=2, pp=2))
    assert resumed.steps[-5:] == list(range(30, 35))
    assert_as_the_plain_loop(resumed)


def test_a_run_goes_on_elsewhere_from_s3_alone(tmp_path: Path, s3: S3) -> None:
    url = f"s3://{BUCKET}/elsewhere"
    config = small_config(
        tmp_path,
        steps=100_000,
        store=Store(url=url),
        checkpoint=Checkpoint(every=25),
        optimizer=Optimizer(lr=1e-3, min_lr=1e-3, warmup_steps=2),  # does not depend on the number of steps
        **UNHURRIED,
    )
    file = write_config(config, tmp_path)
    with Command("train", file, "--output-dir", tmp_path / "run", environ=s3.environ) as training:
        while len(s3.complete("elsewhere")) < 2:
            train_on(training)
        for process in training.session():
            process.kill()
        training.wait()
    lost = RunDirectory((tmp_path / "run").rename(tmp_path / "lost"))
    (*_, before, newest), total = s3.complete("elsewhere"), len(lost.steps()) + 10
    damaged = f"elsewhere/checkpoints/step-{newest:08}/layer-0000"
    s3.change(f"{damaged}.tar")
    other = RunDirectory(tmp_path / "other")
    arguments = ("--resume", url, "--output-dir", other.path, "--steps", total)
    with Command("train", *arguments, environ=s3.environ) as resumed:
        assert resumed.wait() == 0, resumed.printed
    ended = Ended(0, other)
    (unreadable,) = ended.events("checkpoint_unreadable")
    assert unreadable["step"] == newest
    assert f"s3://{BUCKET}/{damaged}" in unreadable["error"]
    again = list(range(before, total))
    assert ended.steps[-len(again) :] == again
    assert_as_the_plain_loop(ended, steps=newest + 10)
    assert s3.complete("elsewhere")[-1] == total


# --- a store that does not -------------------------------------------------------------------------------------------


def test_a_store_that_stalls_delays_no_step_and_the_next_checkpoint_is_complete(tmp_path: Path, s3: S3) -> None:
    store = Store(url=f"s3://{BUCKET}/stalled", timeout_s=8.0)
    config = small_config(tmp_path, steps=100_000, store=store, checkpoint=Checkpoint(every=20), **UNHURRIED)
    run = RunDirectory(tmp_path / "run")
    ended = Ended(130, run)
    with Command("train", write_config(config, tmp_path), "--output-dir", run.path, environ=s3.environ) as training:
        while not s3.complete("stalled"):
            train_on(training)
        s3.proxy.hold()
        said = training.read_until(r"no complete one of step (\d+).* does not answer for 8")
        failed, at = int(said[1]), len(run.steps())
        assert at > failed, "steps go on while it is written"
        while len(run.steps()) < at + 20:
            train_on(training)
        s3.proxy.release()
        while not any(written["step"] > failed for written in ended.events("checkpoint")):
            train_on(training)
        training.signal(signal.SIGINT)
        assert training.wait() == 130, training.printed
    assert ended.failures == []
    assert f"s3://{BUCKET}/stalled" in said.string
    assert s3.complete("stalled")[-1] == len(ended.steps)


@dataclass
class RemovingView(View):
    """Takes away the folder of a store at one step, and gives it back when a checkpoint has failed; shows nothing."""

    folder: Path
    at: int
    said: str = ""

    def show(self, record: Record) -> None:
        if isinstance(record, StepRecord) and record.step == self.at:
            self.folder.mkdir(exist_ok=True)
            self.folder.rename(self.folder.with_name("away"))
            self.folder.write_text("in the way")
        elif isinstance(record, CheckpointFailed) and "times" in record.error and not self.said:
            self.said = record.message or ""
            self.folder.unlink()
            self.folder.with_name("away").rename(self.folder)


def test_a_store_that_fails_stops_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    view = RemovingView(folder, at=15)
    store = Store(url=f"file://{folder}/run")
    config = small_config(tmp_path, steps=60, store=store, checkpoint=Checkpoint(every=20, keep=9), **TWO)
    ended = train_here(config, tmp_path / "run", view=view)
    assert_trained_as_if_nothing_failed(ended)
    assert ended.failures == []
    assert f"file://{folder}/run/checkpoints" in view.said
    assert complete_checkpoints(checkpoint_storage(config, ended.run))[-1] == 60


def test_a_store_that_refuses_is_found_before_anything_starts(tmp_path: Path) -> None:
    config = write_config(small_config(tmp_path, store=Store(url="s3://nowhere/run"), **TWO), tmp_path)
    with s3_server() as s3:
        for change, expected in (
            ({}, "there is no such bucket"),
            ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "credentials"),
        ):
            with Command(
                "train", config, "--output-dir", tmp_path / "run", environ={**s3.environ, **change}
            ) as refused:
                assert refused.wait() == 2, refused.printed
            assert expected in refused.printed
            assert "store.url = s3://nowhere/run" in refused.printed
            assert "Traceback" not in refused.printed
        s3.refuse_all()
        with Command("train", config, "--output-dir", tmp_path / "run", environ=s3.environ) as refused:
            assert refused.wait() == 2, refused.printed
        assert "is refused" in refused.printed
        assert "check the credentials" in refused.printed
    assert not (tmp_path / "run").exists()
