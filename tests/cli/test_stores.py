"""Runs with an object store on the command line: what is refused, and how they go on from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.storage.checkpoints import layer_part, mark_complete
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import ObjectStore, RecordCopies, storage_of
from tests.cli.conftest import CommandLine
from tests.golden import message


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    path = tmp_path / "small.toml"
    path.write_text(
        f'workers = 4\nsteps = 20\n[data]\npath = "{tmp_path}/text.txt"\n[store]\nurl = "file://{tmp_path}/store"\n'
    )
    return path


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def finished_run(chameleon: CommandLine, config_file: Path, url: str, *, step: int = 10) -> RunDirectory:
    """Return the directory of a run that has stopped after a checkpoint in its store."""
    chameleon.configured("train", config_file, "--output-dir", "first")
    run = chameleon.launched.pop().run
    save_checkpoint(run, url, step)
    return run


def save_checkpoint(run: RunDirectory, url: str, step: int) -> None:
    """Put a checkpoint of one layer into the store of a run, and its records."""
    checkpoints = ObjectStore(f"{url}/checkpoints", timeout_s=60)
    with checkpoints.writing(layer_part(step, 0)) as draft:
        draft.mkdir()
    RecordCopies(run, ObjectStore(url, timeout_s=60)).save()
    mark_complete(checkpoints, step, model="a model", num_layers=1)


def test_a_run_begins_in_an_empty_store_alone(chameleon: CommandLine, config_file: Path, url: str) -> None:
    finished_run(chameleon, config_file, url)
    refused = chameleon.refused("train", config_file, "--output-dir", "second")
    assert f"store.url = {url}: has a run already" in refused
    assert f"--resume {url}" in refused
    assert not Path("second").exists()


def test_a_run_goes_on_in_its_directory(chameleon: CommandLine, config_file: Path, url: str) -> None:
    run = finished_run(chameleon, config_file, url)
    config = chameleon.configured("train", "--resume", run.path)
    assert config.store.url == url
    assert chameleon.launched[-1].resume


def test_a_run_goes_on_from_its_store_in_another_directory(
    chameleon: CommandLine, config_file: Path, url: str, tmp_path: Path
) -> None:
    first = finished_run(chameleon, config_file, url)
    config = chameleon.configured("train", "--resume", url, "--output-dir", "second", "--steps", "30")
    assert (config.steps, config.store.url, config.output_dir) == (30, url, tmp_path / "second")
    assert chameleon.launched[-1].resume
    assert first.path == tmp_path / "first"
    chameleon.launched.clear()
    message(chameleon.refused("train", "--resume", url, "--output-dir", "second"))


def test_by_default_its_directory_has_the_name_of_its_store(
    chameleon: CommandLine, config_file: Path, url: str, tmp_path: Path
) -> None:
    finished_run(chameleon, config_file, url)
    assert chameleon.configured("train", "--resume", url).output_dir == tmp_path / "runs" / "store"


def test_what_is_refused_leaves_no_directory_behind(chameleon: CommandLine, config_file: Path, url: str) -> None:
    finished_run(chameleon, config_file, url)
    message(chameleon.refused("train", "--resume", url, "--output-dir", "second", "--seed", "3"))
    assert "all of its 10 steps are done" in chameleon.refused(
        "train", "--resume", url, "--output-dir", "second", "--steps", "10"
    )
    assert not Path("second").exists()


def test_there_has_to_be_a_run_in_a_store_to_go_on_with(chameleon: CommandLine, url: str) -> None:
    assert f"--resume {url}: there is no run" in chameleon.refused("train", "--resume", url, "--output-dir", "second")
    assert not Path("second").exists()


def test_auto_starts_a_run_and_resumes_it_wherever_its_directory_is(
    chameleon: CommandLine, config_file: Path, url: str
) -> None:
    command = ("train", config_file, "--resume", "auto", "--output-dir")
    chameleon.configured(*command, "here")
    run = chameleon.launched[-1].run
    chameleon.configured(*command, "there")
    assert [each.resume for each in chameleon.launched] == [False, False], "there is no checkpoint"
    save_checkpoint(run, url, 10)
    for directory in ("here", "elsewhere"):
        assert chameleon.configured(*command, directory).store.url == url
        assert chameleon.launched[-1].resume
        assert chameleon.launched[-1].run.path.name == directory


def test_a_resumed_run_keeps_its_store(chameleon: CommandLine, config_file: Path, url: str, tmp_path: Path) -> None:
    run = finished_run(chameleon, config_file, url)
    other = f"file://{tmp_path}/other"
    refused = chameleon.refused("train", "--resume", run.path, "--store.url", other)
    assert f"its checkpoints are in {url}, not in {other}" in refused
    message(chameleon.refused("train", "--resume", url, "--store.url", other))


def test_a_fork_has_a_store_of_its_own_or_none(
    chameleon: CommandLine, config_file: Path, url: str, tmp_path: Path
) -> None:
    run = finished_run(chameleon, config_file, url)
    fork = ("train", "--resume", run.path, "--fork", "--output-dir")
    message(chameleon.refused(*fork, "fork"))
    other = f"file://{tmp_path}/other"
    for directory, place in (("fork-1", other), ("fork-2", "")):
        assert chameleon.configured(*fork, directory, "--store.url", place).store.url == place
        checkpoints = (
            ObjectStore(f"{place}/checkpoints", timeout_s=60) if place else tmp_path / directory / "checkpoints"
        )
        assert storage_of(checkpoints).names() == ["step-00000010"]


@pytest.mark.parametrize(
    "value",
    [
        "bucket/run",
        "s3://",
        "memory://run",
        "s3://bucket/runs/*",
        "s3://bucket/run[1]",
        "bogus://bucket/run",
        "file:///proc/nowhere/run",
    ],
)
def test_a_store_that_cannot_be_used_is_refused(chameleon: CommandLine, config_file: Path, value: str) -> None:
    message(chameleon.refused("train", config_file, "--store.url", value))
