"""Samples that other processes read ahead: in the order that is asked for, whatever happens to these processes."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from chameleon_ft.config import Batch, Loading, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.events.kinds import LoaderEnded
from chameleon_ft.job.job import Job
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.execution.micro_batches import DatasetReads, EvaluationReads, RunReads
from chameleon_ft.worker.loaders import PrefetchedReads, _load
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_job
from tests.worker.test_slow_reads import plain_losses

BATCH, SAMPLES = Batch(micro_batches=4, micro_batch_size=2), 48


class Numbers:
    """Samples of random numbers; reading some may fail, end the loader or wait."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.before: Callable[[int], None] = lambda index: None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        self.before(index)
        return torch.full((3,), random.random()), torch.tensor(index)


class EndError(BaseException):
    """The end of a loader."""


@dataclass
class Loaders:
    """Loaders in threads, which read a dataset of their own."""

    job: Job
    reads: RunReads | None = None
    sockets: list[socket.socket] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def start(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.sockets += [ours, theirs]
        started = threading.Event()

        def load() -> None:
            started.set()
            with suppress(EndError, OSError):
                _load(theirs, self.reads or DatasetReads(self.job, BATCH, seed=7))
            theirs.close()

        self.threads.append(threading.Thread(target=load, daemon=True))
        self.threads[-1].start()
        started.wait()
        return ours

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        self.waited.append(doing)
        yield


def job_of(dataset: Numbers) -> Job:
    linear = partial(torch.nn.Linear, 3, 1)
    return Job(layers=[linear], loss=torch.sub, dataset=dataset, optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    made = Loaders(job_of(Numbers()))
    yield made
    for each in made.sockets[::2]:
        each.close()
    for thread in made.threads:
        thread.join()


def always(wanted: list[int]) -> Callable[[int], list[int]]:
    """Return a function of the step that returns these micro-batches."""
    return lambda step: wanted


def prefetched(loaders: Loaders, *, count: int = 2, here: Numbers | None = None, **changed: object) -> PrefetchedReads:
    fields = {
        "reads": DatasetReads(job_of(here or Numbers()), BATCH, seed=7),
        "start": loaders.start,
        "progress": lambda number: "",
        "waiting": loaders.waiting,
        "check": lambda: None,
        "ended": lambda loader, doing: loaders.ended.append(loader),
        "count": count,
        "prefetch": 2,
        "steps": 20,
    }
    return PrefetchedReads(**{**fields, **changed})  # type: ignore[arg-type]


def wait_until_ready(reads: PrefetchedReads) -> None:
    while not all(loader.is_ready for loader in reads._loaders):
        reads._collect(0.01)


def wait(event: threading.Event) -> None:
    event.wait()


def assert_reads(reads: PrefetchedReads, keys: list[tuple[int, int]]) -> None:
    plain = DatasetReads(job_of(Numbers()), BATCH, seed=7)
    for key in keys:
        found, expected = reads.read(*key), plain.read(*key)
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.equal(found.targets, expected.targets)
        assert found.digest == expected.digest


def test_samples_are_those_of_a_plain_read_whatever_was_expected(loaders: Loaders) -> None:
    reads = prefetched(loaders)
    for step, wanted in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [2, 0], [], [1, 3])):
        reads.expect(step, wanted, always(wanted))
        if not step:
            wait_until_ready(reads)
        assert_reads(reads, [(step, each) for each in wanted])
    assert_reads(reads, [(0, 1), (9, 2)])


