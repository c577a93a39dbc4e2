"""Preparation of a run from a command line: checks its configuration and inputs, and makes or opens its directory.

Modules that load numpy or torch are imported lazily, because `--help` must not wait for them.

Checks before a run starts: its address, its inputs, and the checkpoint that it resumes from.

The configuration of a run, from a file or an earlier run and the flags of a command.

Modules that load numpy or torch are imported lazily, because `--help` must not wait for them.
"""

from __future__ import annotations

import errno
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import tyro

from chameleon_ft.cli.arguments import (
    OptionalPath,
    OptionalStr,
    Switch,
    metavar,
    parse_with_flags,
    refuse_foreign_flags,
)
from chameleon_ft.cli.watched import (
    fetch_run,
    has_checkpoints,
    is_url,
    refuse_live_run,
    require_same_store,
    require_store,
)
from chameleon_ft.config import (
    LLAMA_JOB,
    Control,
    Forked,
    RunConfig,
    Store,
    TrainConfig,
    config_type,
    parse_config,
    parse_fields,
    read_recorded_toml,
    read_toml,
)
from chameleon_ft.errors import (
    ChameleonError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    LeaseError,
    LiveRunError,
)
from chameleon_ft.protocol.address import address_of_host, tls_context
from chameleon_ft.storage.checkpoints import link_checkpoint, sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_start_plan
from chameleon_ft.storage.profiles import costs_of_run, profile_of_run
from chameleon_ft.storage.run_lock import RunLock
from chameleon_ft.storage.run_storage import checkpoint_storage
from chameleon_ft.storage.stores import Storage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


FIXED: Final = ("job", "model", "data", "optimizer", "seed", "batch", "precision", "fp32_modules")
"""Keys that determine the weights or the numbering of samples; a resumed run has to keep them."""
FIXED_BY_FORK: Final = tuple(key for key in FIXED if key not in ("optimizer", "batch"))
"""Those that a forked run has to keep, too."""


def require_same_model(config: RunConfig, directory: RunDirectory, *, fixed: Sequence[str]) -> None:
    """Raise CheckpointError if `config` changes one of the `fixed` keys of the run in `directory`."""
    stored, wanted = (value.model_dump(include=set(fixed)) for value in (directory.config(), config))
    for key in fixed:
        before, now = stored.get(key), wanted.get(key)
        if before == now:
            continue
        name = key
        if isinstance(before, dict) and isinstance(now, dict):
            field = next(field for field in before if before[field] != now[field])
            name, before, now = f"{key}.{field}", before[field], now[field]
        remedy = f"keep {key} unchanged, or begin a new run"
        if key not in FIXED_BY_FORK:
            remedy += ", or continue from its state in a new directory by --fork --output-dir DIRECTORY"
        raise CheckpointError(
            f"--resume {directory.path}: its checkpoint was written with {name} = {before}, not {now}; {remedy}"
        )


def newest_checkpoint(config: RunConfig, directory: RunDirectory, *, checkpoints: Storage) -> int:
    """Return the step of the newest checkpoint that can be read; raise if there is none, or no step is left."""
    newest, damages = sound_checkpoint(checkpoints)
    if newest is None:
        found = f" ({'; '.join(damages.values())})" if damages else ""
        raise CheckpointError(
            f"--resume {directory.path}: it has no complete checkpoint to resume from{found}; begin a new run, and do "
            "not set checkpoint.every to 0 if it should survive the loss of its coordinator"
        )
    if newest >= config.steps:
        raise ConfigError(
            f"--resume {directory.path}: all of its {config.steps} steps are done; give a larger --steps to continue"
        )
    return newest


def check_inputs(config: RunConfig) -> None:
    """Raise ConfigError if the profile or the plan that `config` names cannot be used with it."""
    if config.profile is not None:
        profile = profile_of_run(config)
        if config.is_emulated:
            costs_of_run(config, profile, dict.fromkeys(range(config.workers), ""))
    read_start_plan(config)


