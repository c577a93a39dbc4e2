"""The steps to predict before anything runs: workers, work, the costs of both, and micro-batches of several sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import Doc

from chameleon_ft.config import Batch, Parallel, RunConfig, Snapshots, TrainConfig, config_type, parse_config
from chameleon_ft.cost.presets import PRECISIONS, device, state_policy
from chameleon_ft.cost.profile import Profile, derived_profile
from chameleon_ft.cost.shapes import BlockShape, ModelShape
from chameleon_ft.cost.snapshots import SnapshotChoice, SnapshotRule, choose_snapshots
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.recovery import uniform_limits
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.session.configuration import read_config_values, refuse_job_arguments
from chameleon_ft.session.costs import (
    AUTO,
    NO_MODEL,
    USUAL_HOSTS,
    HostRequest,
    ModelRequest,
    hosts_of,
    measured_or_cached,
    profile_of,
)
from chameleon_ft.storage.profiles import profile_of_run, read_profile


@pydantic_dataclass(frozen=True)
class PlanRequest:
    """A step to predict: of a configuration, or of a layout of a published model on a known device, or of a profile."""

    config: Annotated[Path | None, "[CONFIG]"] = None
    """TOML file of a run, as for `chameleon train`; or a job, as for `chameleon run`."""
    profile: Annotated[
        tuple[Path, ...],
        "PATH",
        Doc(
            "Profile of the model of CONFIG; or without CONFIG, instead of --model and --device. Give one profile for "
            "each micro-batch size to choose the best of several sizes."
        ),
    ] = ()
    preset: ModelRequest = NO_MODEL
    dp: PositiveInt | None = None
    """Pipelines of the layout."""
    pp: PositiveInt | None = None
    """Stages of each pipeline."""
    micro_batches: PositiveInt | None = None
    """Micro-batches of a step, over all pipelines; without CONFIG, 16 for each of --dp if not given."""
    global_batch_size: PositiveInt | None = None
    """Samples of a step, instead of --micro-batches, which depend on the micro-batch size."""
    split_backward: bool = False
    """Run the two halves of the backward separately, whatever CONFIG says."""
    hosts: HostRequest = USUAL_HOSTS
    snapshots: Literal["copy", "parity", "none"] | None = None
    """Snapshots whose memory is printed; by default those of CONFIG, or copies."""
    workers: PositiveInt | None = None
    """Workers to search the best plan for, whatever its pipelines; not with --dp and --pp."""
    planner: Annotated[
        Literal["layout", "chameleon", "paper", "oobleck"] | None,
        Doc(
            "layout: equal pipelines, rerouted around failed workers as by --policy reroute; chameleon: the best plan "
            "that a search finds, rerouting included; paper, oobleck: the choice of the published planners, for "
            "comparison. By default the layout, if there is one."
        ),
    ] = None
    slow: Annotated[str, "WORKER=SPEED[,...]"] = ""
    """Workers that are slower than the others, such as 7=0.6."""
    failed: Annotated[str, "WORKER[,WORKER ...]"] = ""
    """Plan for the loss of these workers."""


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """One batch to predict: its micro-batches, and the file of their profile; None if the arguments do not say."""

    micro_batch_size: int | None
    micro_batches: int | None
    profile: Path | None


def plan_batches(given: PlanRequest) -> list[PlanBatch]:
    """Return the batch at each micro-batch size, all of the same samples: --global-batch-size, or those of CONFIG."""
    preset, profiles = given.preset, given.profile
    files = _profiles_by_size(profiles) if len(profiles) > 1 else {}
    if files and preset.micro_batch_size is not None:
        raise ConfigError(
            f"--micro-batch-size {preset.micro_batch_size}: the profiles that are given are of "
            f"{', '.join(map(str, sorted(files)))}; leave it out"
        )
    only_profile = profiles[0] if profiles else None
    sizes = tuple(sorted(files)) or preset.sizes
    samples = given.global_batch_size
    if preset.micro_batch_size != AUTO and len(sizes) < 2 and samples is None:
        return [PlanBatch(preset.size, given.micro_batches, only_profile)]
    if given.micro_batches is not None:
        raise ConfigError(
            f"--micro-batches {given.micro_batches}: follow from the samples of a step and the micro-batch size; "
            "leave it out, and give the samples by --global-batch-size"
        )
    batch, dp = Batch(micro_batch_size=1), given.dp or 1
    if given.config is not None:
        values = read_config_values(given.config)
        batch = parse_config(Batch, values.get("batch", {}), source=f"{given.config}, batch")
        if given.workers is None and given.dp is None:
            dp = parse_config(Parallel, values.get("parallel", {}), source=f"{given.config}, parallel").dp
        samples = samples or batch.samples
    elif only_profile is not None:
        batch = Batch(micro_batch_size=read_profile(only_profile).fingerprint.micro_batch_size)
    if samples is None:
        raise ConfigError(
            "several micro-batch sizes are compared for the same samples in a step; say how many by --global-batch-size"
        )
    if preset.micro_batch_size == AUTO:
        # Powers of two of which there are as many for each pipeline; one in any case.
        powers = [2**exponent for exponent in range(1, samples.bit_length())]
        sizes = (1, *(size for size in powers if samples % (size * dp) == 0))
    return [
        PlanBatch(size, _micro_batches(samples, size), files.get(size, only_profile))
        for size in sizes or (batch.micro_batch_size,)
    ]


def _profiles_by_size(profiles: tuple[Path, ...]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    first = read_profile(profiles[0]).fingerprint
    for path in profiles:
        profile = read_profile(path)
        # The model is not compared: its boundaries, which identify it, have other sizes for other micro-batches.
        profile.require({"dtype": first.dtype, "device": first.device, "threads": first.threads})
        size = profile.fingerprint.micro_batch_size
        if size in found:
            raise ConfigError(
                f"--profile {path}: is of micro-batches of {size}, as {found[size]} is; give one of each size"
            )
        found[size] = path
    return found


def _micro_batches(samples: int, size: int) -> int:
    if samples % size:
        near = max(each for each in range(1, min(size, samples) + 1) if samples % each == 0)
        raise ConfigError(
            f"a micro-batch size of {size} does not divide the {samples} samples of a step; take {near}, or another "
            "number of samples by --global-batch-size"
        )
    return samples // size


_MICRO_BATCHES_OF_A_PIPELINE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A step to predict.

    Attributes:
        profile: costs of layers and links.
        costs: The costs of a step on all workers.
        parallel: the layout of equal pipelines; None if one is to be searched for.
        snapshots: how they are kept, if there are any.
        host_bytes: memory of each host that is available for its workers; None: not known.
        ramp: the first step and the micro-batches of each stage before the batch of `costs`.
    """

    profile: Profile
    costs: CostModel
    parallel: Parallel | None
    ramp: tuple[tuple[int, int], ...] = ()
    snapshots: Snapshots = field(default_factory=Snapshots)
    host_bytes: int | None = None

    @property
    def micro_batches(self) -> int:
        return self.costs.workload.micro_batches

    @property
    def layout(self) -> Plan | None:
        """The plan of the layout before any failure."""
        return None if self.parallel is None else self.plan_of(self.parallel)

    @property
    def in_flight_limits(self) -> Mapping[int, InFlightLimit]:
        """The limit of each worker in a run of the layout."""
        return {} if self.parallel is None else uniform_limits(self.costs.cluster.hosts, self.parallel.pp)

    def plan_of(self, parallel: Parallel) -> Plan:
        """Return the plan of equal pipelines."""
        return data_pipeline_plan(
            layer_costs=self.profile.relative_costs,
            dp=parallel.dp,
            pp=parallel.pp,
            micro_batches=self.micro_batches,
            split_backward=parallel.split_backward,
        )

    def snapshots_of(self, plan: Plan) -> SnapshotChoice | None:
        """Return the snapshots that a run takes under a plan, or why it takes none; None if none are to be taken."""
        if not self.snapshots.every:
            return None
        rule = SnapshotRule(
            group=self.snapshots.parts,
            at_any_size=self.snapshots.every != "auto",
            host_memory={} if self.host_bytes is None else dict.fromkeys(self.hosts.values(), self.host_bytes),
        )
        return choose_snapshots(plan.placement, self.costs.workload, self.hosts, rule)

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each worker."""
        return self.costs.cluster.hosts

    def layouts(self) -> Iterator[Parallel]:
        """Yield all layouts of equal pipelines that the workers can have, the shallowest first."""
        split, workers = self.parallel is not None and self.parallel.split_backward, len(self.costs.cluster.workers)
        for pp in range(1, min(workers, len(self.profile.layers)) + 1):
            if workers % pp == 0 and self.micro_batches % (workers // pp) == 0:
                yield Parallel(dp=workers // pp, pp=pp, split_backward=split)


def plan_cases(given: PlanRequest, job_arguments: Mapping[str, str] = MappingProxyType({})) -> list[PlanCase]:
    """Return the case at each micro-batch size that is given, ascending; one case if there is nothing to choose.

    Args:
        job_arguments: for the function of the job, over those of the configuration.

    Raises:
        ConfigError: the arguments do not fit together; the message says what to change.
        ProfileError: a profile cannot be read, or is of another job; or profiles are of different devices.
    """
    if given.workers is not None and (given.dp is not None or given.pp is not None):
        raise ConfigError(f"--workers {given.workers}: searches for a layout, and --dp and --pp give one; choose")
    if given.config is None:
        refuse_job_arguments(job_arguments)
        return [_case_of_profile(given, batch) for batch in plan_batches(given)]
    return [_case_of_config(given, given.config, batch, job_arguments) for batch in plan_batches(given)]


def _sections(given: PlanRequest, batch: PlanBatch) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration that the arguments set."""
    fields = {
        "parallel": {"dp": given.dp, "pp": given.pp, "split_backward": given.split_backward or None},
        "batch": {"micro_batches": batch.micro_batches, "micro_batch_size": batch.micro_batch_size},
    }
    return {name: {k: v for k, v in section.items() if v is not None} for name, section in fields.items()}


