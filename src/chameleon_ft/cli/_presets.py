"""The profile of a published model on a known device, from the names that a command line gives."""

from __future__ import annotations

import json
from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.presets import (
    Execution,
    ModelShape,
    Recompute,
    device,
    from_hugging_face,
    model_shape,
    state_policy,
)
from chameleon_ft.profiles import Profile, derived_profile

__all__ = ["preset_profile"]


def preset_profile(
    model: str, device_name: str | None, *, micro_batch_size: int, state: str, recompute: str
) -> Profile:
    """Derive the profile of a model, published or a Hugging Face config.json, on a device.

    Raises ConfigError with what to change; for an unknown name that is the nearest known one.
    """
    if device_name is None:
        raise ConfigError(f"--model {model}: needs the --device that it runs on, such as h100-80g")
    return derived_profile(
        _shape(model),
        device(device_name),
        micro_batch_size=micro_batch_size,
        execution=Execution(recompute=_recompute(recompute)),
        state=state_policy(state),
    )


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
    return from_hugging_face(data)


def _recompute(name: str) -> Recompute:
    try:
        return Recompute(name)
    except ValueError:
        raise ConfigError(f"--recompute {name}: should be one of {', '.join(Recompute)}") from None
