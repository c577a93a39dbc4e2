"""Checks of a job's samples before a run: they are stacked to micro-batches of one shape, and read the same again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from threading import Timer
from typing import Any, Final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from chameleon_ft.data.buckets import Buckets
from chameleon_ft.data.mixture import describe_order, sample_order
from chameleon_ft.data.samples import SamplesInOrder, collated, is_pair, require_one_shape, shapes_of
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.job.job import Job
from chameleon_ft.job_record import Fact, JobRecord
from chameleon_ft.models.build import content_of
from chameleon_ft.models.job_record import sketch

# Samples that are read twice before a run at least; they may be slow to read.
_READ_SAMPLES: Final = 4
# Micro-batches whose shapes are compared before a run.
_COLLATED: Final = 4
# Samples that are recorded at most, within `_READING_S`.
_RECORDED_SAMPLES: Final = 64
_READING_S: Final = 1.0
# Seconds after which a single read is reported, as in a run.
_TOLD_S: Final = 10.0


def first_micro_batch(job: Job, micro_batch_size: int, seed: int) -> tuple[Any, Any]:
    """Return the inputs and the targets of the first micro-batch of a run.

    Raises:
        ConfigError: samples cannot be stacked, make no tensors, or have other shapes in the next micro-batch.
    """
    samples = SamplesInOrder(job.dataset, seed, job.collate, is_tolerant=True)
    if job.collate is not None:
        return _collated(samples, micro_batch_size)
    try:
        return samples.micro_batch(0, micro_batch_size)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"the dataset's samples cannot be stacked to a micro-batch ({error}); let all samples have tensors of one "
            "shape, for example by padding"
        ) from error


def _collated(samples: SamplesInOrder, micro_batch_size: int) -> tuple[Any, Any]:
    """Return the first micro-batch. Raises ConfigError if the next ones have other shapes."""
    pairs = [samples.micro_batch(number * micro_batch_size, micro_batch_size) for number in range(_COLLATED)]
    shapes = [tuple(tuple(each.shape) for each in tree_leaves(pair)) for pair in pairs]
    if len(set(shapes)) > 1:
        raise ConfigError(
            f"`collate` returns inputs and targets of the shapes {shapes[0]} for the first micro-batch and of others, "
            f"such as {next(each for each in shapes if each != shapes[0])}, for later ones, but workers exchange "
            'tensors of known shapes; pad to one length, such as by padding="max_length", or to one of several by '
            "chameleon_ft.data.Buckets, and not to the longest sample"
        )
    return pairs[0]


class SampleReads:
    """The first samples of a run, read once, to see later whether they come out the same again.

    Args:
        most: number of samples to read; fewer if they are slow to read.
        is_tolerant: Those that cannot be read are left out.

    Attributes:
        facts: the number of samples of the data set, and sketches of those that were read.
    """

    def __init__(self, job: Job, seed: int, *, most: int = _RECORDED_SAMPLES, is_tolerant: bool = False) -> None:
        self._samples = SamplesInOrder(job.dataset, seed, job.collate, is_tolerant=is_tolerant)
        self._collate = job.collate
        self._seed = seed
        # By number in the order of training.
        self._contents: dict[int, list[bytes]] = {}
        # By id.
        self._shapes: dict[int, Mapping[str, str]] = {}
        self._is_stream, begun_s = is_stream(job.dataset), time.monotonic()
        self.facts: dict[str, Fact] = {}
        self._ids: Sequence[int] = range(most)
        if not self._is_stream:
            size = len(job.dataset)
            self.facts |= {"number of samples": size, "order of samples": describe_order(job.dataset)}
            self._ids = sample_order(job.dataset, seed).ids(0, min(most, size))
        for number, index in enumerate(self._ids):
            if number >= _READ_SAMPLES and time.monotonic() - begun_s > _READING_S:
                break
            try:
                sample = self._sample(number)
            except Exception:
                if not is_tolerant:
                    raise
                continue
            tensors = self._tensors(sample, number)
            self._contents[number], self._shapes[index] = _contents(tensors), shapes_of(sample)
            names = (f"input of sample {index}", f"target of sample {index}")
            self.facts |= dict(zip(names, map(sketch, tensors), strict=False))

    def require(self, facts: Mapping[str, Fact]) -> None:
        """Raise ConfigError if the samples that were read are others than those of `facts`, of another process."""
        for change in JobRecord(data=facts).changes_to(JobRecord(data=self.facts)):
            raise ConfigError(
                f"`dataset` reads other samples here than in the process that examined the job: {change.text}; give "
                "all hosts the same data, and let no sample depend on the process that reads it, such as on its id, or "
                "on the hash of a string unless PYTHONHASHSEED is set"
            )

    def require_one_shape(self) -> None:
        """Raise ConfigError if the samples that were read cannot be stacked, because their shapes differ."""
        if self._collate is None and self._shapes:
            require_one_shape(self._shapes)

    def check(self) -> None:
        """Read each sample again, those of a stream also from a position. Raises ConfigError if one differs."""
        for number, before in self._contents.items():
            if self._is_stream and number and number == len(self._contents) // 2:
                self._samples.begin(number, self._samples.position())
            if _contents(self._tensors(self._sample(number), number)) != before:
                if self._is_stream and number >= len(self._contents) // 2:
                    raise ConfigError(
                        f"`dataset` reads sample {number} differently after load_state_dict() than it did before, so a "
                        "run could not read on after a failure; let its state be all that later samples depend on: "
                        "leave out a buffer from which it shuffles if that is not in the state, and let processes of a "
                        "loader draw random numbers only from a generator that is seeded by the sample"
                    )
                raise ConfigError(
                    f"`dataset` reads sample {self._ids[number]} differently each time, but workers read it "
                    "separately, for the inputs and for the targets, and again after a failure; draw with Python's "
                    "`random`, `numpy.random` or torch's functions, whose global generators are seeded for each read "
                    "of a sample, instead of a generator of its own, the clock or a count of reads"
                )

    def _sample(self, number: int) -> Any:
        text = f"reading sample {self._ids[number]}, before the run, has taken {_TOLD_S:.0f} s so far"
        notice = Timer(_TOLD_S, lambda: print(text, file=sys.stderr, flush=True))
        notice.daemon = True
        notice.start()
        try:
            return self._samples.read(number, 1)[0]
        except Exception as error:
            error.add_note(f"reading sample {self._ids[number]}")
            raise
        finally:
            notice.cancel()

    def _tensors(self, sample: Any, number: int) -> list[Tensor]:
        if self._collate is None and is_pair(sample):
            return tree_leaves(sample)
        try:
            return tree_leaves(collated([sample], self._collate, seed=self._seed, place=(0, number)))
        except Exception as error:  # of the job
            # Others that cannot be collated are refused elsewhere, or only alone.
            if not isinstance(self._collate, Buckets):
                return []
            error.add_note(f"in sample {self._ids[number]}")
            raise


def _contents(tensors: Iterable[Tensor]) -> list[bytes]:
    # Not the versions that torch counts: those of samples in one tensor, such as a cache, change with each write to it.
    return [f"{each.dtype} {each.shape} ".encode() + content_of(each) for each in tensors]
