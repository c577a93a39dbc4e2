"""The next generations of a run, from its configuration, the job and the cluster state alone.

After a loss there is one. While it trains, a run switches to a better plan, and before it to those in which its layers
move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from chameleon_ft import recovery
from chameleon_ft.config import RunConfig
from chameleon_ft.coordinator.decisions.calibration import Calibration, Corrections
from chameleon_ft.coordinator.decisions.cluster_state import IN_PLACE, ClusterState, SpeculativeDecision
from chameleon_ft.coordinator.decisions.recovery_plan import (
    decide,
    decide_in_place,
    describe_pipelines,
    describe_transfer,
)
from chameleon_ft.coordinator.decisions.redundancy import Completion, lacks_copies, with_keepers, with_owners
from chameleon_ft.cost.profile import Profile
from chameleon_ft.cost.transition import StallModel, received_layers
from chameleon_ft.events.records import FORMAT, Started
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.protocol.job_info import JobInfo, OperationRate
from chameleon_ft.recovery import STAY, FailureModel, uniform_limits
from chameleon_ft.recovery.context import Course
from chameleon_ft.recovery.generation import CostsFrom, GenerationSpec, checked_program
from chameleon_ft.recovery.migration import Wave, pace_of, present_draft, waves_to
from chameleon_ft.recovery.scoring import missing_in_transfer
from chameleon_ft.recovery.transition import placement_of, plan_transition
from chameleon_ft.schedule import CostModel, check_program
from chameleon_ft.storage.profiles import costs_of_run
from chameleon_ft.transfer import Transfer, pull_s, transfer_s, transfer_to


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGeneration:
    """The generation to continue with after a loss or a join, and how it was chosen.

    Attributes:
        decision: all candidates; None if there was nothing to choose.
        is_prepared: The decision was made before the workers were lost.
        inputs: the inputs of the decision, as JSON values.
        repeated_share: the share of the interrupted step's work that is done twice, if it is completed.
        repeated_s: seconds of a step whose work is repeated.
        is_provisional: It was chosen without a search, or lacks owners of slices, so that a better plan may be found
            later.
    """

    spec: GenerationSpec
    decision: recovery.Decision | None = None
    is_prepared: bool = False
    inputs: Mapping[str, object] = FrozenMap({})
    repeated_share: float | None = None
    repeated_s: float = 0.0
    is_provisional: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the fields of the `decision` event, except generation and duration."""
        decision = {} if self.decision is None else self.decision.to_json()
        rest = self.spec.rest
        salvaged = None if rest is None else {"rest_s": rest.rest_s, "repeated_share": self.repeated_share}
        return {"prepared": self.is_prepared, **self.inputs, **decision, "salvaged": salvaged}


