"""Real runs that read a stream: whoever fails, the losses are those of a plain loop that reads it once."""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from chameleon_ft.config import (
    Batch,
    Checkpoint,
    Health,
    Loading,
    Parallel,
    Preflight,
    Recovery,
    RunConfig,
    Skip,
    Snapshots,
)
from chameleon_ft.events.kinds import SampleLeftOut
from chameleon_ft.keys import init_key
from chameleon_ft.launch.local import train
from chameleon_ft.protocol.messages import Inject
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import prepare_run
from tests.configs import unhurried
from tests.harness import PATIENT, Ended, assert_as_the_plain_loop, fails, resume_here, train_here
from tests.histories import train_until

pytestmark = pytest.mark.multiprocess

SEED = 5
LENGTH = 90
JOB = """
    import torch
    from torch import nn
    from torch.nn import functional

    from chameleon_ft import Job

    def sample(number):
        if number == FAULTY:
            raise OSError("the disk is gone")
        input = torch.sin(torch.arange(6, dtype=torch.float64) * (number + 1))
        return input, torch.tensor(number % 3)

    class Itself:
        def __init__(self):
            self.next = 0
        def __iter__(self):
            return self
        def __next__(self):
            if self.next == LENGTH:
                raise StopIteration
            self.next += 1
            return sample(self.next - 1)
        def state_dict(self):
            return {"next": self.next}
        def load_state_dict(self, state):
            self.next = state["next"]

    class ByIterator:
        def __iter__(self):
            return Itself()

    class Numbers(Itself):
        def __next__(self):
            if self.next == LENGTH:
                raise StopIteration
            self.next += 1
            return {"number": self.next - 1}

    def collate(samples):
        pairs = [sample(each["number"]) for each in samples]
        return tuple(map(torch.stack, zip(*pairs)))

    class Stateless:
        def __iter__(self):
            return map(sample, range(LENGTH))

    LAYERS = [
        lambda: nn.Linear(6, 8, dtype=torch.float64),
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(8, 3, dtype=torch.float64)),
    ]

    def loss(output, targets):
        return functional.cross_entropy(output, targets, reduction="sum")

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def job():
        own = collate if STREAM is Numbers else None
        return Job(layers=LAYERS, loss=loss, dataset=STREAM(), optimizer=optimizer, collate=own)
"""


def config_of(directory: Path, stream: str, *, dp: int, pp: int, faulty: int = -1, **changes: Any) -> RunConfig:
    path = directory / "a_job.py"
    path.write_text(f"FAULTY, LENGTH = {faulty}, {LENGTH}\n{textwrap.dedent(JOB).replace('STREAM', stream)}")
    fields: dict[str, Any] = {
        "job": f"{path}:job",
        "workers": dp * pp,
        "parallel": Parallel(dp=dp, pp=pp),
        "batch": Batch(micro_batches=4, micro_batch_size=2),
        "steps": 12,
        "seed": SEED,
        "checkpoint": Checkpoint(every=4),
        "snapshots": Snapshots(every=0),
        "timeouts": PATIENT,
        "recovery": Recovery(policy="reroute"),
        "health": Health(detect_slow=False, check_every=1),
        "preflight": Preflight(min_speed=0.0),
    }
    return RunConfig(**{**fields, **changes})


@cache
def plain_losses(steps: int, skips: tuple[Skip, ...] = (), left_out: int = -1) -> list[float]:
    """Train as anyone would: one process that goes through the samples but one, again and again."""
    skipped = {each.step: each.samples for each in skips}
    first = 0
    layers = []
    for number, (size, width) in enumerate([(6, 8), (8, 3)]):
        torch.manual_seed(init_key(SEED, number))
        layers.append(nn.Linear(size, width, dtype=torch.float64))
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, known = [], [number for number in range(LENGTH) if number != left_out]
    for step in range(steps):
        first += skipped.get(step, 0)
        numbers = [known[place % len(known)] for place in range(first, first + 8)]
        first += 8
        inputs = torch.stack([torch.sin(torch.arange(6, dtype=torch.float64) * (number + 1)) for number in numbers])
        mean = functional.cross_entropy(model(inputs), torch.tensor([number % 3 for number in numbers]))
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


def assert_trained_in_order(ended: Ended, left_out: int = -1) -> None:
    found = {record.step: record.loss for record in ended.run.readable_steps()[0]}
    expected = plain_losses(max(found) + 1, ended.run.config().skips, left_out)
    assert [found[step] for step in sorted(found)] == pytest.approx(
        [expected[step] for step in sorted(found)], rel=1e-9
    )


