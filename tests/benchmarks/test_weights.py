"""The benchmark of loading weights, on a small model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.weights import forget, job_of, load, write_files
from chameleon_ft.models.weights import check_weights


def test_a_model_is_written_and_some_layers_of_it_are_loaded(tmp_path: Path) -> None:
    sizes = (8, 3, 16)
    job = job_of(tmp_path, *sizes)
    write_files(job, tmp_path)
    check_weights(job)
    forget(tmp_path)
    assert load(tmp_path, sizes, range(3, 5))["layer_bytes"] == 4 * (4 * 64 + 2 * 256 + 32 + 8 + 128)
