"""Inspection of a job before any rank is started: its layers in numbers, and whether it can be trained at all."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from chameleon_ft.config import RunConfig, TrainConfig
from chameleon_ft.data.buckets import Buckets, buckets_of, largest_bucket
from chameleon_ft.errors import ChameleonError, ConfigError
from chameleon_ft.events.evidence import place_of
from chameleon_ft.host.fork_server import Terminated
from chameleon_ft.job.datasets import RESERVED_METRICS, is_stream
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.job_arguments import as_setting
from chameleon_ft.job_record import Fact
from chameleon_ft.models.build import frozen_bytes, gradient_bytes, layers_built_in_full, param_bytes, tied_bytes
from chameleon_ft.models.checks import (
    boundary_specs,
    check_evaluation,
    check_loss,
    check_separate_parameters,
)
from chameleon_ft.models.fields import with_fields
from chameleon_ft.models.job_record import record_of, sketch
from chameleon_ft.models.optimizer import state_bytes, undivided_optimizer
from chameleon_ft.models.optimizer_checks import check_learning_rate, check_optimizer
from chameleon_ft.models.sample_checks import SampleReads, first_micro_batch
from chameleon_ft.models.weights import check_weights
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.protocol.job_info import JobInfo
from chameleon_ft.protocol.parts import BoundaryMessage, InspectedLayers, LeafMessage
from chameleon_ft.quantities import data_size
from chameleon_ft.side_outputs import AUXILIARY
from chameleon_ft.trees import (
    Boundary,
    BoundarySpec,
    BoundaryTree,
    boundary_of,
    leaf_spec,
    leaves_of,
    structure_from_json,
    structure_to_json,
)
from chameleon_ft.worker.device import claim_device, device_name, missing_device, require_devices
from chameleon_ft.worker.execution.compilation import compile_layers
from chameleon_ft.workload import TiedParameters


def inspection_main(pipe: int, *, config: RunConfig, workers: int) -> None:
    """Send through `pipe` the JobInfo of the job that `config` names, or the ChameleonError that explains why not.

    `pipe` is a descriptor of a `multiprocessing.Pipe`. This host needs devices for so many workers.
    """
    found: JobInfo | ChameleonError
    try:
        if workers:
            require_devices(config, workers)
        # Then the workers find compiled layers in the host's cache.
        found = inspect_job(config, compiles=workers > 0)
    except ChameleonError as error:
        found = error
    with contextlib.suppress(OSError):
        Connection(pipe, readable=False).send(found)


@contextmanager
def users_errors(config: RunConfig, *, of: str = "") -> Iterator[None]:
    """Turn any error that the user's code raises inside the block into a ConfigError that names the job and the line.

    A ConfigError that such an error has led to gets the line, too.

    Args:
        of: the code, if it is not that of the job.
    """
    try:
        yield
    except ConfigError as error:
        place = None if error.__cause__ is None else _own_place_of(error.__cause__)
        if place is None or place in str(error):
            raise
        raise ConfigError(f"{error}; the error is raised at {place}") from error.__cause__
    except (ChameleonError, Terminated):
        raise
    except (Exception, SystemExit) as error:
        place = _own_place_of(error)
        where = (*([] if place is None else [f"at {place}"]), *getattr(error, "__notes__", ()))
        text = ", ".join((f"{type(error).__name__}: {error}", *where))
        raise ConfigError(f"{of or f'job {config.job}'}: {text}") from error


def _own_place_of(error: BaseException) -> str | None:
    """Return the place in the user's code at which an error was raised, if it was in that."""
    place = place_of(error)
    return None if place is None or "/chameleon_ft/" in place else place


def inspect_job(config: RunConfig, *, compiles: bool = False) -> JobInfo:
    """Load the job and measure its layers; with `compiles`, also compile them if they are to be.

    Raises ConfigError where it cannot be trained with `config`.
    """
    with users_errors(config):
        return _inspect_job(config, compiles=compiles)


def require_held_out(job: Job, config: RunConfig) -> None:
    """Raise ConfigError if the run is to evaluate, and the job has no samples for it."""
    if config.evaluation.every and job.evaluation is None:
        raise ConfigError(
            f"evaluation.every = {config.evaluation.every}: the job has no samples to evaluate; give it `evaluation`, "
            "a dataset of held-out samples, or leave the setting out"
        )


