"""The configuration of a run, and of a run of the built-in Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from chameleon_ft.config.devices import BACKENDS, DEVICES, BackendName, DeviceName
from chameleon_ft.config.llama import Data, LlamaConfig, Optimizer
from chameleon_ft.config.saved_state import Checkpoint, Forked, Skip, Snapshots, Store
from chameleon_ft.config.sections import (
    LASTING_KINDS,
    Batch,
    Control,
    Emulation,
    Evaluation,
    Failure,
    Health,
    Loading,
    Parallel,
    Preflight,
    Recovery,
    Section,
    Timelines,
    Timeouts,
)

LLAMA_JOB = "chameleon_ft.models.llama:llama_job"
"""Reference of the default job of `chameleon train`."""

STAND_IN_JOB = "chameleon_ft.lab.stand_in:stand_in"
"""Reference of the job for emulated devices: nearly empty layers, as many as the profile has."""

MAX_WORKERS: Final = 100_000
"""Of a run or a prediction: a mistyped number would fill the memory of the machine."""


def _known_precision(precision: object) -> object:
    if precision in ("fp16", "float16"):
        raise PydanticCustomError("precision", "should be bf16: gradients of fp16 leave its range without loss scaling")
    return precision


class RunConfig(Section):
    """How to run a job: everything but the code of the job."""

    job: str = Field(
        default=LLAMA_JOB,
        min_length=1,
        description='Job to train, as "package.module:function" or "path/to/file.py:function".',
    )
    # TOML files and flags give paths as strings, which `strict` would refuse.
    output_dir: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="New directory for everything the run writes; by default runs/NAME-TIME."
    )
    output_mode: str = Field(
        default="0700",
        pattern="^0?[0-7]{3}$",
        description="Rights on that directory, as for chmod: by default nothing in it can be read by other users.",
    )
    workers: int = Field(
        default=4, ge=1, le=MAX_WORKERS, description="Worker processes; must equal parallel.dp * parallel.pp."
    )
    steps: int = Field(default=100, ge=1, description="Optimizer steps, numbered from 0.")
    horizon_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps that the learning rate's schedule is made for, which a job gets as `config.steps`; by "
        "default those of the first start, also when a run resumes with other steps.",
    )
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Seed of the weights, the sample order and the dropout."
    )
    backend: BackendName = Field(
        default="gloo", description="Library that sends tensors between workers; gloo sends those of every device."
    )
    device: DeviceName = Field(
        default="cpu",
        description="Device of a worker; emulated: nothing is computed, operations last as long as `profile` says.",
    )
    share_devices: bool = Field(
        default=False,
        description="Let workers share accelerators if a host has more workers than accelerators; for tests.",
    )
    profile: Annotated[Path, Field(strict=False)] | None = Field(
        default=None,
        description="Profile that plans are based on, written by `chameleon profile`; required for emulated devices.",
    )
    precision: Annotated[Literal["fp32", "bf16"], BeforeValidator(_known_precision)] = Field(
        default="fp32",
        description="Element type of layers. fp32: that of the model's own parameters; bf16: parameters and "
        "activations in bfloat16; gradients, masters of the parameters and the optimizer's state in float32.",
    )
    fp32_modules: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=("*LayerNorm", "*RMSNorm", "*GroupNorm", "*RotaryEmbedding", "*Router", "*inv_freq", "*A_log"),
        description="Modules, parameters and buffers that bf16 leaves in float32: patterns of the names of classes of "
        'modules, or of names within a layer, such as "feed_forward.router".',
    )
    compile: Literal["off", "static", "dynamic"] = Field(
        default="off",
        description="Compile each layer by torch.compile, before training: static: for the shapes of this run; "
        "dynamic: for variable shapes, if shapes inside a layer depend on the data. Equal layers are compiled once.",
    )
    compile_backend: str = Field(
        default="inductor",
        min_length=1,
        description="Backend of torch.compile; inductor needs a C++ compiler on a CPU.",
    )
    threads: int = Field(default=1, ge=1, description="Threads per worker on a CPU.")
    plan: Annotated[Path, Field(strict=False)] | None = Field(
        default=None,
        description="Plan to start with, as `chameleon plan --json` prints it, instead of parallel.dp equal pipelines.",
    )
    debug: Literal["off", "single process"] = Field(
        default="off",
        description="single process: train all layers in the process of the command, without workers, so that "
        "breakpoints and prints work; for this start alone.",
    )
    on_signal: str = Field(
        default="",
        pattern=r"^$|^USR[12]=(checkpoint|stop)(,USR[12]=(checkpoint|stop))*$",
        description="Actions of the command or the coordinator at SIGUSR1 and SIGUSR2, such as "
        '"USR1=checkpoint,USR2=stop"; otherwise these signals change nothing.',
    )
    callbacks: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description="Callbacks, which the command runs during training: functions or classes, named as a job is, maybe "
        'with arguments, such as "my_job.py:Best" or "chameleon_ft:EarlyStop(patience=3)". See docs/evaluation.md.',
    )
    on_callback_error: Literal["warn", "stop"] = Field(
        default="warn",
        description="Effect of an error of such a callback. warn: it is logged; stop: it ends the run, with a "
        "checkpoint.",
    )
    job_arguments: dict[str, bool | int | float | str] = Field(
        default={}, description="Arguments of the job's function by name, which are flags, too: `--job.NAME VALUE`."
    )
    parallel: Parallel = Parallel()
    batch: Batch = Batch()
    loading: Loading = Loading()
    checkpoint: Checkpoint = Checkpoint()
    store: Store = Store()
    snapshots: Snapshots = Snapshots()
    recovery: Recovery = Recovery()
    timeouts: Timeouts = Timeouts()
    timelines: Timelines = Timelines()
    evaluation: Evaluation = Evaluation()
    health: Health = Health()
    preflight: Preflight = Preflight()
    forked: Forked = Forked()
    skips: Annotated[tuple[Skip, ...], Field(strict=False)] = Field(
        default=(),
        description="Samples left out before steps, each with `step` and `samples`: set by `--skip-samples`, not by "
        "hand.",
    )
    accept_changes: Annotated[tuple[Literal["data", "layers"], ...], Field(strict=False)] = Field(
        default=(),
        description="With --resume: continue although the data, or the layers, are others than those that the "
        "checkpoint was written with. For this start alone.",
    )
    run_id: str = Field(
        default="",
        description="Tells the checkpoints of this run from those of others: set when it begins, not by hand.",
    )
    emulation: Emulation = Emulation()
    control: Control = Control()
    failures: Annotated[tuple[Failure, ...], Field(strict=False)] = Field(default=(), description="Failures to inject.")

    @property
    def horizon(self) -> int:
        """The steps that the learning rate's schedule is made for."""
        return self.horizon_steps or self.steps

    def with_horizon_of(self, before: RunConfig) -> Self:
        """Return it with the horizon of the run that it continues, unless it has one of its own."""
        return self.model_copy(update={"horizon_steps": self.horizon_steps or before.horizon})

    def first_sample(self, step: int) -> int:
        """Return the position of the first sample of a step in the concatenation of all epochs."""
        return self.samples_before(step) + self.skipped_before(step)

    def samples_before(self, step: int) -> int:
        """Return the position after the last sample of the step before, from which a step may skip some."""
        skipped = sum(each.samples for each in self.skips if each.step < step)
        trained = self.batch.samples_before(step) - self.batch.samples_before(self.forked.step)
        return self.forked.samples + trained + skipped

    def skipped_before(self, step: int) -> int:
        """Return how many samples are left out between a step and the one before."""
        return sum(each.samples for each in self.skips if each.step == step)

    def run_of(self, step: int) -> str:
        """Return the id of the run that writes the checkpoint of a step; empty if that was an earlier version."""
        return self.forked.run_id if self.forked.run and step == self.forked.step else self.run_id

    @property
    def compiled(self) -> str:
        """How layers are compiled, and by which backend; or "off"."""
        return "off" if self.compile == "off" else f"{self.compile} by {self.compile_backend}"

    @property
    def is_emulated(self) -> bool:
        """Whether workers compute nothing, and operations last as long as the profile says."""
        return self.device == "emulated"

    @property
    def untried(self) -> str:
        """A warning, if no real run has been made on this device with this backend; otherwise empty."""
        kind = DEVICES[self.device]
        if self.backend in kind.run_on:
            return ""
        return (
            f'warning: device = "{self.device}" with backend = "{self.backend}" has not been run on any {kind.title} '
            "yet; docs/devices.md says what has"
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from self._layout_problems()
        yield from self._device_problems()
        yield from self._emulation_problems()
        yield from self._failure_problems()

    def _layout_problems(self) -> Iterator[tuple[str, str]]:
        dp, pp = self.parallel.dp, self.parallel.pp
        if self.plan is not None:
            return
        if dp * pp != self.workers:
            yield (
                "workers",
                f"must equal parallel.dp * parallel.pp = {dp} * {pp} = {dp * pp}; "
                f"set workers to {dp * pp} or change the layout",
            )
        if self.batch.micro_batches % dp:
            below = self.batch.micro_batches // dp * dp
            nearest = f"{below} or {below + dp}" if below else f"{dp}"
            yield "batch.micro_batches", f"must divide evenly over parallel.dp = {dp} pipelines; take {nearest}"

    def _device_problems(self) -> Iterator[tuple[str, str]]:
        kind, backend = DEVICES[self.device], BACKENDS[self.backend]
        if self.backend not in kind.backends and self.device not in backend.devices:
            others = " or ".join(kind.backends)
            yield "backend", f'does not send the tensors of device = "{self.device}"; use {others}'
        if self.share_devices and not (kind.is_accelerator and backend.shares_devices):
            needed = "an accelerator" if backend.shares_devices else "the backend gloo"
            yield "share_devices", f"needs {needed}; leave it out"

    def _emulation_problems(self) -> Iterator[tuple[str, str]]:
        if self.is_emulated and self.profile is None:
            yield "profile", 'device = "emulated" needs a profile for the times of operations; see chameleon profile'
        if self.is_emulated and self.compile != "off":
            yield "compile", "an emulated device computes nothing; leave one of them out"
        if self.is_emulated and self.debug != "off":
            yield "debug", "an emulated device computes nothing; leave one of them out"
        if self.is_emulated != (self.job == STAND_IN_JOB):
            yield (
                "job",
                f'device = "emulated" and job = "{STAND_IN_JOB}" go together: an emulated device computes nothing, and '
                "that job takes its layers from the profile; set both or neither",
            )

    def _failure_problems(self) -> Iterator[tuple[str, str]]:
        seen: dict[int, int] = {}
        for index, failure in enumerate(self.failures):
            key = f"failures[{index}]"
            if failure.worker >= self.workers:
                yield (
                    f"{key}.worker",
                    f"there is no such worker: the run has {self.workers}, numbered 0 to {self.workers - 1}",
                )
            elif failure.worker in seen and not self.recovery.respawn:
                yield (
                    f"{key}.worker",
                    f"already fails in failures[{seen[failure.worker]}], and a lost worker does not come back; "
                    "name another one, remove this failure, or set recovery.respawn",
                )
            if failure.kind not in LASTING_KINDS:
                seen.setdefault(failure.worker, index)
            if failure.step >= self.steps:
                yield (
                    f"{key}.step",
                    f"there is no such step: the run has {self.steps}, numbered 0 to {self.steps - 1}; "
                    "change it, or pass --failures none for a run without failures",
                )
            if failure.phase == "checkpoint" and not self.checkpoint.every:
                yield f"{key}.phase", "no checkpoint is written during training; set checkpoint.every"
            if failure.phase == "snapshot" and not self.snapshots.every:
                yield f"{key}.phase", "no snapshot is taken; set snapshots.every"


class TrainConfig(RunConfig):
    """A run of the built-in Llama."""

    model: LlamaConfig = LlamaConfig()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        # The layers of another model are known once its folder has been read.
        if self.parallel.pp > self.model.partition_layers and not self.model.hf:
            yield (
                "parallel.pp",
                f"asks for more stages than the model has layers: {self.model.partition_layers}, "
                f"counting the embedding, model.num_layers = {self.model.num_layers} blocks and the head; "
                f"set {self.model.partition_layers} or fewer, or add blocks",
            )
        if self.data.format == "text" and self.model.vocab_size < 256:
            yield "model.vocab_size", "text is read as bytes, which need 256 ids; set it to 256"


def config_type(data: Mapping[str, Any]) -> type[RunConfig]:
    """Return the type that describes `data`: `TrainConfig` for the Llama and for any job with a section of its own."""
    own = set(TrainConfig.model_fields) - set(RunConfig.model_fields)
    return TrainConfig if own & set(data) or data.get("job", LLAMA_JOB) == LLAMA_JOB else RunConfig
