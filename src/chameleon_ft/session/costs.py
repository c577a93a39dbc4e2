"""Costs of layers and links: derived for a published model on a known device, read from a file, or measured."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from typing_extensions import Doc

from chameleon_ft.config import MAX_WORKERS, RunConfig
from chameleon_ft.cost.hugging_face import from_hugging_face
from chameleon_ft.cost.presets import (
    DEVICES,
    MODELS,
    PRECISIONS,
    STATE_POLICIES,
    Execution,
    Recompute,
    device,
    model_shape,
    state_policy,
)
from chameleon_ft.cost.profile import Profile, derived_profile
from chameleon_ft.cost.shapes import ModelShape
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.configuration import absolute_job, prepare_data_of
from chameleon_ft.storage.profiles import cached_profile, profile_cache, profile_cache_file, read_profile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AUTO: Final = "auto"
"""Value of --micro-batch-size that chooses the best size."""
_STATE: Final = "bf16-master"
_QUICK_REPEATS: Final = 10


@dataclass(frozen=True)
class ModelRequest:
    """Costs derived from the shape of a model and the rates of a device, without measuring."""

    model: Annotated[
        str | None, "NAME", Doc(f"Published model: {', '.join(MODELS)}; or a Hugging Face config.json, or its folder.")
    ] = None
    seq_len: PositiveInt | None = None
    """Tokens in a training sequence, with --model; that of its pre-training, or the longest, if not given."""
    device: Annotated[str | None, "NAME", Doc(f"Device it runs on: {', '.join(DEVICES)}; h100 for short.")] = None
    micro_batch_size: Annotated[
        str | None,
        "INT",
        Doc(
            "Samples per micro-batch; with --model, 1 if not given. `chameleon plan` chooses among several sizes "
            "separated by commas, or, with auto, among all powers of two that divide the batch."
        ),
    ] = None
    state: Annotated[
        str | None,
        "{" + ",".join(STATE_POLICIES) + "}",
        Doc(f"Types of parameters, gradients and optimizer state, with --model; {_STATE} if not given."),
    ] = None
    precision: Annotated[
        str | None,
        "{" + ",".join(PRECISIONS) + "}",
        Doc(f"With --model, instead of --state: as a run of this precision has them, {PRECISIONS['bf16']} for bf16."),
    ] = None
    recompute: Annotated[str | None, "{" + ",".join(Recompute) + "}"] = None
    """Activations that every worker recomputes to save memory, with --model; none if not given."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The given micro-batch sizes, in ascending order; empty if none is given, and for auto.

        Raises ConfigError if a size is not a whole number above 0, or occurs twice.
        """
        if self.micro_batch_size is None or self.micro_batch_size == AUTO:
            return ()
        sizes = []
        for part in self.micro_batch_size.split(","):
            if not part.strip().isdecimal() or not int(part):
                several = " of a list such as 1,2,4" if "," in self.micro_batch_size else ""
                raise ConfigError(f"--micro-batch-size {part.strip()}{several}: should be a whole number of 1 or more")
            sizes.append(int(part))
        if len(set(sizes)) < len(sizes):
            raise ConfigError(f"--micro-batch-size {self.micro_batch_size}: has a size twice")
        return tuple(sorted(sizes))

    @property
    def size(self) -> int | None:
        """The micro-batch size. Raises ConfigError if there are several to choose from."""
        if self.micro_batch_size == AUTO or len(self.sizes) > 1:
            raise ConfigError(
                f"--micro-batch-size {self.micro_batch_size}: give one; `chameleon plan` chooses the best of several"
            )
        return self.sizes[0] if self.sizes else None

    def profile(self) -> Profile:
        """Derive the profile of the model on the device.

        Raises ConfigError, whose message says what to change; for an unknown name it gives the nearest known one.
        """
        assert self.model is not None
        path = Path(self.model)
        if self.model not in MODELS and path.is_dir():
            path /= "config.json"
        shape = _read_shape(path, self.seq_len) if path.suffix == ".json" else model_shape(self.model)
        if self.seq_len is not None:
            shape = dataclasses.replace(shape, seq_len=self.seq_len)
        if self.device is None:
            raise ConfigError(f"--model {self.model}: needs the --device that it runs on, such as h100-80g")
        if self.recompute not in (None, *Recompute):
            raise ConfigError(f"--recompute {self.recompute}: should be one of {', '.join(Recompute)}")
        if self.precision is not None and self.state is not None:
            raise ConfigError(f"--precision {self.precision}: --state {self.state} says this already; leave one out")
        if self.precision not in (None, *PRECISIONS):
            raise ConfigError(f"--precision {self.precision}: should be one of {', '.join(PRECISIONS)}")
        state = PRECISIONS[self.precision] if self.precision else self.state or _STATE
        return derived_profile(
            shape,
            device(self.device),
            micro_batch_size=self.size or 1,
            execution=Execution(recompute=Recompute(self.recompute or Recompute.NONE)),
            state=state_policy(state),
        )

    def refuse(self, reason: str, *, but: Collection[str] = ()) -> None:
        """Raise ConfigError with `reason` if a flag is given, other than those in `but`."""
        for flag, value in given_flags(self):
            if flag not in but:
                raise ConfigError(f"{flag} {value}: {reason}")


NO_MODEL: Final = ModelRequest()


@dataclass(frozen=True)
class HostRequest:
    """The hosts of the workers, and the state that they keep."""

    workers_per_host: PositiveInt = 8
    """Workers per host. Links between hosts are slower, and a host fails as a whole."""
    host_memory: Annotated[
        Annotated[float, Field(ge=1e-9, le=1e9)] | None,
        Doc(
            "Memory of a host that is available for its workers, in 10^9 bytes: snapshots that would take more than "
            "half of it are not taken. Unlimited if not given."
        ),
    ] = None
    optimizer_redundancy: Annotated[
        PositiveInt | Literal["all"] | None,
        "INT|{all}",
        Doc(
            "Holders of a layer that keep the same part of its optimizer state; by default that of the configuration, "
            "or 2 without one."
        ),
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory of a host; None if not given."""
        return None if self.host_memory is None else round(self.host_memory * 1e9)

    def owners(self, usual: int | None) -> int | None:
        """Return how many workers own each slice of the optimizer's state; None if every holder keeps all of it.

        `usual` is the number if none is given.
        """
        given = usual if self.optimizer_redundancy is None else self.optimizer_redundancy
        return None if given == "all" else given


