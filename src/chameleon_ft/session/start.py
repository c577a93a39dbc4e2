"""The start of a run: its directory is made, opened, fetched or forked, after everything that can be checked is.

Modules that load numpy or torch, and fsspec, are imported lazily, because `--help` must not wait for them.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from chameleon_ft.config import (
    Forked,
    RunConfig,
    Skip,
    Store,
    TrainConfig,
    config_type,
    parse_config,
    read_recorded_toml,
)
from chameleon_ft.errors import (
    ChameleonError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    LeaseError,
    LiveRunError,
    StoreError,
)
from chameleon_ft.protocol.address import split_address
from chameleon_ft.quantities import counted
from chameleon_ft.session.callbacks import callbacks_beside
from chameleon_ft.session.configuration import (
    AUTO,
    RunRequest,
    check_address,
    check_inputs,
    overridden,
    prepare_data_of,
    with_absolute_paths,
)
from chameleon_ft.storage.checkpoints import (
    complete_checkpoints,
    link_checkpoint,
    named_step,
    pinned_checkpoints,
    require_complete,
    restore_checkpoints,
    sound_checkpoint,
    supersede_checkpoints,
)
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.run_lock import RunLock
from chameleon_ft.storage.stores import Storage, checkpoint_storage

FIXED: Final = ("job", "model", "data", "optimizer", "seed", "batch", "precision", "fp32_modules")
"""Keys that determine the weights or the numbering of samples; a resumed run has to keep them."""
FIXED_BY_FORK: Final = tuple(key for key in FIXED if key not in ("optimizer", "batch"))
"""Those that a forked run has to keep, too."""

_MADE_FIRST: Final = {"checkpoints", "logs", "profile.json", "plan.json"}
"""Names in a run directory before its configuration is written."""
_DRAFT: Final = ".config.toml."
"""Begins the name of a file with a part of the configuration."""
_ANSWER_S: Final = 2.0
_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start; `config.output_dir` is its directory.

    Attributes:
        is_done: All steps are trained already.
        is_new: The directory was made for this start.
        lock: The lock of the directory, until the run has ended.
        superseded: The steps of checkpoints after the one to begin with.
    """

    config: RunConfig
    directory: RunDirectory
    resume: bool
    is_done: bool = False
    is_new: bool = True
    lock: RunLock = field(default_factory=RunLock)
    superseded: tuple[int, ...] = ()

    def start(self, launch: Callable[..., int]) -> int:
        """Start the run with `launch`, a function of `chameleon_ft.launch`, and return its exit code.

        Raises ConfigError if the job itself is invalid, which shows only when its code runs, and LeaseError if the
        place of the lease cannot be used. In these cases, or if interrupted or terminated that early, the directory of
        a new run is removed.
        """
        size = _size(self.directory)
        try:
            if self.is_done:
                print(f"{self.directory.path}: all of its {self.config.steps} steps are done")
                return 0
            if warning := self.config.untried:
                print(warning, file=sys.stderr, flush=True)
            if self.config.debug != "off":
                from chameleon_ft.session.debugging import train_in_one_process

                launch = train_in_one_process
            from chameleon_ft.launch.live_run import signals_obeyed

            with (
                _rivals_told(self.lock),
                callbacks_beside(self.config, self.directory),
                signals_obeyed(self.config.on_signal, self.directory),
            ):
                return launch(self.config, run=self.directory, resume=self.resume)
        except (ConfigError, CheckpointError, LeaseError, KeyboardInterrupt, SystemExit):
            if _size(self.directory) == size:
                restore_checkpoints(checkpoint_storage(self.config, self.directory), self.superseded)
            if self.is_new and not self.directory.metrics_file.exists() and self.lock.rival() is None:
                shutil.rmtree(self.directory.path)
            raise
        finally:
            self.lock.release()


def _size(run: RunDirectory) -> int:
    """Return the bytes of the records of steps: if they have not grown, no step was trained."""
    return run.metrics_file.stat().st_size if run.metrics_file.exists() else 0


def prepare_run(request: RunRequest) -> PreparedRun:
    """Read the configuration, check everything that can be checked beforehand, and make or open the run directory.

    Raises:
        ConfigError or CheckpointError: The message says what to change.
        LiveRunError: Another process starts or runs that run.
    """
    if request.from_step is not None and request.resume in (None, AUTO):
        raise ConfigError(f"--from-step {request.from_step}: needs the run to continue; write --resume RUN")
    if request.skip_samples is not None and (request.resume in (None, AUTO) or request.skip_samples < 0):
        raise ConfigError(
            f"--skip-samples {request.skip_samples}: should be 0 or more, and needs the run to continue; "
            "write --resume RUN"
        )
    lock = RunLock()
    try:
        with _rivals_told(lock):
            if request.fork:
                prepared = _forked_run(request, lock)
            elif request.resume is None or request.resume == AUTO:
                prepared = _started_run(request, lock)
            elif is_url(request.resume):
                prepared = _fetched_run(request, request.resume, lock)
            else:
                prepared = _resumed_run(request, Path(request.resume), lock)
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


