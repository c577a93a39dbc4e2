"""Samples that cannot be read are left out: the same ones by all workers, also after failures and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chameleon_ft.config import Checkpoint, Loading, Parallel
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import SamplesInOrder, load_readable
from chameleon_ft.events.kinds import SampleLeftOut
from chameleon_ft.report.view import RunView
from tests.harness import Ended, assert_as_the_plain_loop, fails, resume_here, train_job
from tests.worker.plainly import losses_of_next_tokens

STEPS, SIZE = 10, 48
ORDER = SampleOrder(SIZE, 0)


class Rows:
    """Pairs of a number and its id, of which some cannot be read."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.bad:
            raise OSError(f"sample {index} is damaged")
        return torch.tensor([float(index)]), torch.tensor(index)


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if any(int(target) == ORDER.ids(0, 8)[5] for _, target in samples):
        raise ValueError("this text has no tokens")
    return torch.stack([each for each, _ in samples]), torch.stack([each for _, each in samples])


def test_others_stand_in_for_samples_that_cannot_be_read() -> None:
    ids = ORDER.ids(0, 8)
    (_, targets), errors = load_readable(Rows(ids[0], ids[2]), ORDER, 0, 4)
    assert targets.tolist() == [ids[1], ids[1], ids[1], ids[3]]
    assert sorted(errors) == [0, 2]
    (_, targets), errors = load_readable(Rows(*ids[:5]), ORDER, 0, 4)
    assert targets.tolist() == [ids[5]] * 4
    assert sorted(errors) == [0, 1, 2, 3]
    with pytest.raises(OSError, match=f"sample {ids[0]} is damaged"):
        load_readable(Rows(*ids), ORDER, 0, 4)


def test_a_sample_that_cannot_be_collated_is_found() -> None:
    ids = ORDER.ids(0, 8)
    (_, targets), errors = load_readable(Rows(ids[4]), ORDER, 4, 4, collate=collate)
    assert targets.tolist() == [ids[6], ids[6], ids[6], ids[7]]
    assert [type(errors[row]) for row in sorted(errors)] == [OSError, ValueError]

    def none(samples: list[Any]) -> Any:
        if len({int(target) for _, target in samples}) > 1:
            raise ValueError("they do not fit together")
        return collate(samples)

    with pytest.raises(ValueError, match="do not fit"):
        load_readable(Rows(), ORDER, 0, 4, collate=none)


def test_the_plain_loop_raises_the_error_of_a_sample_that_a_run_could_read() -> None:
    ids, samples = ORDER.ids(0, 8), SamplesInOrder(Rows(ORDER.ids(0, 8)[1]), 0)
    samples.left_out = frozenset({(0, ids[1]), (1, ids[2])})
    assert samples.left_out_of(0, 4) == {1}
    samples.micro_batch(0, 4)
    samples.left_out = frozenset()
    with pytest.raises(OSError, match="damaged"):
        samples.micro_batch(0, 4)


JOB = """
from pathlib import Path
import torch
from tests.worker.plainly import next_tokens

class Rows:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        name = Path("/proc/self/comm").read_text().strip()
        if index in {always} or index in {here} and name == "worker 3":
            raise OSError(f"sample {{index}} is damaged")
        tokens = (index + torch.arange(9)) % 16
        return tokens[:-1], tokens[1:]

def job():
    return next_tokens(Rows())
"""


def plain_losses(left_out: dict[int, set[int]], steps: int) -> list[float]:
    """Train as anyone would, without the samples that are left out of each step."""
    ids = [[index for index in ORDER.ids(step, 8) if index not in left_out.get(step, ())] for step in range(steps)]
    tokens = [[(index + torch.arange(9)) % 16 for index in own] for own in ids]
    return losses_of_next_tokens([[(each[:-1], each[1:]) for each in own] for own in tokens])


def left_out_of(ended: Ended) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for event in ended.run.events():
        if isinstance(event, SampleLeftOut):
            found.setdefault(event.step, set()).add(event.sample)
    return found


def assert_trained_without(ended: Ended, left_out: dict[int, set[int]]) -> None:
    steps, _ = ended.run.readable_steps()
    losses = {record.step: record.loss for record in steps}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(plain_losses(left_out, len(losses)), rel=1e-5)
    assert ended.summary["samples_lost"] == 0
    assert ended.summary["samples_skipped"] == sum(map(len, left_out.values()))
    assert_as_the_plain_loop(ended)


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [0, 1])
def test_all_workers_leave_out_the_same_samples(tmp_path: Path, processes: int) -> None:
    """Some samples no worker can read, and others only one of them, in steps with and without a failure."""
    ids = [ORDER.ids(step, 8) for step in range(STEPS)]
    always = {ids[0][1], ids[1][4], ids[1][5], ids[4][3]}
    here = {ids[step][row] for step in (2, 5) for row in (0, 3, 4, 7)} - always
    file = tmp_path / "rows.py"
    file.write_text(JOB.format(always=always, here=here))
    ended = train_job(
        file,
        tmp_path / "run",
        steps=6,
        checkpoint=Checkpoint(every=3),
        loading=Loading(processes=processes, on_error="skip"),
        failures=(fails(2, step=4, phase="backward"),),
    )
    assert ended.code == 0, ended.summary["reason"]
    assert ended.lost == {2}
    left_out = left_out_of(ended)
    assert {step: left_out.get(step, set()) & always for step in range(6)} == {
        step: always & set(ids[step]) for step in range(6)
    }
    assert processes or left_out[2], "worker 3 has computed the loss of some of these"
    assert all(samples <= set(ids[step]) for step, samples in left_out.items())
    assert_trained_without(ended, left_out)
    view, _ = RunView.of_events(ended.run)
    assert {each.kind for each in view.conditions.found()} >= {"sample_left_out"}
    resumed = resume_here(ended, steps=STEPS, workers=1, parallel=Parallel(dp=1, pp=1))
    assert_trained_without(resumed, left_out_of(resumed))
