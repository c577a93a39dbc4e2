"""The sections of a configuration: frozen and strict, with relations between fields that are checked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from chameleon_ft.registry import installed
from chameleon_ft.workload import MAX_MICRO_BATCHES

# Some 32 years.
_LONGEST_S: Final = 1e9

RELATION_ERROR: Final = "relation"
"""Type of the error that lists the relations between fields that do not hold."""


class Section(BaseModel):
    """Base of every section: frozen, refuses unknown keys and values of another type.

    A section overrides `problems` to state what its fields must satisfy together; all of them are reported at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what to change) for every relation between fields that does not hold."""
        yield from ()

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        times = ((name, value) for name, value in self if name.endswith("_s") and isinstance(value, float))
        endless = [(name, f"should be {_LONGEST_S:g} at most") for name, value in times if value > _LONGEST_S]
        found = [*endless, *self.problems()]
        if found:
            summary = "; ".join(f"{field}: {message}" for field, message in found)
            # A validator can raise only one error, so all problems travel in its context.
            problems = [(field, self._value_at(field), message) for field, message in found]
            raise PydanticCustomError(RELATION_ERROR, "{summary}", {"summary": summary, "problems": problems})
        return self

    def _value_at(self, key: str) -> object:
        """Return the value at a key such as failures[0].worker."""
        value: Any = self
        for part in re.findall(r"\w+", key):
            value = value[int(part)] if part.isdecimal() else getattr(value, part)
        return value


@dataclass(frozen=True, slots=True)
class OrInstalled:
    """Marks a choice of names to which installed packages may add others; see `chameleon_ft.registry`."""

    group: str

    def choices(self, own: Any) -> Any:
        """Return the choice with the names that are installed."""
        return Literal[(*get_args(own), *installed(self.group))]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(value: Any, own: Callable[[Any], Any]) -> Any:
            try:
                return own(value)
            except ValidationError:
                return TypeAdapter(self.choices(source)).validate_python(value)

        return no_info_wrap_validator_function(checked, handler(source))


PolicyName = Literal[
    "chameleon", "reroute", "repair", "repartition", "recycle", "oobleck", "paper", "drop-replica", "restart"
]
# One of them may be lost.
_USUAL_OWNERS: Final = 2
_MAX_IN_A_MICRO_BATCH: Final = 1_000_000
# Reads that may be slow, one after the other, while another worker waits for a message.
_MAX_READS: Final = 100
_ENDPOINT: Final = r"([^\s,/@:\[\]]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}"
_LEASE: Final = re.compile(
    rf"files|kubernetes(://[a-z0-9]([-a-z0-9]{{0,61}}[a-z0-9])?)?|etcds?://{_ENDPOINT}(,{_ENDPOINT})*(/[^\s?#]*)?"
)


class Parallel(Section):
    """The initial division of the model and the batch over the workers."""

    dp: int = Field(default=2, ge=1, description="Pipelines, each training a share of the batch.")
    pp: int = Field(default=2, ge=1, description="Stages of a pipeline, each holding a range of layers.")
    split_backward: bool = Field(
        default=False,
        description="Run the input-gradient and the weight-gradient half of a backward separately (zero bubble).",
    )
    optimizer_redundancy: Literal["auto", "all"] | int = Field(
        default="auto",
        description="Holders of a layer that keep the same part of its optimizer state, and update that part of its "
        "parameters; all: every holder keeps all of it; auto: 2, or all if the optimizer is not known to update each "
        "element by itself. 1 saves the most memory, but every loss returns to a snapshot or a checkpoint.",
    )

    @field_validator("optimizer_redundancy", mode="before")
    @classmethod
    def _require_copies_or_all(cls, redundancy: object) -> object:
        if redundancy in ("auto", "all") or (type(redundancy) is int and redundancy >= 1):
            return redundancy
        raise PydanticCustomError("copies_or_all", 'should be "auto", "all" or the number of holders, 1 or more')

    @property
    def owners(self) -> int | None:
        """The owners of a slice of the optimizer's state, if it can be divided; None if every holder keeps all."""
        match self.optimizer_redundancy:
            case "all":
                return None
            case "auto":
                return _USUAL_OWNERS
            case owners:
                return owners


class RampStage(Section):
    """A stage of the batch's ramp: steps of fewer micro-batches, before those of the next stage."""

    until_step: int = Field(ge=1, description="The first step after the stage.")
    micro_batches: int = Field(
        ge=1, le=MAX_MICRO_BATCHES, description="Micro-batches of each of its steps, over all pipelines."
    )


