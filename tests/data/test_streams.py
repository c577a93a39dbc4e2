"""Each sample exactly once and in order, whoever reads, from wherever training goes on; most of all of streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from chameleon_ft.data import Mixture, sample_order
from chameleon_ft.data.samples import SamplesInOrder, TokenWindows, load_micro_batch
from chameleon_ft.data.streams import START, Position, StreamReader
from chameleon_ft.errors import ConfigError, DataError
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.job.job import Job

SEED = 7
Sample = tuple[int, Any]


def sample(number: int) -> Sample:
    """Return a sample with its id, and a random number that is to depend on the draw alone."""
    return number, random.random() + float(torch.rand(1))


@dataclass
class Itself:
    """A stream that is its own iterator, with its state."""

    length: int
    next: int = 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self.next == self.length:
            raise StopIteration
        self.next += 1
        return sample(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


@dataclass
class FromState:
    """As streaming `datasets`: the stream has the state, and iterates from the one that was loaded, again and again."""

    length: int
    begin: int | None = None
    now: int | None = None

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.begin or 0, self.length):
            self.now = number + 1
            yield sample(number)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.now is None else {"now": self.now}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.begin = self.now = None if state is None else state["now"]


@dataclass
class Shuffled:
    """As Grain: the iterator has the state. Each epoch has an order of its own."""

    length: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        return _Order(order)


@dataclass
class _Order:
    order: list[int]
    next: int = 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self.next == len(self.order):
            raise StopIteration
        self.next += 1
        return sample(self.order[self.next - 1])

    def get_state(self) -> bytes:
        return str(self.next).encode()

    def set_state(self, state: bytes) -> None:
        self.next = int(state)


@dataclass
class Stateless:
    length: int

    def __iter__(self) -> Iterator[Sample]:
        return (sample(number) for number in range(self.length))


STREAMS = (Itself, FromState, Shuffled, Stateless)


@dataclass
class Numbered:
    """Map-style data of pairs: an id, and a random number."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number, drawn = sample(index)
        return torch.tensor(number), torch.tensor(drawn)


def packed(length: int, first: int = 0) -> TokenWindows:
    """Return windows of documents of 3 tokens, with the numbers of these; the first token is the id of a window."""
    tokens = np.arange(first, first + 5 * length, dtype=np.int64)
    return TokenWindows(tokens, 4, starts=np.arange(0, len(tokens), 3))


def mixed(length: int) -> Mixture:
    return Mixture([(packed(length), 2.5), (packed(2, 1000), 1.0)])


MAP_STYLE = (Numbered, packed, mixed)


@dataclass
class ByNumber:
    """Reads map-style data as some workers do, each its own samples of a step; a position is a number of samples."""

    data: Any
    place: bytes
    workers: int

    def read(self, count: int) -> list[Sample]:
        first, order, found = 0 if self.place == START else int(self.place), sample_order(self.data, SEED), {}
        for worker in reversed(range(self.workers)):
            for row in range(worker, count, self.workers):
                inputs, targets = load_micro_batch(self.data, order, first + row, 1)
                leaves = tree_leaves((inputs, targets))
                found[row] = int(leaves[0].flatten()[0]), [leaf.tolist() for leaf in leaves]
        self.place = str(first + count).encode()
        return [found[row] for row in range(count)]

    def position(self) -> bytes:
        return self.place


def reader_of(data: Any, position: bytes = START, workers: int = 1) -> Any:
    return StreamReader(data, SEED, position) if is_stream(data) else ByNumber(data, position, workers)