def _started_run(request: RunRequest, lock: RunLock) -> PreparedRun:
    config, is_auto = request.config(), request.resume == AUTO
    if is_auto and (found := _earlier_run(config, lock)) is not None:
        return found
    out = config.output_dir or default_directory(request)
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
    _require_even_shares(config, 0)
    require_store(config, is_free=not is_auto)
    if not is_auto:
        lock.take(out)
    directory = RunDirectory.create(out, config)
    config = directory.own(config)
    try:
        prepare_data_of(config)
    except BaseException:
        # Once what the error says is changed, the same command is to work.
        if lock.rival() is None:
            shutil.rmtree(out, ignore_errors=True)
        raise
    return PreparedRun(config, directory, resume=False)


def default_directory(request: RunRequest) -> Path:
    """Return the directory of a new run that names none."""
    return Path("runs") / f"{request.usual_name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _resumed_run(request: RunRequest, path: Path, lock: RunLock) -> PreparedRun:
    if request.is_configured or "output_dir" in request.changes:
        raise ConfigError(
            f"--resume {path}: takes the configuration and the directory from that run; leave out the configuration "
            "file and --output-dir, and give any changes as flags; --fork continues in another directory"
        )
    directory = RunDirectory.open(path)
    lock.take(directory.path)
    return _resumed(_recorded_config(request.changes, directory), directory, request=request)


def _fetched_run(request: RunRequest, url: str, lock: RunLock) -> PreparedRun:
    """Return a run that resumes from its object store, in a new directory."""
    if request.is_configured:
        raise ConfigError(f"--resume {url}: takes the configuration from that run; leave out the configuration file")
    changes = {key: value for key, value in request.changes.items() if key != "output_dir"}
    if "url" in changes.get("store", {}):
        raise ConfigError(f"--resume {url}: the run continues in that store; leave out --store.url")
    store = parse_config(Store, {**changes.get("store", {}), "url": url}, source="--resume")
    out = Path(request.changes.get("output_dir") or Path("runs") / store.url.rpartition("/")[2])
    RunDirectory.require_free(out)
    lock.take(out)
    directory = fetch_run(store, out)
    try:
        return _resumed(_recorded_config(changes, directory), directory, request=request)
    except ChameleonError:
        # With what the error says changed, the same command is to work.
        shutil.rmtree(directory.path)
        raise


def _forked_run(request: RunRequest, lock: RunLock) -> PreparedRun:
    """Make the directory of a run that continues from the newest checkpoint of another one."""
    path = request.resume
    if path is None or path == AUTO or request.is_configured or "output_dir" not in request.changes:
        raise ConfigError(
            "--fork: needs the run to continue and a new directory, and no configuration file; write --resume RUN "
            "--fork --output-dir DIRECTORY, and give any changes as flags"
        )
    if is_url(path):
        raise ConfigError(f"--resume {path} --fork: a fork needs the directory of the run; resume it there first")
    source = RunDirectory.open(Path(path))
    config = _recorded_config(request.changes, source)
    out = Path(config.output_dir or "").absolute()
    RunDirectory.require_free(out)
    require_same_model(config, source, fixed=FIXED_BY_FORK)
    before = source.config()
    if before.store.url and before.store.url == config.store.url:
        raise ConfigError(
            f"--fork: store.url = {before.store.url} is the store of the run that is continued; give another by "
            "--store.url, or none by --store.url ''"
        )
    checkpoints = checkpoint_storage(before, source)
    chosen = named_step(checkpoints, request.from_step, criterion=before.checkpoint.keep_best)
    step = newest_checkpoint(config, source, checkpoints=checkpoints, chosen=chosen)
    fork = Forked(
        run=str(source.path),
        run_id=before.run_of(step),
        step=step,
        samples=before.samples_before(step),
        micro_batch_size=before.batch.micro_batch_size,
    )
    _say_horizon(config, before)
    config = config.with_horizon_of(before)
    skips = _with_skip((), step, request.skip_samples)
    own = {"output_dir": out, "forked": fork, "skips": skips, "run_id": uuid.uuid4().hex}
    config = config.model_copy(update=own)
    check_inputs(config)
    _require_even_shares(config, step)
    check_address(config.control)
    require_store(config, is_free=True)
    lock.take(out)
    directory = RunDirectory.create(out, config)
    try:
        link_checkpoint(checkpoints, step, checkpoint_storage(config, directory))
        config = directory.own(config)
        prepare_data_of(config)
    except (OSError, DamagedCheckpointError) as error:
        shutil.rmtree(out)
        raise CheckpointError(
            f"--resume {path} --fork: its checkpoint of step {step} cannot be copied: {error}"
        ) from None
    return PreparedRun(config, directory, resume=True)


