"""Input that `chameleon plan` rejects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.storage.profiles import write_profile
from tests.cli.planning import PRESET, ROOT, plan


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
    ("arguments", "message"),
    [
        ((), "give a CONFIG, or a published --model and its --device, or a --profile"),
        (("--model", "llama2-7c", "--device", "h100-80g", "--dp", "1", "--pp", "1"), "llama2-7b"),
        (("--model", "llama2-7b", "--device", "h100-81g", "--dp", "1", "--pp", "1"), "h100-80g"),
        (("--model", "llama2-7b", "--dp", "1", "--pp", "1"), "needs the --device that it runs on"),
        (("--model", "lama2-7b", "--dp", "1", "--pp", "1"), "did you mean 'llama2-7b'"),
        (("--model", "llama2-7b", "--device", "h100-80g"), "needs --dp and --pp"),
        ((*PRESET[:-1], "35"), "has 34 layers; take as many stages at most"),
        ((*PRESET, "--micro-batches", "33"), "must divide evenly over parallel.dp = 2 pipelines; take 32 or 34"),
        ((*PRESET, "--state", "bf17"), "bf16"),
        ((*PRESET, "--recompute", "all"), "should be one of none, selective, full"),
        ((*PRESET, "--failed", "8"), "there is no worker 8; they are numbered 0 to 7"),
        ((*PRESET, "--failed", "one"), "should be numbers of workers with commas between them"),
        ((*PRESET, "--failed", "0,1,2,3,4,5,6,7"), "leaves no worker"),
        ((*PRESET, "--failed", "1,5"), "no live worker holds layers 9-16; a run then returns to its newest checkpoint"),
        ((*PRESET, "--workers-per-host", "0"), "should be greater than 0"),
        ((*PRESET, "--micro-batches", "0"), "--micro-batches 0: should be greater than 0"),
        ((*PRESET, "--micro-batches", "9" * 12), "batch.micro_batches = 999999999999: should be less than or equal"),
        ((*PRESET, "--dp", "9" * 12), "workers = 3999999999996: should be less than or equal to 100000"),
        (
            ("--model", "llama2-7b", "--device", "h100", "--workers", "9" * 9, "--micro-batches", "8"),
            "--workers 999999999: should be 100000 at most",
        ),
        (
            ("--model", "llama2-7b", "--device", "h100", "--workers", "8", "--micro-batches", "9" * 9),
            "micro_batches must be at most 1000000; got 999999999",
        ),
        ((*PRESET, "--dp", "0"), "--dp 0: should be greater than 0"),
        ((*PRESET, "--micro-batch-size", "0"), "--micro-batch-size 0: should be a whole number of 1 or more"),
        ((*PRESET, "--micro-batch-size", "two"), "--micro-batch-size two: should be a whole number of 1 or more"),
        (
            (*PRESET, "--micro-batch-size", "1,x"),
            "--micro-batch-size x of a list such as 1,2,4: should be a whole number of 1 or more",
        ),
        ((*PRESET, "--micro-batch-size", "1,1"), "--micro-batch-size 1,1: has a size twice"),
        ((*PRESET, "--micro-batch-size", "1,2"), "say how many by --global-batch-size"),
        (
            (*PRESET, "--global-batch-size", "32", "--micro-batches", "32"),
            "--micro-batches 32: follow from the samples",
        ),
        (
            (*PRESET, "--global-batch-size", "32", "--micro-batch-size", "1,3"),
            "a micro-batch size of 3 does not divide",
        ),
        ((*PRESET, "--global-batch-size", "32", "--micro-batch-size", "64"), "take 32, or another number of samples"),
        ((*PRESET, "--global-batch-size", "4", "--micro-batch-size", "2,4"), "must divide evenly over parallel.dp = 2"),
        (
            (*PRESET, "--global-batch-size", "8", "--micro-batch-size", "1,2", "--failed", "1"),
            "keeps its micro-batch size",
        ),
        (
            (*PRESET, "--global-batch-size", "8", "--micro-batch-size", "auto", "--planner", "paper"),
            "--planner paper: a micro-batch size is chosen for a layout",
        ),
        ((*PRESET, "--precision", "bf16", "--state", "bf16"), "--precision bf16: --state bf16 says this already"),
        ((*PRESET, "--precision", "fp16"), "--precision fp16: should be one of fp32, bf16"),
        (("--state", "bf16", "--dp", "1", "--pp", "1"), "--state bf16: is for a published --model; name one"),
        (
            (ROOT / "examples" / "quickstart.toml", "--device", "h100", "--state", "bf16"),
            "--state bf16: .*quickstart.toml says what is trained; leave one of them out",
        ),
        ((*PRESET, "--picture", "schedule.bmp"), r"\.svg"),
        ((*PRESET, "--trace", "no folder/trace.json"), "the trace cannot be written there; give a file in a folder"),
        (
            (*PRESET, "--profile", "profile.json"),
            "--profile profile.json determines this already; leave one of them out",
        ),
        (("nothing.toml",), "there is no such file"),
        ((ROOT / "examples" / "quickstart.toml", "--profile", "none.json"), "profile .*none.json: cannot be read"),
        ((ROOT / "examples" / "quickstart.toml", "--model", "llama2-7b"), "leave one of them out"),
        (("--model", "none.json", "--device", "h100-80g", "--dp", "1", "--pp", "1"), "none.json: cannot be read"),
        (("--model", "empty.json", "--device", "h100-80g", "--dp", "1", "--pp", "1"), "--model empty.json: model_type"),
        (("--profile", "empty.json", "--dp", "1", "--pp", "1"), "empty.json: profile: is missing; give a file of"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str | Path, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}")
    error = plan(capsys, *arguments, code=2)
    assert error.startswith("chameleon plan: ")
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_profile_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=2), profile)
    error = plan(capsys, ROOT / "examples" / "quickstart.toml", "--profile", profile, code=2)
    assert "the profile of llama2-7b is of another model" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0", "--micro-batches", "8"), "--workers 0: should be greater than 0"),
        (("--workers", "8"), "needs --micro-batches, how many a step has"),
        (("--workers", "8", "--dp", "2"), "searches for a layout, and --dp and --pp give one; choose"),
        (("--workers", "8", "--micro-batches", "8", "--planner", "layout"), "leaves the layout open; give --dp"),
        (("--workers", "8", "--micro-batches", "8", "--failed", "8"), "there is no worker 8"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "9=0.5"), "there is no worker 9"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "1:0.5"), "should be WORKER=SPEED, such as 7=0.6"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "1=.5,1=.7"), "names worker 1 twice"),
        (("--workers", "8", "--micro-batches", "8", "--slow", "1=0"), "speed of worker 1 must be positive"),
        (("--workers", "1", "--micro-batches", "8"), "does not fit the memory of 1 worker: .* workers .* would do"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", "--model", "llama2-7b", "--device", "h100-80g", *arguments])
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert error.startswith("chameleon plan: ")
    assert re.search(message, error), error


def test_a_job_is_planned_by_the_configuration_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("not read before the configuration is")
    (tmp_path / "mine.toml").write_text("workers = 5\n")
    assert main(["plan", str(tmp_path / "mine.py")]) == 2
    assert "workers = 5" in capsys.readouterr().err
