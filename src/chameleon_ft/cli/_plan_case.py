"""From the arguments of `chameleon plan` to the workers, the work, and what both cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chameleon_ft.cli._config_file import config_values
from chameleon_ft.cli._measuring import measured_or_cached
from chameleon_ft.cli._presets import hosts_of
from chameleon_ft.config import Parallel, RunConfig, TrainConfig, config_type, parse_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.presets import ModelShape, device, state_policy
from chameleon_ft.profiles import Profile, derived_profile, profile_of_run
from chameleon_ft.recovery import uniform_limits
from chameleon_ft.schedule import CostModel, InFlightLimit

__all__ = ["Layout", "PlanCase", "case_of_config", "case_of_profile"]

_SHARE = 16  # micro-batches of a pipeline where nothing says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Workers, pipelines, stages, and what passes through them; None leaves what a configuration says."""

    workers: int | None = None
    dp: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    split_backward: bool | None = None

    def sections(self) -> dict[str, dict[str, Any]]:
        """The fields of sections that are given, as in a configuration."""
        fields = {
            "parallel": {"dp": self.dp, "pp": self.pp, "split_backward": self.split_backward},
            "batch": {"micro_batches": self.micro_batches, "micro_batch_size": self.micro_batch_size},
        }
        return {name: {k: v for k, v in section.items() if v is not None} for name, section in fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """What is to be predicted.

    Attributes:
        profile: what layers and links cost.
        hosts: the host of every worker.
        speeds: of the workers that are not of speed 1.
        micro_batches: of a step.
        parallel: the layout of equal pipelines; None where one is to be searched for.
    """

    profile: Profile
    hosts: Mapping[int, str]
    speeds: Mapping[int, float]
    micro_batches: int
    parallel: Parallel | None

    @property
    def costs(self) -> CostModel:
        """The cost model of a step on all workers. Raises ProfileError where links of several hosts are unknown."""
        cluster = self.profile.cluster(self.hosts, speeds=self.speeds)
        return CostModel(self.profile.workload(self.micro_batches), cluster)

    def ceiling(self, parallel: Parallel) -> Mapping[int, InFlightLimit]:
        """What each worker may keep, as in a run of this layout."""
        return uniform_limits(self.hosts, parallel.pp)

    def layout(self, parallel: Parallel) -> Plan:
        """The plan of a layout before anything fails."""
        return data_pipeline_plan(
            layer_costs=self.profile.relative_costs,
            dp=parallel.dp,
            pp=parallel.pp,
            micro_batches=self.micro_batches,
            split_backward=parallel.split_backward,
        )

    def depths(self) -> tuple[Parallel, ...]:
        """All layouts of equal pipelines that these workers can have, the shallowest first."""
        split = self.parallel is not None and self.parallel.split_backward
        workers = len(self.hosts)
        return tuple(
            Parallel(dp=workers // pp, pp=pp, split_backward=split)
            for pp in range(1, min(workers, len(self.profile.layers)) + 1)
            if workers % pp == 0 and self.micro_batches % (workers // pp) == 0
        )


def case_of_config(
    path: Path,
    layout: Layout,
    *,
    profile: Path | None,
    device_name: str | None,
    workers_per_host: int,
    speeds: Mapping[int, float],
) -> PlanCase:
    """The case of a configuration, with its own profile, the given one, one derived for a known device, or measured.

    Raises ConfigError or ProfileError with what to change.
    """
    values = config_values(path)
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
    searched = layout.workers is not None
    per_host = config.emulation.workers_per_host if config.device == "emulated" else workers_per_host
    return PlanCase(
        profile=_profile_for(config, path, device_name=device_name),
        hosts=hosts_of(layout.workers or config.workers, per_host),
        speeds=speeds,
        micro_batches=config.batch.micro_batches,
        parallel=None if searched else config.parallel,
    )


def case_of_profile(
    profile: Profile, layout: Layout, *, workers_per_host: int, speeds: Mapping[int, float]
) -> PlanCase:
    """The case of a layout of what a profile is of. Raises ConfigError with what to change."""
    if layout.workers is not None:
        if layout.micro_batches is None:
            raise ConfigError(
                f"--workers {layout.workers}: needs --micro-batches, how many a step has, or its --global-batch-size"
            )
        parallel, workers, micro_batches = None, layout.workers, layout.micro_batches
    else:
        if layout.dp is None or layout.pp is None:
            raise ConfigError(f"{profile.name}: needs --dp and --pp, or --workers to have the layout searched for")
        given = layout.sections()
        batch = {"micro_batches": _SHARE * layout.dp, **given["batch"]}
        values = {"workers": layout.dp * layout.pp, "parallel": given["parallel"], "batch": batch}
        config = parse_config(RunConfig, values, source="the arguments")
        parallel, workers, micro_batches = config.parallel, config.workers, config.batch.micro_batches
        if parallel.pp > len(profile.layers):
            raise ConfigError(
                f"--pp {layout.pp}: {profile.name} has {len(profile.layers)} layers; take as many stages at most"
            )
    return PlanCase(
        profile=profile,
        hosts=hosts_of(workers, workers_per_host),
        speeds=speeds,
        micro_batches=micro_batches,
        parallel=parallel,
    )


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
        return measured_or_cached(config, path)
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
