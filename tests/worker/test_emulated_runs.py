"""Stand-ins for layers, and whole runs on emulated devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Emulation, Failure, Parallel, Recovery, RunConfig
from chameleon_ft.cost.profile import Fingerprint, Profile
from chameleon_ft.errors import ConfigError, ProfileError
from chameleon_ft.job.reference import load_job
from chameleon_ft.lab.stand_in import stand_in, stand_in_scale
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.report.comparison import compare_generations
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.profiles import profile_of_run, read_profile, write_profile
from chameleon_ft.storage.timelines import read_recorded_steps
from chameleon_ft.worker.execution.layers import HeldLayer
from tests.configs import write_config
from tests.golden import refused
from tests.harness import Command, Ended, assert_as_the_plain_loop, assert_trained_as_if_nothing_failed, train_here
from tests.strategies import recomputing
from tests.worker.emulated import LAYERS, emulated_config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_stand_in_is_a_part_of_the_model_in_every_tensor(tmp_path: Path, precision: str) -> None:
    config = emulated_config(tmp_path, precision=precision)
    profile_scale = stand_in_scale(
        Profile(
            name="",
            fingerprint=Fingerprint(model="", micro_batch_size=2, dtype="", device="", threads=0, versions={}),
            source="derived",
            provenance="",
            layers=LAYERS,
            intra_host=Link(0, 1),
        )
    )
    job = load_job(config.job, config)
    boundary = torch.zeros(2, 1)
    for number, cost in enumerate(LAYERS):
        layer = HeldLayer.initial(job, number, seed=0, device=torch.device("cpu"))
        boundary = layer.module(boundary)
        assert boundary.dtype is (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert boundary.nbytes * profile_scale == cost.output_bytes
        boundary.sum().backward(retain_graph=True)
        gradients = [parameter.grad for parameter in layer.parameters]
        assert sum(each.nbytes for each in gradients if each is not None) * profile_scale == cost.gradient_bytes
    assert profile_scale == 256
    assert job.relative_costs == pytest.approx([0.010] * 5)


def test_an_emulated_device_has_the_precision_of_its_profile(tmp_path: Path) -> None:
    config = emulated_config(tmp_path, precision="bf16")
    assert config.profile is not None
    profile = read_profile(config.profile)
    other = dataclasses.replace(profile.fingerprint, dtype="float32")
    write_profile(dataclasses.replace(profile, fingerprint=other), config.profile)
    with refused(ProfileError):
        profile_of_run(config)


def test_the_stand_in_needs_a_profile() -> None:
    with refused(ConfigError):
        stand_in(RunConfig(workers=4))


@pytest.mark.multiprocess
def test_an_emulated_run_through_a_kill_is_a_real_one_and_takes_the_time_of_its_profile(tmp_path: Path) -> None:
    failure = Failure(step=3, worker=1, phase="backward")
    emulation = Emulation(time_scale=2.0)
    # Without a search for a better plan, which would lead to further generations.
    recovery = Recovery(policy="reroute")
    config = emulated_config(tmp_path, failures=(failure,), emulation=emulation, recovery=recovery)
    ended = train_here(config, tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    plans = read_generation_plans(ended.run.plans)
    recorded = read_recorded_steps(ended.run.timelines)
    assert [plan.costs_from for plan in plans.values()] == ["profile", "corrected"]
    # Devices keep the profile, whatever has been corrected by what they did.
    plans = {number: dataclasses.replace(plan, costs=plans[1].costs) for number, plan in plans.items()}
    assert sorted({(step.step, step.generation, step.part) for step in recorded}) == [
        (0, 1, "whole"),
        (1, 1, "whole"),
        (2, 1, "whole"),
        (3, 1, "interrupted"),
        (3, 2, "rest"),
        (4, 2, "whole"),
        (5, 2, "whole"),
        (6, 2, "whole"),
    ]
    for step in (step for step in recorded if step.part == "whole"):
        plan = plans[step.generation]
        for operation, (start, end) in zip(plan.program.of(step.worker), step.operations, strict=True):
            assert end - start >= plan.costs.operation_s(step.worker, operation) - 1e-5
    for comparison in compare_generations(plans, recorded):
        assert comparison.error < 0, "the real system can only be slower than what it emulates"


@pytest.mark.multiprocess
def test_a_run_starts_with_the_plan_that_it_is_given(tmp_path: Path) -> None:
    plan = data_pipeline_plan(layer_costs=[1, 1, 1, 9, 1], dp=2, pp=2, micro_batches=8, split_backward=True)
    plan = recomputing(plan, {1, 2})
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    config = emulated_config(tmp_path, plan=file, steps=3)
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    assert [found.plan for found in read_generation_plans(ended.run.plans).values()] == [plan]


@pytest.mark.multiprocess
def test_state_moves_at_the_speed_of_the_emulated_links(tmp_path: Path) -> None:
    config = emulated_config(
        tmp_path,
        precision="bf16",
        workers=6,
        parallel=Parallel(dp=2, pp=3, optimizer_redundancy="all"),
        recovery=Recovery(policy="repartition"),
        failures=(Failure(step=3, worker=1, phase="backward"),),
    )
    assert config.profile is not None
    slow = dataclasses.replace(
        read_profile(config.profile),
        layers=tuple(dataclasses.replace(layer, optimizer_bytes=28 << 20) for layer in LAYERS),
        intra_host=Link(1e-4, 1e9),
    )
    write_profile(slow, config.profile)
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    (transition,) = ended.events("transition")
    (decision,) = ended.events("decision")
    chosen = next(each for each in decision["candidates"] if each["policy"] == decision["chosen"])
    assert transition["moved_bytes"] == transition["planned_bytes"] == chosen["bytes"]
    assert transition["planned_bytes"] % (32 << 20) == 0
    assert transition["transfer_s"] >= (32 << 20) / 1e9, "a layer's bytes are those of the profile"


@pytest.mark.multiprocess
def test_an_emulated_worker_that_is_new_takes_part(tmp_path: Path) -> None:
    config = emulated_config(
        tmp_path,
        steps=100_000,
        recovery=Recovery(policy="chameleon"),
        batch=Batch(micro_batches=10, micro_batch_size=2),
    )
    file = write_config(config, tmp_path)
    run = RunDirectory(tmp_path / "run")
    with Command("train", file, "--output-dir", run.path) as training:
        training.read_until(r"^\s+3\s")
        with Command("agent", "--run", run.path, "--workers", 1) as late:
            training.read_until("worker 4 joined before step")
            training.read_until(r"^\s+\d+\s")
            training.interrupt_all()
            assert training.wait() == 130
            assert late.wait() == 0, late.printed
    assert {len(plan.plan.workers) for plan in read_generation_plans(run.plans).values()} == {4, 5}
    assert_as_the_plain_loop(Ended(130, run))
