"""The run directory on nodes that do not share it."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.ray import cluster as directory
from chameleon_ft.storage.files import RunDirectory
from tests.golden import refused
from tests.harness import create_run, small_config


def test_a_node_tells_whether_it_sees_the_directory(tmp_path: Path) -> None:
    run = create_run(small_config(tmp_path), tmp_path / "run")
    mark = directory.mark(run)
    assert directory.sees(run, mark)
    assert not directory.sees(run, "another"), "a directory at this path that another run has left"
    assert not directory.sees(RunDirectory(tmp_path / "elsewhere"), mark)


def test_a_node_gets_what_ranks_read_and_gives_back_the_checkpoint(tmp_path: Path) -> None:
    run, copy = create_run(small_config(tmp_path), tmp_path / "run"), RunDirectory(tmp_path / "node" / "run")
    mark = directory.mark(run)
    for _ in range(2):  # another agent on that node may have made one before
        directory.copy_to(copy, directory.packed(run))
    assert copy.config_file.read_text() == run.config_file.read_text()
    assert (copy.path / "data" / "text.bin").read_bytes() == (run.path / "data" / "text.bin").read_bytes()
    assert copy.logs.is_dir()
    assert not directory.sees(copy, mark)
    assert directory.packed_checkpoints(copy) is None
    part = copy.checkpoints / "step-00000010" / "layer-0" / "parameters"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"parameters")
    archive = directory.packed_checkpoints(copy)
    assert archive is not None
    directory.keep_checkpoints(run, archive)
    assert (run.path / part.relative_to(copy.path)).read_bytes() == b"parameters"
    assert directory.packed_checkpoints(run) is None, "this one is no copy"


def test_a_copy_replaces_nothing_else(tmp_path: Path) -> None:
    run = create_run(small_config(tmp_path), tmp_path / "run")
    (tmp_path / "other").mkdir()
    with refused(ConfigError):
        directory.copy_to(RunDirectory(tmp_path / "other"), directory.packed(run))
