"""Input that `chameleon plan` rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.storage.profiles import write_profile
from tests.cli.planning import PRESET, ROOT, plan
from tests.golden import message


@pytest.mark.parametrize("picture", ["a.bmp", "no folder/a.svg"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_predicted(
    picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert picture in plan(capsys, "--picture", picture, code=2), "not that nothing is given to plan for"


@pytest.mark.parametrize("command", [("--dp", "2"), ("--micro-batch-size", "1,2")])
def test_a_section_that_is_none_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("parallel = 3\nbatch = 4\n")
    printed = plan(capsys, config, *command, code=2)
    assert f"{config}: 2 errors:" in printed
    assert "parallel = 3: should be" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--model", "llama2-7c", "--device", "h100-80g", "--dp", "1", "--pp", "1"),
        ("--model", "llama2-7b", "--device", "h100-81g", "--dp", "1", "--pp", "1"),
        ("--model", "llama2-7b", "--dp", "1", "--pp", "1"),
        ("--model", "lama2-7b", "--dp", "1", "--pp", "1"),
        ("--model", "llama2-7b", "--device", "h100-80g"),
        (*PRESET[:-1], "35"),
        (*PRESET, "--micro-batches", "33"),
        (*PRESET, "--state", "bf17"),
        (*PRESET, "--recompute", "all"),
        (*PRESET, "--failed", "8"),
        (*PRESET, "--failed", "one"),
        (*PRESET, "--failed", "0,1,2,3,4,5,6,7"),
        (*PRESET, "--failed", "1,5"),
        (*PRESET, "--workers-per-host", "0"),
        (*PRESET, "--micro-batches", "0"),
        (*PRESET, "--micro-batches", "9" * 12),
        (*PRESET, "--dp", "9" * 12),
        ("--model", "llama2-7b", "--device", "h100", "--workers", "9" * 9, "--micro-batches", "8"),
        ("--model", "llama2-7b", "--device", "h100", "--workers", "8", "--micro-batches", "9" * 9),
        (*PRESET, "--dp", "0"),
        (*PRESET, "--micro-batch-size", "0"),
        (*PRESET, "--micro-batch-size", "two"),
        (*PRESET, "--micro-batch-size", "1,x"),
        (*PRESET, "--micro-batch-size", "1,1"),
        (*PRESET, "--micro-batch-size", "1,2"),
        (*PRESET, "--global-batch-size", "32", "--micro-batches", "32"),
        (*PRESET, "--global-batch-size", "32", "--micro-batch-size", "1,3"),
        (*PRESET, "--global-batch-size", "32", "--micro-batch-size", "64"),
        (*PRESET, "--global-batch-size", "4", "--micro-batch-size", "2,4"),
        (*PRESET, "--global-batch-size", "8", "--micro-batch-size", "1,2", "--failed", "1"),
        (*PRESET, "--global-batch-size", "8", "--micro-batch-size", "auto", "--planner", "paper"),
        (*PRESET, "--precision", "bf16", "--state", "bf16"),
        (*PRESET, "--precision", "fp16"),
        ("--state", "bf16", "--dp", "1", "--pp", "1"),
        (ROOT / "examples" / "quickstart.toml", "--device", "h100", "--state", "bf16"),
        (*PRESET, "--picture", "schedule.bmp"),
        (*PRESET, "--trace", "no folder/trace.json"),
        (*PRESET, "--profile", "profile.json"),
        ("nothing.toml",),
        (ROOT / "examples" / "quickstart.toml", "--profile", "none.json"),
        (ROOT / "examples" / "quickstart.toml", "--model", "llama2-7b"),
        ("--model", "none.json", "--device", "h100-80g", "--dp", "1", "--pp", "1"),
        ("--model", "empty.json", "--device", "h100-80g", "--dp", "1", "--pp", "1"),
        ("--profile", "empty.json", "--dp", "1", "--pp", "1"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str | Path, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}")
    error = plan(capsys, *arguments, code=2)
    assert error.startswith("chameleon plan: ")
    message(error)
    assert "Traceback" not in error


def test_a_profile_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=2), profile)
    error = plan(capsys, ROOT / "examples" / "quickstart.toml", "--profile", profile, code=2)
    assert "the profile of llama2-7b is of another model" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "0", "--micro-batches", "8"),
        ("--workers", "8"),
        ("--workers", "8", "--dp", "2"),
        ("--workers", "8", "--micro-batches", "8", "--planner", "layout"),
        ("--workers", "8", "--micro-batches", "8", "--failed", "8"),
        ("--workers", "8", "--micro-batches", "8", "--slow", "9=0.5"),
        ("--workers", "8", "--micro-batches", "8", "--slow", "1:0.5"),
        ("--workers", "8", "--micro-batches", "8", "--slow", "1=.5,1=.7"),
        ("--workers", "8", "--micro-batches", "8", "--slow", "1=0"),
        ("--workers", "1", "--micro-batches", "8"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--model", "llama2-7b", "--device", "h100-80g", *arguments])
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert error.startswith("chameleon plan: ")
    message(error)


def test_a_job_is_planned_by_the_configuration_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("not read before the configuration is")
    (tmp_path / "mine.toml").write_text("workers = 5\n")
    assert main(["plan", str(tmp_path / "mine.py")]) == 2
    assert "workers = 5" in capsys.readouterr().err