@pytest.mark.parametrize(
    ("stream", "phase"), [("Itself", "forward"), ("ByIterator", "sync"), ("Stateless", "optimizer")]
)
def test_the_reader_is_killed(tmp_path: Path, stream: str, phase: Any) -> None:
    # A stream without a state is read again from its beginning.
    skips = (Skip(step=2, samples=3), Skip(step=5, samples=70)) if stream == "Stateless" else ()
    config = config_of(tmp_path, stream, dp=2, pp=2, failures=(fails(0, step=5, phase=phase),), skips=skips)
    ended = train_here(config, tmp_path / "run")
    assert (ended.code, ended.lost) == (0, {0})
    assert_trained_in_order(ended)
    assert ended.summary["samples_lost"] == 0
    assert_as_the_plain_loop(ended)


def test_all_who_know_the_position_are_killed(tmp_path: Path) -> None:
    """The position of the checkpoint is in the state of layer 0."""
    config = config_of(tmp_path, "Itself", dp=1, pp=2, steps=100_000, failures=unhurried(2, speed=0.25))
    killed = Inject(worker=0, kind="kill", phase="backward")
    ended = train_until(config, tmp_path / "run", lambda ended: ended.lost, injected={("checkpoint", 2): killed})
    assert ended.failures[-1].resume_step > 0
    assert_trained_in_order(ended)


def test_a_snapshot_has_the_position(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"snapshots": Snapshots(every=2), "checkpoint": Checkpoint(every=0)}
    failures = (fails(0, step=7, phase="sync"),)
    ended = train_here(config_of(tmp_path, "ByIterator", dp=1, pp=2, failures=failures, **changes), tmp_path / "run")
    assert (ended.code, ended.failures[-1].policy) == (0, "snapshot")
    assert_trained_in_order(ended)


def test_resumed_and_forked_with_other_workers(tmp_path: Path) -> None:
    ended = train_here(config_of(tmp_path, "Itself", dp=1, pp=2, steps=7), tmp_path / "run")
    assert ended.code == 0
    resumed = resume_here(ended, steps=11, workers=4, parallel=Parallel(dp=4, pp=1))
    assert resumed.steps[-1] == 10
    assert_trained_in_order(resumed)
    assert_as_the_plain_loop(resumed)
    flags = {"output_dir": tmp_path / "fork", "steps": 14, "batch": {"micro_batch_size": 3}}
    prepared = prepare_run(RunRequest(changes=flags, resume=str(resumed.run.path), fork=True))
    forked = Ended(prepared.start(train), prepared.directory)
    assert forked.steps == [11, 12, 13]
    assert_as_the_plain_loop(forked)


def test_a_newcomer_becomes_the_reader(tmp_path: Path) -> None:
    recovery = Recovery(policy="chameleon", respawn=True, respawn_delay_s=0.0, worker_mtbf_hours=1e6)
    failures = (*unhurried(4, speed=0.25), fails(0, step=5, phase="backward"))
    config = config_of(tmp_path, "Itself", dp=2, pp=2, steps=100_000, recovery=recovery, failures=failures)

    def has_joined(ended: Ended) -> bool:
        return bool(ended.lost) and 0 in {int(worker) for route in ended.plans()[-1]["routes"] for worker, *_ in route}

    ended = train_until(config, tmp_path / "run", has_joined)
    assert_trained_in_order(ended)


def test_an_error_of_the_stream_is_named(tmp_path: Path) -> None:
    ended = train_here(config_of(tmp_path, "Itself", dp=2, pp=1, faulty=85), tmp_path / "run")
    assert ended.code != 0
    assert "the disk is gone" in ended.summary["reason"]
    assert "sample 85 of epoch 0" in ended.summary["reason"]
    assert_trained_in_order(ended)


@pytest.mark.parametrize("stream", ["Itself", "Numbers"])
def test_a_sample_that_cannot_be_read_or_collated_is_left_out(tmp_path: Path, stream: str) -> None:
    """In its place there is the next one, also if the reader is killed in the step that lacks it."""
    loading, failures = Loading(on_error="skip"), (fails(0, step=5, phase="sync"),)
    ended = train_here(
        config_of(tmp_path, stream, dp=2, pp=1, faulty=44, loading=loading, failures=failures), tmp_path / "run"
    )
    assert (ended.code, ended.lost) == (0, {0}), ended.summary["reason"]
    events = [event for event in ended.run.events() if isinstance(event, SampleLeftOut)]
    assert [(event.step, event.epoch, event.sample) for event in events] == [(5, 0, 44)]
    assert_trained_in_order(ended, left_out=44)
    assert (ended.summary["samples_lost"], ended.summary["samples_seen"]) == (0, 96)
    assert_as_the_plain_loop(ended)