class Planner:
    """Makes the decisions of one run, by the times of operations, steps and transfers that were observed in it.

    `profile` says what operations and links cost, `plan` is the first plan; without them, the workers' reports and the
    layout of the configuration take their place. In every call, `hosts` has the host of each worker that has joined.

    Attributes:
        calibration: observed times of operations and steps.
        policy: name of the run's policy.
    """

    def __init__(
        self, config: RunConfig, job: JobInfo, *, profile: Profile | None = None, plan: Plan | None = None
    ) -> None:
        self._config = job.settled(config)
        self._job = job
        self._profile = profile
        self._plan = plan
        self._shares_by_default = config.parallel.optimizer_redundancy == "auto" and config.parallel.owners is not None
        self.calibration = Calibration(knows_layers=profile is not None)
        self.policy = config.recovery.policy

    def start(
        self,
        workers: Sequence[int],
        hosts: Mapping[int, str],
        *,
        checkpoint: int | None,
        host_memory: Mapping[str, int] | None = None,
    ) -> GenerationSpec:
        """Begin with the layout of the configuration, at `checkpoint` or with fresh weights at step 0.

        `host_memory`: host -> bytes available for its workers, as far as known.
        """
        plan, parallel = self._plan, self._config.parallel
        if plan is None:
            plan = data_pipeline_plan(
                layer_costs=self._job.relative_costs if self._profile is None else self._profile.relative_costs,
                dp=parallel.dp,
                pp=parallel.pp,
                micro_batches=self._config.batch.micro_batches,
                workers=workers,
                split_backward=parallel.split_backward,
            )
        limits = uniform_limits(plan.workers, max(len(route.hops) for route in plan.routes))
        costs = self._costs(hosts, plan)
        start = GenerationSpec(
            plan=plan,
            program=checked_program(plan, costs, limits),
            costs=costs,
            in_flight_limits=limits,
            first_step=0 if checkpoint is None else checkpoint,
            load="initial" if checkpoint is None else checkpoint,
            policy="start",
            action="start",
        )
        return self._completed(start, None, hosts, hosts, host_memory or {})

    def transferred(self, transfer: Transfer, observed_s: float, hosts: Mapping[int, str]) -> None:
        """Record the duration of a transfer."""
        expected_s = transfer_s(transfer.rounds, self._reference(hosts).cluster)
        self.calibration.transfer(expected_s=expected_s, observed_s=observed_s)

    def migrated(self, migration: Transfer, observed_s: float, hosts: Mapping[int, str]) -> None:
        """Record the duration of a migration."""
        expected_s = pull_s(migration.messages, self._reference(hosts).cluster)
        self.calibration.migration(expected_s=expected_s, observed_s=observed_s)

    def context(
        self,
        in_force: GenerationSpec,
        live: Collection[int],
        hosts: Mapping[int, str],
        *,
        phases: StallModel,
        repeat_s: float,
        unsaved: int = 0,
        checkpoint_interval_s: float | None = None,
        leaving: Collection[int] = (),
        held: Mapping[int, Collection[int]] | None = None,
    ) -> recovery.DecisionContext:
        """Return the context of a decision with these live workers.

        Args:
            in_force: the plan whose placement the workers hold.
            phases: expected stall, without transfers.
            repeat_s: seconds of work of the interrupted step that is repeated.
            unsaved: steps since the newest complete checkpoint.
            checkpoint_interval_s: seconds of steps between two checkpoints, if the run chooses that itself.
            leaving: workers that are to leave, which are not among `live`.
            held: live worker -> the layers that it holds; None: its part of the placement in force.
        """
        costs, live = self._costs(hosts, in_force.plan), frozenset(live)
        cluster = costs.cluster
        workers = tuple(worker for worker in cluster.workers if worker.id in live)
        every = self._config.checkpoint.every
        # It costs a replay, and only runs with checkpoints need it.
        step_s = self.calibration.step_s(costs) if every else 0.0
        longest_s = (checkpoint_interval_s or 0.0) if every == "auto" else every * step_s
        return recovery.DecisionContext(
            plan=in_force.plan,
            in_flight_limits=in_force.in_flight_limits,
            costs=CostModel(costs.workload, cluster.of(workers)),
            phases=phases,
            repeat_s=repeat_s,
            restart_cost_s=self._config.recovery.restart_cost_s,
            has_checkpoints=every != 0,
            checkpoints=recovery.Checkpoints(unsaved_s=unsaved * step_s, longest_s=longest_s),
            step_factor=self.calibration.unexplained(costs),
            transfer_factor=self.calibration.transfers,
            measured_migration_factor=self.calibration.migrations,
            salvages=self.salvages,
            leaving=tuple(worker for worker in cluster.workers if worker.id in leaving),
            holdings=None if held is None else placement_of(held, in_force.plan.placement.num_layers),
        )

    def recover(
        self,
        cluster: ClusterState,
        context: recovery.DecisionContext,
        rate: FailureModel,
        *,
        prepared: recovery.Decision | None,
        decide_s: Callable[[], float] | None = None,
    ) -> ChosenGeneration:
        """Decide how to continue after a loss or a join; see `recovery_plan.decide` for arguments and errors."""
        spec, decision = decide(cluster, context, policy=self.policy, rate=rate, prepared=prepared, decide_s=decide_s)
        found = self._next(spec, decision, cluster, context, rate)
        course = None if prepared is None or decision is not prepared else prepared.course
        # On the way back to a snapshot, other workers may take the places of the plan.
        return replace(found, is_prepared=course is not None and course.plan == spec.plan)

    def _next(
        self,
        spec: GenerationSpec,
        decision: recovery.Decision | None,
        cluster: ClusterState,
        context: recovery.DecisionContext,
        rate: FailureModel,
    ) -> ChosenGeneration:
        """Return a decision with the owners and keepers of its generation, and its inputs for the records."""
        left, senders = cluster.owners_left, context.senders.hosts
        spec = self._completed(spec, left, senders, cluster.hosts, cluster.host_memory)
        redundancy = self._config.parallel.owners
        lacks = redundancy is not None and spec.sharding is not None and lacks_copies(spec.sharding, redundancy)
        if decision is not None:
            context = replace(context, phases=decision.phases)
        inputs = self.inputs(cluster.committed, context, rate)
        return ChosenGeneration(spec=spec, decision=decision, inputs=inputs, is_provisional=lacks)

    @property
    def hints(self) -> tuple[str, ...]:
        """Doubts about the job, which do not prevent a run."""
        return self._job.hints

    @property
    def undivided(self) -> str:
        """Name of the optimizer whose state holders do not share, though they would by default; otherwise empty."""
        return self._job.undivided if self._shares_by_default else ""

    @property
    def migrates(self) -> bool:
        """Whether layers move while the run trains, if the policy is not one that stops to move them."""
        return recovery.POLICIES[self.policy].salvages

    @property
    def salvages(self) -> bool:
        """Whether an interrupted step is completed, and the search for the best plan is left for later."""
        return self._config.recovery.salvage and recovery.POLICIES[self.policy].salvages

    def salvage(self, cluster: ClusterState) -> recovery.SalvagedStep | None:
        """Return the program that completes the interrupted step; None if there is none, or it has to be repeated."""
        progress = cluster.progress
        if progress is None:
            return None
        costs = self._costs(cluster.hosts, cluster.plan)
        lost = [worker for worker in cluster.plan.workers if worker not in progress]
        left = CostModel(costs.workload, costs.cluster.without(lost))
        return recovery.complete_step(cluster.plan, progress, left, cluster.in_flight_limits, before=cluster.rest)

    def is_reviewed(self, context: recovery.DecisionContext, newcomers: Collection[int]) -> bool:
        """Return whether a search for a better plan follows a decision in place."""
        # Under the policy that decides in place, a search would find the same plan.
        return bool(newcomers or (context.lost and self.policy != IN_PLACE))

    def recover_in_place(
        self,
        cluster: ClusterState,
        context: recovery.DecisionContext,
        rate: FailureModel,
        salvaged: recovery.SalvagedStep | None,
        *,
        speculative: SpeculativeDecision | None,
        decide_s: Callable[[], float],
    ) -> ChosenGeneration | None:
        """Decide how to continue at once; see `recovery_plan.decide_in_place`."""
        is_reviewed = self.is_reviewed(context, cluster.newcomers)
        decided = decide_in_place(
            cluster, context, salvaged, rate=rate, is_reviewed=is_reviewed, speculative=speculative, decide_s=decide_s
        )
        if decided is None:
            return None
        found = self._next(*decided, cluster, context, rate)
        return replace(
            found,
            is_provisional=found.is_provisional or is_reviewed,
            repeated_share=None if salvaged is None else salvaged.repeated_share,
        )

    def inputs(self, step: int, context: recovery.DecisionContext, rate: FailureModel) -> dict[str, object]:
        """Return the fields of the event `decision` that give its inputs; see docs/files.md."""
        phases, leaving = context.phases, {worker.id for worker in context.leaving}
        corrections = replace(
            self._corrections,
            step=context.step_factor,
            transfer=context.transfer_factor,
            migration=context.migration_factor,
        )
        return {
            "step": step,
            "lost": [worker for worker in context.lost if worker not in leaving],
            "leaving": sorted(leaving),
            "live": len(context.live),
            "plan": describe_pipelines(context.plan),
            "rate": {
                "failures": rate.failures,
                "incidents": rate.incidents,
                "together": {str(size): count for size, count in sorted(rate.together.items())},
                "bursts": rate.bursts,
                "worker_s": rate.worker_s,
                "prior_failures": rate.prior_failures,
                "worker_mtbf_s": rate.worker_mtbf_s,
                "host_failure_fraction": rate.host_failure_fraction
                if len(set(context.costs.cluster.hosts.values())) > 1
                else None,
            },
            "stall": {
                "repeat_s": context.repeat_s,
                "detect_s": phases.detect_s,
                "stop_s": phases.stop_s,
                "decide_s": phases.decide_s,
                "regroup_s": phases.regroup_s,
                "restart_cost_s": context.return_s,
            },
            "snapshots": context.snapshots and context.snapshots.to_json(),
            "corrections": corrections.to_json(),
        }

    def require_costs(self, hosts: Mapping[int, str]) -> None:
        """Raise ProfileError if the run's profile lacks the costs of a step on these workers."""
        self._reference(hosts)

    def begin(self, spec: GenerationSpec, hosts: Mapping[int, str]) -> None:
        """Begin to observe the steps of a generation."""
        reference = self._reference(hosts).with_micro_batches(spec.plan.micro_batches)
        self.calibration.begin(spec.trained_plan, spec.program, reference)

    def completion(
        self, active: GenerationSpec, hosts: Mapping[int, str], live: Collection[int], *, host_memory: Mapping[str, int]
    ) -> Completion:
        """Return what gives plans to switch to their owners and keepers; it can be sent to another process."""
        return Completion(
            config=self._config,
            costs=self._costs(hosts, active.plan),
            costs_from=self._costs_from,
            active=active,
            hosts=hosts,
            live=tuple(live),
            host_memory=host_memory,
            migrates=self.migrates,
        )

    def _completed(
        self,
        spec: GenerationSpec,
        left: Sharding | None,
        senders: Mapping[int, str],
        hosts: Mapping[int, str],
        host_memory: Mapping[str, int],
    ) -> GenerationSpec:
        """Return a generation with the costs of all workers that have joined, and its owners and keepers."""
        spec = replace(spec, costs=self._costs(hosts, spec.plan), costs_from=self._costs_from)
        spec = spec.along(self._config.batch.stages_from(spec.first_step))
        redundancy = self._config.parallel.owners
        if redundancy is not None:
            left = left if spec.restoration is None else spec.restoration.sharding
            spec = with_owners(spec, left, senders, redundancy)
        return with_keepers(spec, self._config, host_memory)

    def describe(self, spec: GenerationSpec, *, run: str) -> Started:
        """Describe what is trained, on what, by which workers, and from which step."""
        plan = spec.plan
        return Started(
            format=FORMAT,
            model=self._job.model,
            data=self._job.data,
            run=run,
            pipelines=tuple(dict.fromkeys(tuple(hop.worker for hop in route.hops) for route in plan.routes)),
            stages=tuple(f"{hop.layers.start}-{hop.layers.stop - 1}" for hop in plan.routes[0].hops),
            first_step=spec.first_step,
            steps=self._config.steps,
            generation=spec.generation,
            checkpoint=spec.load if isinstance(spec.load, int) else None,
            horizon_steps=self._config.horizon,
        )

    @property
    def _costs_from(self) -> CostsFrom:
        if self.calibration.rates is not None:
            return "measured" if self._profile is None else "corrected"
        return "assumed" if self._profile is None else "profile"

    def _costs(self, hosts: Mapping[int, str], plan: Plan) -> CostModel:
        """Return the costs of a step of a plan as currently known."""
        if self._profile is not None:
            costs = self._reference(hosts)
        else:
            rates = self.calibration.rates
            # One rate for all but the slow: a worker that was slow in one step need not be slow in the next.
            rate = OperationRate() if rates is None else OperationRate(*rates)
            costs = self._job.costs(self._config, hosts, rate)
        return self._corrections.applied(costs).with_micro_batches(plan.micro_batches)

    def _reference(self, hosts: Mapping[int, str]) -> CostModel:
        """Return the costs that observations are divided by: the profile's, or one second for the whole model."""
        if self._profile is not None:
            costs = costs_of_run(self._config, self._profile, hosts)
            if not self._config.is_emulated:
                return self._job.completed(costs)
            # The layers of emulated devices stand for those of the profile, and so do their bytes. They share nothing.
            return replace(costs, workload=replace(costs.workload, tied=()))
        return self._job.costs(self._config, hosts, OperationRate(forward_s=1.0, backward_s=1.0))

    @property
    def _corrections(self) -> Corrections:
        """Corrections of the costs; those of whole steps and transfers are in the context."""
        operations = 1.0 if self._profile is None else self.calibration.both
        return replace(self.calibration.corrections, operations=operations)


