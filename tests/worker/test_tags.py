"""Messages of different kinds between two workers are told apart by their tags."""

from __future__ import annotations

import re
from pathlib import Path

import chameleon_ft.worker
from chameleon_ft.worker.communicators.base import Tag, tag_of, tag_of_layer

ROOT = Path(chameleon_ft.worker.__path__[0])
MAX_RESULTS = 1000 * 4096  # layers and micro-batches


def test_no_kind_of_message_has_the_tag_of_another() -> None:
    assert all(tag % 2 == 0 for tag in Tag), "NCCL carries those of odd tags on the channels of gradients"
    assert max(Tag) < 1 << 31
    assert max(tag_of((False, 4095, 999), num_layers=1000), tag_of_layer(MAX_RESULTS)) < min(Tag)


def test_results_of_a_step_have_tags_of_their_own() -> None:
    results = [
        (forward, micro_batch, layer) for forward in (True, False) for micro_batch in range(3) for layer in (0, 1)
    ]
    assert len({tag_of(result, num_layers=2) for result in results}) == len(results)


def test_every_message_has_a_tag_of_the_list() -> None:
    passed_on = {"tag", "self._tag", "tag_of", "tag_of_layer"}
    for path in ROOT.rglob("*.py"):
        if path != ROOT / "profiling" / "links.py":  # which times messages, and sends no others
            given = set(re.findall(r"\btag=([\w.]+)", path.read_text(encoding="utf-8")))
            assert {each for each in given if not re.fullmatch(r"Tag\.[A-Z_]+", each)} <= passed_on, path
