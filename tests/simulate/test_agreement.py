"""Simulation by class against `recovery.decide`: drawn small clusters on which both run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.simulate import MODELS, generate_trace
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import simulate
from tests.simulate.clusters import cluster, random_trace, workload

BY_CLASS = Parameters(exact_up_to=0, worker_mtbf_s=20 * 3600.0)
EXACT = replace(BY_CLASS, exact_up_to=32)


@pytest.mark.parametrize(
    ("seed", "policy"), [*enumerate(["chameleon", "reroute", "repair", "repartition", "drop-replica"])]
)
def test_exact_and_class_planners_train_equally_much(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    per_host = draw.choice([1, 2, 4])
    workers = per_host * draw.randint(-(-8 // per_host), 24 // per_host)
    trace = random_trace(seed, workers=workers, per_host=per_host, faults=4)
    work = workload(layers=draw.choice([6, 8]), micro_batches=draw.choice([2, 3]) * workers)
    by_class, exact = (
        simulate(trace, work, cluster(workers, per_host=per_host), [policy], parameters=parameters).policies[policy]
        for parameters in (BY_CLASS, EXACT)
    )
    assert by_class.samples == pytest.approx(exact.samples, rel=0.02)


def test_a_policy_of_fixed_depth_has_the_better_of_several_starts_in_both_planners() -> None:
    # From the fastest plan of all, which is one pipeline or two, nearly every loss sends it back to a checkpoint.
    rates = device("h100-80g")
    work = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=48)
    trace = generate_trace(MODELS["spot"], hosts=12, workers_per_host=1, duration_s=20_000.0, seed=1)
    for parameters in (BY_CLASS, EXACT):
        results = simulate(
            trace, work, rates.cluster(12, workers_per_host=1), ["drop-replica", "oracle"], parameters=parameters
        )
        assert results.policies["drop-replica"].share_of_oracle > 0.4