class Batch(Section):
    """The global batch: the samples of one optimizer step."""

    micro_batches: int = Field(
        default=8,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description="Micro-batches of one step, over all pipelines; after the ramp, if there is one.",
    )
    micro_batch_size: int = Field(default=2, ge=1, le=_MAX_IN_A_MICRO_BATCH, description="Samples of one micro-batch.")
    ramp: Annotated[tuple[RampStage, ...], Field(strict=False)] = Field(
        default=(),
        description="Stages of fewer micro-batches at the beginning, each with `micro_batches` and `until_step`, the "
        "first step after it; see docs/data.md.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        until_step, fewer = 0, 0
        for index, stage in enumerate(self.ramp):
            if stage.until_step <= until_step:
                yield f"ramp[{index}].until_step", f"must be after step {until_step}, which ends the stage before"
            if stage.micro_batches <= fewer:
                yield f"ramp[{index}].micro_batches", f"must be more than {fewer}, as the stage before has"
            until_step, fewer = stage.until_step, stage.micro_batches
        if self.micro_batches <= fewer:
            yield "micro_batches", f"must be more than {fewer}, as the last stage of the ramp has"

    @property
    def samples(self) -> int:
        """Samples of one step after the ramp."""
        return self.micro_batches * self.micro_batch_size

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """The first step of each stage and its micro-batches, ascending; the last stage has no end."""
        starts = (0, *(stage.until_step for stage in self.ramp))
        return tuple(zip(starts, (*(stage.micro_batches for stage in self.ramp), self.micro_batches), strict=True))

    def stages_from(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the stages that are not over before a step."""
        return self.stages[sum(stage.until_step <= step for stage in self.ramp) :]

    def micro_batches_at(self, step: int) -> int:
        """Return the micro-batches of a step."""
        return self.stages_from(step)[0][1]

    @property
    def description(self) -> str:
        """Samples of a step in words."""
        return f"{f'{self.samples_before(1)} to ' if self.ramp else ''}{self.samples} a step"

    def samples_before(self, step: int) -> int:
        """Return the samples of all steps before one."""
        stops = (*(min(step, stage.until_step) for stage in self.ramp), step)
        steps = (max(0, stop - start) for stop, (start, _) in zip(stops, self.stages, strict=True))
        return self.micro_batch_size * sum(own * count for own, (_, count) in zip(steps, self.stages, strict=True))


class Recovery(Section):
    """Recovery from losses, joins, and the prior for failure rates."""

    policy: Annotated[PolicyName, OrInstalled("policies")] = Field(
        default="chameleon",
        description="Policy that proposes plans; see docs/policies.md. A package may add others.",
        json_schema_extra={"flag": "--policy"},
    )
    worker_mtbf_hours: float = Field(
        default=5_000.0,
        ge=1e-12,
        le=10**12,
        description="Prior mean time between failures of one worker, in hours. Workers of a host that are lost "
        "together count as one failure.",
    )
    prior_weight: float = Field(
        default=1.0, ge=1e-9, le=10**12, description="Weight of worker_mtbf_hours, in observed failures."
    )
    host_failure_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Prior fraction of failures that take all workers of a host; prior_weight applies to it too.",
    )
    salvage: bool = Field(
        default=True,
        description="After a loss, complete the interrupted step from what the survivors hold of it, instead of "
        "repeating it. Baseline policies repeat it, as their systems do.",
    )
    restart_cost_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds that a return to a checkpoint takes, without repeating the steps since.",
    )
    respawn: bool = Field(default=False, description="Restart a lost worker on the host that ran it.")
    respawn_delay_s: float = Field(
        default=5.0, ge=0, description="Seconds before a restart; doubled each time the worker is soon lost again."
    )
    max_respawns: int = Field(
        default=3,
        ge=0,
        description="Losses of a worker in quick succession after which it is still restarted.",
    )


class Loading(Section):
    """How samples are read. A rank reads those of the first and of the last layer, if it has them."""

    processes: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Processes that read samples ahead for each rank, beside it; 0: a rank reads them itself, when it "
        "needs them.",
    )
    prefetch: int = Field(default=2, ge=0, description="Steps for which they read ahead, beyond the present one.")
    on_error: Literal["fail", "skip"] = Field(
        default="fail",
        description="Action if a sample cannot be read, also not when it is read once more. fail: another worker tries "
        "the step, and if it fails, too, the run ends with the state before the step; skip: leave the sample out.",
    )


class Timeouts(Section):
    """Times after which a worker or a message counts as lost. The first four must be in ascending order."""

    heartbeat_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds of silence after which a control connection is lost; longer with very many workers, see "
        "docs/failures.md.",
    )
    watchdog_min_s: float = Field(
        default=10.0, gt=0, description="Minimum seconds in one operation after which a worker counts as hung."
    )
    watchdog_factor: float = Field(
        default=10.0,
        gt=1,
        description="A worker counts as hung in an operation that takes this many times the longest one seen.",
    )
    collective_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds after which messages count as failed: all workers wait for each other, or a worker does "
        "not acknowledge what another one sends. 0: three times the longest of the recent steps, and at least 60 s for "
        "the first and 1.5 * watchdog_min_s for the second.",
    )
    sample_read_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that a worker may take to read one sample, for example from a file system that stalls, "
        "before it counts as hung.",
    )
    rendezvous_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds the workers have to form their communicators together, and a process has to connect after "
        "its start; and for which a run that has not begun waits for others in place of lost workers.",
    )
    first_step_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds in one operation after which a worker counts as hung until it has finished a step with "
        "the layers that it has, since it may have to compile them; and which a newcomer has to load the job. Must "
        "be longer than collective_timeout_s.",
    )

    reconnect_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds for which workers and agents look for another coordinator once they have lost theirs.",
    )

    @property
    def transport_s(self) -> float:
        """Seconds after which a communication library gives up a message: never before a detector would."""
        return self.first_step_s + _MAX_READS * self.sample_read_s

    def message_timeout_s(self, longest_step_s: float, *, at_least_s: float = 0.0) -> float:
        """Return `collective_timeout_s`; if that is 0, the time for steps that take up to `longest_step_s`."""
        return self.collective_timeout_s or max(3.0 * longest_step_s, 1.5 * self.watchdog_min_s, at_least_s)

    def problems(self) -> Iterator[tuple[str, str]]:
        last = "collective_timeout_s" if self.collective_timeout_s else "watchdog_min_s"
        ordered = dict.fromkeys(("heartbeat_timeout_s", "watchdog_min_s", last, "rendezvous_s"))
        for shorter, longer in (*itertools.pairwise(ordered), (last, "first_step_s")):
            if getattr(self, shorter) >= getattr(self, longer):
                yield (
                    longer,
                    f"must be longer than {shorter} = {getattr(self, shorter):g}, or the later of the two never fires; "
                    f"raise {longer} or lower {shorter}",
                )


class Health(Section):
    """Checks of the training state, and of the steps that change it."""

    check_every: int = Field(
        default=10,
        ge=0,
        description="Steps between two comparisons of the state of each layer between its holders; 0: none.",
    )
    on_disagreement: Literal["rollback", "stop"] = Field(
        default="rollback",
        description="Action if holders differ and no majority tells which is right. rollback: return to the "
        "newest snapshot or checkpoint from before they last agreed, and stop if there is none; stop: end the run.",
    )
    on_bad_step: Literal["skip", "rollback", "stop"] = Field(
        default="skip",
        description="Action if a loss or gradient is bad, and also when the step is computed again. skip: leave the "
        "samples of the step out; rollback: return to the newest snapshot or checkpoint, and leave them out then; "
        "stop: end the run with a checkpoint.",
    )
    spike_factor: float = Field(
        default=0.0,
        ge=0,
        description="A loss or gradient norm is bad, too, if it is above the median of the last 64 steps by more than "
        "this many standard deviations; 0: only if it is not finite.",
    )
    detect_slow: bool = Field(
        default=True,
        description="Whether workers and links that stay slower than the others are reported, and a better plan is "
        "looked for. Turn it off where workers share processors with other work, which looks like slowness.",
    )
    slow_links: Literal["between-hosts", "all"] = Field(
        default="between-hosts",
        description="Links that are judged. all: also those inside a host, where a worker that waits for a processor "
        "looks like a slow link. Emulated links always are.",
    )


class Preflight(Section):
    """Examination of a host before its `chameleon agent` may start workers; emulated devices are not examined."""

    enabled: bool = Field(default=True, description="Whether hosts are examined.")
    same_versions: bool = Field(
        default=True,
        description="Whether a host needs the versions of Python, torch, Chameleon and the device driver that the run "
        "has.",
    )
    min_free_memory: float = Field(
        default=0.8, ge=0, le=1, description="Least free share of an accelerator's memory, which other jobs may occupy."
    )
    min_speed: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Least speed of matrix products and of copies in memory, as a share of the median of the hosts "
        "that were admitted before; 0 admits hosts of any speed.",
    )
    max_clock_error_s: float = Field(
        default=5.0,
        gt=0,
        description="Largest difference between the clocks of a host and of the coordinator, in seconds.",
    )


class Timelines(Section):
    """Recording of operation times, for `chameleon report`."""

    every: int = Field(
        default=10,
        ge=0,
        description="Interval in steps at which operations are recorded, beside the first two after a change; 0: none.",
    )


class Evaluation(Section):
    """Evaluation of the job's held-out samples during training; see docs/evaluation.md."""

    every: int = Field(default=0, ge=0, description="Steps between two evaluations; 0: only on request.")
    samples: int | None = Field(
        default=None, ge=1, description="Samples to evaluate, the first of the data set; by default all of them."
    )


class Emulation(Section):
    """Settings of emulated devices."""

    time_scale: float = Field(
        default=1.0,
        gt=0,
        description="Seconds per second of the profile; larger values hide the time of the machine itself.",
    )
    workers_per_host: int = Field(default=8, ge=1, description="Workers of an emulated host.")
    min_message_s: float = Field(
        default=2e-3,
        ge=0,
        description="Minimum seconds until the first byte of a message arrives; hides the machine's own latency.",
    )


class Control(Section):
    """Address of the coordinator."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address the coordinator listens on, by default loopback; the name of a network "
        "interface, such as eth0; or auto: the address at which other machines reach this one.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port the coordinator listens on; 0 takes a free one.")
    worker_ports: str = Field(
        default="",
        pattern=r"^([1-9][0-9]{0,4}-[1-9][0-9]{0,4})?$",
        description="Ports that a firewall leaves open between workers, such as 40000-49999: on a host whose kernel "
        "would give them others, no worker starts; empty: any.",
    )
    tls: str = Field(
        default="off",
        min_length=1,
        description="TLS of the control connections: off; generate: with a new certificate for this run; or a "
        "directory with ca.pem, cert.pem and key.pem.",
    )
    lease: str = Field(
        default="files",
        description="Place where coordinators claim leadership: files, in the run directory; "
        "etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or etcds://... with TLS; kubernetes, or kubernetes://NAMESPACE. See "
        "docs/cluster.md.",
    )
    lease_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds without a renewal after which a coordinator leads no longer, and another one may.",
    )

    @field_validator("lease")
    @classmethod
    def _require_place(cls, lease: str) -> str:
        if _LEASE.fullmatch(lease):
            return lease
        raise PydanticCustomError(
            "lease", "should be files, etcd://HOST:PORT, etcds://HOST:PORT, kubernetes or kubernetes://NAMESPACE"
        )


FailurePhase = Literal[
    "forward",
    "backward",
    "sync",
    "vote",
    "optimizer",
    "evaluation",
    "gather",
    "recovery",
    "rest",
    "preparation",
    "transfer",
    "confirm",
    "switch",
    "checkpoint",
    "snapshot",
]
FailureKind = Literal["kill", "hang", "disconnect", "slow", "slow-link", "corrupt", "nan"]
SLOWNESS: Final = ("slow", "slow-link")
"""Kinds of failures that have a factor."""
LASTING_KINDS: Final = (*SLOWNESS, "corrupt", "nan")
"""Kinds of failures that a worker survives."""


class Failure(Section):
    """A failure to inject: `worker` fails, or becomes slow, in `phase` of `step`."""

    step: int = Field(ge=0, description="Step in which it happens, counted from 0.")
    worker: int = Field(ge=0, description="Worker that fails, counted from 0.")
    phase: FailurePhase = Field(default="forward", description="Phase of the step or of a recovery in which it fails.")
    kind: FailureKind = Field(
        default="kill",
        description="kill: SIGKILL; hang: SIGSTOP; disconnect: its control connection is cut; slow: from then on it "
        "computes at `factor` of its speed; slow-link: from then on its links have `factor` of their bandwidth; "
        "corrupt: a random bit of a parameter or of the optimizer's state flips; nan: an element of its gradient is "
        "not a number, once.",
    )
    factor: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Of kind slow or slow-link: the speed, or bandwidth, as a share of the usual one; 1 ends it.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.kind in SLOWNESS and self.factor is None:
            yield "factor", f'is missing; kind = "{self.kind}" needs a share of what is usual, such as 0.5'
        if self.kind not in SLOWNESS and self.factor is not None:
            yield (
                "factor",
                f'only the kinds slow and slow-link have a factor, not "{self.kind}"; remove it, or change the kind',
            )