def test_held_out_samples_are_read_ahead_of_each_evaluation(loaders: Loaders) -> None:
    config = RunConfig(batch=BATCH, seed=7)

    def reads_of(training: Numbers, held_out: Numbers) -> RunReads:
        job = replace(job_of(training), evaluation=held_out)
        return RunReads(job, config, reading=lambda doing: nullcontext())

    here, there = [Numbers(), Numbers()], [Numbers(), Numbers()]
    loaders.reads = reads_of(*there)
    reads, wanted = prefetched(loaders, reads=reads_of(*here)), [0, 1, 2, 3]
    evaluated, numbers = EvaluationReads(reads), range(-(-SAMPLES // BATCH.micro_batch_size) + 1)
    for step in range(3):
        reads.expect(step, wanted, always(wanted))
        wait_until_ready(reads)
        assert_reads(reads, [(step, each) for each in wanted])
        evaluated.expect(step, numbers, lambda step: ())
        found = [index for each in numbers for index in evaluated.read(step, each).targets.tolist()]
        assert found == [min(each, SAMPLES - 1) for each in range(len(found))]
    assert [each.read for each in here] == [[], []], "all were read by loaders"
    assert len(there[1].read) == 3 * len(found)


def test_each_sample_is_read_once_and_only_so_many_steps_ahead(loaders: Loaders) -> None:
    dataset, here = Numbers(), Numbers()
    loaders.job = job_of(dataset)
    reads = prefetched(loaders, count=1, here=here, prefetch=1, steps=5)
    for step in range(5):
        reads.expect(step, [0, 2], lambda step: [0, 2])
        wait_until_ready(reads)
        assert_reads(reads, [(step, 0), (step, 2)])
        assert len(dataset.read) <= 4 * (step + 2)
    order = SampleOrder(SAMPLES, 7)
    assert dataset.read == [order.ids(step, 8)[place] for step in range(5) for place in (0, 1, 4, 5)]
    assert not here.read


def test_a_rank_reads_itself_while_no_loader_is_ready(loaders: Loaders) -> None:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for ours, _ in pairs:
        ours.setblocking(False)
    reads = prefetched(loaders, start=lambda number: pairs[number][0])
    reads.expect(0, [0, 1], lambda step: [0, 1])
    assert_reads(reads, [(0, 0), (0, 1)])
    for each in (end for pair in pairs for end in pair):
        each.close()


def test_no_loader_can_be_started(loaders: Loaders) -> None:
    def start(number: int) -> socket.socket:
        raise OSError("the server has ended")

    reads = prefetched(loaders, start=start)
    reads.expect(0, [0, 1], lambda step: [0, 1])
    assert_reads(reads, [(0, 0), (0, 1)])


def test_a_loader_that_ends_is_replaced_and_its_reads_are_done_again(loaders: Loaders) -> None:
    dataset = Numbers()
    loaders.job = job_of(dataset)
    fatal = set(SampleOrder(SAMPLES, 7).ids(1, 8)[:3])

    def before(index: int) -> None:
        if index in fatal:
            fatal.remove(index)
            raise EndError

    dataset.before = before
    reads = prefetched(loaders)
    for step in range(4):
        reads.expect(step, [0, 1, 2, 3], lambda step: [0, 1, 2, 3])
        wait_until_ready(reads)
        assert_reads(reads, [(step, each) for each in range(4)])
    assert not fatal
    assert len(loaders.threads) == 5
    assert len(loaders.ended) == 3


def test_a_micro_batch_that_ends_each_loader_is_an_error(loaders: Loaders) -> None:
    dataset = Numbers()
    loaders.job = job_of(dataset)
    fatal = SampleOrder(SAMPLES, 7).ids(0, 8)[2]

    def before(index: int) -> None:
        if index == fatal:
            raise EndError

    dataset.before = before
    reads = prefetched(loaders, count=1)
    reads.expect(0, [0, 1, 2], lambda step: [])
    wait_until_ready(reads)
    assert_reads(reads, [(0, 0)])
    with pytest.raises(RuntimeError, match="loaders in a row have ended"):
        reads.read(0, 1)
    assert_reads(reads, [(0, 2)])


def test_a_sample_that_a_loader_fails_to_read_is_read_here(
    loaders: Loaders, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, here = Numbers(), Numbers()
    loaders.job = job_of(dataset)
    bad = SampleOrder(SAMPLES, 7).ids(0, 8)[3]

    def before(index: int) -> None:
        if index == bad:
            raise OSError("input/output error")

    dataset.before = before
    reads = prefetched(loaders, here=here)
    reads.expect(0, [0, 1], lambda step: [])
    wait_until_ready(reads)
    assert_reads(reads, [(0, 0), (0, 1)])
    assert bad in here.read
    assert "input/output error" in capsys.readouterr().err
    here.before = before
    reads.expect(0, [1], lambda step: [])
    with pytest.raises(OSError, match="input/output error"):
        reads.read(0, 1)


def test_a_wait_ends_with_the_generation(loaders: Loaders) -> None:
    dataset, go_on = Numbers(), threading.Event()
    loaders.job = job_of(dataset)

    def check() -> None:
        raise CommunicationError(None, "the generation is over")

    reads = prefetched(loaders, count=1, check=check, progress=lambda number: "reading sample 5")
    reads.expect(0, [0], lambda step: [])
    dataset.before = lambda index: wait(go_on)
    wait_until_ready(reads)
    with pytest.raises(CommunicationError):
        reads.read(0, 0)
    assert loaders.waited == ["reading sample 5"]
    go_on.set()
    reads.check = lambda: None
    assert_reads(reads, [(0, 0)])


JOB = """
import os
import random
import signal
import time
from pathlib import Path
import torch
from chameleon_ft.data import SampleOrder
from tests.worker.plainly import next_tokens

KILLS, RAISES = SampleOrder(48, 0).ids(7, 8)[5], SampleOrder(48, 0).ids(8, 8)[2]

def once(name):
    try:
        os.close(os.open(Path({folder!r}, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

class Crops:
    def __init__(self):
        self.cannot_be_pickled = lambda: None

    def __len__(self):
        return 48

    def __getitem__(self, index):
        name = Path("/proc/self/comm").read_text()
        if name.startswith("loader "):
            once("begun")
            if index == KILLS and once("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if index == RAISES and once("raised"):
                raise OSError("input/output error")
        elif name.startswith("worker") and not Path({folder!r}, "begun").exists():
            time.sleep(0.2)
        tokens = (random.randrange(100) + torch.arange(9)) % 16
        return tokens[:-1], tokens[1:]

def job():
    return next_tokens(Crops())
"""


@pytest.mark.multiprocess
def test_loaders_that_are_killed_or_fail_cost_no_worker_and_no_sample(tmp_path: Path) -> None:
    file, steps = tmp_path / "crops.py", 12
    file.write_text(JOB.format(folder=str(tmp_path)))
    ended = train_job(
        file,
        tmp_path / "run",
        steps=steps,
        loading=Loading(processes=2),
        failures=(fails(3, step=10, phase="backward"),),
    )
    assert ended.lost == {3}, "by its own failure"
    assert (tmp_path / "killed").exists()
    assert (tmp_path / "raised").exists()
    logs = "".join(path.read_text() for path in ended.run.logs.glob("worker-*.log"))
    assert "another one takes its place" in logs
    (event,) = (event for event in ended.run.events() if isinstance(event, LoaderEnded))
    assert f"reading sample {SampleOrder(48, 0).ids(7, 8)[5]} " in event.doing
    assert "reads the micro-batch once more itself" in logs
    assert_trained_as_if_nothing_failed(ended)
    losses = [json.loads(line)["loss"] for line in ended.run.metrics_file.read_text().splitlines()]
    assert losses == pytest.approx(plain_losses(ended.run.config(), steps=steps), rel=1e-5)
