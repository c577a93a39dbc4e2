"""Sections of a configuration: layout, batch, recovery, timeouts, health, timelines, emulation and control."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from chameleon_ft.config.section import Section
from chameleon_ft.workload import MOST_MICRO_BATCHES

PolicyName = Literal[
    "chameleon", "reroute", "repair", "repartition", "recycle", "oobleck", "paper", "drop-replica", "restart"
]
_USUAL_OWNERS: Final = 2  # one may be lost
_MOST_IN_A_MICRO_BATCH: Final = 1_000_000
_MOST_READS: Final = 100  # that may be slow, one after the other, while another worker waits for a message
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
        "element by itself, or over another backend than gloo. 1 saves the most memory, but every loss returns to a "
        "snapshot or a checkpoint.",
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


class Batch(Section):
    """The global batch: the samples of one optimizer step."""

    micro_batches: int = Field(
        default=8, ge=1, le=MOST_MICRO_BATCHES, description="Micro-batches of one step, over all pipelines."
    )
    micro_batch_size: int = Field(default=2, ge=1, le=_MOST_IN_A_MICRO_BATCH, description="Samples of one micro-batch.")

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.micro_batches * self.micro_batch_size


class Recovery(Section):
    """Recovery from losses, joins, and the prior for failure rates."""

    policy: PolicyName = Field(
        default="chameleon",
        description="Policy that proposes plans; see docs/policies.md.",
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
        return self.first_step_s + _MOST_READS * self.sample_read_s

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
    least_free_memory: float = Field(
        default=0.8, ge=0, le=1, description="Least free share of an accelerator's memory, which other jobs may occupy."
    )
    least_speed: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Least speed of matrix products and of copies in memory, as a share of the median of the hosts "
        "that were admitted before; 0 admits hosts of any speed.",
    )
    most_clock_error_s: float = Field(
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


class Emulation(Section):
    """Settings of emulated devices."""

    time_scale: float = Field(
        default=1.0,
        gt=0,
        description="Seconds per second of the profile; larger values hide the time of the machine itself.",
    )
    workers_per_host: int = Field(default=8, ge=1, description="Workers of an emulated host.")
    least_message_s: float = Field(
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
