"""Configurations: what is refused and in which words, and that TOML brings back what it was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chameleon_ft.config import (
    BackendName,
    Batch,
    Checkpoint,
    DeviceName,
    Failure,
    LlamaConfig,
    Parallel,
    RunConfig,
    TrainConfig,
    config_to_toml,
    config_type,
    load_config,
    parse_config,
    parse_fields,
    read_recorded_toml,
)
from chameleon_ft.errors import ConfigError
from tests.golden import message, refused

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


def error_of(data: dict[str, Any], model: type[RunConfig] = TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(model, data, source="run.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    "lease",
    ["files", "etcd://a:2379", "etcd://10.0.0.1:1,[::1]:2/my/runs", "etcds://a:1/", "kubernetes", "kubernetes://ml-1"],
)
def test_places_of_the_lease(lease: str) -> None:
    assert parse_config(TrainConfig, {"control": {"lease": lease}}, source="run.toml").control.lease == lease


@pytest.mark.parametrize(
    "data",
    [
        {"paralel": {}},
        {"batch": {"micro_batch": 4}},
        {"micro_batches": 4},
        {"model": {"wombat": 4}},
        {"failures": [{"step": 1, "worker": 0, "fase": "sync"}]},
        {"failures": [{"step": 1}]},
        {"steps": 0},
        {"steps": "many"},
        {"steps": True},
        {"workers": 10**9},
        {"batch": {"micro_batches": 10**9}},
        {"steps": 2.0},
        {"optimizer": {"lr": float("nan")}},
        {"recovery": {"policy": "magic"}},
        {"policy": "magic"},
        {"recovery": {"worker_mtbf_hours": 0.0}},
        {"recovery": {"prior_weight": 1e13}},
        {"control": {"lease": "etcd"}},
        {"control": {"lease": "etcd://root:secret@a:2379"}},
        {"control": {"lease": "etcd://a:2379,b"}},
        {"control": {"lease": "kubernetes://Team"}},
        {"control": {"lease_s": 0.0}},
        {"recovery": {"prior_weight": 0.0}},
        {"recovery": {"restart_cost_s": -1.0}},
        {"failures": [{"step": 1, "worker": 0, "kind": "melt"}]},
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_expected_one(data: dict[str, Any]) -> None:
    message(error_of(data))


def test_all_mistakes_are_listed_at_once() -> None:
    text = error_of({"stepz": 1, "workers": -1, "model": {"dim": "wide"}})
    assert text.startswith("run.toml: 3 errors:")
    assert all(key in text for key in ("stepz", "workers = -1", 'model.dim = "wide"'))


@pytest.mark.parametrize(
    "data",
    [
        {"workers": 6},
        {"parallel": {"dp": 3}, "workers": 6},
        {"parallel": {"dp": 1, "pp": 9}, "workers": 9},
        {"failures": [{"step": 1, "worker": 0, "kind": "slow"}]},
        {"failures": [{"step": 1, "worker": 0, "factor": 0.5}]},
        {"failures": [{"step": 1, "worker": 4}]},
        {"failures": [{"step": 100, "worker": 1}]},
        {"failures": [{"step": 1, "worker": 1}, {"step": 2, "worker": 1}]},
        {"failures": [{"step": 1, "worker": 1, "phase": "checkpoint"}], "checkpoint": {"every": 0}},
        {"backend": "nccl"},
        {"device": "npu", "backend": "nccl"},
        {"snapshots": {"every": 0}, "failures": [{"step": 1, "worker": 1, "phase": "snapshot"}]},
        {"device": "npu", "backend": "xccl"},
        {"share_devices": True},
        {"device": "npu", "backend": "hccl", "share_devices": True},
        {"timeouts": {"heartbeat_timeout_s": 20.0}},
        {"timeouts": {"collective_timeout_s": 1.0}},
        {"timeouts": {"first_step_s": 1e12}},
        {"timeouts": {"rendezvous_s": 9.0}},
        {"timeouts": {"collective_timeout_s": -1}},
        {"timeouts": {"collective_timeout_s": 130.0}},
        {"model": {"dim": 130}},
        {"model": {"dim": 12}},
        {"model": {"num_kv_heads": 3}},
        {"optimizer": {"min_lr": 1.0}},
        {"data": {"format": "text"}, "model": {"vocab_size": 100}},
    ],
)
def test_inconsistent_fields_are_refused_with_a_remedy(data: dict[str, Any]) -> None:
    message(error_of(data))


@pytest.mark.parametrize(
    ("device", "backend", "untried"),
    [("cpu", "gloo", False), ("cuda", "gloo", False), ("cuda", "nccl", True), ("npu", "gloo", True)],
)
def test_a_device_that_no_run_was_made_on_is_warned_of(device: DeviceName, backend: BackendName, untried: bool) -> None:
    warning = RunConfig(device=device, backend=backend).untried
    assert ("has not been run on any" in warning and "docs/devices.md" in warning) == untried


def test_relations_are_all_reported() -> None:
    text = error_of({"workers": 6, "batch": {"micro_batches": 3}, "failures": [{"step": 1, "worker": 8}]})
    assert text.startswith("run.toml: 3 errors:")


def test_fields_can_be_checked_before_it_is_known_whether_they_fit_together() -> None:
    parse_fields(TrainConfig, {"workers": 6}, source="run.toml")
    with refused(ConfigError):
        parse_fields(TrainConfig, {"workers": -6}, source="run.toml")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_the_type_follows_from_what_is_trained() -> None:
    assert config_type({}) is TrainConfig
    assert config_type({"job": "mine.py:job"}) is RunConfig
    assert config_type({"job": "mine.py:job", "optimizer": {}}) is TrainConfig


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    data = load_config(path)
    assert data.failures, "an example shows a failure"


@pytest.mark.parametrize("content", [None, "steps = ", "steps = " + "[" * 5000, "steps = " + "9" * 5000, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(ConfigError):
        load_config(path)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    steps = draw(st.integers(1, 50))
    workers = draw(st.lists(st.integers(0, dp * pp - 1), unique=True, max_size=3))
    common: dict[str, Any] = {
        "workers": dp * pp,
        "steps": steps,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "parallel": Parallel(dp=dp, pp=pp, split_backward=draw(st.booleans())),
        "batch": Batch(micro_batches=dp * draw(st.integers(1, 4)), micro_batch_size=draw(st.integers(1, 8))),
        "checkpoint": Checkpoint(every=draw(st.integers(1, 9) | st.just("auto"))),
        "failures": tuple(
            Failure(step=draw(st.integers(0, steps - 1)), worker=worker, phase=draw(st.sampled_from(["sync", "vote"])))
            for worker in workers
        ),
    }
    if draw(st.booleans()):
        return RunConfig(job=draw(st.text('/aé "\\\n=[', min_size=1)) + ".py:job", **common)
    return TrainConfig(model=LlamaConfig(norm_eps=draw(st.floats(1e-12, 1e-3))), **common)


@given(config=configs())
def test_toml_brings_back_the_same_configuration(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("round") / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_the_run_directory_is_not_part_of_the_file() -> None:
    assert "/somewhere" not in config_to_toml(TrainConfig(output_dir=Path("/somewhere")))


def test_importing_it_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, chameleon_ft.config; print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("config", [TrainConfig(), RunConfig(job="mine.py:job")], ids=["Llama", "own job"])
def test_what_a_run_has_recorded_is_refused_if_it_is_cut(tmp_path: Path, config: RunConfig) -> None:
    path = tmp_path / "config.toml"
    lines = config_to_toml(config).splitlines(keepends=True)
    for length in range(len(lines)):
        path.write_text("".join(lines[:length]))
        with pytest.raises(ConfigError, match=r"is incomplete|is not valid TOML"):
            read_recorded_toml(path)
    path.write_text("".join(lines))
    assert read_recorded_toml(path)["workers"] == config.workers
    path.write_text("".join(line for line in lines if not line.startswith(("lease_s", "clip_norm"))))
    with refused(ConfigError):
        read_recorded_toml(path)


def test_by_default_two_holders_own_a_slice_of_the_optimizer() -> None:
    assert Parallel().owners == 2
    assert Parallel(optimizer_redundancy="all").owners is None
