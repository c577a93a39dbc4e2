"""The comparison of types of transformers, on types that are seldom like others."""

from __future__ import annotations

from unittest import mock

import pytest

from benchmarks import transformers_types
from benchmarks.transformers_types import Compared, report_of, types, verdict

pytest.importorskip("transformers", reason="the development extra has it")


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        # Its decoder layers return two outputs.
        ("BambaConfig", ["documents"]),
        # It has routers of two types in a layer.
        ("JetMoeConfig", []),
        # Its positions begin behind its padding.
        ("Data2VecTextConfig", ["documents"]),
    ],
)
def test_types_are_equal_or_name_what_they_refuse(name: str, refused: list[str]) -> None:
    found = verdict(types()[name])
    assert (found.result, list(found.refused)) == ("equal", refused), found


def test_a_decoder_layer_that_gets_more_than_the_hidden_state_is_refused() -> None:
    assert verdict(types()["GlmMoeDsaConfig"]).result == "refused"


def test_a_difference_is_found() -> None:
    right = Compared.loss

    def wrong(compared: Compared, *args: object, **fields: object) -> object:
        return right(compared, *args, **fields) * 1.001  # type: ignore[arg-type]

    with mock.patch.object(transformers_types.Compared, "loss", wrong):
        found = verdict(types()["LlamaConfig"])
    assert found.result == "wrong"
    assert not report_of([found]).bars[0].reached