def _inspect_job(config: RunConfig, *, compiles: bool) -> JobInfo:
    job = load_job(config.job, config)
    if job.num_layers < config.parallel.pp:
        raise ConfigError(
            f"parallel.pp = {config.parallel.pp}: asks for more stages than the job has layers, {job.num_layers}"
        )
    # Whatever builds a layer relies on the copies.
    tied, undivided = tied_bytes(job), undivided_optimizer(job)
    is_tolerant = config.loading.on_error == "skip"
    samples = SampleReads(job, config.seed, is_tolerant=is_tolerant)
    # A coordinator's host may lack the device of the workers.
    run_on = torch.device("meta") if missing_device(config) else claim_device(config)
    device = "" if run_on.type == "meta" or config.is_emulated else device_name(run_on)
    check_separate_parameters(job)
    check_weights(job)
    if run_on.type != "meta":
        check_optimizer(job, device=run_on)
    size = config.batch.micro_batch_size
    if (buckets := buckets_of(job)) is not None:
        if is_tolerant:
            raise ConfigError(
                'loading.on_error = "skip": the job has buckets, and the sample in the place of one that cannot be '
                'read may have another length; set it to "fail"'
            )
        if job.compile.is_on:
            raise ConfigError('compile: the job has buckets, and layers are compiled for one shape; set it to "off"')
        job = largest_bucket(job)
    first = first_micro_batch(job, size, config.seed)
    if size > 1:
        samples.require_one_shape()
    job = with_fields(job, *first)
    hints: list[str] = []
    outputs: dict[str, Fact] = {}
    # Of layers that are not examined, as if each had some.
    side: dict[int, tuple[str, ...]] = {}

    def ran(layer: int, output: Any) -> None:
        for number, leaf in enumerate(leaves_of(output) if run_on.type != "meta" else ()):
            which = f"tensor {number} of the output" if number else "output"
            outputs[f"{which} of layer {layer} for the same samples"] = sketch(leaf)

    boundaries = boundary_specs(job, size, device=run_on, seed=config.seed, hints=hints, ran=ran, side=side)
    if run_on.type != "meta" and job.boundaries is None:
        loss, more = check_loss(job, boundaries[-1], size, device=run_on, seed=config.seed)
        hints += more
        outputs = {"loss for the same samples and outputs": loss, **outputs}
    if buckets is not None:
        boundaries = _in_buckets(job, buckets, boundaries, size, device=run_on, seed=config.seed)
    if job.evaluation is not None:
        output = None if run_on.type == "meta" else boundaries[-1]
        check_evaluation(job, output, size, device=run_on, seed=config.seed, trained=first)
    require_held_out(job, config)
    if best := config.checkpoint.keep_best.rpartition(" ")[2]:
        if job.evaluation is None:
            raise ConfigError(f"checkpoint.keep_best = {best}: needs evaluations; give the job `evaluation`")
        if best not in (known := (*RESERVED_METRICS, *job.metrics)):
            raise ConfigError.unknown_name("checkpoint.keep_best", best, known)
    check_learning_rate(job)
    # Some time after they were read, or the clock might not have moved.
    samples.check()
    sizes, gradients = param_bytes(job), gradient_bytes(job)
    if not any(gradients):
        raise ConfigError(f"job {config.job}: has nothing to train; no parameter of its layers requires a gradient")
    name = "Llama" if isinstance(config, TrainConfig) else config.job.rpartition("/")[2]
    num_bytes = sum(sizes) - sum((len(layers) - 1) * size for layers, size in tied.items())
    data = "samples of a stream" if is_stream(job.dataset) else f"{len(job.dataset):,} samples"
    job = replace(job, side_outputs=tuple(side.get(layer, (AUXILIARY,)) for layer in range(job.num_layers)))
    read = boundary_of(tuple(first), leaf_spec) if job.compile.is_on else None
    if compiles and read is not None and run_on.type != "meta":
        compile_layers(job, boundaries, read, seed=config.seed, device=run_on)
    return JobInfo(
        model=f"{name}, {job.num_layers} layers, {data_size(num_bytes)} of parameters",
        data=f"{data}, {config.batch.description}",
        relative_costs=job.relative_costs,
        layers=InspectedLayers(
            boundaries=tuple(map(boundary_to_message, boundaries)),
            fields=tuple(map(tuple, job.fields or ())),
            side_outputs=tuple(map(tuple, job.side_outputs)),
            built_in_full=layers_built_in_full(job, config.seed),
            micro_batch=None if read is None else boundary_to_message(read),
        ),
        boundary_bytes=tuple(spec.num_bytes for spec in boundaries),
        param_bytes=sizes,
        gradient_bytes=gradients,
        state_bytes=state_bytes(job),
        frozen_bytes=frozen_bytes(job),
        tied=tuple(TiedParameters(layers, num_bytes) for layers, num_bytes in tied.items()),
        undivided=undivided,
        hints=tuple(hints),
        has_evaluation=job.evaluation is not None,
        device=device,
        record=record_of(job, config, samples=samples.facts, outputs=outputs, device=run_on),
        arguments=FrozenMap({name: as_setting(job.arguments[name]) for name in config.job_arguments}),
        versions=FrozenMap({"python": platform.python_version(), "torch": str(torch.__version__)}),
    )


