"""Real runs with drawn failures; `python -m benchmarks.sequences` draws more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._sequence_draws import draw
from benchmarks.sequences import run_drawn

pytestmark = pytest.mark.multiprocess


# Together they have all parts of models, and trees between layers beside all else.
@pytest.mark.parametrize("seed", [1, 5, 40, 113, 141, 236])
def test_a_drawn_run_is_trained_as_if_nothing_had_failed(tmp_path: Path, seed: int) -> None:
    drawn = draw(seed)
    print(drawn)  # with the number to repeat it by: python -m benchmarks.sequences --runs 1 --seed N
    findings = run_drawn(drawn, tmp_path / "drawn")
    print(findings)
    assert not findings.problems


@pytest.mark.parametrize("seed", [83, 302])  # strikes at most kinds of processes, and workers that are slow or wrong
def test_a_drawn_run_outlives_its_other_processes(tmp_path: Path, seed: int) -> None:
    drawn = draw(seed, strikes=True)
    print(drawn)  # to repeat it: python -m benchmarks.sequences --runs 1 --strikes --seed N
    findings = run_drawn(drawn, tmp_path / "drawn")
    print(findings)
    assert not findings.problems
