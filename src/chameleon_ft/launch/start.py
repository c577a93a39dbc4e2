"""The facts that a coordinator starts from, checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import socket
from typing import Final, Self

from chameleon_ft.config import RunConfig
from chameleon_ft.cost.profile import Profile
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.job_record import ACCEPTABLE, FROZEN_FILES, JobRecord
from chameleon_ft.plan import Plan
from chameleon_ft.protocol.address import address_of_host, generate_certificates, join_address
from chameleon_ft.protocol.job_info import JobInfo
from chameleon_ft.protocol.server import listening_socket
from chameleon_ft.storage.checkpoints import read_mark, sound_checkpoint
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from chameleon_ft.storage.plans import read_start_plan
from chameleon_ft.storage.profiles import profile_of_run
from chameleon_ft.storage.stores import checkpoint_storage

_NAMED: Final = 5
"""Changes that a refusal names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run that is ready to be coordinated.

    Attributes:
        profile: the profile of the run, if it has one.
        plan: the plan to start with, if the run was given one.
        resume: Begin with a checkpoint.
        changes: how the job differs from the one that the checkpoint was written by.
    """

    config: RunConfig
    run: RunDirectory
    job: JobInfo
    profile: Profile | None
    plan: Plan | None
    resume: bool
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, *, run: RunDirectory, job: JobInfo, resume: bool) -> Self:
        """Check the configuration against the job, and write it if the run resumes, or arguments got their types.

        Raises:
            CheckpointError: the newest sound checkpoint is of another model; or it is of other data or layers, and this
                change is not accepted.
            ConfigError: the plan to start with is of another model.
            ProfileError: the profile is not of this job on this device.
        """
        changes = _accepted_changes(run, job, config) if resume else ()
        if resume or job.arguments:
            config = config.model_copy(update={"job_arguments": dict(job.arguments)})
            run.write_config(config)
            config = run.own(config)
        profile, plan = _profile(config, job), _plan(config, job)
        return cls(config=config, run=run, job=job, profile=profile, plan=plan, resume=resume, changes=changes)


@contextmanager
def control_listener(config: RunConfig, run: RunDirectory, *, token: str) -> Iterator[tuple[ControlAddress, socket]]:
    """Listen at the address of the coordinator within the block, which begins with new certificates if so configured.

    Raises ConfigError or OSError if that is impossible.
    """
    match config.control.tls:
        case "off":
            tls = None
        case "generate":
            generate_certificates(run.tls)
            tls = run.tls
        case directory:
            tls = Path(directory)
    host = address_of_host(config.control.host)
    with listening_socket(host, config.control.port) as listener:
        address = join_address(host, listener.getsockname()[1])
        yield ControlAddress(address=address, token=token, pid=os.getpid(), tls=tls), listener


def _accepted_changes(run: RunDirectory, job: JobInfo, config: RunConfig) -> tuple[str, ...]:
    """Return how `job` differs from the one that the newest sound checkpoint of `run` was written by.

    Raises CheckpointError if it cannot continue with that, or not without being told to.
    """
    checkpoints = checkpoint_storage(config, run)
    step, _ = sound_checkpoint(checkpoints)
    if step is None:
        return ()
    mark = read_mark(checkpoints, step)
    before = JobRecord.from_json(mark.get("job", {}))
    changes = before.changes_to(job.record)
    expected = job.fingerprint
    if config.forked.run and step == config.forked.step:
        expected = job.fingerprint_with(config.forked.micro_batch_size, instead_of=config.batch.micro_batch_size)
    said = f"--resume {run.path}: its checkpoint of step {step}"
    if mark["model"] != expected:
        layers = "".join(f"; {change.text}" for change in changes if change.topic == "layers")
        raise CheckpointError(
            f"{said} is of a model with other layers than the job has now{layers}; undo the change to the model, or "
            "begin a new run"
        )
    if refused := [each for each in changes if each.topic in ACCEPTABLE and each.topic not in config.accept_changes]:
        topics, more = sorted({each.topic for each in refused}), len(refused) - _NAMED
        named = "; ".join(each.text for each in refused[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(
            f"{said} was written with other {' and '.join(topics)}: {named}; undo the change, or continue with it by "
            f"--accept-changes {' '.join(topics)}"
        )
    files, files_now = (record.settings.get(FROZEN_FILES) for record in (before, job.record))
    if files and files != files_now:
        raise CheckpointError(
            f"{said} has no frozen parameters, which are in the files of the job's `weights`: these "
            f"{'are others now' if files_now else 'are not read for them now'}; give the job the files and the frozen "
            "parameters of before, or begin a new run"
        )
    kept, needed = (
        frozenset(filter(None, str(record.settings.get("state of the optimizer", "")).split(", ")))
        for record in (before, job.record)
    )
    if kept and needed - kept:
        raise CheckpointError(
            f"{said} has {', '.join(sorted(kept))} of the optimizer, which now needs {', '.join(sorted(needed))}; "
            "continue with the optimizer of before, or begin a new run"
        )
    if "job" not in mark:
        print(f"the checkpoint of step {step} was written by an earlier version: data and job are not compared with it")
    return tuple(each.text for each in changes)


def _profile(config: RunConfig, job: JobInfo) -> Profile | None:
    """Return the profile of the run, if it has one. Raises ProfileError if it is not of this job on this device."""
    if config.profile is None:
        return None
    profile = profile_of_run(config)
    if not config.is_emulated:
        wanted = asdict(job.profiled_as(config))
        if not job.device:
            # The workers are on other hosts.
            del wanted["device"]
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
