"""What `profile`, `plan` and `simulate` have in common: the flags of a published model on a known device, and hosts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli._flags import optional_argument
from chameleon_ft.errors import ConfigError
from chameleon_ft.presets import (
    DEVICES,
    MODELS,
    STATE_POLICIES,
    Execution,
    ModelShape,
    Recompute,
    device,
    from_hugging_face,
    model_shape,
    state_policy,
)
from chameleon_ft.profiles import Profile, derived_profile, read_profile

__all__ = ["NO_PRESET", "Preset", "PresetArguments", "WorkersPerHost", "hosts_of", "profile_of"]

_STATE = "bf16-master"

# Optional in this file and others, for tyro knows that form without loading a type checker, which takes a tenth of a
# second.


@dataclass(frozen=True)
class PresetArguments:
    """Costs derived from the shape of a model and the rates of a device, without measuring."""

    model: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument("NAME", f"Published model: {', '.join(MODELS)}; or a Hugging Face config.json."),
    ] = None
    device: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument("NAME", f"Device that it runs on: {', '.join(DEVICES)}; h100 for short."),
    ] = None
    micro_batch_size: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Samples of a micro-batch; with --model 1 if not given."),
    ] = None
    state: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument(
            "{" + ",".join(STATE_POLICIES) + "}",
            f"Types of parameters, gradients and optimizer state, with --model; {_STATE} if not given.",
        ),
    ] = None
    recompute: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument(
            "{" + ",".join(Recompute) + "}",
            "What every worker computes twice to save memory, with --model; none if not given.",
        ),
    ] = None

    def profile(self) -> Profile:
        """Derive the profile of the model on the device.

        Raises ConfigError with what to change; for an unknown name that is the nearest known one.
        """
        assert self.model is not None
        shape = _shape(self.model)
        if self.device is None:
            raise ConfigError(f"--model {self.model}: needs the --device that it runs on, such as h100-80g")
        size = 1 if self.micro_batch_size is None else self.micro_batch_size
        if size < 1:
            raise ConfigError(f"--micro-batch-size {size}: should be 1 or more")
        return derived_profile(
            shape,
            device(self.device),
            micro_batch_size=size,
            execution=Execution(recompute=_recompute(self.recompute or Recompute.NONE)),
            state=state_policy(self.state or _STATE),
        )

    def refuse(self, reason: str, *, but: Collection[str] = ()) -> None:
        """Raise ConfigError, with the reason, for the first argument that is given and none of `but`."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in but:
                raise ConfigError(f"--{field.name.replace('_', '-')} {value}: {reason}")


NO_PRESET = PresetArguments()

Preset = Annotated[PresetArguments, tyro.conf.OmitArgPrefixes, tyro.conf.arg(help=PresetArguments.__doc__)]
"""The type of a field that stands for these flags; their names have no prefix."""

WorkersPerHost = Annotated[
    int,
    tyro.conf.arg(help="Workers of a host: links between hosts are slower, and a host is lost as a whole."),
]


def profile_of(preset: PresetArguments, path: Path | None, *, missing: str) -> Profile:
    """What layers and links cost: those of a model on a known device, or those of a file.

    Raises ConfigError with what to change; `missing` where nothing is given.
    """
    if path is not None:
        preset.refuse(f"--profile {path} holds what it would say; leave one of them out")
        return read_profile(path)
    if preset.model is None:
        preset.refuse("is for a published --model; name one")
        raise ConfigError(missing)
    return preset.profile()


def hosts_of(workers: int, per_host: int) -> dict[int, str]:
    """The host of each worker. Raises ConfigError where a host would have none."""
    if per_host < 1:
        raise ConfigError(f"--workers-per-host {per_host}: should be 1 or more")
    return {worker: f"host{worker // per_host}" for worker in range(workers)}


def _shape(model: str) -> ModelShape:
    if not model.endswith(".json"):
        return model_shape(model)
    try:
        data = json.loads(Path(model).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {model}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--model {model}: is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--model {model}: should hold a JSON object, as the config.json of a model does")
    try:
        return from_hugging_face(data)
    except ConfigError as error:
        raise ConfigError(f"--model {model}: {error}") from None


def _recompute(name: str) -> Recompute:
    try:
        return Recompute(name)
    except ValueError:
        raise ConfigError(f"--recompute {name}: should be one of {', '.join(Recompute)}") from None
