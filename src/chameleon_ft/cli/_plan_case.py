"""From the arguments of `chameleon plan` to a plan and the costs by which it is judged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chameleon_ft.config import RunConfig, TrainConfig, config_type, parse_config, read_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.presets import (
    Execution,
    ModelShape,
    Recompute,
    device,
    from_hugging_face,
    model_shape,
    state_policy,
)
from chameleon_ft.profiles import Profile, costs_of_run, derived_profile, profile_of_run
from chameleon_ft.recovery import in_flight_ceiling
from chameleon_ft.schedule import CostModel, InFlightLimit

__all__ = ["Layout", "PlanCase", "case_of_config", "case_of_preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines, stages, and what passes through them; None leaves what a configuration says."""

    dp: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    split_backward: bool | None = None

    def sections(self) -> dict[str, dict[str, Any]]:
        """The fields that are given, as in a configuration."""
        fields = {
            "parallel": {"dp": self.dp, "pp": self.pp, "split_backward": self.split_backward},
            "batch": {"micro_batches": self.micro_batches, "micro_batch_size": self.micro_batch_size},
        }
        return {name: {k: v for k, v in section.items() if v is not None} for name, section in fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """What is to be predicted.

    Attributes:
        config: layout and batch.
        profile: what layers and links cost.
        workers_per_host: for the hosts of workers.
    """

    config: RunConfig
    profile: Profile
    workers_per_host: int

    @property
    def costs(self) -> CostModel:
        """The cost model of a step on all workers. Raises ProfileError where links of several hosts are unknown."""
        hosts = {worker: f"host{worker // self.workers_per_host}" for worker in range(self.config.workers)}
        return costs_of_run(self.config, self.profile, hosts)

    @property
    def ceiling(self) -> Mapping[int, InFlightLimit]:
        """What each worker may keep, as in a run."""
        return in_flight_ceiling(range(self.config.workers), self.config.parallel.pp)

    def layout(self) -> Plan:
        """The plan before anything fails."""
        parallel = self.config.parallel
        return data_pipeline_plan(
            layer_costs=self.profile.relative_costs,
            dp=parallel.dp,
            pp=parallel.pp,
            micro_batches=self.config.batch.micro_batches,
            split_backward=parallel.split_backward,
        )

    def with_depth(self, pp: int) -> PlanCase | None:
        """The same workers in pipelines of `pp` stages; None where that does not divide."""
        workers, micro_batches = self.config.workers, self.config.batch.micro_batches
        if pp > len(self.profile.layers) or workers % pp or micro_batches % (workers // pp):
            return None
        parallel = self.config.parallel.model_copy(update={"dp": workers // pp, "pp": pp})
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))


def case_of_config(
    path: Path, layout: Layout, *, profile: Path | None, device_name: str | None, workers_per_host: int
) -> PlanCase:
    """The case of a configuration, with its own profile, the given one, or one derived for a known device.

    Raises ConfigError or ProfileError with what to change.
    """
    values = read_toml(path)
    for name, section in layout.sections().items():
        values[name] = {**values.get(name, {}), **section}
    parallel = values.get("parallel", {})
    if layout.dp is not None or layout.pp is not None:
        defaults = RunConfig.model_fields["parallel"].default
        values["workers"] = parallel.get("dp", defaults.dp) * parallel.get("pp", defaults.pp)
    values.pop("failures", None)  # they are for a run
    if profile is not None:
        values["profile"] = str(profile)
    config = parse_config(config_type(values), values, source=str(path))
    return PlanCase(
        config=config,
        profile=_profile_for(config, path, device_name=device_name),
        workers_per_host=workers_per_host,
    )


def case_of_preset(
    model: str, layout: Layout, *, device_name: str | None, state: str, recompute: str, workers_per_host: int
) -> PlanCase:
    """The case of a published model, or of a Hugging Face config.json, on a known device.

    Raises ConfigError with what to change.
    """
    if device_name is None:
        raise ConfigError(f"--model {model}: needs the --device that it runs on, such as h100-80g")
    if layout.dp is None or layout.pp is None:
        raise ConfigError(f"--model {model}: needs --dp and --pp, the pipelines and the stages of each")
    given = layout.sections()
    batch = {"micro_batches": 16 * layout.dp, "micro_batch_size": 1, **given["batch"]}
    values = {"workers": layout.dp * layout.pp, "parallel": given["parallel"], "batch": batch}
    config = parse_config(RunConfig, values, source="the arguments")
    profile = derived_profile(
        _shape(model),
        device(device_name),
        micro_batch_size=config.batch.micro_batch_size,
        execution=Execution(recompute=_recompute(recompute)),
        state=state_policy(state),
    )
    if layout.pp > len(profile.layers):
        raise ConfigError(f"--pp {layout.pp}: {model} has {len(profile.layers)} layers; take as many stages at most")
    return PlanCase(config=config, profile=profile, workers_per_host=workers_per_host)


def _profile_for(config: RunConfig, path: Path, *, device_name: str | None) -> Profile:
    if device_name is not None:
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"--device {device_name}: only for a Llama; give the profile of {path} by --profile")
        if config.profile is not None:
            raise ConfigError(f"--device {device_name}: {path} has a profile already; leave one of them out")
        return derived_profile(
            _shape_of(config),
            device(device_name),
            micro_batch_size=config.batch.micro_batch_size,
            state=state_policy("fp32"),
        )
    if config.profile is None:
        raise ConfigError(
            f"{path}: nothing says how long its layers take; measure that by `chameleon profile {path} --out "
            "profile.json` and give --profile profile.json, or name a --device"
        )
    profile = profile_of_run(config)
    if config.device != "emulated":
        # Loads torch, and is the only way to know what the job is made of.
        from chameleon_ft.runtime.inspection import inspect_job

        # The device and the versions are those of where it will run, which need not be here.
        made_for = inspect_job(config).profiled_as(config)
        profile.require({"model": made_for.model, "dtype": made_for.dtype, "threads": made_for.threads})
    return profile


def _shape_of(config: TrainConfig) -> ModelShape:
    model = config.model
    return ModelShape(
        name=f"the Llama of dim {model.dim}",
        hidden=model.dim,
        blocks=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.dim // model.num_heads,
        ffn=model.ffn_dim,
        vocab=model.vocab_size,
        seq_len=model.seq_len,
        dropout=model.dropout > 0,
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