def _case_of_config(given: PlanRequest, path: Path, batch: PlanBatch, job_arguments: Mapping[str, str]) -> PlanCase:
    given.preset.refuse(
        f"{path} says what is trained; leave one of them out", but=("--device", "--micro-batch-size", "--precision")
    )
    values = read_config_values(path, job_arguments)
    for name, section in _sections(given, batch).items():
        values[name] = {**values.get(name, {}), **section}
        if name == "batch" and section:
            # The ramp leads to the batch of the configuration.
            values[name].pop("ramp", None)
    if given.dp is not None or given.pp is not None:
        own = values["parallel"]
        values["workers"] = own.get("dp", Parallel().dp) * own.get("pp", Parallel().pp)
    # Failures are injected into runs only.
    values.pop("failures", None)
    if (redundancy := given.hosts.optimizer_redundancy) is not None:
        values["parallel"] = {**values.get("parallel", {}), "optimizer_redundancy": redundancy}
    if given.preset.precision is not None:
        values["precision"] = given.preset.precision
    if batch.profile is not None:
        values["profile"] = str(batch.profile)
    config = _settled(parse_config(config_type(values), values, source=str(path)))
    per_host = config.emulation.workers_per_host if config.is_emulated else given.hosts.workers_per_host
    return _build(
        given,
        _profile_of_config(config, path, device_name=given.preset.device),
        workers=given.workers or config.workers,
        micro_batches=config.batch.micro_batches,
        ramp=config.batch.stages[:-1],
        parallel=None if given.workers is not None else config.parallel,
        owners=config.parallel.owners,
        per_host=per_host,
        snapshots=config.snapshots,
    )


