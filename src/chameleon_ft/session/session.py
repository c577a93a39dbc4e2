"""A run from Python: started, followed step by step, and asked for checkpoints, drains and its end."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from chameleon_ft.config import FailureKind, FailurePhase, RunConfig
from chameleon_ft.errors import ConfigError, ControlError, RunFailedError
from chameleon_ft.events.base import Event
from chameleon_ft.events.kinds import CheckpointComplete
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import Evaluation, FailureRecord, RunStatus, StepRecord
from chameleon_ft.job_arguments import as_setting
from chameleon_ft.launch import live_run
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.report.view import RunReport
from chameleon_ft.session.configuration import AUTO, NamedStep, RunRequest, checkpoint_of
from chameleon_ft.session.joining import WatchRequest
from chameleon_ft.session.process import LAUNCHED, Launch, RunProcess
from chameleon_ft.storage.checkpoints import sign_and_name
from chameleon_ft.storage.files import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

    from chameleon_ft.job.job import Job
    from chameleon_ft.session.export import Export, ExportFormat, ExportType

_POLL_S: Final = 0.05
_RAY: Final = "ray://"
_STATUS: Final[Mapping[int, RunStatus]] = {0: "finished", 130: "interrupted", os.EX_TEMPFAIL: "terminated"}
"""How a run ended, by the exit code of its launcher; any other code is a failure."""

OnCallbackError: TypeAlias = Literal["warn", "stop"]

_logger = logging.getLogger(__name__)


class Session:
    """A run, with all of its worker processes, for a `with` block, whose end is its end.

        with Session("my_job.py", "my_job.toml", steps=1000) as run:
            for step in run:
                print(step.number, step.loss)
            weights = run.state_dict()

    Iterating yields the committed steps in order, each once, through any failure of workers; a step that is repeated
    from a checkpoint is not yielded again. The run trains on, whether or not it is iterated. If it is not finished at
    the end of the block, it ends after its current step with a checkpoint, and can be resumed. Its output is in its
    directory, in logs/session.log.

    Args:
        job: What is trained: a Python file or a module, as `chameleon run` takes them, or a function that returns a
            `Job` and that other processes can import. By default what the configuration names, or the built-in Llama.
        config: A TOML file, its values, or a `RunConfig`; by default the TOML file beside the job's file.
        resume: Directory or object store of a run to continue from its newest checkpoint. "auto": continue the run in
            `output_dir` if it has a checkpoint, and start it otherwise.
        fork: Continue the run of `resume` in the new directory `output_dir`.
        from_step: Continue from the checkpoint of this step, or "best", instead of the newest one.
        skip_samples: With `resume`: leave out so many samples before the first step.
        address: None trains on this machine. "ray://HOST:PORT" or "ray://auto" trains on that Ray cluster, on a node of
            which this process runs. "HOST:PORT" follows a run that is live, by the address of its coordinator, as does
            the path of its directory. Such a run is followed from its first step, and goes on after the block.
        token: Join token for "HOST:PORT", by default that of CHAMELEON_TOKEN.
        tls: Directory of the certificates for "HOST:PORT".
        verbose: Print what the command line prints.
        callbacks: Their methods are called when something happens in the run; see `Callback`.
        on_callback_error: An error of a callback is only logged ("warn"), or ends the block, and so the run ("stop").
        changes: Values over those of the configuration, such as ``steps=100``, ``parallel={"dp": 4}`` or
            ``**{"parallel.dp": 4}``; ``**{"job.lr": 3e-4}`` is an argument of the job's function.

    Raises:
        ChameleonError: The message says what to change. ConfigError already before the block if the configuration is
            not valid.
    """

    def __init__(
        self,
        job: str | Path | Callable[..., Job] | None = None,
        config: str | Path | Mapping[str, Any] | RunConfig | None = None,
        *,
        resume: str | Path | None = None,
        fork: bool = False,
        from_step: NamedStep = None,
        skip_samples: int | None = None,
        address: str | None = None,
        token: str | None = None,
        tls: Path | None = None,
        verbose: bool = False,
        callbacks: Sequence[Callback] = (),
        on_callback_error: OnCallbackError = "warn",
        **changes: Any,
    ) -> None:
        self._resources = ExitStack()
        self._process: RunProcess | None = None
        self._steps: deque[StepRecord] = deque()
        self._last_step = -1
        self._has_raised = False
        self._callbacks = Callbacks(callbacks, on_error=on_callback_error)
        self._source: Launch | WatchRequest
        if address is not None and not address.startswith(_RAY):
            if job is not None or config is not None or resume is not None or changes:
                raise ConfigError(f"address={address!r}: follows a live run as it is; leave out all but token and tls")
            is_directory = Path(address).is_dir()
            self._source = WatchRequest(
                run=Path(address) if is_directory else None,
                coordinator=None if is_directory else address,
                token=token,
                tls=tls,
            )
            return
        if LAUNCHED in os.environ:
            raise ConfigError(
                "this process belongs to a run, which loads the file of its job: start sessions there only below "
                '`if __name__ == "__main__":`'
            )
        asked = {"resume": None if resume is None else str(resume), "fork": fork}
        request = _request(job, config, changes, **asked, from_step=from_step, skip_samples=skip_samples)
        if resume in (None, AUTO) and not fork:
            request.config()
        ray = None if address is None else address.removeprefix(_RAY)
        self._source = Launch(request=request, ray=ray, is_quiet=not verbose)

    def __enter__(self) -> Self:
        if isinstance(self._source, WatchRequest):
            self._watcher = self._resources.enter_context(self._source.watcher())
            return self
        self._process = RunProcess(self._source)
        try:
            self._watcher = RunWatcher(RunDirectory(self._process.path))
            # If the run is resumed.
            self.skip()
            self._process.begin()
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            try:
                self.end()
            finally:
                self._tell_end(raises=kind is None)
        if kind is None:
            self._raise_failure()

    def _tell_end(self, *, raises: bool) -> None:
        if not self._callbacks:
            return
        status: RunStatus | None = None
        # The coordinator of a run that is only followed may be gone.
        with suppress(ControlError):
            self._read(calls=False)
            status = self.status
        if status is not None:
            self._callbacks.end(self, status, raises=raises)

    def __iter__(self) -> Iterator[StepRecord]:
        while True:
            # Looked up before reading, so that the last lines are read.
            is_over = self.is_over
            self._read()
            while self._steps:
                yield self._steps.popleft()
            if is_over:
                break
            time.sleep(_POLL_S)
        self._raise_failure()

    def skip(self) -> None:
        """Leave out the steps until now where it is iterated, and what has happened for callbacks."""
        self._watcher.update_readable()

    def _read(self, *, calls: bool = True) -> None:
        for record in self._watcher.update_readable():
            if isinstance(record, StepRecord):
                if record.step <= self._last_step:
                    continue
                self._last_step = record.step
                self._steps.append(record)
            self._callbacks.add(record)
        if calls:
            self._callbacks.call(self)

    @property
    def directory(self) -> Path:
        """The run directory, or a copy of the records of a run that is followed by its address."""
        return self._watcher.run.path

    @property
    def config(self) -> RunConfig:
        """The configuration of the run, with all values."""
        return self._watcher.run.config()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        if self._process is not None:
            return self._process.exit_code is not None
        return self.report().is_over

    @property
    def status(self) -> RunStatus | None:
        """How the run has ended; None while it is live."""
        if not self.is_over:
            return None
        if self._process is not None:
            return _STATUS.get(self._process.exit_code or 0, "failed")
        condition = self.report().condition
        return condition if condition in ("finished", "interrupted", "terminated") else "failed"

    def report(self) -> RunReport:
        """Return the state of the run now, as `chameleon status` shows it."""
        self._read()
        return self._watcher.report()

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the run until now, by ascending steps; of a step that was trained again, the newest."""
        self._read()
        return list(self._watcher.view.evaluations.values())

    @property
    def events(self) -> list[Event]:
        """All events of the run until now, in their order."""
        self._read()
        return list(self._watcher.view.events)

    def wait(self) -> RunStatus:
        """Wait until the run has ended, and return how. Raises RunFailedError if it has failed."""
        for _ in self:
            pass
        return self.status or "failed"

    def end(self, *, at_once: bool = False) -> None:
        """End a run of this session after its current step with a checkpoint, or at once without; wait for its end.

        An interrupt meanwhile ends it at once, and is raised again. A run that is only followed goes on.
        """
        if (process := self._process) is None:
            return
        interrupt: KeyboardInterrupt | None = None
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            try:
                if at_once:
                    time.sleep(_POLL_S)
                    process.send_signal(signal.SIGINT)
                process.wait()
                break
            except KeyboardInterrupt as again:
                interrupt = again
        else:
            process.kill()
        if interrupt is not None:
            raise interrupt

    def stop(self, *, at_once: bool = False) -> None:
        """Ask for the end of the run after its current step with a checkpoint, or at once without one."""
        live_run.stop(self._watcher.run, at_once=at_once)

    def checkpoint(self, *, wait: bool = True) -> int | None:
        """Have a checkpoint written now, and return the step with which training would resume; None without `wait`."""
        run = self._run_to_wait_for(wait)
        before = live_run.count_events(run)
        committed = live_run.checkpoint(run)
        return live_run.wait_until_saved(run, committed, after=before) if wait else None

    def evaluate(self) -> Evaluation:
        """Have the held-out samples evaluated after the current step or the next one; return the result.

        Raises:
            ControlError: The job has no samples to evaluate, or the run ends before.
        """
        run = self._run_to_wait_for(wait=True)
        if (found := live_run.evaluate(run)) is None:
            raise ControlError(f"{run.path}: the run was over before the evaluation")
        return found

    def drain(self, workers: Collection[int] = (), *, host: str | None = None, wait: bool = True) -> tuple[int, ...]:
        """Take workers out of the run, those of a host included, without repeating a step; return all that leave."""
        run = self._run_to_wait_for(wait)
        before = live_run.count_events(run)
        leaving = live_run.drain(run, workers=workers, host=host)
        if wait:
            live_run.wait_until_out(run, leaving, after=before)
        return leaving

    def inject(
        self,
        worker: int,
        kind: FailureKind = "kill",
        *,
        phase: FailurePhase | None = None,
        step: int | None = None,
        factor: float | None = None,
    ) -> None:
        """Make a worker fail, to watch the run recover, as `chameleon inject` does."""
        live_run.inject(self._watcher.run, worker=worker, kind=kind, phase=phase, step=step, factor=factor)

    def _run_to_wait_for(self, wait: bool) -> RunDirectory:
        if wait and isinstance(self._source, WatchRequest) and self._source.coordinator is not None:
            raise ConfigError("wait: needs the files of the run, which is followed by its address; give wait=False")
        return self._watcher.run

    def state_dict(self) -> dict[str, Tensor]:
        """Return all weights and buffers of the newest checkpoint, by the names of `nn.Sequential(*layers)`.

        A run that has ended has a checkpoint of its end. The weights of bf16 are the masters, in float32.

        Raises:
            CheckpointError: There is no checkpoint.
        """
        return load_checkpoint(self._watcher.run.path)

    def export(
        self,
        to: str | Path,
        *,
        step: NamedStep = None,
        form: ExportFormat = "safetensors",
        dtype: ExportType | None = None,
        adapters: bool = False,
        merge: bool = False,
        average: str = "",
    ) -> Export:
        """Write the weights of a checkpoint, by default the newest, into a new folder, as `chameleon export` does.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        from chameleon_ft.session.export import export_weights

        return export_weights(
            self._watcher.run,
            Path(to),
            step=step,
            form=form,
            dtype=dtype,
            adapters=adapters,
            merge=merge,
            average=average,
        )

    def _raise_failure(self) -> None:
        """Raise the error that has ended the run, once."""
        if self._process is None or self._has_raised or self.status != "failed":
            return
        self._has_raised = True
        if (error := self._process.error()) is not None:
            raise error
        run, reason = self._watcher.run, "its launcher was lost"
        with suppress(OSError, ValueError, KeyError):
            reason = json.loads(run.summary_file.read_text(encoding="utf-8"))["reason"]
        raise RunFailedError(f"the run has failed: {reason}; its output is in {run.logs}, its state in {run.path}")


def load_checkpoint(run: str | Path, step: NamedStep = None, *, average: str = "") -> dict[str, Tensor]:
    """Return all weights and buffers of a checkpoint, by the names of `nn.Sequential(*layers)`, such as "3.weight".

    Parameters are whole, also if their holders have kept slices of them. The weights of bf16 are the masters, in
    float32.

    Args:
        run: The directory of the run, which may be live.
        step: The step with which training would resume, as `chameleon status` names it, or "best"; by default the
            newest.
        average: "ema" for the averages of `chameleon_ft.optim.ema` in place of the parameters.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        ConfigError: The optimizer keeps no averages; or the files with the frozen parameters are missing, or others.
    """
    from chameleon_ft.verify.stored_state import stored_weights
    from chameleon_ft.worker.inspection import users_errors

    directory = RunDirectory.open(Path(run))
    checkpoints, number = checkpoint_of(directory, step)
    with users_errors(directory.config()):
        return stored_weights(directory.config(), checkpoints, number, average)


class Callback:
    """Base of callbacks; override what you need. `run` is the session, which can be asked for anything.

    They are called in the thread that uses the session, while it iterates, waits, asks for the state, or ends.
    """

    def on_step(self, run: Session, step: StepRecord) -> None:
        """Take a committed step: each once, in order."""

    def on_evaluate(self, run: Session, evaluation: Evaluation) -> None:
        """Take the result of an evaluation."""

    def on_checkpoint(self, run: Session, checkpoint: CheckpointComplete) -> None:
        """Take a checkpoint that is complete."""

    def on_incident(self, run: Session, failure: FailureRecord) -> None:
        """Take the loss of a worker, once the run has recovered."""

    def on_end(self, run: Session, status: RunStatus) -> None:
        """Take the end of the run."""


class EarlyStop(Callback):
    """Ends the run after its current step, with a checkpoint, if the results of evaluations do not get better any more.

    The evaluations before a resume count, too.

    Args:
        patience: evaluations in a row without a result that is better than the best one before.
        min_delta: by how much it has to be better.
        metric: the result, as in `checkpoint.keep_best`: the loss, or a metric of the job, such as "max accuracy".
    """

    def __init__(self, patience: int, *, min_delta: float = 0.0, metric: str = "loss") -> None:
        if patience < 1 or min_delta < 0:
            given = f"EarlyStop({patience}, min_delta={min_delta})"
            raise ConfigError(f"{given}: give a patience of at least 1, and a min_delta of at least 0")
        self._patience = patience
        self._min_delta = min_delta
        self._sign, self._name = sign_and_name(metric)
        self._has_stopped = False

    def on_evaluate(self, run: Session, evaluation: Evaluation) -> None:
        """See `Callback`."""
        best, in_vain = math.inf, 0
        for each in run.evaluations:
            if each.step > evaluation.step:
                break
            if self._name not in each.results:
                raise ConfigError.unknown_name("EarlyStop(metric=...)", self._name, each.results)
            value = each.results[self._name]
            if value is not None and self._sign * value < best - self._min_delta:
                best, in_vain = self._sign * value, 0
            else:
                in_vain += 1
        if in_vain >= self._patience and not self._has_stopped:
            run.stop()
            self._has_stopped = True


class Callbacks:
    """Calls the callbacks of a session, with the records of its run in their order.

    Args:
        on_error: what an error of a callback does: "warn" logs it, "stop" lets it end the block of the session.
    """

    def __init__(self, callbacks: Sequence[Callback], *, on_error: OnCallbackError) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks: {callback!r:.60} is no chameleon_ft.Callback; give an object of a class of that"
                )
        if on_error not in ("warn", "stop"):
            raise ConfigError.unknown_name("on_callback_error", on_error, ("warn", "stop"))
        self._callbacks: Final = tuple(callbacks)
        self._on_error = on_error
        self._records: deque[Record] = deque()
        self._logged: set[tuple[int, type, type]] = set()
        self._is_calling = False

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, record: Record) -> None:
        """Add a record, which `call` tells."""
        if self._callbacks:
            self._records.append(record)

    def call(self, run: Session) -> None:
        """Tell the records that were added. A callback that asks for the state of the run adds more."""
        if self._is_calling:
            return
        self._is_calling = True
        try:
            while self._records:
                record = self._records.popleft()
                for callback in self._callbacks:
                    self._tell(callback, run, record)
        finally:
            self._is_calling = False

    def end(self, run: Session, status: RunStatus, *, raises: bool) -> None:
        """Tell the end of the run; without `raises`, because another error is under way, an error is only logged."""
        if not raises:
            self._on_error = "warn"
        self.call(run)
        for callback in self._callbacks:
            self._tell(callback, run, status)

    def _tell(self, callback: Callback, run: Session, news: Record | RunStatus) -> None:
        try:
            match news:
                case str():
                    callback.on_end(run, news)
                case StepRecord():
                    callback.on_step(run, news)
                case Evaluation():
                    callback.on_evaluate(run, news)
                case CheckpointComplete():
                    callback.on_checkpoint(run, news)
                case FailureRecord():
                    callback.on_incident(run, news)
        except Exception as error:
            if self._on_error == "stop":
                raise
            # Each step may bring it again.
            kind = (id(callback), type(news), type(error))
            if kind not in self._logged:
                self._logged.add(kind)
                _logger.warning(
                    "a callback, %s, has failed; the run goes on, and this error is not logged again",
                    type(callback).__name__,
                    exc_info=True,
                )


def _request(
    job: str | Path | Callable[..., Job] | None,
    config: str | Path | Mapping[str, Any] | RunConfig | None,
    changes: Mapping[str, Any],
    **given: Any,
) -> RunRequest:
    """Return what the arguments of a session ask for, of which `given` are fields. Raises ConfigError."""
    file, values = None, None
    if isinstance(config, str | Path):
        file = Path(config)
    elif isinstance(config, RunConfig):
        values = config.model_dump(exclude_unset=True)
    elif config is not None:
        values = dict(config)
    sections: dict[str, Any] = {}
    for key, value in changes.items():
        section, dot, name = key.partition(".")
        if dot and section == "job":
            # A configuration has no None.
            section, value = "job_arguments", as_setting(value)
        sections[section] = {**sections.get(section, {}), name: value} if dot else value
    request = RunRequest(file=file, values=values, changes=sections, **given)
    if job is None:
        return request
    return request.of_job(str(job) if isinstance(job, str | Path) else _reference(job))


def _reference(job: Callable[..., Job]) -> str:
    """Return the name by which workers import a function. Raises ConfigError if they cannot."""
    name, module = getattr(job, "__qualname__", ""), inspect.getmodule(job)
    if module is None or not name.isidentifier() or getattr(module, name, None) is not job:
        raise ConfigError(
            f"job {job!r}: workers cannot import it; give a function at the top of a file, or the path of that file"
        )
    if module is not sys.modules["__main__"]:
        return f"{module.__name__}:{name}"
    if (file := getattr(module, "__file__", None)) is None:
        raise ConfigError(
            f"job {name}: is defined in a notebook or an interactive interpreter, from which workers cannot import it; "
            "write it into a file, such as by %%writefile my_job.py, and give its path"
        )
    return f"{Path(file).absolute()}:{name}"
