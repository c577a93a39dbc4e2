"""Messages of different kinds between two workers are told apart by their tags."""

from __future__ import annotations

import re
from pathlib import Path

import chameleon_ft.worker
from chameleon_ft.schedule.channels import Kind
from chameleon_ft.worker.communicators.base import Tag, kind_on_device, tag_of

ROOT = Path(chameleon_ft.worker.__path__[0])
LAST = (False, 4095, 999)


def test_no_kind_of_message_has_the_tag_of_another() -> None:
    assert max(Tag) < 1 << 31
    assert tag_of(LAST, num_layers=1000) < tag_of((True, 0, 0), num_layers=1000, is_rest=True)
    assert tag_of(LAST, num_layers=1000, is_rest=True) < min(Tag)


def test_results_of_a_step_have_tags_of_their_own() -> None:
    results = [
        (forward, micro_batch, layer) for forward in (True, False) for micro_batch in range(3) for layer in (0, 1)
    ]
    assert len({tag_of(result, num_layers=2) for result in results}) == len(results)


def test_results_and_updated_parameters_go_from_device_to_device_and_all_else_through_host_memory() -> None:
    assert kind_on_device(tag_of(LAST, num_layers=1000)) is Kind.GRADIENT
    assert kind_on_device(tag_of((True, 4095, 999), num_layers=1000)) is Kind.ACTIVATION
    assert kind_on_device(tag_of(LAST, num_layers=1000, is_rest=True)) is None
    assert {tag for tag in Tag if kind_on_device(tag) is not None} == {Tag.UPDATED_PARAMETERS}


def test_every_message_has_a_tag_of_the_list() -> None:
    passed_on = {"tag", "self._tag"}
    for path in ROOT.rglob("*.py"):
        if path != ROOT / "profiling" / "links.py":  # which times messages, and sends no others
            given = set(re.findall(r"\btag=([\w.]+)", path.read_text(encoding="utf-8")))
            assert {each for each in given if not re.fullmatch(r"Tag\.[A-Z_]+", each)} <= passed_on, path