def _case_of_profile(given: PlanRequest, batch: PlanBatch) -> PlanCase:
    preset = given.preset
    if preset.micro_batch_size is not None and batch.profile is None:
        preset = replace(preset, micro_batch_size=str(batch.micro_batch_size))
    profile = profile_of(
        preset,
        batch.profile,
        missing="nothing to plan for: give a CONFIG, or a published --model and its --device, or a --profile",
    )
    workers, micro_batches, parallel = given.workers, batch.micro_batches, None
    if workers is None:
        if given.dp is None or given.pp is None:
            raise ConfigError(f"{profile.name}: needs --dp and --pp, or --workers to have the layout searched for")
        values: dict[str, Any] = {"workers": given.dp * given.pp, **_sections(given, batch)}
        values["batch"] = {"micro_batches": _MICRO_BATCHES_OF_A_PIPELINE * given.dp, **values["batch"]}
        config = parse_config(RunConfig, values, source="the arguments")
        if given.pp > len(profile.layers):
            raise ConfigError(
                f"--pp {given.pp}: {profile.name} has {len(profile.layers)} layers; take as many stages at most"
            )
        workers, micro_batches, parallel = config.workers, config.batch.micro_batches, config.parallel
    elif micro_batches is None:
        raise ConfigError(
            f"--workers {workers}: needs --micro-batches, how many a step has, or its --global-batch-size"
        )
    return _build(
        given,
        profile,
        workers=workers,
        micro_batches=micro_batches,
        parallel=parallel,
        owners=Parallel().owners,
        per_host=given.hosts.workers_per_host,
    )