def _in_buckets(
    job: Job,
    buckets: Buckets,
    boundaries: Sequence[Boundary],
    micro_batch_size: int,
    *,
    device: torch.device,
    seed: int,
) -> tuple[Boundary, ...]:
    """Return the output of each layer with its shape in each bucket, given that in the largest.

    Raises ConfigError if outputs differ in more than their shape.
    """
    if job.boundaries is not None:
        raise ConfigError("the job has `boundaries` of one length, but buckets of several: leave `boundaries` out")
    found = [
        boundary_specs(replace(job, collate=buckets.only(length)), micro_batch_size, device=device, seed=seed)
        for length in buckets.lengths[:-1]
    ]
    made: list[Boundary] = []
    for layer, each in enumerate(zip(*found, boundaries, strict=True)):
        leaves = tuple(
            replace(same[-1], shapes=tuple(leaf.shape for leaf in same))
            for same in zip(*(boundary.leaves for boundary in each), strict=False)
        )
        largest = each[-1]
        made.append(replace(largest, leaves=leaves) if isinstance(largest, BoundaryTree) else leaves[0])
        if any(
            leaf.dtype != spec.dtype for other in each for leaf, spec in zip(other.leaves, leaves, strict=False)
        ) or (len({len(other.leaves) for other in each}) > 1):
            raise ConfigError(
                f"the output of layer {layer} differs between buckets in more than the shapes of its tensors; let it "
                "return one tree of tensors of the same types"
            )
    return tuple(made)


def boundary_to_message(spec: Boundary) -> BoundaryMessage:
    """Return a boundary as it is sent."""
    leaves = tuple(
        LeafMessage(
            shape=leaf.shape,
            dtype=str(leaf.dtype).removeprefix("torch."),
            requires_grad=leaf.requires_grad,
            shapes=leaf.shapes,
        )
        for leaf in spec.leaves
    )
    structure = structure_to_json(spec.structure) if isinstance(spec, BoundaryTree) else ""
    return BoundaryMessage(leaves=leaves, structure=structure)


def boundary_of_message(message: BoundaryMessage) -> Boundary:
    """Return the boundary of a message; classes in it are looked up by name."""
    leaves = tuple(
        BoundarySpec(each.shape, getattr(torch, each.dtype), each.requires_grad, each.shapes) for each in message.leaves
    )
    return BoundaryTree(leaves, structure_from_json(message.structure)) if message.structure else leaves[0]


def load_examined(config: RunConfig, facts: Mapping[str, Fact]) -> Job:
    """Load the job. Raises ConfigError if it has other samples than `facts` say of some, unless it reads a stream."""
    job = load_job(config.job, config)
    if is_stream(job.dataset):
        # One worker reads it, from a position.
        return job
    SampleReads(job, config.seed, most=1, is_tolerant=config.loading.on_error == "skip").require(facts)
    return job