def _recorded_config(changes: Mapping[str, Any], directory: RunDirectory) -> RunConfig:
    """Return the configuration of an earlier run that is not live, with changes."""
    refuse_live_run(directory)
    values = read_recorded_toml(directory.config_file)
    # The failures have happened already, and the plan was made for the original workers.
    values = {key: value for key, value in values.items() if key not in ("failures", "plan", "accept_changes", "debug")}
    if "profile" in values:
        values["profile"] = str(directory.profile_file)
    return with_absolute_paths(overridden(values, changes, source=str(directory.config_file)))


def _resumed(
    config: RunConfig, directory: RunDirectory, *, may_be_done: bool = False, request: RunRequest | None = None
) -> PreparedRun:
    """Return a run that resumes with `config`, maybe from a step, and without samples, of the `request`.

    Raises ConfigError or CheckpointError if it cannot.
    """
    before = directory.config()
    own = {"output_dir": directory.path, "forked": before.forked, "skips": before.skips, "run_id": before.run_id}
    config = config.model_copy(update=own)
    check_inputs(config)
    require_same_model(config, directory, fixed=[key for key in FIXED if key not in config.accept_changes])
    if config.store.url != before.store.url:
        raise CheckpointError(
            f"--resume {directory.path}: its checkpoints are in {before.store.url or directory.checkpoints}, not in "
            f"{config.store.url or directory.checkpoints}; leave store.url as it was, or continue from its state in a "
            "new directory by --fork --output-dir DIRECTORY"
        )
    require_store(config)
    checkpoints = checkpoint_storage(config, directory)
    if may_be_done and sound_checkpoint(checkpoints)[0] == config.steps:
        return PreparedRun(config, directory, resume=True, is_done=True, is_new=False)
    request = request or RunRequest()
    chosen = named_step(checkpoints, request.from_step, criterion=config.checkpoint.keep_best)
    first = newest_checkpoint(config, directory, checkpoints=checkpoints, chosen=chosen)
    _require_even_shares(config, first)
    # Before an earlier step, what was left out later is no longer decided.
    kept = before.skips if chosen is None else [each for each in before.skips if each.step <= chosen]
    config = config.model_copy(update={"skips": _with_skip(kept, first, request.skip_samples)})
    check_address(config.control)
    prepare_data_of(config, may_differ="data" in config.accept_changes)
    _say_horizon(config, before)
    superseded = () if chosen is None else _superseded(checkpoints, chosen)
    return PreparedRun(config.with_horizon_of(before), directory, resume=True, is_new=False, superseded=superseded)


def _require_even_shares(config: RunConfig, step: int) -> None:
    """Raise ConfigError if, from a step on, the batch grows by other numbers than each pipeline has a share of."""
    dp = config.parallel.dp
    for first_step, count in () if config.plan is not None else config.batch.stages_from(step):
        if count % dp:
            raise ConfigError(
                f"batch.ramp: {count} micro-batches from step {first_step} on do not divide evenly over "
                f"parallel.dp = {dp} pipelines; take a multiple of {dp}"
            )


def _with_skip(skips: Sequence[Skip], step: int, samples: int | None) -> tuple[Skip, ...]:
    """Return what is left out if so many samples are before a step; None: what is known."""
    if samples is None:
        return tuple(skips)
    print(f"--skip-samples: {counted(samples, 'sample')} before step {step} left out")
    own = (Skip(step=step, samples=samples),) if samples else ()
    return (*(each for each in skips if each.step != step), *own)


def _superseded(checkpoints: Storage, step: int) -> tuple[int, ...]:
    """Have later checkpoints be read no more, and return their steps. Raises CheckpointError if one is pinned."""
    if pinned := [each for each in pinned_checkpoints(checkpoints) if each > step]:
        raise CheckpointError(
            f"--from-step {step}: the later checkpoint of step {pinned[0]} is pinned, and would be written again; "
            "unpin it, or continue in a new directory by --fork --output-dir DIRECTORY"
        )
    return supersede_checkpoints(checkpoints, after=step)


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
        return _run_in_store(resumed, path)
    # Otherwise a process was killed that was about to write the configuration.
    if not all(name in _MADE_FIRST or name.startswith(_DRAFT) for name in names):
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
    return _run_in_store(resumed, path)


