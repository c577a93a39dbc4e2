"""Runs whose batch grows: each step trains its samples, whatever fails at the boundaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from chameleon_ft import Job
from chameleon_ft.cli.arguments import parse_start
from chameleon_ft.cli.commands.train import TrainArguments
from chameleon_ft.config import Batch, Checkpoint, Parallel, RampStage, RunConfig, Skip, Snapshots, parse_config
from chameleon_ft.data import SampleOrder
from chameleon_ft.errors import ConfigError
from chameleon_ft.keys import init_key
from chameleon_ft.launch.local import train
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.recovery.generation import GenerationSpec, checked_program
from chameleon_ft.recovery.layout import uniform_limits
from chameleon_ft.report.comparison import compare_generations
from chameleon_ft.schedule import OperationKind, check_program
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import _require_even_shares, prepare_run
from chameleon_ft.storage.plans import read_generation, read_generation_plans, read_start_plan, write_generation
from chameleon_ft.storage.timelines import read_recorded_steps
from chameleon_ft.worker.execution.micro_batches import DatasetReads
from tests.golden import refused
from tests.harness import Ended, assert_as_the_plain_loop, fails, resume_here, small_config, train_here
from tests.strategies import equal_costs
from tests.worker.test_streams import LENGTH, SEED, config_of

RAMP = Batch(
    micro_batches=9,
    micro_batch_size=2,
    ramp=(RampStage(micro_batches=3, until_step=3), RampStage(micro_batches=6, until_step=7)),
)


def ramp_of(starts: list[int], counts: list[int]) -> tuple[RampStage, ...]:
    return tuple(RampStage(until_step=stop, micro_batches=own) for stop, own in zip(starts, counts, strict=False))


@st.composite
def batches(draw: st.DrawFn, *, of: int = 1) -> Batch:
    """Batches of up to four stages, each of which has a multiple of some number of micro-batches."""
    steps = list(accumulate(draw(st.lists(st.integers(1, 4), max_size=3))))
    more = draw(st.lists(st.integers(1, 3), min_size=len(steps) + 1, max_size=len(steps) + 1))
    counts = [of * each for each in accumulate(more)]
    return Batch(micro_batches=counts[-1], micro_batch_size=draw(st.integers(1, 3)), ramp=ramp_of(steps, counts))


@given(batch=batches(), forked=st.integers(0, 6), skip=st.integers(0, 8))
def test_each_sample_is_in_one_step_and_in_order(batch: Batch, forked: int, skip: int) -> None:
    values: dict[str, Any] = {"batch": batch.model_dump(), "parallel": {"dp": 1, "pp": 1}, "workers": 1, "steps": 20}
    values["forked"] = {"run": "a run", "step": forked, "samples": 7}
    values["skips"] = [{"step": forked + skip, "samples": 5}]
    config = RunConfig.model_validate(values)
    dataset = torch.utils.data.TensorDataset(torch.arange(31), torch.arange(31))
    layers = [partial(nn.Linear, 1, 1)]
    job = Job(layers=layers, loss=nn.functional.mse_loss, dataset=dataset, optimizer=partial(torch.optim.SGD, lr=0.1))
    reads = DatasetReads(job, batch, seed=3, first_sample=config.first_sample)
    read = [
        draw
        for step in range(forked, 20)
        for micro_batch in range(batch.micro_batches_at(step))
        for draw in reads.draws(step, micro_batch)
    ]
    order = [(epoch, number) for number, epoch in SampleOrder(31, 3).draws_at(7, len(read) + 5)]
    first = config.samples_before(forked + skip) - 7
    assert read == order[:first] + order[first + 5 :]


@given(batch=batches(of=2), first_step=st.integers(0, 9), pp=st.integers(1, 2))
def test_a_generation_has_a_plan_for_every_step(batch: Batch, first_step: int, pp: int, tmp_path_factory: Any) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 2, dp=2, pp=pp, micro_batches=batch.micro_batches)
    costs = equal_costs(layers=2, micro_batches=batch.micro_batches, workers=2 * pp)
    limits = uniform_limits(plan.workers, pp)
    program = checked_program(plan, costs, limits)
    spec = GenerationSpec(
        plan=plan,
        program=program,
        costs=costs,
        in_flight_limits=limits,
        first_step=first_step,
        policy="start",
        action="start",
    ).along(batch.stages_from(first_step))
    path = tmp_path_factory.mktemp("plans") / "generation-00001.json"
    write_generation(spec, path)
    recorded = read_generation(path)
    for step in range(first_step, 14):
        now, count = spec.at(step), batch.micro_batches_at(step)
        assert now.plan.micro_batches == now.costs.workload.micro_batches == count
        assert now.plan.placement == plan.placement
        check_program(now.program, now.plan)
        assert {len(route.hops) for route in now.plan.routes} == {pp}
        assert set(Counter(route.hops for route in now.plan.routes).values()) == {count // 2}
        assert (recorded.at(step).plan, recorded.at(step).program) == (now.plan, now.program)
        run = [
            each.micro_batch
            for orders in spec.orders().values()
            for each in orders.at(step).operations
            if each.kind is OperationKind.FORWARD and each.first
        ]
        assert sorted(run) == list(range(count))
    assert GenerationSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("step", [5, 0], ids=["no later", "at step 0"])
@pytest.mark.parametrize("counts", [[4], [4, 2], [6]])
def test_stages_that_are_refused(step: int, counts: list[int]) -> None:
    stages = [{"micro_batches": count, "until_step": step} for count in counts]
    values = {"batch": {"micro_batches": 6, "ramp": stages}}
    with nullcontext() if (step, counts) == (5, [4]) else refused(ConfigError):
        parse_config(RunConfig, values, source="a file")


def test_shares_of_the_stages_to_come(tmp_path: Path) -> None:
    config = small_config(tmp_path, batch=Batch(micro_batches=6, ramp=ramp_of([5], [4])))
    with refused(ConfigError):
        _require_even_shares(config, 4)
    _require_even_shares(config, 5)


def test_a_plan_with_more_pipelines_than_micro_batches_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(data_pipeline_plan(layer_costs=[1.0] * 4, dp=3, pp=2, micro_batches=6).to_json())
    config = small_config(tmp_path, plan=plan, batch=Batch(micro_batches=6, ramp=ramp_of([5], [2])))
    with refused(ConfigError):
        read_start_plan(config)


def test_ramps_on_the_command_line() -> None:
    _, given = parse_start(TrainArguments, ["--batch.ramp", "2:5,4:9"], command="train")
    assert given["batch"]["ramp"] == [{"micro_batches": 2, "until_step": 5}, {"micro_batches": 4, "until_step": 9}]
    with refused(ConfigError):
        parse_start(TrainArguments, ["--batch.ramp", "2"], command="train")


@pytest.mark.multiprocess
def test_losses_before_at_and_after_the_boundaries(tmp_path: Path) -> None:
    lost = (fails(0, step=2, phase="backward"), fails(3, step=3), fails(5, step=7, phase="vote"))
    ended = train_here(small_config(tmp_path, batch=RAMP, failures=lost), tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    assert [row.samples for row in ended.run.steps()] == [6] * 3 + [12] * 4 + [18] * 3
    assert (ended.summary["samples_seen"], ended.summary["samples_lost"]) == (120, 0)
    assert ended.lost == {0, 3, 5}
    assert_as_the_plain_loop(ended)
    plans = read_generation_plans(ended.run.plans)
    assert [each.plan.micro_batches for each in plans[1].later] == [6, 9]
    compared = compare_generations(plans, read_recorded_steps(ended.run.timelines))
    assert {each.plan.plan.micro_batches for each in compared} == {3, 6, 9}


def plain_losses(sizes: Sequence[int], skips: Mapping[int, int]) -> list[float]:
    """Train as anyone would, with so many samples in each step: one process that goes through the stream.

    `skips`: step -> samples that are left out before it.
    """
    layers: list[nn.Module] = []
    for number, (width, height) in enumerate([(6, 8), (8, 3)]):
        torch.manual_seed(init_key(SEED, number))
        layers.append(nn.Linear(width, height, dtype=torch.float64))
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, first = [], 0
    for step, size in enumerate(sizes):
        first += skips.get(step, 0)
        numbers = [place % LENGTH for place in range(first, first + size)]
        first += size
        inputs = torch.stack([torch.sin(torch.arange(6, dtype=torch.float64) * (number + 1)) for number in numbers])
        mean = nn.functional.cross_entropy(model(inputs), torch.tensor([number % 3 for number in numbers]))
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


@pytest.mark.multiprocess
def test_a_stream_goes_back_over_a_boundary_and_resumes_and_forks_at_others(tmp_path: Path) -> None:
    batch = Batch(micro_batches=8, micro_batch_size=2, ramp=ramp_of([3, 6, 8], [1, 2, 4]))
    changes: dict[str, Any] = {"snapshots": Snapshots(every=2), "checkpoint": Checkpoint(every=0)}
    failures = (fails(0, step=4, phase="sync"),)
    config = config_of(tmp_path, "Itself", dp=1, pp=2, steps=6, batch=batch, failures=failures, **changes)
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    skips = (Skip(step=8, samples=3),)
    resumed = resume_here(ended, steps=11, workers=4, parallel=Parallel(dp=4, pp=1), skips=skips)
    assert resumed.code == 0, resumed.summary["reason"]
    sizes = [2] * 3 + [4] * 3 + [8] * 2 + [16] * 3
    assert (resumed.summary["samples_seen"], resumed.summary["samples_lost"]) == (sum(sizes), 0)
    assert_as_the_plain_loop(resumed)
    stages = [{"micro_batches": 2, "until_step": 12}, {"micro_batches": 4, "until_step": 13}]
    flags = {"output_dir": tmp_path / "fork", "workers": 2, "parallel": {"dp": 2, "pp": 1}, "steps": 14}
    changes = {**flags, "batch": {"micro_batches": 6, "ramp": stages}}
    prepared = prepare_run(RunRequest(changes=changes, resume=str(resumed.run.path), fork=True, skip_samples=5))
    forked = Ended(prepared.start(train), prepared.directory)
    assert forked.steps == [11, 12, 13]
    assert_as_the_plain_loop(forked)
    found = {record.step: record.loss for run in (resumed, forked) for record in run.run.steps()}
    losses = plain_losses([*sizes, 4, 8, 12], {8: 3, 11: 5})
    assert [found[step] for step in range(14)] == pytest.approx(losses, rel=1e-9)