def _build(
    given: PlanRequest,
    profile: Profile,
    *,
    workers: int,
    micro_batches: int,
    parallel: Parallel | None,
    owners: int | None,
    per_host: int,
    snapshots: Snapshots = Snapshots(),
    ramp: tuple[tuple[int, int], ...] = (),
) -> PlanCase:
    hosts, speeds = hosts_of(workers, per_host), _speeds(given.slow)
    for worker in speeds:
        if worker not in hosts:
            raise ConfigError(f"--slow {given.slow}: there is no worker {worker}; they are numbered 0 to {workers - 1}")
    workload = replace(profile.workload(micro_batches), owners=given.hosts.owners(owners))
    costs = CostModel(workload, profile.cluster(hosts, speeds=speeds))
    if given.snapshots == "none":
        snapshots = Snapshots(every=0)
    elif given.snapshots is not None:
        snapshots = snapshots.model_copy(update={"mode": given.snapshots, "every": snapshots.every or "auto"})
    return PlanCase(
        profile=profile,
        costs=costs,
        parallel=parallel,
        snapshots=snapshots,
        host_bytes=given.hosts.memory_bytes,
        ramp=ramp,
    )


def _settled(config: RunConfig) -> RunConfig:
    """Return the configuration with the redundancy of the optimizer's state that its job allows."""
    if config.parallel.owners is None or isinstance(config, TrainConfig) or config.is_emulated:
        return config
    # Loads torch, and is the only way to know the optimizer of the job.
    from chameleon_ft.worker.inspection import inspect_job

    return inspect_job(config).settled(config)


def _profile_of_config(config: RunConfig, path: Path, *, device_name: str | None) -> Profile:
    """Return the profile of a configuration: its own, derived for a known device, or measured."""
    if device_name is not None:
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"--device {device_name}: only for a Llama; give the profile of {path} by --profile")
        if config.profile is not None:
            raise ConfigError(f"--device {device_name}: {path} has a profile already; leave one of them out")
        model = config.model
        if model.hf:
            raise ConfigError(f"--device {device_name}: plan for the model of {path} by --model {model.hf}/config.json")
        shape = ModelShape(
            name=f"the Llama of dim {model.dim}",
            blocks=(
                BlockShape(
                    hidden=model.dim,
                    heads=model.num_heads,
                    kv_heads=model.num_kv_heads,
                    head_dim=model.dim // model.num_heads,
                    ffn=model.ffn_dim,
                    dropout=model.dropout > 0,
                ),
            )
            * model.num_layers,
            vocab=model.vocab_size,
            seq_len=model.seq_len,
        )
        size = config.batch.micro_batch_size
        state = state_policy(PRECISIONS[config.precision])
        return derived_profile(shape, device(device_name), micro_batch_size=size, state=state)
    if config.profile is None:
        return measured_or_cached(config, path)
    profile = profile_of_run(config)
    if not config.is_emulated:
        # Loads torch, and is the only way to know the layers of the job.
        from chameleon_ft.worker.inspection import inspect_job

        # Device and versions are not compared: the run may be on another machine than this one.
        job = inspect_job(config).profiled_as(config)
        profile.require({name: getattr(job, name) for name in ("model", "dtype", "threads", "compile")})
    return profile


def _speeds(text: str) -> dict[int, float]:
    speeds: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        worker, _, speed = part.partition("=")
        try:
            number, value = int(worker), float(speed)
        except ValueError:
            raise ConfigError(f"--slow {text}: should be WORKER=SPEED, such as 7=0.6, with commas between") from None
        if number in speeds:
            raise ConfigError(f"--slow {text}: names worker {number} twice; give it one speed")
        speeds[number] = value
    return speeds
