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

__all__ = ["AUTO", "NO_PRESET", "Preset", "PresetArguments", "WorkersPerHost", "hosts_of", "profile_of"]

AUTO = "auto"
"""In place of micro-batch sizes: choose."""

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
        Optional[str],  # noqa: UP045
        optional_argument(
            "INT",
            "Samples of a micro-batch; with --model 1 if not given. `chameleon plan` chooses among several, with "
            "commas between them, or auto: all powers of two that divide the batch.",
        ),
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that are given, ascending; none if that is left out, or left to the command.

        Raises ConfigError for one that is no whole number above 0, or that is there twice.
        """
        if self.micro_batch_size in (None, AUTO):
            return ()
        assert self.micro_batch_size is not None
        sizes = []
        for part in self.micro_batch_size.split(","):
            if not part.strip().isdecimal() or not int(part):
                several = " of a list such as 1,2,4" if "," in self.micro_batch_size else ""
                raise ConfigError(f"--micro-batch-size {part.strip()}{several}: should be 1 or more, a whole number")
            sizes.append(int(part))
        if len(set(sizes)) < len(sizes):
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size}: has a size twice")
        return tuple(sorted(sizes))

    @property
    def size(self) -> int | None:
        """The micro-batch size. Raises ConfigError where it is not one."""
        if self.micro_batch_size == AUTO or len(self.sizes) > 1:
            raise ConfigError(
                f"--micro-batch-size {self.micro_batch_size}: give one; `chameleon plan` chooses the best of several"
            )
        return self.sizes[0] if self.sizes else None

    def profile(self) -> Profile:
        """Derive the profile of the model on the device.

        Raises ConfigError with what to change; for an unknown name that is the nearest known one.
        """
        assert self.model is not None
        shape = _shape(self.model)
        if self.device is None:
            raise ConfigError(f"--model {self.model}: needs the --device that it runs on, such as h100-80g")
        return derived_profile(
            shape,
            device(self.device),
            micro_batch_size=self.size or 1,
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