def expected(kind: Callable[[int], Any], length: int, count: int) -> list[int]:
    """Return the ids of the first samples, by a loop over the data as a user would write it."""
    ids: list[int] = []
    if not is_stream(data := kind(length)):
        return [int(tree_leaves(data[index])[0].flatten()[0]) for index in sample_order(data, SEED).ids_at(0, count)]
    for epoch in range(count // length + 1):
        stream = kind(length)
        if isinstance(stream, Shuffled):
            stream.set_epoch(epoch)
        ids += [number for number, _ in stream]
    return ids[:count]


@dataclass
class Trained:
    """A run of some workers, as far as its data goes: each knows the position after the last step that it has applied.

    A step is read by the lowest worker, which reads ahead, and commits with its position on any of the workers.
    """

    stream: Callable[[int], Any]
    length: int
    batch: int
    positions: dict[int, bytes]
    steps: list[list[Sample]] = field(default_factory=list)
    checkpoints: dict[int, bytes] = field(default_factory=lambda: {0: START})

    def train(self, steps: int, *, ahead: int, applied_by: int | None = None) -> None:
        """Train some steps; a worker that was not among the first `applied_by` rolls the last one forward."""
        reader = self._reader()
        for _ in range(steps):
            self.steps.append(reader.read(self.batch))
            after = reader.position()
            self.positions = dict.fromkeys(self.positions, after)
        reader.read(ahead)
        assert applied_by is None or applied_by <= len(self.positions)

    def lose(self, worker: int) -> None:
        """Lose a worker in a step that has been read, and maybe computed in part."""
        self._reader().read(self.batch)
        self.positions.pop(worker, None)

    def _reader(self) -> Any:
        return reader_of(self.stream(self.length), self.positions[min(self.positions)], len(self.positions))

    def save(self) -> None:
        self.checkpoints[len(self.steps)] = self.positions[min(self.positions)]

    def load(self, step: int, workers: int) -> None:
        """Return to a checkpoint, or resume or fork from it, with any number of workers."""
        del self.steps[step:]
        self.checkpoints = {each: position for each, position in self.checkpoints.items() if each <= step}
        self.positions = dict.fromkeys(range(workers), self.checkpoints[step])


@settings(deadline=None)
@given(st.data(), st.sampled_from(STREAMS + MAP_STYLE), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_each_sample_is_trained_once_and_in_order(
    data: st.DataObject, kind: Callable[[int], Any], length: int, batch: int, workers: int
) -> None:
    run = Trained(kind, length, batch, dict.fromkeys(range(workers), START))
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["train", "lose", "join", "save", "load"])):
            case "train":
                run.train(data.draw(st.integers(1, 4)), ahead=data.draw(st.integers(0, 10)))
            case "lose" if len(run.positions) > 1:
                run.lose(data.draw(st.sampled_from(sorted(run.positions))))
            case "join":
                # With the state of layer 0 it gets the position.
                run.positions |= {data.draw(st.integers(0, 5)): run.positions[min(run.positions)]}
            case "save":
                run.save()
            case "load":
                run.load(data.draw(st.sampled_from(sorted(run.checkpoints))), data.draw(st.integers(1, 4)))
    run.train(3, ahead=0)
    trained = [each for step in run.steps for each in step]
    assert [number for number, _ in trained] == expected(kind, length, len(trained))
    # The draws are those of a run without any failure.
    assert trained == reader_of(kind(length)).read(len(trained))
    if kind in MAP_STYLE:
        for size, begin in ((length, 0), (2, 1000)):
            ids = [number for number, _ in trained if (number >= 1000) == (begin == 1000)]
            epochs = [ids[place : place + size] for place in range(0, len(ids), size)]
            assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


@given(st.sampled_from(STREAMS), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1))
def test_samples_are_read_by_their_number_from_anywhere(kind: type[Any], reads: list[tuple[int, int]]) -> None:
    samples = SamplesInOrder(kind(8), SEED)
    known = StreamReader(kind(8), SEED).read(40)
    for first, count in reads:
        assert samples.read(first, count) == known[first : first + count]
    middle = StreamReader(kind(8), SEED)
    middle.read(13)
    samples.begin(13, middle.position())
    assert samples.read(15, 3) == known[15:18]


