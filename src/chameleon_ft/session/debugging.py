"""A run with `debug = "single process"`: all layers in this process, one step after the other, for breakpoints."""

from __future__ import annotations

import bdb
import math
import time
import traceback

import torch

from chameleon_ft.clock import unix_s
from chameleon_ft.config import RunConfig
from chameleon_ft.coordinator.handlers.evaluations import evaluation_of
from chameleon_ft.data.order import EvaluationOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.events.records import FORMAT, Evaluation, RunStatus, Started, StepRecord
from chameleon_ft.host.fork_server import Terminated
from chameleon_ft.job.datasets import is_stream
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.launch.coordinator import EXIT_CODES
from chameleon_ft.protocol.messages import Evaluated
from chameleon_ft.report.terminal import TerminalView
from chameleon_ft.storage.checkpoints import sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder
from chameleon_ft.storage.stores import checkpoint_storage
from chameleon_ft.verify.plain_loop import PlainLoop
from chameleon_ft.worker.execution.evaluation import EvaluationBatches
from chameleon_ft.worker.execution.micro_batches import evaluated_samples
from chameleon_ft.worker.inspection import require_held_out


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
    require_held_out(job, config)
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
                if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                    recorder.record(_evaluated(loop, step, job, config))
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


@torch.no_grad()
def _evaluated(loop: PlainLoop, step: int, job: Job, config: RunConfig) -> Evaluation:
    """Evaluate the state after a step, in the micro-batches of a run."""
    assert job.evaluation is not None
    begun_s, size = time.perf_counter(), config.batch.micro_batch_size
    batches = EvaluationBatches(evaluated_samples(job, config), size)
    order = EvaluationOrder(batches.samples, config.seed)
    loss, terms, labels, metrics = 0.0, 0.0, 0.0, dict.fromkeys(job.metrics, 0.0)
    for number in range(batches.count):
        inputs, targets = load_micro_batch(job.evaluation, order, number * size, size, collate=job.collate)
        weight, own_terms = batches.weight(number), float(job.loss_terms(targets))
        if not own_terms:
            continue
        output, targets = loop.evaluated(inputs, targets)
        loss += weight * float(job.loss(output, targets))
        terms += weight * own_terms
        if isinstance(targets, torch.Tensor) and not (targets.is_floating_point() or targets.is_complex()):
            labels += weight * own_terms
        for name, metric in job.metrics.items():
            metrics[name] += weight * float(metric(output, targets))
    sums = Evaluated(
        generation=0,
        step=step,
        loss=loss,
        terms=terms,
        samples=batches.samples,
        labels=labels,
        metrics=tuple(metrics.items()),
        seconds=time.perf_counter() - begun_s,
        longest_s=0.0,
    )
    return evaluation_of(sums)
