"""Samples that other processes read ahead: in the order that is asked for, whatever happens to these processes."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import struct
import threading
import time
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
from chameleon_ft.worker import shared_reads
from chameleon_ft.worker.communicators.base import CommunicationError
from chameleon_ft.worker.execution.micro_batches import DatasetReads, EvaluationReads, RunReads
from chameleon_ft.worker.loaders import PrefetchedReads, _load
from chameleon_ft.worker.shared_reads import SharedReads, pack, unpack
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_job
from tests.worker.test_slow_reads import plain_losses

BATCH, SAMPLES = Batch(micro_batches=4, micro_batch_size=2), 48


class Numbers:
    """Samples of random numbers; reading some may fail, end the loader or wait."""

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.read: list[int] = []
        self.before: Callable[[int], None] = lambda index: None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        self.before(index)
        return torch.full((self.width,), random.random()), torch.tensor(index)


class EndError(BaseException):
    """The end of a loader."""


@dataclass
class Loaders:
    """Loaders in threads, which read a dataset of their own."""

    job: Job
    reads: RunReads | None = None
    shared: bytes = b""
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
                _load(
                    theirs,
                    self.reads or DatasetReads(self.job, BATCH, seed=7),
                    SharedReads(self.shared or os.urandom(8)),
                )
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
    assert len(there[1].read) <= 2 * len(found), "each loader holds what it has read for the next evaluation"


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


def _read_shared(results: socket.socket, dataset: Numbers, *, step: int, slow_s: float) -> None:
    """Act as the loader of a rank that wants a step: send what it gets, and which samples this process has read."""
    dataset.before = lambda index: time.sleep(slow_s)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(
        target=_load, args=(theirs, DatasetReads(job_of(dataset), BATCH, seed=7), SharedReads(b"run"))
    )
    thread.start()
    assert ours.recv(9) == b"ready"
    wanted = [(step, each) for each in range(BATCH.micro_batches)]
    ours.send(struct.pack("<9q", 0, *itertools.chain.from_iterable(wanted)))
    found = dict(unpack(*socket.recv_fds(ours, 1 << 17, 1)[:2]) for _ in wanted)
    for read in found.values():
        # No other rank sees this.
        read.inputs.add_(1)
    results.send(pickle.dumps(({key: read.digest for key, read in found.items()}, dataset.read)))
    results.recv(1)
    ours.close()
    thread.join()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give loaders a board of their own, without places that this process has taken for other tests."""
    board = os.memfd_create("samples of a test")
    monkeypatch.setattr(shared_reads, "_BOARD", board)
    os.ftruncate(board, 1 << 22)
    yield
    os.close(board)


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("width", [3, 5000])
def test_loaders_of_several_ranks_read_each_sample_once_but_those_that_workers_compare(width: int) -> None:
    dataset, pairs = Numbers(width), [socket.socketpair() for _ in range(3)]
    processes = [
        multiprocessing.get_context("fork").Process(
            target=_read_shared, args=(theirs, dataset), kwargs={"step": 3, "slow_s": 0.02}
        )
        for _, theirs in pairs
    ]
    for (_, theirs), process in zip(pairs, processes, strict=True):
        process.start()
        theirs.close()
    digests, read = zip(*(pickle.loads(ours.recv(1 << 16)) for ours, _ in pairs), strict=True)
    for (ours, _), process in zip(pairs, processes, strict=True):
        ours.send(b"x")
        ours.close()
        process.join()
    plain = DatasetReads(job_of(Numbers(width)), BATCH, seed=7)
    assert list(digests) == 3 * [{(3, each): plain.read(3, each).digest for each in range(BATCH.micro_batches)}]
    size = BATCH.micro_batches * BATCH.micro_batch_size
    ids = SampleOrder(SAMPLES, 7).ids(3, size)
    compared = 3 * list(ids[: BATCH.micro_batch_size])
    assert sorted(index for each in read for index in each) == sorted([*compared, *ids[BATCH.micro_batch_size :]])


@pytest.mark.usefixtures("board")
def test_a_loader_that_may_not_open_what_another_one_holds_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    holder = os.fork()
    if not holder:
        shared = SharedReads(b"run")
        shared.claim((0, 1))
        shared.hold(pack(torch.ones(5000)))
        os.write(theirs, b"held")
        signal.pause()
    try:
        assert os.read(ours, 4) == b"held"
        shared = SharedReads(b"run")
        found = shared.find((0, 1))
        assert found is not None
        assert torch.equal(unpack(found.message, found.files), torch.ones(5000))
        assert not shared.claim((0, 1))

        def refuse(*_: object) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "open", refuse)
        assert shared.find((0, 1)) is None
        assert shared.claim((0, 1))
        monkeypatch.undo()
    finally:
        os.close(ours)
        os.close(theirs)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


@pytest.mark.usefixtures("board")
def test_what_a_loader_reads_that_does_not_go_on_is_read_by_another_one(loaders: Loaders) -> None:
    stopped = os.fork()
    if not stopped:
        for number in range(1, BATCH.micro_batches):
            SharedReads(b"stopped").claim((0, number))
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitid(os.P_PID, stopped, os.WSTOPPED)
    try:
        loaders.shared = b"stopped"
        reads, wanted = prefetched(loaders, count=1), list(range(BATCH.micro_batches))
        assert not SharedReads(b"stopped").claim((0, 1))
        reads.expect(0, wanted, always([]))
        wait_until_ready(reads)
        assert_reads(reads, [(0, 0), (0, 1)])
    finally:
        os.kill(stopped, signal.SIGKILL)
        os.waitpid(stopped, 0)
    assert_reads(reads, [(0, each) for each in wanted[2:]])


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