def decide_on_switch(
    context: recovery.DecisionContext,
    policy: str,
    failures: FailureModel,
    *,
    migrates: bool,
    complete: Callable[[Sequence[GenerationSpec]], tuple[GenerationSpec, ...]] = tuple,
) -> tuple[recovery.Decision, tuple[GenerationSpec, ...]]:
    """Decide, and return the decision with the plans to switch to, whose programs are checked; see `plans_to`.

    Args:
        complete: gives the plans their owners and keepers.
    """
    decision = recovery.decide(replace(context, migrates=migrates), policy, failures)
    return decision, complete(plans_to(decision, context, migrates=migrates))


def plans_to(
    decision: recovery.Decision, context: recovery.DecisionContext, *, migrates: bool
) -> tuple[GenerationSpec, ...]:
    """Return the plans that lead to the decision's course, with the step at which they begin left open.

    None if the run is to continue as before. If layers move, two for each wave of `waves_to`: one during which they
    move, with the routes of the plan before, and one that uses them; the last is the course itself. If there is no
    wave, or not `migrates`, the course alone, with a transition before it trains.
    """
    course, chosen = decision.course, decision.chosen
    if course is None or chosen is None or chosen.policy == STAY:
        return ()
    layers = received_layers(context.costs.workload, course.plan.placement)
    # No layer is lost, so there is nothing to read from a checkpoint.
    senders = context.senders.hosts
    transfer = course.transfer or transfer_to(context.held, course.plan.placement, live=senders, layers=layers)
    assert chosen.step_s is not None
    costs = CostModel(context.costs.workload, context.senders)
    waves = waves_to(present_draft(context), transfer, costs) if migrates and transfer.messages else ()
    final = replace(
        _generation(
            course,
            context,
            chosen.policy,
            f"{describe_pipelines(course.plan)}; {describe_transfer(transfer, stops=not waves)}",
        ),
        predicted_step_s=chosen.step_s,
        predicted_stall_s=0.0,
    )
    if not transfer.messages:
        return (final,)
    if waves:
        every = (
            each
            for number, wave in enumerate(waves, 1)
            for each in _plans_of(wave, number, len(waves), context, final_step_s=chosen.step_s)
        )
        return (*every, final)
    # Of other policies than those that migrate, and of those that would read the layers from a checkpoint.
    if missing_in_transfer(transfer, context):
        return ()
    held = {worker: context.held.layers_of(worker) for worker in senders}
    transition = plan_transition(
        context.plan.placement, course.plan.placement, held=held, layers=layers, transfer=transfer
    )
    stall_s = transfer_s(transfer.rounds, context.senders) * context.transfer_factor
    return (replace(final, transition=transition, predicted_stall_s=stall_s),)


