"""A run with `debug = "single process"`: all layers in this process, one step after the other, for breakpoints."""

from __future__ import annotations

import bdb
import math
import time
import traceback

import torch

from chameleon_ft.clock import unix_s
from chameleon_ft.config import RunConfig
from chameleon_ft.events.records import FORMAT, RunStatus, Started, StepRecord
from chameleon_ft.host.fork_server import Terminated
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.launch.coordinator import EXIT_CODES
from chameleon_ft.report.terminal import TerminalView
from chameleon_ft.storage.checkpoints import sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder
from chameleon_ft.storage.stores import checkpoint_storage
from chameleon_ft.verify.plain_loop import PlainLoop


def train_in_one_process(config: RunConfig, *, run: RunDirectory, resume: bool) -> int:
    """Train by the plain loop of `chameleon verify`, record the steps, and return the exit code.

    No checkpoint is written and no failure injected. An error of the job is printed with its traceback. Raises
    ConfigError if the job cannot be loaded.
    """
    torch.set_num_threads(config.threads)
    checkpoints = checkpoint_storage(config, run)
    newest = sound_checkpoint(checkpoints)[0] if resume else None
    first = newest or 0
    job = load_job(config.job, config)
    samples = "samples of a stream" if is_stream(job.dataset) else f"{len(job.dataset):,} samples"
    started = Started(
        format=FORMAT,
        model=f"{config.job.rpartition('/')[2]}, {job.num_layers} layers",
        data=f"{samples}, {config.batch.description}",
        run=str(run.path),
        pipelines=((0,),),
        stages=(f"0-{job.num_layers - 1}",),
        first_step=first,
        steps=config.steps,
        checkpoint=newest,
        horizon_steps=config.horizon,
    )
    status: RunStatus = "failed"
    reason = "an error of the job"
    with Recorder(run, TerminalView()) as recorder:
        recorder.record(started)
        try:
            loop = PlainLoop(config, job)
            if newest is not None:
                loop.load(checkpoints, newest)
            for step in range(first, config.steps):
                recorder.record(_trained(loop, step, job))
            status, reason = "finished", "all steps are trained"
        except (KeyboardInterrupt, bdb.BdbQuit):
            status, reason = "interrupted", "interrupted, or left by the debugger"
        except Terminated:
            status, reason = "terminated", "the process was asked to end"
        except Exception as error:  # noqa: BLE001 - of the user's code, whose traceback is what is looked for
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        recorder.finish(status, reason=reason)
    return EXIT_CODES[status]


def _trained(loop: PlainLoop, step: int, job: Job) -> StepRecord:
    """Train a step, and return its record."""
    begun_s = time.perf_counter()
    trained = loop.run_step(step, job)
    return StepRecord(
        step=step,
        loss=trained.loss,
        grad_norm=trained.grad_norm if trained.terms else 0.0,
        lr=loop.learning_rate,
        samples=trained.samples,
        tokens=trained.terms,
        step_s=max(time.perf_counter() - begun_s, 1e-9),
        workers=1,
        generation=0,
        time=unix_s(),
        is_skipped=not trained.terms,
        auxiliary_loss=trained.auxiliary_loss,
        metrics={name: value if math.isfinite(value) else None for name, value in trained.metrics.items()},
    )
