"""Real runs in which user code holds the interpreter's lock, takes long, or hangs: who is lost, and what is said."""

from __future__ import annotations

import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Batch, Loading, Parallel, Recovery, RunConfig, Timeouts
from tests.harness import Ended, assert_trained_as_if_nothing_failed, train_here

pytestmark = pytest.mark.multiprocess

# A place is marked by the comment at its end, and hangs once it has been reached often enough.
JOB = """
import ctypes, os, threading, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
from chameleon_ft import Job

hold_the_lock = ctypes.PyDLL(None).sleep  # unlike CDLL, it keeps the lock of the interpreter
lock = threading.Lock()
lock.acquire()
calls = {{}}


def once(place, after):
    if not Path("/proc/self/comm").read_text().startswith("worker"):
        return False  # the job is examined before the run
    calls[place] = calls.get(place, 0) + 1
    if place != {place!r} or calls[place] != after:
        return False
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(4, 4)

    def forward(self, x):
        if not x.is_meta and once("forward", {after}):
            {hang}  # here: forward
        return Both.apply(self.weights(x))


class Both(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        if once("backward", {after}):
            {hang}  # here: backward
        return gradient


class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if once("dataset", {after}):
            {hang}  # here: dataset
        return torch.full((4,), index / 64), torch.zeros(4)


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if once("optimizer", {after}):
            {hang}  # here: optimizer
        return super().step(closure)


def loss(output, targets):
    if not output.is_meta and once("loss", {after}):
        {hang}  # here: loss
    return ((output - targets) ** 2).sum()


def job():
    return Job(layers=[Layer, Layer], loss=loss, dataset=Data(), optimizer=partial(Optimizer, lr=1e-3))
"""
QUICK = Timeouts(
    heartbeat_timeout_s=2.0,
    watchdog_min_s=4.0,
    watchdog_factor=3.0,
    collective_timeout_s=6.0,
    sample_read_s=6.0,
    rendezvous_s=60.0,
    first_step_s=60.0,
)


def train(directory: Path, place: str, hang: str, *, after: int, timeouts: Timeouts = QUICK) -> Ended:
    """Train two pipelines of two stages, one worker of which runs the statement `hang` at a place, once."""
    path = directory / "job.py"
    path.write_text(JOB.format(place=place, hang=hang, after=after, flag=str(directory / "taken")))
    config = RunConfig(
        job=str(path),
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        steps=8,
        batch=Batch(micro_batches=4, micro_batch_size=2),
        timeouts=timeouts,
        loading=Loading(processes=0),
        recovery=Recovery(policy="reroute"),
    )
    ended = train_here(config, directory / "run")
    assert (directory / "taken").exists(), "the place was reached"
    return ended


def the_line(directory: Path, place: str) -> str:
    """FILE:LINE of a place."""
    lines = (directory / "job.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# here: {place}")]
    return f"{directory / 'job.py'}:{number}"


# --- slow, and not hung ----------------------------------------------------------------------------------------------


def test_who_holds_the_lock_of_the_interpreter_for_longer_than_a_heartbeat_is_not_lost(tmp_path: Path) -> None:
    timeouts = QUICK.model_copy(update={"watchdog_min_s": 30.0, "collective_timeout_s": 40.0})
    ended = train(tmp_path, "forward", "hold_the_lock(5)", after=7, timeouts=timeouts)
    assert_trained_as_if_nothing_failed(ended)
    assert not ended.failures


# --- hung ------------------------------------------------------------------------------------------------------------


def test_who_holds_the_lock_of_the_interpreter_for_ever_is_hung(tmp_path: Path) -> None:
    ended = train(tmp_path, "forward", "hold_the_lock(1000)", after=7)
    assert_trained_as_if_nothing_failed(ended)
    (failure,) = ended.failures
    assert failure.noticed_by == "watchdog"
    assert failure.cause.startswith("hung: its process lives, but has not answered for ")
    hang = the_hang(ended)
    assert hang["place"] == f"{the_line(tmp_path, 'forward')} in forward"
    assert hang["doing"].startswith("in the forward of micro-batch ")
    assert failure.cause.endswith(f"; {hang['doing']}, at {hang['place']}")


def the_hang(ended: Ended) -> dict[str, Any]:
    """The evidence of the only hang of a run."""
    (hang,) = ended.events("hang")
    (failure,) = ended.failures
    assert hang["worker"] == failure.worker
    return hang


WAYS = {
    "asleep": "time.sleep(1000)",
    "computing": "while True: pass",
    "a lock": "lock.acquire()",
    "holding the lock of the interpreter": "hold_the_lock(1000)",
}
PLACES = ["forward", "backward", "dataset", "optimizer", "loss"]
_random = random.Random(18)
# Every place and every way, at a drawn moment after the first step.
DRAWN = [(place, way, _random.randint(9, 12)) for place, way in zip(PLACES, cycle(WAYS), strict=False)]


@pytest.mark.parametrize(("place", "way", "after"), DRAWN)
def test_the_line_in_which_a_worker_hangs(tmp_path: Path, place: str, way: str, after: int) -> None:
    # The optimizer is called once in a step, the others at least twice, and the dataset for every sample.
    after = {"optimizer": 3, "dataset": 2 * after}.get(place, after)
    ended = train(tmp_path, place, WAYS[way], after=after)
    assert ended.code == 0, ended.summary["reason"]
    hang = the_hang(ended)
    assert hang["place"].startswith(f"{the_line(tmp_path, place)} in "), hang
    assert hang["process"].startswith("state ")
    (failure,) = ended.failures
    assert failure.noticed_by == "watchdog"
    text = (ended.run.incidents / hang["file"]).read_text()
    assert the_line(tmp_path, place).partition(":")[0] in text
    assert hang["doing"].removeprefix("in ") in text