def _run_in_store(config: RunConfig, path: Path) -> PreparedRun | None:
    """Fetch the run in the store of `config` into its empty directory; None if none has a checkpoint there."""
    if not config.store.url or not _has_checkpoints(config.store):
        return None
    return _resumed(config, fetch_run(config.store, path), may_be_done=True)


# --- checks --------------------------------------------------------------------------------------------------------


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


def newest_checkpoint(
    config: RunConfig, directory: RunDirectory, *, checkpoints: Storage, chosen: int | None = None
) -> int:
    """Return the step of the newest checkpoint that can be read, or check that of the `chosen` step.

    Raises if there is none, or no step is left.
    """
    damages: dict[int, str] = {}
    if chosen is None:
        newest, damages = sound_checkpoint(checkpoints)
    else:
        require_complete(checkpoints, newest := chosen)
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


def lost_run(path: Path) -> RunDirectory:
    """Return the directory of a live run whose coordinator is lost. Raises ConfigError if it is not."""
    directory = RunDirectory.open(path)
    control = directory.read_control()
    with contextlib.suppress(OSError), socket.create_connection(split_address(control.address), timeout=_ANSWER_S):
        raise ConfigError(
            f"--take-over {path}: the coordinator at {control.address} still listens; end it first, by "
            f"`kill -9 {control.pid}` on its host"
        )
    if not directory.journals():
        raise ConfigError(f"--take-over {path}: the run has no journal; begin with --resume")
    return directory


def refuse_live_run(directory: RunDirectory) -> None:
    """Raise LiveRunError if the coordinator of a run lives.

    The id of its process alone proves nothing, because another process may have it now.
    """
    if not directory.control_file.exists():
        return
    control = directory.read_control()
    lives = control.has_process_here()
    if lives is None:
        from chameleon_ft.launch.live_run import require_coordinator

        with contextlib.suppress(ChameleonError, OSError):
            require_coordinator(control.address, control.token, tls=control.tls)
            lives = True
    if lives:
        where = f" on {control.host}" if control.host else ""
        raise LiveRunError(directory.path, f"process {control.pid}{where}")


def give_way(run: RunDirectory) -> None:
    """Wait until a coordinator that stands by would have taken over a run that has not ended.

    Raises LiveRunError as soon as a coordinator answers.
    """
    until_s = time.monotonic() + 2 * run.config().control.lease_s
    while time.monotonic() < until_s:
        refuse_live_run(run)
        time.sleep(_POLL_S)


# --- object stores -------------------------------------------------------------------------------------------------


def is_url(run: str) -> bool:
    """Return whether a run is named by its folder in an object store."""
    return "://" in run


def require_store(config: RunConfig, *, is_free: bool = False) -> None:
    """Raise ConfigError if the store of a run cannot be used, or if `is_free` is required and it has a run already."""
    if not config.store.url:
        return
    from chameleon_ft.storage.stores import has_records, store_of

    store = store_of(config)
    store.check()
    try:
        if is_free and (has_records(store) or _has_checkpoints(config.store)):
            raise ConfigError(
                f"store.url = {store.url}: has a run already, and a run never writes over anything; take another "
                f"folder, or continue that run by --resume {store.url}"
            )
    except StoreError as error:
        raise ConfigError(f"store.url = {error}") from None


def _has_checkpoints(store: Store) -> bool:
    """Return whether a store has a complete checkpoint. Raises StoreError."""
    from chameleon_ft.storage.stores import ObjectStore

    return bool(complete_checkpoints(ObjectStore(store.checkpoints, timeout_s=store.timeout_s)))


def fetch_run(store: Store, path: Path) -> RunDirectory:
    """Fill the directory of a run, empty but for its lock, with the records in its store. Raises ConfigError."""
    from chameleon_ft.storage.stores import ObjectStore, RecordCopies, has_records

    run, remote = RunDirectory(path.absolute()), ObjectStore(store.url, timeout_s=store.timeout_s)
    try:
        if not has_records(remote):
            raise ConfigError(f"--resume {store.url}: there is no run; give the store.url of one")
        for folder in (run.path, run.checkpoints, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
        RecordCopies(run, remote).fetch()
        values = read_recorded_toml(run.config_file)
        # The folder may have been moved.
        values["store"] = {**values.get("store", {}), "url": store.url}
        config = run.own(parse_config(config_type(values), values, source=f"{store.url}/config.toml"))
        run.path.chmod(int(config.output_mode, 8))
        run.write_config(config)
    except (ConfigError, OSError) as error:
        # Once the cause is gone, the same command is to work.
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--resume {store.url}: its records cannot be fetched: {error}") from None
    print(f"{run.path}: the records of the run are fetched from {store.url}")
    return run
