"""The arguments of a job that are set from outside get the types of its function, and wrong ones are refused."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.job_arguments import as_setting, bound_arguments, settable_arguments
from tests.golden import refused


def job(  # type: ignore[no-untyped-def]
    config: object,
    lr: float = 3e-4,
    depth: int = 4,
    *,
    gated: bool = False,
    norm: Literal["rms", "layer"] = "rms",
    heads: Literal[4, 8] = 4,
    clip: float | None = 1.0,
    name="small",
    betas: tuple[float, float] = (0.9, 0.95),
) -> None:
    """A job takes all kinds of arguments."""


DEFAULTS = {"lr": 3e-4, "depth": 4, "gated": False, "norm": "rms", "heads": 4, "clip": 1.0, "name": "small"}


def test_without_settings_all_arguments_have_their_defaults() -> None:
    assert bound_arguments(job, {}, job="my_job.py") == DEFAULTS


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("lr", "1e-3", 1e-3),
        ("lr", 1, 1.0),
        ("depth", "12", 12),
        ("depth", 12, 12),
        ("gated", "true", True),
        ("gated", True, True),
        ("norm", "layer", "layer"),
        ("heads", "8", 8),
        ("heads", 8, 8),
        ("clip", "none", None),
        ("clip", "0.5", 0.5),
        ("name", "7", "7"),
    ],
)
def test_a_setting_gets_the_type_of_the_argument(name: str, setting: Any, value: Any) -> None:
    found = bound_arguments(job, {name: setting}, job="my_job.py")[name]

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "given",
    [
        {"lr": "fast"},
        {"lr": "nan"},
        {"lr": True},
        {"depth": 4.5},
        {"gated": "maybe"},
        {"norm": "batch", "heads": 5},
        {"name": 7},
        {"detph": 5},
        {"betas": 0.5},
        {"config": 1},
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_is_refused_with_what_there_is(given: dict[str, Any]) -> None:
    with refused(ConfigError):
        bound_arguments(job, given, job="my_job.py")


def test_an_argument_without_a_default_must_be_given() -> None:
    def needing(*, lr: float) -> None: ...

    assert bound_arguments(needing, {"lr": "0.1"}, job="my_job.py") == {"lr": 0.1}
    with refused(ConfigError):
        bound_arguments(needing, {}, job="my_job.py")


def test_a_job_without_arguments_takes_none() -> None:
    assert settable_arguments(lambda config: config) == {}
    with refused(ConfigError):
        bound_arguments(lambda: None, {"lr": 1}, job="my_job.py")


@given(st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.none()))
def test_every_value_comes_back_from_its_setting_and_from_its_text(value: Any) -> None:
    def taking(argument: Any = value) -> None: ...

    parameter = inspect.Parameter(
        "argument", inspect.Parameter.KEYWORD_ONLY, annotation=(str if value is None else type(value)) | None
    )
    taking.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    for setting in (as_setting(value), str(as_setting(value))):
        found = bound_arguments(taking, {"argument": setting}, job="my_job.py")["argument"]
        assert found == (None if value == "none" else value)