def test_draws_differ_between_epochs() -> None:
    samples = StreamReader(Itself(3), SEED).read(6)
    assert [number for number, _ in samples] == [0, 1, 2, 0, 1, 2]
    assert len({drawn for _, drawn in samples}) == 6


@pytest.mark.parametrize("stream", [Itself(0), Stateless(0), iter([(0, 0.0)] * 3)])
def test_a_stream_without_samples_is_refused(stream: Any) -> None:
    with pytest.raises(DataError, match="another epoch"):
        StreamReader(stream, SEED).read(4)


def test_a_stream_that_has_become_shorter_is_refused() -> None:
    reader = StreamReader(Stateless(9), SEED)
    reader.read(7)
    with pytest.raises(DataError, match="same samples"):
        StreamReader(Stateless(5), SEED, reader.position())


class Opaque(Itself):
    def state_dict(self) -> dict[str, Any]:
        return {"next": Stateless(self.next)}


def test_a_state_that_could_run_code_when_it_is_read_is_refused() -> None:
    with pytest.raises(DataError, match="numbers, strings"):
        StreamReader(Opaque(3), SEED)


def test_a_position_has_tensors_and_is_small() -> None:
    state = {"generator": torch.arange(5), "files": ["a", "b"], "seen": {1: None, 2: 2.5}}
    position = Position(3, 14, state).to_bytes()
    epoch, samples, read = Position.from_bytes(position)
    assert (epoch, samples, read["files"], read["seen"]) == (3, 14, state["files"], state["seen"])
    assert torch.equal(read["generator"], torch.arange(5))
    assert len(START) < 256


def job_of(dataset: Any) -> Job:
    return Job(layers=[torch.nn.Identity], loss=torch.sub, dataset=dataset, optimizer=torch.optim.SGD)


class Rows(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 5


def test_a_dataset_that_iterates_is_a_stream_unless_it_has_numbers() -> None:
    assert all(is_stream(stream) for stream in (Itself(3), Stateless(3), Rows()))
    assert not is_stream([1, 2])
    assert not is_stream(torch.utils.data.TensorDataset(torch.ones(2)))
    assert job_of(Rows()).dataset
    with pytest.raises(ConfigError, match="read only once"):
        job_of(sample(number) for number in range(3))
    with pytest.raises(ConfigError, match="batch_size=None"):
        job_of(torch.utils.data.DataLoader(Rows(), batch_size=4))
    with pytest.raises(ConfigError, match="map-style"):
        job_of(3)


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 17

    def __getitem__(self, number: int) -> int:
        return number


def _of_datasets(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    (folder / "rows.json").write_text("".join(f'{{"number": {number}}}\n' for number in range(17)))
    files, cache = str(folder / "rows.json"), str(folder / "cache")
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)


def _of_torchdata(_: Path) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(0)  # as a job is loaded
    return loaders.StatefulDataLoader(_Numbers(), batch_size=None, shuffle=True)


def _of_torch(_: Path) -> Any:
    return torch.utils.data.DataLoader(_Numbers(), batch_size=None, shuffle=True)


def _of_grain(_: Path) -> Any:
    grain = pytest.importorskip("grain.python")
    return grain.MapDataset.source(list(range(17))).shuffle(seed=2).to_iter_dataset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_of_datasets, _of_torchdata, _of_torch, _of_grain])
def test_streams_of_packages_are_read_on_from_any_place(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    known = StreamReader(make(tmp_path), SEED).read(40)
    numbers = [each["number"] if isinstance(each, dict) else int(each) for each in known]
    assert sorted(numbers[:17]) == sorted(numbers[17:34]) == list(range(17))
    for count in (0, 5, 17, 29):
        reader = StreamReader(make(tmp_path), SEED)
        reader.read(count)
        assert StreamReader(make(tmp_path), SEED, reader.position()).read(40 - count) == known[count:]