def check_address(control: Control) -> None:
    """Raise ConfigError if the coordinator cannot listen on the address, or workers cannot connect to it."""
    host = f'control.host = "{control.host}"'
    if control.host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{host}: means every address of this host, but the workers need a single one; give the address at "
            "which the other machines reach this host"
        )
    own = address_of_host(control.host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(own, control.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Like the server, accept a port whose last connection is still in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"{host}: {error.strerror}; give an address of this host") from None
    except UnicodeError:
        raise ConfigError(f"{host}: is not a host name; give an address of this host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"control.port = {control.port}: is in use on {control.host}; choose another, or 0 for any free port"
            ) from None
        raise ConfigError(f"{host}: cannot listen there: {error.strerror}; give an address of this host") from None


def configured(values: Mapping[str, Any], flags: Mapping[str, Any], *, job: str | None, source: str) -> RunConfig:
    """Return the validated configuration: `values`, read from `source`, overridden by `flags`.

    Paths become absolute, so that the configuration does not depend on the working directory.
    """
    config = overridden(values, flags, job=job, source=source)
    changes: dict[str, Any] = {"job": absolute_job(config.job)}
    for name in ("profile", "plan"):
        if (path := getattr(config, name)) is not None:
            changes[name] = _absolute_path(path)
    if (tls := config.control.tls) not in ("off", "generate"):
        directory = _absolute_path(Path(tls))
        tls_context(directory, server=True)
        changes["control"] = config.control.model_copy(update={"tls": str(directory)})
    if isinstance(config, TrainConfig) and config.data.path:
        path = _absolute_path(Path(config.data.path))
        changes["data"] = config.data.model_copy(update={"path": str(path)})
    return config.model_copy(update=changes)


def overridden(values: Mapping[str, Any], flags: Mapping[str, Any], *, job: str | None, source: str) -> RunConfig:
    """Return the validated configuration with all paths as they are given; see `configured`."""
    job = job or flags.get("job") or values.get("job", LLAMA_JOB)
    model = config_type({**values, "job": job})
    parse_fields(model, values, source=source)
    merged = dict(values)
    for key, value in flags.items():
        merged[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(model, {**merged, "job": job}, source=f"{source} with the flags given" if flags else source)


def read_config_values(file: Path) -> dict[str, Any]:
    """Return the values of a configuration file; for a job, those of the configuration beside it, if there is one.

    Raises ConfigError if the file cannot be read, or a value is of a wrong type or out of range.
    """
    script = Path(str(file).partition(":")[0])
    if script.suffix != ".py":
        values, source = read_toml(file), file
    else:
        beside = script.with_suffix(".toml")
        values, source = {**(read_toml(beside) if beside.is_file() else {}), "job": str(file)}, beside
    parse_fields(config_type(values), values, source=str(source))
    return values


def absolute_job(reference: str) -> str:
    """Return a job reference with its file path, if any, made absolute. Raises ConfigError if there is no such job."""
    from chameleon_ft.job import check_job_reference

    check_job_reference(reference)
    location, colon, function = reference.rpartition(":")
    if not colon:
        location, function = reference, ""
    if location.endswith(".py"):
        location = str(_absolute_path(Path(location)))
    return f"{location}{colon}{function}"


def _absolute_path(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # an unknown ~user
        raise ConfigError(f"{path}: {error}; write the path out") from None


_Own = TypeVar("_Own", bound="DataclassInstance")

ConfigFile = Annotated[
    OptionalPath,
    tyro.conf.Positional,
    metavar("[CONFIG]", "TOML file with the configuration; flags override it."),
]
Resume = Annotated[
    OptionalStr,
    metavar(
        "RUN|auto",
        "Directory of a run, or the URL of its object store, to resume from its newest checkpoint; the number of "
        "workers may change. With auto: resume the run in --output-dir, or in its store, if it has a checkpoint, and "
        "otherwise start it, so that the same command does both.",
    ),
]

Forks = Annotated[
    Switch,
    tyro.conf.arg(
        help="With --resume: continue in the new directory of --output-dir, maybe with another batch or optimizer."
    ),
]

AUTO = "auto"
"""The value of --resume that resumes a run if its directory has a checkpoint, and starts it otherwise."""

_MADE_FIRST = {"checkpoints", "logs", "profile.json", "plan.json"}  # before the configuration of a run is written
_DRAFT = ".config.toml."  # begins the name of a file with a part of the configuration


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start; `config.output_dir` is its directory."""

    config: RunConfig
    directory: RunDirectory
    resume: bool
    is_done: bool = False
    is_new: bool = True  # whether its directory was made for this start
    lock: RunLock = field(default_factory=RunLock)  # of its directory, until it has ended

    def start(self, entry: Callable[..., int]) -> int:
        """Start the run with `entry`, a function of `chameleon_ft.launch`, and return its exit code.

        Raises ConfigError if the job itself is invalid, which shows only when its code runs, and LeaseError if the
        place of the lease cannot be used. In these cases, or if interrupted or terminated that early, the directory of
        a new run is removed.
        """
        try:
            if self.is_done:
                print(f"{self.directory.path}: all of its {self.config.steps} steps are done")
                return 0
            if warning := self.config.untried:
                print(warning, file=sys.stderr, flush=True)
            with _rivals_told(self.lock):
                return entry(self.config, run=self.directory, resume=self.resume)
        except (ConfigError, CheckpointError, LeaseError, KeyboardInterrupt, SystemExit):
            if self.is_new and not self.directory.metrics_file.exists() and self.lock.rival() is None:
                shutil.rmtree(self.directory.path)
            raise
        finally:
            self.lock.release()


def parse_start(
    own: type[_Own], arguments: Sequence[str], *, command: str, without: tuple[str, ...] = ()
) -> tuple[_Own, dict[str, Any]]:
    """Parse the arguments of a command that starts a run; see `parse_with_flags`."""
    # A job's configuration may have the sections of the Llama; the help shows only those that every job has.
    refuse_foreign_flags(arguments, own_job=bool(without))
    model: type[RunConfig] = TrainConfig
    if without and {"-h", "--help"} & set(arguments):
        model, without = RunConfig, (*without, "emulation")
    return parse_with_flags(own, model, arguments, command=command, without=without)


def prepare_run(
    flags: dict[str, Any],
    *,
    file: Path | None,
    resume: str | None,
    fork: bool = False,
    job: str | None = None,
    name: str | None = None,
) -> PreparedRun:
    """Read the configuration, check everything that can be checked beforehand, and make or open the run directory.

    Args:
        flags: values that override those of the configuration file.
        file: the configuration file.
        resume: the directory of the run to resume, or the URL of its store, which replaces `file`; `AUTO`: that run
            which the configuration names, if it has a checkpoint.
        fork: whether to continue from the state of that run in a new directory, maybe with another batch or optimizer.
        job: reference of the job; None takes it from `flags` or `file`.
        name: name of a new run; by default that of the file.

    Raises:
        ConfigError or CheckpointError: the message says what to change.
        LiveRunError: another process starts or runs that run.
    """
    lock = RunLock()
    try:
        with _rivals_told(lock):
            if fork:
                prepared = _forked_run(flags, None if resume == AUTO else resume, lock, file=file, job=job)
            elif resume is not None and is_url(resume):
                prepared = _fetched_run(flags, resume, lock, file=file, job=job)
            elif resume is not None and resume != AUTO:
                prepared = _resumed_run(flags, Path(resume), lock, file=file, job=job)
            else:
                prepared = _started_run(flags, lock, file=file, is_auto=resume == AUTO, job=job, name=name)
    except BaseException:
        lock.release()
        raise
    return replace(prepared, lock=lock)


@contextmanager
def _rivals_told(lock: RunLock) -> Iterator[None]:
    """Have an error say that the run is live, if a process of another host has taken its directory meanwhile."""
    try:
        yield
    except ChameleonError:
        if (rival := lock.rival()) is not None:
            raise LiveRunError(lock.directory, rival) from None
        raise


def _started_run(
    flags: dict[str, Any], lock: RunLock, *, file: Path | None, is_auto: bool, job: str | None, name: str | None
) -> PreparedRun:
    values = {} if file is None else read_toml(file)
    config = configured(values, flags, job=job, source="the configuration" if file is None else str(file))
    if is_auto and (found := _earlier_run(config, lock)) is not None:
        return found
    name = name or ("llama" if file is None else file.stem)
    out = config.output_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = config.model_copy(update={"output_dir": out.absolute(), "run_id": uuid.uuid4().hex})
    check_address(config.control)
    if not is_auto:
        RunDirectory.require_free(out)
    if isinstance(config, TrainConfig):
        from chameleon_ft.data.corpus import check_data

        data = check_data(config)
        skipped = f", {len(data.skipped)} files skipped" if data.skipped else ""
        print(f"data: {data.source}: {data.num_tokens:,} tokens, {data.num_samples:,} samples{skipped}")
    check_inputs(config)
    require_store(config, is_free=not is_auto)
    if not is_auto:
        lock.take(out)
    directory = RunDirectory.create(out, config)
    config = directory.own(config)
    try:
        prepare_data_of(config)
    except BaseException:  # once what it says is changed, the same command is to work
        if lock.rival() is None:
            shutil.rmtree(out, ignore_errors=True)
        raise
    return PreparedRun(config, directory, resume=False)


def _resumed_run(
    flags: dict[str, Any], path: Path, lock: RunLock, *, file: Path | None, job: str | None
) -> PreparedRun:
    if file is not None or "output_dir" in flags:
        raise ConfigError(
            f"--resume {path}: takes the configuration and the directory from that run; leave out the configuration "
            "file and --output-dir, and give any changes as flags; --fork continues in another directory"
        )
    directory = RunDirectory.open(path)
    lock.take(directory.path)
    return _resumed(_recorded_config(flags, directory, job=job), directory)


def _fetched_run(flags: dict[str, Any], url: str, lock: RunLock, *, file: Path | None, job: str | None) -> PreparedRun:
    """Return a run that resumes from its object store, in a new directory."""
    if file is not None:
        raise ConfigError(f"--resume {url}: takes the configuration from that run; leave out the configuration file")
    own = {key: value for key, value in flags.items() if key != "output_dir"}
    if "url" in own.get("store", {}):
        raise ConfigError(f"--resume {url}: the run continues in that store; leave out --store.url")
    store = parse_config(Store, {**own.get("store", {}), "url": url}, source="--resume")
    out = Path(flags.get("output_dir") or Path("runs") / store.url.rpartition("/")[2])
    RunDirectory.require_free(out)
    lock.take(out)
    directory = fetch_run(store, out)
    try:
        return _resumed(_recorded_config(own, directory, job=job), directory)
    except ChameleonError:  # with what it says changed, the same command is to work
        shutil.rmtree(directory.path)
        raise


def _forked_run(
    flags: dict[str, Any], path: str | None, lock: RunLock, *, file: Path | None, job: str | None
) -> PreparedRun:
    """Make the directory of a run that continues from the newest checkpoint of another one."""
    if path is None or file is not None or "output_dir" not in flags:
        raise ConfigError(
            "--fork: needs the run to continue and a new directory, and no configuration file; write --resume RUN "
            "--fork --output-dir DIRECTORY, and give any changes as flags"
        )
    if is_url(path):
        raise ConfigError(f"--resume {path} --fork: a fork needs the directory of the run; resume it there first")
    source = RunDirectory.open(Path(path))
    config = _recorded_config(flags, source, job=job)
    out = Path(config.output_dir or "").absolute()
    RunDirectory.require_free(out)
    require_same_model(config, source, fixed=FIXED_BY_FORK)
    before = source.config()
    if before.store.url and before.store.url == config.store.url:
        raise ConfigError(
            f"--fork: store.url = {before.store.url} is the store of the run that is continued; give another by "
            "--store.url, or none by --store.url ''"
        )
    step = newest_checkpoint(config, source, checkpoints=checkpoint_storage(before, source))
    fork = Forked(
        run=str(source.path),
        run_id=before.run_of(step),
        step=step,
        samples=before.first_sample(step),
        micro_batch_size=before.batch.micro_batch_size,
    )
    _say_horizon(config, before)
    config = config.with_horizon_of(before)
    config = config.model_copy(update={"output_dir": out, "forked": fork, "run_id": uuid.uuid4().hex})
    check_inputs(config)
    check_address(config.control)
    require_store(config, is_free=True)
    lock.take(out)
    directory = RunDirectory.create(out, config)
    try:
        link_checkpoint(checkpoint_storage(before, source), step, checkpoint_storage(config, directory))
        config = directory.own(config)
        prepare_data_of(config)
    except (OSError, DamagedCheckpointError) as error:
        shutil.rmtree(out)
        raise CheckpointError(
            f"--resume {path} --fork: its checkpoint of step {step} cannot be copied: {error}"
        ) from None
    return PreparedRun(config, directory, resume=True)


def _recorded_config(flags: dict[str, Any], directory: RunDirectory, *, job: str | None) -> RunConfig:
    """Return the configuration of an earlier run that is not live, with the flags given."""
    refuse_live_run(directory)
    values = read_recorded_toml(directory.config_file)
    # The failures have happened already, and the plan was made for the original workers.
    values = {key: value for key, value in values.items() if key not in ("failures", "plan", "accept_changes")}
    if "profile" in values:
        values["profile"] = str(directory.profile_file)
    return configured(values, flags, job=job, source=str(directory.config_file))


def _resumed(config: RunConfig, directory: RunDirectory, *, may_be_done: bool = False) -> PreparedRun:
    """Return a run that resumes with `config`. Raises ConfigError or CheckpointError if it cannot."""
    before = directory.config()
    own = {"output_dir": directory.path, "forked": before.forked, "run_id": before.run_id}
    config = config.model_copy(update=own)
    check_inputs(config)
    require_same_model(config, directory, fixed=[key for key in FIXED if key not in config.accept_changes])
    require_same_store(config, directory)
    require_store(config)
    checkpoints = checkpoint_storage(config, directory)
    if may_be_done and sound_checkpoint(checkpoints)[0] == config.steps:
        return PreparedRun(config, directory, resume=True, is_done=True, is_new=False)
    newest_checkpoint(config, directory, checkpoints=checkpoints)
    check_address(config.control)
    prepare_data_of(config, may_differ="data" in config.accept_changes)
    _say_horizon(config, before)
    return PreparedRun(config.with_horizon_of(before), directory, resume=True, is_new=False)


def _say_horizon(config: RunConfig, before: RunConfig) -> None:
    """Say that the schedule of the learning rate is made for another number of steps from now on."""
    if config.horizon_steps not in (None, before.horizon):
        print(f"horizon_steps: the learning rate is scheduled for {config.horizon_steps} steps, not {before.horizon}")


def _earlier_run(config: RunConfig, lock: RunLock) -> PreparedRun | None:
    """Lock `config.output_dir`, and return its run as `config` resumes it; None if none has a checkpoint there.

    The directory of a run without a checkpoint is renamed: nothing in it is needed, and another run takes its place.
    """
    if config.output_dir is None:
        raise ConfigError("--resume auto: needs a fixed --output-dir, or output_dir in the configuration")
    path = config.output_dir
    lock.take(path)
    require_store(config)
    resumed = config.model_copy(update={"failures": (), "plan": None})
    if not (names := RunLock.names_in(path)):
        return _run_in_store(resumed)
    is_begun = all(name in _MADE_FIRST or name.startswith(_DRAFT) for name in names)  # and its process was killed
    if not is_begun:
        directory = RunDirectory.open(path)
        refuse_live_run(directory)
        newest, damages = sound_checkpoint(checkpoint_storage(directory.config(), directory))
        if newest is not None or damages:
            return _resumed(resumed, directory, may_be_done=True)
    aside = path.with_name(f"{path.name}-before-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        path.rename(aside)
    except OSError as error:
        raise ConfigError(
            f"--resume auto: {path} has a run without a checkpoint and cannot be renamed: {error.strerror}; take a "
            "directory below it"
        ) from None
    lock.take(path)
    print(f"{path}: its run has no checkpoint and begins anew; its files are in {aside}")
    return _run_in_store(resumed)


def _run_in_store(config: RunConfig) -> PreparedRun | None:
    """Fetch the run in the store of `config` into its empty directory; None if none has a checkpoint there."""
    assert config.output_dir is not None
    if not config.store.url or not has_checkpoints(config.store):
        return None
    return _resumed(config, fetch_run(config.store, config.output_dir), may_be_done=True)


def prepare_data_of(config: RunConfig, *, may_differ: bool = False) -> None:
    """Write the data into the run directory as workers read it, maybe other than before. Raises DataError."""
    if isinstance(config, TrainConfig) and config.output_dir is not None:
        from chameleon_ft.data.corpus import check_data, prepare_data

        if may_differ:
            check_data(config)
        prepare_data(config, config.output_dir, may_differ=may_differ)
