"""The state of a run as one frozen value that can be stored and loaded.

Peers that have lost their connections to a coordinator, and are to come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Self

from pydantic import TypeAdapter
from pydantic_core import to_json

from chameleon_ft.coordinator.detectors import Detectors
from chameleon_ft.coordinator.state.checkpoints import Checkpoints, Health, Snapshots
from chameleon_ft.coordinator.state.evaluations import Evaluations
from chameleon_ft.coordinator.state.incidents import FailureHistory, Fault, Incident, Loss, Outcomes
from chameleon_ft.coordinator.state.members import HostAdmission, Members, Respawns, ScaleUp, Worker
from chameleon_ft.coordinator.state.settings import Settings
from chameleon_ft.coordinator.state.switches import NextGeneration, Switches
from chameleon_ft.events.records import RunStatus
from chameleon_ft.plan.frames import plain
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.messages import Quiesced
from chameleon_ft.protocol.parts import Member
from chameleon_ft.recovery.generation import GenerationSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnection:
    """The wait for peers after a coordinator was lost or held up. Times are monotonic seconds.

    Attributes:
        awaited: lost connections whose peers have not come back.
        until_s: when those count as lost.
        stalled_at_s: when this coordinator had not run, or not led, for a while; None if that never happened.
        doubtful: the generation that a lost coordinator was preparing by its journal; its last lines may be missing,
            so workers may have been told to switch to it.
        journaled: the newest generation in the journal of a lost coordinator, until all of its peers are back: they may
            know later ones, whose numbers this coordinator has used for others meanwhile.
    """

    awaited: frozenset[int] = frozenset()
    until_s: float = 0.0
    stalled_at_s: float | None = None
    doubtful: NextGeneration | None = None
    journaled: int | None = None

    def awaiting(self, connections: Iterable[int], *, until_s: float) -> Self:
        """Note further lost connections; all that are awaited count as lost at `until_s`."""
        return replace(self, awaited=self.awaited.union(connections), until_s=until_s)

    def without(self, connections: Iterable[int]) -> Self:
        """Note that the peers of these connections are back."""
        return replace(self, awaited=self.awaited.difference(connections))

    def extended(self, seconds: float) -> Self:
        """Extend the wait by a time in which the coordinator did not run."""
        return replace(self, until_s=self.until_s + seconds)

    def has_stalled(self, now_s: float, *, within_s: float) -> bool:
        """Return whether the coordinator has stalled in the last `within_s` seconds."""
        return self.stalled_at_s is not None and now_s <= self.stalled_at_s + within_s


class Phase(Enum):
    """The phase of a run."""

    GATHERING = "gathering"
    """Workers are joining."""
    STOPPING = "stopping"
    """A generation is over, and some survivors have not quiesced yet."""
    DECIDING = "deciding"
    """All survivors have quiesced and wait for a decision."""
    REGROUPING = "regrouping"
    """A new generation has its orders, but has not run an operation yet."""
    TRAINING = "training"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run after its current step.

    Attributes:
        trains_no_step: whether it ends with the state before that step, because the job's own code fails in it.
        signal: that has asked for it, if the run is terminated.
        since_s: when it was asked for, in monotonic seconds.
    """

    status: RunStatus
    signal: str = ""
    since_s: float = 0.0
    trains_no_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of a run between two events."""

    settings: Settings
    phase: Phase = Phase.GATHERING
    # None: the run continues.
    ending: Ending | None = None
    # How the run ended, and why.
    ended: tuple[RunStatus, str] | None = None

    # While the current generation is being stopped, this is the next.
    generation: int
    # The highest number of a generation, prepared ones included; none is used twice.
    newest: int = 0
    # The newest generation that was begun; None before the first.
    active: GenerationSpec | None = None
    # The generation before it, if the run has switched from one to the other.
    switched_from: int | None = None
    # The last generation whose placement all survivors hold; None before the first.
    in_force: GenerationSpec | None = None
    switches: Switches = field(default_factory=Switches)

    # Steps that some worker, live or lost, has applied.
    committed: int = 0
    # The vote of step ``committed - 1``, if a worker has reported it.
    last_vote: Vote | None = None
    # Workers that have finished training in this generation.
    finished: frozenset[int] = frozenset()
    # The reports of workers for the generation that is ending.
    quiesced: Mapping[int, Quiesced] = FrozenMap({})
    # The number of the last decision that was requested.
    question: int = 0
    incident: Incident = field(default_factory=Incident)
    outcomes: Outcomes = field(default_factory=Outcomes)
    history: FailureHistory
    # Failures that were injected in this run, oldest first.
    faults: tuple[Fault, ...] = ()

    members: Members
    respawns: Respawns
    admission: HostAdmission = field(default_factory=HostAdmission)
    scale_up: ScaleUp = field(default_factory=ScaleUp)
    detectors: Detectors
    health: Health = field(default_factory=Health)

    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    snapshots: Snapshots = field(default_factory=Snapshots)
    evaluations: Evaluations = field(default_factory=Evaluations)

    # This coordinator leads in this term.
    term: int = 0
    # The address of each coordinator that stands by, by connection.
    standbys: Mapping[int, str] = FrozenMap({})
    reconnection: Reconnection = field(default_factory=Reconnection)
    # The time of the last tick, in monotonic seconds.
    ticked_at_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("quiesced", "standbys"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    @classmethod
    def before(
        cls,
        settings: Settings,
        *,
        last_generation: int = 0,
        skipped: Iterable[int] = (),
        left_out: Iterable[tuple[int, int, int]] = (),
        term: int = 0,
    ) -> Self:
        """Return the state of a run that no worker has joined.

        Args:
            last_generation: the last generation of the resumed run, whose numbering continues.
            skipped: steps that it has found to be bad.
            left_out: samples that it could not read; see `Health`.
            term: in which the coordinator leads.
        """
        return cls(
            settings=settings,
            generation=last_generation,
            newest=last_generation,
            term=term,
            members=Members(count=settings.workers),
            detectors=Detectors.with_timeouts(settings.timeouts),
            respawns=Respawns(settings.recovery),
            history=FailureHistory.before(settings.recovery),
            health=Health(skipped=frozenset(skipped), left_out=frozenset(left_out)),
        )

    @property
    def usual_step_s(self) -> float:
        """The median duration of recent steps in seconds; 0 before the first."""
        return self.detectors.watchdog.step_s

    @property
    def nothing_trained(self) -> bool:
        """Whether ending the run now would lose no training of this run or of the one it resumes."""
        return self.phase is Phase.GATHERING or (self.phase is Phase.REGROUPING and self.last_vote is None)

    @property
    def holds_nothing(self) -> bool:
        """Whether nothing is trained and no worker holds a layer: the first orders have not been sent."""
        return self.last_vote is None and not any(report.layers for report in self.quiesced.values())

    @property
    def active_generation(self) -> int:
        """The number of the newest generation that was begun; 0 before the first."""
        return 0 if self.active is None else self.active.generation

    @property
    def placed(self) -> GenerationSpec | None:
        """The plan whose placement the workers of the active generation hold; shadow holders are not in it."""
        return self.active if self.active is None or self.active.migration is None else self.in_force

    @property
    def reported(self) -> tuple[int | None, ...]:
        """The generations whose failed messages count, since workers do not switch at the same moment."""
        after = self.switches.underway
        return self.active_generation, self.switched_from, None if after is None else after.number

    @property
    def participants(self) -> frozenset[int]:
        """The workers of the active generation, and of one that workers may have switched to."""
        after = self.switches.underway
        now = () if self.active is None else self.active.participants
        return frozenset(now).union(() if after is None else after.spec.participants)

    @property
    def connections(self) -> tuple[int, ...]:
        """The connections of all workers, agents, hosts that are not admitted yet, and standbys."""
        workers = (worker.connection for worker in self.members if worker.connection is not None)
        return *workers, *self.members.agents, *self.admission.connections, *self.standbys

    @property
    def needed(self) -> frozenset[int]:
        """The workers that one of these generations needs, to train or for its transition."""
        if self.active is None:
            return frozenset()
        # The transition of the active one is over once training has begun.
        now = self.active.participants if self.phase is Phase.REGROUPING else self.active.plan.workers
        after = self.switches.underway
        return frozenset(now).union(() if after is None else after.spec.participants)

    def can_do_without(self, worker: int) -> bool:
        """Return whether the other live workers hold all layers, and own all slices, that a worker does."""
        if self.placed is None:
            return True
        placement, sharding = self.placed.plan.placement, self.placed.sharding
        left = placement.without({worker, *placement.workers}.difference(set(self.members.live()) - {worker}))
        held = {other: left.layers_of(other) for other in left.workers}
        return not left.unheld_layers and (sharding is None or not sharding.left_to(held).lost_layers)

    def hosts(self) -> dict[int, str]:
        """Return the host of every worker that has ever joined; an emulated host if devices are emulated."""
        hosts = self.members.hosts()
        size = self.settings.workers_per_host
        return hosts if size is None else {worker: f"host{worker // size}" for worker in hosts}

    def fault_of(self, worker: Worker) -> Fault | None:
        """Return the first failure injected into this incarnation of a worker."""
        times = (each for each in self.faults if each.worker == worker.id and each.time >= worker.since)
        return next(times, None)

    def describe_cause(self, loss: Loss) -> str:
        """Describe the cause of a loss, as far as it is known."""
        worker = self.members.find(Member(loss.worker, loss.incarnation))
        assert worker is not None
        return loss.describe_cause(
            crash=worker.crash,
            exit_code=worker.exit_code,
            fault=self.fault_of(worker),
            hung_in=worker.hung_in,
            hung_at=worker.hung_at,
        )

    def to_json(self) -> str:
        """Write the state as one line of JSON; `from_json` reads it back to an equal state."""
        return to_json(self, fallback=plain, inf_nan_mode="constants").decode()

    @staticmethod
    def from_json(text: str) -> State:
        """Read the output of `to_json`. Raises ValidationError for any other text."""
        return _adapter().validate_json(text)


@cache
def _adapter() -> TypeAdapter[State]:
    # It is slow to build.
    return TypeAdapter(State)
