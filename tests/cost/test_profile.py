"""Profiles: what is read is what was written, and nothing is used for what it is not of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Link
from chameleon_ft.config import STAND_IN_JOB, Batch, Emulation, Parallel, RunConfig
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import AllReduceTime, Fingerprint, LayerTimes, Profile, Spread, derived_profile
from chameleon_ft.errors import ProfileError
from chameleon_ft.storage.profiles import costs_of_run, profile_of_run, read_profile, write_profile
from chameleon_ft.workload import LayerCost
from tests.golden import message, refused

SPREAD = Spread(2.0, 1.0, 4.0, 5)


def profile(*, fused_backward_s: float | None = 2.5, inter_host: Link | None = None) -> Profile:
    times = LayerTimes(forward=SPREAD, backward=SPREAD, input_grad=SPREAD, weight_grad=SPREAD)
    layers = (
        LayerCost("embedding", 1.0, 0.0, 0.5, output_bytes=64, gradient_bytes=400),
        LayerCost("head", 2.0, 1.5, 1.5, param_bytes=8, fused_backward_s=fused_backward_s),
    )
    return Profile(
        name="a small one",
        fingerprint=Fingerprint(
            model="abc", micro_batch_size=2, dtype="float32", device="cpu", threads=1, versions={"torch": "2.13.0"}
        ),
        source="measured",
        provenance="by hand",
        layers=layers,
        times=(times, times),
        operation_overhead_s=0.25,
        intra_host=Link(0.125, 1e9),
        inter_host=inter_host,
        all_reduces=(AllReduceTime(4, 1000, SPREAD),),
        memory_bytes=1 << 30,
    )


@pytest.mark.parametrize("written", [profile(), profile(fused_backward_s=None, inter_host=Link(1.0, 5.0))])
def test_a_profile_is_read_as_it_was_written(written: Profile, tmp_path: Path) -> None:
    write_profile(written, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == written


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"forward_s":', '"foward_s":'),
        ('"micro_batch_size": 2', '"micro_batch_size": "2"'),
        ('"micro_batch_size": 2', '"micro_batch_size": 2, "more": 1'),
        ('"forward_s": 1.0', '"forward_s": -1.0'),
        ("chameleon-profile-1", "chameleon-profile-9"),
        ('"bytes_per_s": 1000000000.0', '"bytes_per_s": 0.0'),
        ('"min_s": 1.0', '"min_s": 3.0'),
        ("{", ""),
    ],
)
def test_a_damaged_profile_is_refused_with_the_place(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    message(str(caught.value))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(ProfileError):
        read_profile(tmp_path / "nothing.json")
    with refused(ProfileError):
        write_profile(profile(), tmp_path / "no folder" / "profile.json")


@pytest.mark.parametrize(
    "wanted",
    [
        {"model": "abd"},
        {"micro_batch_size": 4},
        {"device": "NVIDIA H100"},
        {"threads": 2},
        {"versions": {"torch": "2.14.0"}},
        {"versions": {"numpy": "2.0"}},
    ],
)
def test_what_does_not_match_is_named(wanted: dict[str, object]) -> None:
    with refused(ProfileError):
        profile().require(wanted)


def test_what_matches_is_let_through() -> None:
    own = dataclasses.asdict(profile().fingerprint)
    profile().require(own)
    profile().require({})


def test_several_hosts_need_a_link_between_them() -> None:
    hosts = {0: "a", 1: "b"}
    with refused(ProfileError):
        profile().cluster(hosts)
    cluster = profile(inter_host=Link(9.0, 1.0)).cluster(hosts, speeds={1: 0.5})
    assert cluster.link(0, 1) == Link(9.0, 1.0)
    assert [worker.speed for worker in cluster.workers] == [1.0, 0.5]
    assert cluster.worker(0).memory_bytes == 1 << 30
    assert profile().cluster({0: "a", 1: "a"}).link(0, 1) == profile().intra_host


@given(factor=st.floats(0.01, 100))
def test_a_slowed_profile_takes_so_much_longer(factor: float) -> None:
    before, after = profile(inter_host=Link(0.5, 8.0)), profile(inter_host=Link(0.5, 8.0)).slowed(factor)
    for old, new in zip(before.layers, after.layers, strict=True):
        for field in ("forward_s", "input_grad_s", "weight_grad_s", "backward_s"):
            assert getattr(new, field) == pytest.approx(factor * getattr(old, field))
        assert new.gradient_bytes == old.gradient_bytes
    assert after.operation_overhead_s == pytest.approx(factor * before.operation_overhead_s)
    assert after.inter_host is not None
    assert after.intra_host.message_s(100) == pytest.approx(factor * before.intra_host.message_s(100))
    assert after.inter_host.message_s(100) == pytest.approx(factor * (0.5 + 100 / 8))
    assert (after.times, after.all_reduces) == ((), ()), "what was measured was not measured like this"


def test_latencies_have_a_floor_where_one_is_given() -> None:
    slowed = profile(inter_host=Link(0.5, 8.0)).slowed(2.0, min_latency_s=0.3)
    assert slowed.intra_host.latency_s == 0.3
    assert slowed.inter_host == Link(1.0, 4.0)


def test_a_derived_profile_is_the_derived_workload() -> None:
    shape, rates = model_shape("llama2-7b"), device("h100-80g")
    found = derived_profile(shape, rates, micro_batch_size=2)
    assert found.workload(24) == derive_workload(shape, rates, micro_batch_size=2, micro_batches=24)
    assert (found.intra_host, found.inter_host) == (rates.intra_host, rates.inter_host)
    assert found.memory_bytes == rates.memory_bytes
    assert (found.source, found.times) == ("derived", ())


def test_a_derived_profile_knows_what_layers_share(tmp_path: Path) -> None:
    shape = dataclasses.replace(model_shape("qwen2.5-7b"), tied_embeddings=True)
    found = derived_profile(shape, device("h100-80g"), micro_batch_size=1)
    (tied,) = derive_workload(shape, device("h100-80g"), micro_batch_size=1, micro_batches=4).tied
    assert found.workload(4).tied == (tied,)
    write_profile(found, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": (LayerCost("one", 0.0, 0.0, 0.0),), "times": ()},
        {"layers": (LayerCost("one", 1.0, 1.0, 1.0),)},
    ],
)
def test_an_invalid_profile_is_refused(changes: dict[str, object]) -> None:
    with refused(ProfileError):
        dataclasses.replace(profile(), **changes)  # type: ignore[arg-type]


def run_config(file: Path | None, **changes: object) -> RunConfig:
    fields = {"workers": 2, "parallel": Parallel(dp=1, pp=2), "batch": Batch(micro_batches=4, micro_batch_size=2)}
    return RunConfig(profile=file, **{**fields, **changes})  # type: ignore[arg-type]


def test_the_profile_of_a_run_is_of_its_micro_batch(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    write_profile(profile(), file)
    assert profile_of_run(run_config(file)) == profile()
    with refused(ProfileError):
        profile_of_run(run_config(file, batch=Batch(micro_batches=4, micro_batch_size=3)))
    with refused(ProfileError):
        profile_of_run(run_config(None))


def test_emulated_devices_are_slower_and_on_hosts_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    write_profile(profile(inter_host=Link(0.5, 8.0)), file)
    emulation = Emulation(time_scale=3.0, workers_per_host=1, min_message_s=0.5)
    config = run_config(file, device="emulated", job=STAND_IN_JOB, emulation=emulation)

    found = profile_of_run(config)
    costs = costs_of_run(config, found, {0: "here", 1: "here"})

    assert found == profile(inter_host=Link(0.5, 8.0)).slowed(3.0, min_latency_s=0.5)
    assert costs.cluster.link(0, 1) == Link(1.5, 8.0 / 3)
    assert costs.workload.micro_batches == 4