USUAL_HOSTS: Final = HostRequest()


def hosts_of(workers: int, per_host: int) -> dict[int, str]:
    """Return the host of each worker. Raises ConfigError if there are too many."""
    if workers > MAX_WORKERS:
        raise ConfigError(f"--workers {workers}: should be {MAX_WORKERS} at most")
    return {worker: f"host{worker // per_host}" for worker in range(workers)}


def given_flags(request: DataclassInstance) -> Iterator[tuple[str, Any]]:
    """Yield the flag and the value of each field that differs from its default, those of nested requests too."""
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from given_flags(value)
        elif value != field.default:
            yield f"--{field.name.replace('_', '-')}", value


def _read_shape(file: Path, seq_len: int | None) -> ModelShape:
    """Read the config.json of a Hugging Face model. Raises ConfigError."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ConfigError("should hold a JSON object, as the config.json of a model does")
        return from_hugging_face(data, seq_len=seq_len)
    except OSError as error:
        raise ConfigError(f"--model {file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--model {file}: is not JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"--model {file}: {error}") from None


def profile_of(preset: ModelRequest, path: Path | None, *, missing: str) -> Profile:
    """Return the profile of a model on a known device, or the one in a file.

    Raises ConfigError, whose message says what to change; it is `missing` if neither is given.
    """
    if path is not None:
        preset.refuse(f"--profile {path} determines this already; leave one of them out")
        return read_profile(path)
    if preset.model is None:
        preset.refuse("is for a published --model; name one")
        raise ConfigError(missing)
    return preset.profile()


def measured_profile(config: RunConfig, *, repeats: int, peer: str | None, token: str = "", command: str) -> Profile:
    """Measure the job of `config` on this machine; on a terminal, show the progress.

    Raises as `measure_profile` does, and DataError.
    """
    # Imported here because it loads torch.
    from chameleon_ft.worker.profiling.profile import measure_profile

    config = config.model_copy(update={"job": absolute_job(config.job)})
    with tempfile.TemporaryDirectory(prefix="chameleon-profile-") as folder:
        config = config.model_copy(update={"output_dir": Path(folder)})
        prepare_data_of(config)
        profile = measure_profile(
            config, repeats=repeats, peer=peer, token=token, command=command, progress=_show_progress
        )
    _show_progress("")
    return profile


def measured_or_cached(config: RunConfig, path: Path) -> Profile:
    """Return the profile for the configuration `config` of `path`: from the user's cache, or measured and cached.

    Prints the profile's origin on standard error. Raises as `measured_profile` does.
    """
    from chameleon_ft.worker.inspection import inspect_job

    fingerprint = inspect_job(config).profiled_as(config)
    file = profile_cache_file(profile_cache(os.environ), fingerprint, backend=config.backend)
    origin = "taken from"

    def measure() -> Profile:
        nonlocal origin
        origin = "kept in"
        _tell(f"{path} has no profile: measuring the costs of its layers and links, which takes a few seconds")
        try:
            return measured_profile(config, repeats=_QUICK_REPEATS, peer=None, command=f"chameleon plan {path}")
        except ConfigError as error:
            raise ConfigError(f"{error}; or give a profile that was measured elsewhere with --profile") from None

    profile = cached_profile(file, fingerprint, measure)
    if file.is_file():
        _tell(f"profile {origin} {file}: {profile.provenance}; remove the file to have it measured again")
    return profile


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show_progress(what: str) -> None:
    """Show what is being measured in one line that is overwritten, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