def _plans_of(
    wave: Wave, number: int, waves: int, context: recovery.DecisionContext, *, final_step_s: float
) -> list[GenerationSpec]:
    """Return the plan under which the layers of a wave move, and the one that follows it, unless it is the course.

    A vote waits for the layers if another step under the first of the two would cost more time than they take, or if
    they would slow steps down for longer; see `pace_of`.
    """
    course = wave.migrating.course()
    assert course.transfer is not None
    step_s, pace = wave.migrating.estimate.step_s * context.step_factor, pace_of(wave, context)
    next_s = final_step_s if wave.reached is None else wave.reached.estimate.step_s * context.step_factor
    gain_s = step_s - next_s
    which = f", wave {number} of {waves}" if waves > 1 else ""
    migrating = replace(
        _generation(course, context, "migration", f"{describe_transfer(course.transfer, stops=False)}{which}"),
        migration=course.transfer,
        hold_s=gain_s if pace.moves_s < gain_s else pace.hold_s,
        migration_s=pace.moves_s,
        predicted_step_s=step_s,
    )
    if wave.reached is None:
        return [migrating]
    reached = wave.reached.course()
    return [
        migrating,
        _generation(reached, context, "migration", f"{describe_pipelines(reached.plan)}{which} has arrived"),
    ]


def _generation(course: Course, context: recovery.DecisionContext, policy: str, action: str) -> GenerationSpec:
    """Return a generation to switch to. Raises ProgramError if its program breaks a rule."""
    check_program(course.program, course.plan)
    return GenerationSpec(
        plan=course.plan,
        program=course.program,
        costs=context.costs,
        in_flight_limits=course.in_flight_limits,
        first_step=0,
        policy=policy,
        action=action,
    )
