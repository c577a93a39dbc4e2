"""The section "Corpora" of the page on data: its commands and its code, run in order in one folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.config import TrainConfig, parse_config, read_toml
from chameleon_ft.data import check_data
from tests.data.tokenizers import TEXT, make_tokenizer
from tests.test_docs import ROOT


@pytest.mark.multiprocess
def test_the_blocks_run_as_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    section = re.search(r"^## Corpora\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "news").mkdir()
    for number in range(4):
        (tmp_path / "news" / f"{number}.txt").write_text(TEXT * 20, encoding="utf-8")
    (tmp_path / "code.jsonl").write_text("\n".join(json.dumps({"content": TEXT * 30}) for _ in range(2)))
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL):
        if language == "sh":
            for line in block.splitlines():
                assert main(shlex.split(line)[1:]) == 0
        elif language == "toml":
            (tmp_path / "run.toml").write_text(block)
            config = parse_config(TrainConfig, read_toml(tmp_path / "run.toml"), source="run.toml")
            assert check_data(config).kind == "mixture"
        else:
            assert language == "python"
            exec(compile(block, "docs/data.md", "exec"), {})
