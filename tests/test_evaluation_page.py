"""The blocks of the page on evaluation run, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "evaluation.md"


@pytest.mark.multiprocess
def test_the_session_of_the_page_evaluates_the_job_of_the_page(tmp_path: Path) -> None:
    job, session, *more = blocks(PAGE, "python")
    assert not more
    (tmp_path / "my_job.py").write_text(job)
    script = tmp_path / "session.py"
    script.write_text(session)
    ended = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=os.environ, text=True, capture_output=True, check=False, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    on_request, best = ended.stdout.strip().splitlines()
    assert 0 < float(on_request) < 1
    assert "Evaluation(" in best
    assert "'accuracy': 0." in best or "'accuracy': 1.0" in best
