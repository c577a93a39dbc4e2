"""The fields of a micro-batch that each layer gets, by the names of the arguments of its forward.

A micro-batch whose inputs are a dict has fields. Layer 0 gets one as its first argument; and every layer, on whatever
worker it is, gets those that the further arguments of its forward are named after. So positions, masks and numbers of
documents need not travel through the layers between.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from chameleon_ft.data.samples import INPUT_IDS, LABELS, MASK, fields_of
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import build_on_meta
from chameleon_ft.models.precision import arguments_of

_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def with_fields(job: Job, inputs: Any, targets: Any) -> Job:
    """Return the job with the `fields` of its layers, for micro-batches such as this one.

    Raises:
        ConfigError: a forward requires an argument that is no field; or it is not clear which field layer 0 gets first.
    """
    fields = fields_of(inputs, targets)
    if job.fields is None:
        found: dict[tuple[int, bool], tuple[str, ...]] = {}
        for layer, factory in enumerate(job.layers if fields else ()):
            key = id(factory), layer == 0
            if key not in found:
                found[key] = _named_by(job, layer, fields)
        return replace(job, fields=[found[id(each), layer == 0] for layer, each in enumerate(job.layers) if fields])
    for layer, names in enumerate(job.fields):
        if unknown := [name for name in names if name not in fields]:
            raise ConfigError(f"`fields` names {unknown[0]!r} for layer {layer}: {_available(fields)}")
    return job


def require_padding_at_end(job: Job, fields: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if samples are padded at their beginning, and no layer gets the mask that says so."""
    mask = fields.get(MASK)
    if mask is None or any(MASK in names for names in job.fields or ()):
        return
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ConfigError(
            f"the samples of a micro-batch are padded at their beginning, and no layer gets {MASK}; pad them at their "
            f'end, such as by padding_side="right", or name {MASK} as an argument in the forward of layers that use it'
        )


def _named_by(job: Job, layer: int, fields: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the fields that the arguments of a layer's forward are named after, as in `Job.fields`."""
    module = build_on_meta(job, layer)
    name = f"the forward of layer {layer} ({type(module).__name__})"
    arguments = arguments_of(module)
    others = [each for each in arguments[1:] if each.kind in _BY_NAME]
    for each in others:
        if each.default is each.empty and each.name not in fields:
            raise ConfigError(
                f"{name} requires the argument {each.name!r}: {_available(fields)}. Name arguments after the first by "
                "fields, and give others a default"
            )
    named = tuple(each.name for each in others if each.name in fields)
    if layer:
        return named
    # The field that layer 0 gets as its first argument.
    first = [each.name for each in arguments[:1] if each.kind is not each.KEYWORD_ONLY and each.name in fields]
    rest = [each for each in fields if each not in (*named, LABELS, MASK)]
    if not first and (INPUT_IDS in rest or len(rest) == 1):
        first = [INPUT_IDS if INPUT_IDS in rest else rest[0]]
    if not first or (arguments and arguments[0].kind is inspect.Parameter.KEYWORD_ONLY):
        raise ConfigError(f"{name} has no first argument that is a field: {_available(fields)}. Name it by one of them")
    return first[0], *named


def _available(fields: Mapping[str, Tensor]) -> str:
    if not fields:
        return "a micro-batch has no fields; let samples, or `collate`, be a dict of tensors"
    return f"a micro-batch has the fields {', '.join(map(str, fields))}"
