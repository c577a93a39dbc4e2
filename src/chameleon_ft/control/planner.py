"""What to do and what everyone is told, worked out from the configuration, the job and the situation alone."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from chameleon_ft import recovery
from chameleon_ft.cluster import Cluster
from chameleon_ft.config import RunConfig
from chameleon_ft.control.decision import Decision, Situation, decide
from chameleon_ft.control.job_info import JobInfo, OperationRate
from chameleon_ft.control.messages import OperationTimes, Run, Transition
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import GenerationPlan, RunInfo
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.profiles import Profile, costs_of_run
from chameleon_ft.recovery import FailureRate, in_flight_ceiling
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program, check_program
from chameleon_ft.sync import gradient_rounds, gradient_segments

__all__ = ["Planner"]


class Planner:
    """Makes the decisions of one run, by the operation times that its workers report.

    `profile` says what operations and links cost, `plan` what to start with; without them it is what workers report,
    and the layout of the configuration. In every call, `hosts` gives the host of each worker that has joined.
    """

    def __init__(
        self, config: RunConfig, job: JobInfo, *, profile: Profile | None = None, plan: Plan | None = None
    ) -> None:
        self._config = config
        self._job = job
        self._profile = profile
        self._plan = plan
        self._rates: dict[int, OperationRate] = {}

    def start(self, workers: Sequence[int], *, checkpoint: int | None) -> Decision:
        """Begin with the layout of the configuration, at `checkpoint` or with fresh weights at step 0."""
        plan = self._layout(workers) if self._plan is None else self._plan
        depth = max(len(route.hops) for route in plan.routes)
        return Decision(
            plan=plan,
            ceiling=in_flight_ceiling(plan.workers, depth),
            first_step=0 if checkpoint is None else checkpoint,
            load="initial" if checkpoint is None else checkpoint,
            roll_forward=None,
            policy="start",
            action="start",
        )

    def _layout(self, workers: Sequence[int]) -> Plan:
        parallel = self._config.parallel
        return data_pipeline_plan(
            layer_costs=self._job.relative_costs if self._profile is None else self._profile.relative_costs,
            dp=parallel.dp,
            pp=parallel.pp,
            micro_batches=self._config.batch.micro_batches,
            workers=workers,
            split_backward=parallel.split_backward,
        )

    def measure(self, worker: int, plan: Plan, times: OperationTimes) -> None:
        """Take in how long a worker's operations took in a step that it ran as part of `plan`."""
        if worker in plan.workers and times.forward_s > 0 and times.backward_s > 0:
            share = self._job.share(layer for layers in plan.placement.ranges_of(worker) for layer in layers)
            self._rates[worker] = OperationRate(times.forward_s / share, times.backward_s / share)

    def go_on(
        self,
        situation: Situation,
        hosts: Mapping[int, str],
        *,
        ceiling: Mapping[int, InFlightLimit],
        phases: StallModel,
        repeat_s: float,
        rate: FailureRate,
    ) -> Decision:
        """Decide what follows a loss, or what to do with those who have come; see `decide` for what it raises.

        Args:
            ceiling: what the workers of the plan in force can keep at most.
            phases: what the stall will take, transfers left out.
            repeat_s: seconds of work of the interrupted step that is done again.
            rate: how soon the next failure is to be expected.
        """
        outlook = self.outlook(situation.plan, situation.live, hosts, ceiling=ceiling, phases=phases, repeat_s=repeat_s)
        return decide(situation, outlook, policy=self.policy, rate=rate)

    def outlook(
        self,
        plan: Plan,
        workers: Collection[int],
        hosts: Mapping[int, str],
        *,
        ceiling: Mapping[int, InFlightLimit],
        phases: StallModel,
        repeat_s: float,
    ) -> recovery.Situation:
        """What a decision is made from when `plan` was running and these workers are live; see `go_on`."""
        costs = self._costs(hosts)
        cluster = costs.cluster
        live = tuple(worker for worker in cluster.workers if worker.id in workers)
        return recovery.Situation(
            plan=plan,
            ceiling=ceiling,
            costs=CostModel(costs.workload, Cluster(live, cluster.intra_host, cluster.inter_host)),
            phases=phases,
            repeat_s=repeat_s,
            restart_s=self._config.recovery.restart_s,
        )

    @property
    def policy(self) -> str:
        """Name of the policy of the run."""
        return self._config.recovery.policy

    def require_costs(self, hosts: Mapping[int, str]) -> None:
        """Raise ProfileError where the run's profile does not say what a step costs on these workers."""
        self._costs(hosts)

    def orders(
        self, decision: Decision, hosts: Mapping[int, str], *, generation: int, store_port: int
    ) -> tuple[GenerationPlan, dict[int, Run]]:
        """Return what the generation does, checked that it can be run, and what each worker of the plan is told.

        Raises ProgramError where the program breaks a rule; nobody must be told to run it.
        """
        plan = decision.plan
        costs = self._costs(hosts)
        program = decision.program or best_program(plan, costs, ceiling=decision.ceiling).program
        check_program(program, plan)
        planned = GenerationPlan(
            generation=generation,
            first_step=decision.first_step,
            plan=plan,
            program=program,
            costs=costs,
            costs_from="profile" if self._profile is not None else "measured" if self._rates else "assumed",
        )
        alone = (segment for segment in gradient_segments(plan.placement) if len(segment.holders) == 1)
        segments = tuple(
            (segment.layers.start, segment.layers.stop, segment.holders)
            for segment in (*gradient_rounds(plan.placement).order, *alone)
        )
        return planned, {
            worker: Run(
                generation=generation,
                members=plan.workers,
                store_port=store_port,
                first_step=decision.first_step,
                operations=Run.pack_operations(program.of(worker)),
                segments=segments,
                roll_forward=decision.roll_forward,
                load=decision.load,
                transition=_part_in(decision, worker, costs),
            )
            for worker in decision.everyone
        }

    def describe(self, plan: Plan, *, run: str, first_step: int, generation: int) -> RunInfo:
        """Say what is trained, on what and by whom."""
        return RunInfo(
            model=self._job.model,
            data=self._job.data,
            run=run,
            pipelines=tuple(dict.fromkeys(tuple(hop.worker for hop in route.hops) for route in plan.routes)),
            stages=tuple(f"{hop.layers.start}-{hop.layers.stop - 1}" for hop in plan.routes[0].hops),
            first_step=first_step,
            steps=self._config.steps,
            generation=generation,
        )

    def _costs(self, hosts: Mapping[int, str]) -> CostModel:
        if self._profile is not None:
            return costs_of_run(self._config, self._profile, hosts)
        rates = self._rates.values()
        if not rates:
            return self._job.costs(self._config, hosts, OperationRate())
        # One rate for all: a worker that was slow in one step need not be slow in the next.
        measured = OperationRate(
            statistics.median(rate.forward_s for rate in rates), statistics.median(rate.backward_s for rate in rates)
        )
        return self._job.costs(self._config, hosts, measured)


def _part_in(decision: Decision, worker: int, costs: CostModel) -> Transition | None:
    """What the transition, if there is one, asks of a worker."""
    planned = decision.transition
    if planned is None:
        return None
    return Transition(
        everyone=planned.everyone,
        keep=planned.keep[worker],
        moves=planned.moves_of(worker, costs.workload.layers),
    )
