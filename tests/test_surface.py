"""The names that users import: those of the documentation and of the examples."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

import chameleon_ft
from chameleon_ft import optim
from tests.test_architecture import PURE, modules_in
from tests.test_docs import PAGES, ROOT, blocks

SURFACE = {
    "": {
        "BoundarySpec",
        "Callback",
        "ChameleonError",
        "ConfigError",
        "EarlyStop",
        "Job",
        "Pieces",
        "RunConfig",
        "Session",
        "TrainConfig",
        "Weights",
        "__version__",
        "auxiliary_loss",
        "load_checkpoint",
        "log",
    },
    "optim": {
        "Combined",
        "NO_DECAY",
        "Schedule",
        "TorchSchedule",
        "adamw",
        "combined",
        "constant",
        "cosine",
        "ema",
        "groups",
        "linear",
        "matrices",
        "rate_shares",
        "scheduler",
        "vectors",
        "warmup_cosine",
        "wsd",
    },
    "data": {"Buckets", "Mixture", "SampleOrder", "open_corpus", "read_sample", "sample_order"},
    "keys": {"init_key", "step_key"},
    "models.recomputation": {"recomputable"},
    "storage.files": {"RunDirectory"},
    "launch.ray": {"ClusterOptions", "train"},
    "cluster": {"Cluster", "Link"},
    "plan": {"data_pipeline_plan"},
    "schedule": {"CostModel", "best_program"},
    "cost": {"StallModel", "derive_workload", "device", "estimate_step", "model_shape", "total_work_bound_s"},
    "search": {"find_plan", "find_plan_of_sizes"},
    "recovery": {"DecisionContext", "FailureModel", "decide", "uniform_limits"},
    "simulate": {"MODELS", "generate_trace", "save_trace", "simulate"},
}


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_what_users_import_is_there(name: str) -> None:
    module = importlib.import_module(f"chameleon_ft.{name}".rstrip("."))
    assert {each for each in SURFACE[name] if not hasattr(module, each)} == set()


def test_the_package_offers_what_it_is_documented_to_and_no_more() -> None:
    assert set(chameleon_ft.__all__) == set(dir(chameleon_ft)) == SURFACE[""]
    assert set(optim.__all__) == SURFACE["optim"]


def test_what_is_shown_to_users_is_on_the_surface() -> None:
    codes = [block for page in PAGES for block in blocks(page, "python")]
    codes += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    shown = {
        (module.strip("."), name)
        for code in codes
        for module, names in re.findall(r"(?m)^\s*from chameleon_ft([\w.]*) import ([\w, ]+)$", code)
        for name in names.split(", ")
        if f"{module}.{name}".strip(".") not in SURFACE
    }
    assert shown
    assert {(module, name) for module, name in shown if name not in SURFACE.get(module, ())} == set()


@pytest.mark.parametrize("name", sorted(PURE))
def test_everything_public_in_the_pure_part_is_explained(name: str) -> None:
    for module, path in modules_in(name):
        if "._" in module:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_a_name_that_is_not_there_is_missed_as_usual() -> None:
    with pytest.raises(AttributeError):
        _ = chameleon_ft.Trainer
