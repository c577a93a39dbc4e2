"""The facts that a coordinator starts from, checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from chameleon_ft.config import RunConfig
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.control.start_plan import read_start_plan
from chameleon_ft.control.wire.tls import generate_certificates
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.observe import RunDirectory, checkpoint_model, checkpoint_storage, sound_checkpoint
from chameleon_ft.plan import Plan
from chameleon_ft.profiles import Profile, profile_of_run

__all__ = ["RunStart", "tls_directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run that is ready to be coordinated.

    Attributes:
        profile: the profile of the run, if it has one.
        plan: the plan to start with, if the run was given one.
        resume: whether to begin with a checkpoint.
    """

    config: RunConfig
    run: RunDirectory
    job: JobInfo
    profile: Profile | None
    plan: Plan | None
    resume: bool

    @classmethod
    def of(cls, config: RunConfig, *, run: RunDirectory, job: JobInfo, resume: bool) -> Self:
        """Check the configuration against the job, and write it if the run resumes.

        Raises:
            CheckpointError: the newest sound checkpoint is of another model.
            ConfigError: the plan to start with is of another model.
            ProfileError: the profile is not of this job on this device.
        """
        if resume:
            _require_same_model(run, job, config)
            config = config.with_horizon_of(run.config())
            run.write_config(config)
            config = run.own(config)
        profile, plan = _profile(config, job), _plan(config, job)
        return cls(config=config, run=run, job=job, profile=profile, plan=plan, resume=resume)


def tls_directory(config: RunConfig, run: RunDirectory) -> Path | None:
    """Return the directory for TLS, with new certificates where they are to be generated. Raises ConfigError."""
    match config.control.tls:
        case "off":
            return None
        case "generate":
            generate_certificates(run.tls)
            return run.tls
        case directory:
            return Path(directory)


def _require_same_model(run: RunDirectory, job: JobInfo, config: RunConfig) -> None:
    """Raise CheckpointError if the newest sound checkpoint of `run` is of another model than `job`."""
    checkpoints = checkpoint_storage(config, run)
    step, _ = sound_checkpoint(checkpoints)
    expected = job.fingerprint
    if config.forked.run and step == config.forked.step:
        expected = job.fingerprint_with(config.forked.micro_batch_size, instead_of=config.batch.micro_batch_size)
    if step is not None and checkpoint_model(checkpoints, step) != expected:
        raise CheckpointError(
            f"--resume {run.path}: its checkpoint of step {step} is of a model with other layers than the job has "
            "now; undo the change to the model, or begin a new run"
        )


def _profile(config: RunConfig, job: JobInfo) -> Profile | None:
    """Return the profile of the run, if it has one. Raises ProfileError if it is not of this job on this device."""
    if config.profile is None:
        return None
    profile = profile_of_run(config)
    if not config.is_emulated:
        wanted = asdict(job.profiled_as(config))
        if not job.device:
            del wanted["device"]  # the workers are on other hosts
        profile.require(wanted)
    return profile


def _plan(config: RunConfig, job: JobInfo) -> Plan | None:
    """Return the plan to start with, if the run was given one. Raises ConfigError if it is of another model."""
    plan = read_start_plan(config)
    if plan is not None and plan.placement.num_layers != job.num_layers:
        raise ConfigError(
            f"plan {config.plan}: places {plan.placement.num_layers} layers, and the job has {job.num_layers}; "
            "make one for this job by `chameleon plan`"
        )
    return plan
