"""Drawn sequences of failures: a number gives a run's layout, policy, batch and failures."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from chameleon_ft.config import SLOWNESS, Failure, FailureKind, FailurePhase, PolicyName

_MAX_WORKERS: Final = 8  # on the few cores of a machine that runs tests
_MAX_LOSSES: Final = 4
_KINDS: Final[tuple[FailureKind, ...]] = ("kill", "kill", "kill", "hang", "disconnect")
_IN_A_STEP: Final[tuple[FailurePhase, ...]] = ("forward", "backward", "sync", "vote", "optimizer")
_IN_A_RECOVERY: Final[tuple[FailurePhase, ...]] = ("recovery", "rest", "preparation", "transfer", "confirm", "switch")
_STEPS: Final = (7, 10)
_STEPS_WITH_JOINS: Final = (60, 200)  # enough for searches during training, and for the switches that follow
_STEPS_WITH_STRIKES: Final = (40, 100)
_FIRST_HANG: Final = 2  # before the first step, only the heartbeats detect a hang
_STRIKES: Final[tuple[tuple[Target, StrikeKind], ...]] = (
    ("background process", "kill"),
    ("background process", "stop"),
    ("disk", "fill"),
    ("coordinator", "kill"),
    ("coordinator", "kill"),
    ("coordinator", "stop"),
    ("agent", "kill"),
    ("agent", "stop"),
    ("fork server", "kill"),
    ("fork server", "stop"),
    ("worker", "kill"),
    ("coordinator", "terminate"),
    ("launcher", "terminate"),
    ("all", "terminate"),
)
_STRIKES_ON_HOSTS: Final[tuple[tuple[Target, StrikeKind], ...]] = (
    ("link", "cut"),
    ("link", "cut one way"),
    ("coordinator", "cut off"),
)
_ON_HOSTS: Final = 0.2  # of the runs with strikes
_STEPS_ON_HOSTS: Final = 400  # enough for a lost worker to come back
_SPEED_ON_HOSTS: Final = 0.1  # likewise, and without taking the processors
_LASTING: Final[tuple[FailureKind, ...]] = ("slow", "slow", "slow-link", "nan", "corrupt", "corrupt")
_IN_BF16: Final = 0.2  # of the runs
_IN_SLICES: Final = 0.35  # of the runs, in some of which a failure hits the exchange of parameters
_WITH_PART: Final = 0.3  # of the runs, each part by itself, but for the last two
_WITH_EVALUATION: Final = 0.4  # of the runs, in some of which a failure comes during one
_LONGEST_DELAY_IN_EVALUATION_S: Final = 0.02
_MAX_EVALUATED: Final = 25  # samples
_WITH_SNAPSHOTS: Final = 0.35  # of the runs, in some of which a failure comes while one is being taken
_LONGEST_DELAY_S: Final = 0.2  # some steps
_BY_CHECKPOINT: Final = "restart"  # the policy that restarts after every loss
_WITHOUT_MOVES: Final = ("reroute", "recycle", _BY_CHECKPOINT)  # whose recoveries have no transition
_SALVAGING: Final = ("chameleon", "reroute")  # policies that complete an interrupted step
_MOVING: Final = tuple(name for name in get_args(PolicyName) if name not in _WITHOUT_MOVES)

Part = Literal[
    "routed", "experts", "trees", "tied", "frozen", "optimizer", "stream", "buckets", "ramp", "best", "recomputed"
]
"""An addition to a run of the built-in Llama.

routed: routers with auxiliary losses, metrics and sums over the step; experts: mixtures of experts; trees: trees of
tensors between layers; tied: a tied head; frozen: frozen layers; optimizer: parameter groups, several optimizers or
averages, each with a schedule; stream: data from a stream; buckets: samples of several lengths; ramp: a batch that
grows; best: the best evaluated state is kept; recomputed: the first plan recomputes.
"""
_DRAWN_PARTS: Final = get_args(Part)[:-2]
_MAX_STAGES: Final = 3  # of a ramp, before the whole batch

Target = Literal[
    "coordinator", "background process", "agent", "fork server", "worker", "launcher", "all", "disk", "link"
]
StrikeKind = Literal["kill", "stop", "terminate", "fill", "cut", "cut one way", "cut off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A signal to a process of a run, or a fault of its disk or of the network between its hosts.

    Attributes:
        step: of the run; the signal is sent after its commit.
        delay_s: from that commit to the signal.
        worker: the number of the worker, if the target is one.
        in_evaluation: whether it waits for an evaluation after that step or a later one, and then for `delay_s`.
        kind: SIGKILL; SIGSTOP, with SIGCONT two seconds later; or SIGTERM. A disk is full for two seconds, a link is
            cut until a worker is lost, and the coordinator is cut off for some seconds.
    """

    step: int
    delay_s: float
    target: Target
    kind: StrikeKind
    worker: int | None = None
    in_evaluation: bool = False

    def __str__(self) -> str:
        target = self.target if self.worker is None else f"worker {self.worker}"
        after = f"evaluating {self.step}" if self.in_evaluation else f"{self.step}"
        return f"{self.kind} {target} {self.delay_s * 1e3:.0f} ms after {after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRun:
    """One drawn run; `str` gives all of it in one line.

    Attributes:
        seed: of the draw, the model's weights and the order of samples.
        blocks: blocks of the model, beside embedding and head.
        checkpoint_every: steps between two checkpoints; 0 for none.
        failures: at most one per worker that ends it, unless lost workers come back.
        respawn: whether they do.
        precision: of the layers; bf16 in few runs, whose draw is otherwise that of a run in fp32.
        drains: workers that are to leave, each with the step after which they are told.
        strikes: signals to its processes, in the order of their steps.
        owners: of a slice of the optimizer's state; None if every holder keeps all of it.
        snapshots: most steps that are repeated with them, and how they are kept; None for none.
        parts: of the model, beside the built-in Llama.
        evaluation: steps between two evaluations, and their samples; None for none.
        ramp: stages of the batch before the whole of it: each with the step after it and its micro-batches.
    """

    seed: int
    dp: int
    pp: int
    split_backward: bool
    policy: PolicyName
    micro_batches: int
    micro_batch_size: int
    blocks: int
    dropout: float
    steps: int
    checkpoint_every: int
    failures: tuple[Failure, ...]
    precision: Literal["fp32", "bf16"] = "fp32"
    respawn: bool = False
    drains: tuple[tuple[int, int], ...] = ()
    strikes: tuple[Strike, ...] = ()
    owners: int | None = None
    snapshots: tuple[int, Literal["copy", "parity"]] | None = None
    parts: tuple[Part, ...] = ()
    evaluation: tuple[int, int] | None = None
    ramp: tuple[tuple[int, int], ...] = ()

    @property
    def workers(self) -> int:
        return self.dp * self.pp

    @property
    def is_on_hosts(self) -> bool:
        """Whether it runs on several hosts, between which links are cut."""
        return any((strike.target, strike.kind) in _STRIKES_ON_HOSTS for strike in self.strikes)

    def __str__(self) -> str:
        failures = ", ".join(_describe(failure) for failure in self.failures)
        words = [
            f"{self.dp} x {self.pp}",
            "split" if self.split_backward else "fused",
            self.policy,
            f"{self.micro_batches} x {self.micro_batch_size} samples",
            *(f"{count} micro-batches to {step}" for step, count in self.ramp),
            f"{self.blocks} blocks",
            f"{self.steps} steps",
            f"checkpoint every {self.checkpoint_every}" if self.checkpoint_every else "no checkpoint",
            *([self.precision] if self.precision != "fp32" else []),
            *(["dropout"] if self.dropout else []),
            *self.parts,
            *(["respawn"] if self.respawn else []),
            *([f"{self.owners} owners"] if self.owners is not None else []),
            *(["snapshots every {}, {}".format(*self.snapshots)] if self.snapshots is not None else []),
            *(["evaluation every {} of {}".format(*self.evaluation)] if self.evaluation is not None else []),
        ]
        drains = "".join(f", drain {worker} in {step}" for step, worker in self.drains)
        strikes = "".join(f", {strike}" for strike in self.strikes)
        return f"seed {self.seed}: {', '.join(words)}: {failures or 'no failure'}{drains}{strikes}"


def draw(seed: int, *, joins: bool = False, strikes: bool = False) -> DrawnRun:
    """Draw a run deterministically, on any machine.

    Without checkpoints fewer workers fail than every layer has holders at first. Even so a policy may leave a layer
    with fewer, and with checkpoints the first one may be needed before it exists: such a run has to end with an error
    that says so.

    Args:
        joins: whether lost workers may come back, and workers may be drained.
        strikes: whether its other processes are hit, too, at moments that are no named phases.
    """
    if strikes:
        run = _struck(random.Random(f"strikes {seed}"), _drawn(seed, _STEPS_WITH_STRIKES, joins=True))
        return _struck_in_evaluations(random.Random(f"struck evaluations {seed}"), run)
    return _drawn(seed, _STEPS_WITH_JOINS if joins else _STEPS, joins=joins)


def _drawn(seed: int, steps: tuple[int, int], *, joins: bool) -> DrawnRun:
    """Return a run without strikes, of a number of steps between two."""
    run = _in_slices(random.Random(f"slices {seed}"), _draw(seed, steps, joins=joins))
    parts = tuple(part for part in _DRAWN_PARTS if random.Random(f"{part} {seed}").random() < _WITH_PART)
    run = _with_snapshots(random.Random(f"snapshots {seed}"), with_parts(run, parts))
    return _with_evaluation(random.Random(f"evaluation {seed}"), run)


def with_parts(run: DrawnRun, parts: Iterable[Part]) -> DrawnRun:
    """Return the run with these parts, too, and with a ramp if that is among them: stages mostly end at failures."""
    run, rng = replace(run, parts=tuple(dict.fromkeys((*run.parts, *parts)))), random.Random(f"stages {run.seed}")
    if "ramp" not in run.parts:
        return run
    count = rng.randint(1, _MAX_STAGES)
    *fewer, whole = sorted(rng.sample(range(1, 3 + _MAX_STAGES), count + 1))
    at_failures = [step for each in run.failures for step in (each.step, each.step + 1) if 0 < step < run.steps]
    ends = {
        rng.choice(at_failures) if at_failures and rng.random() < 0.7 else rng.randrange(1, run.steps) for _ in fewer
    }
    ramp = tuple((end, run.dp * share) for end, share in zip(sorted(ends), fewer, strict=False))
    return replace(run, micro_batches=run.dp * whole, ramp=ramp)


def _with_evaluation(rng: random.Random, run: DrawnRun) -> DrawnRun:
    """Return the run, perhaps with evaluations, and then perhaps with a failure during one."""
    if rng.random() >= _WITH_EVALUATION:
        return run
    failures = tuple(
        failure.model_copy(update={"phase": "evaluation"})
        if failure.phase in ("forward", "backward", "vote", "checkpoint") and rng.random() < 0.5
        else failure
        for failure in run.failures
    )
    every = rng.choice((1, 1, 2, 3) if run.steps <= max(_STEPS) else (1, 5, 10, 20))
    return replace(run, evaluation=(every, rng.randint(1, _MAX_EVALUATED)), failures=failures)


def _with_snapshots(rng: random.Random, run: DrawnRun) -> DrawnRun:
    """Return the run, perhaps with snapshots, and then perhaps with a failure while one is being taken."""
    if rng.random() >= _WITH_SNAPSHOTS:
        return run
    failures = tuple(
        failure.model_copy(update={"phase": "snapshot"})
        if failure.phase in ("forward", "backward") and rng.random() < 0.5
        else failure
        for failure in run.failures
    )
    mode: Literal["copy", "parity"] = rng.choice(("copy", "parity"))
    return replace(run, snapshots=(rng.choice((1, 2, 3, 5)), mode), failures=failures)


def _in_slices(rng: random.Random, run: DrawnRun) -> DrawnRun:
    """Return the run, perhaps with owners of slices, and then perhaps with a failure while parameters are exchanged.

    Without redundancy it has checkpoints, which every loss needs.
    """
    if rng.random() >= _IN_SLICES:
        return run
    owners = rng.choice((1, 2, 2, 2, 3)) if run.checkpoint_every else rng.choice((2, 2, 3))
    failures = tuple(
        failure.model_copy(update={"phase": "gather"})
        if failure.phase in ("sync", "vote", "optimizer") and rng.random() < 0.5
        else failure
        for failure in run.failures
    )
    return replace(run, owners=owners, failures=failures)


def _draw(seed: int, steps: tuple[int, int], *, joins: bool) -> DrawnRun:
    rng = random.Random(seed)
    layouts = [(d, p) for d in range(1, 5) for p in range(1, 5) if 2 <= d * p <= _MAX_WORKERS]
    # The more workers and pipelines, the more can fail, and the more kinds of recovery there are.
    (dp, pp), *_ = rng.choices(layouts, weights=[d * d * p for d, p in layouts])
    policies: list[PolicyName] = [*get_args(PolicyName)]
    # Only this one changes its plan while training goes on.
    policy = rng.choice(policies + ["chameleon"] * (len(policies) if joins else 0))
    checkpoint_every = rng.choice((1, 2, 3) if dp == 1 or policy == _BY_CHECKPOINT else (0, 1, 2, 3))
    run = DrawnRun(
        seed=seed,
        dp=dp,
        pp=pp,
        split_backward=rng.random() < 0.5,
        policy=policy,
        micro_batches=dp * rng.randint(1, 3),
        micro_batch_size=rng.randint(1, 2),
        blocks=rng.randint(max(1, pp - 2), 4),
        dropout=rng.choice((0.0, 0.0, 0.2)),
        steps=rng.randint(*steps),
        checkpoint_every=checkpoint_every,
        failures=(),
        precision="bf16" if random.Random(f"precision {seed}").random() < _IN_BF16 else "fp32",
        respawn=joins and rng.random() < 0.5,
    )
    most = min(_MAX_LOSSES, run.workers - 1, run.workers if checkpoint_every else dp - 1)
    count = max(rng.randint(1, most), rng.randint(1, most))
    run = replace(run, failures=_failures(rng, run, count))
    if not joins or rng.random() < 0.5:
        return run
    told = sorted(rng.sample(range(1, run.steps // 2), rng.randint(1, 2)))
    if not run.respawn:
        told = told[: run.workers - 1 - count]  # one worker is left
    return replace(run, drains=tuple((step, rng.randrange(run.workers)) for step in told))


def _struck(rng: random.Random, run: DrawnRun) -> DrawnRun:
    """Return the run with strikes, and with workers that become slow, or whose gradients or state are spoiled.

    They take the place of its drains, and of a failure if they hit a worker.
    """
    if rng.random() < _ON_HOSTS:
        return _struck_on_hosts(rng, run)
    run = replace(run, drains=(), checkpoint_every=run.checkpoint_every or rng.choice((0, 3, 20)))
    strikes: list[Strike] = []
    failures = list(run.failures)
    steps = sorted(rng.sample(range(run.steps - 5), rng.randint(1, 3)))
    # Signals that end the run come last, because a resumed run injects no failures.
    drawn = sorted((rng.choice(_STRIKES) for _ in steps), key=lambda each: each[1] == "terminate")
    for step, (target, kind) in zip(steps, drawn, strict=True):
        worker = None
        if target == "worker":
            if not failures:
                continue
            worker = failures.pop().worker
        strikes.append(
            Strike(step=step, delay_s=rng.uniform(0, _LONGEST_DELAY_S), target=target, kind=kind, worker=worker)
        )
    run = replace(run, failures=tuple(failures), strikes=tuple(strikes))
    # First, and so of the first process of each worker: the order of failures is that of processes.
    return replace(run, failures=(*(_lasting(rng, run) for _ in range(rng.choice((0, 1, 2)))), *failures))


def _struck_on_hosts(rng: random.Random, run: DrawnRun) -> DrawnRun:
    """Return the run on several hosts, with strikes at links and no other failures; lost workers come back."""
    strikes = [
        Strike(step=step, delay_s=rng.uniform(0, _LONGEST_DELAY_S), target=target, kind=kind)
        for step in sorted(rng.sample(range(3, 60), rng.randint(1, 2)))
        for target, kind in (rng.choice(_STRIKES_ON_HOSTS),)
    ]
    slowed = tuple(Failure(step=2, worker=worker, kind="slow", factor=_SPEED_ON_HOSTS) for worker in range(run.workers))
    return replace(
        run,
        drains=(),
        failures=slowed,
        strikes=tuple(strikes),
        steps=_STEPS_ON_HOSTS,
        checkpoint_every=run.checkpoint_every or 20,
        respawn=True,
    )


def _struck_in_evaluations(rng: random.Random, run: DrawnRun) -> DrawnRun:
    """Return the run with some of its strikes during evaluations, if it has any."""
    if run.evaluation is None:
        return run
    strikes = (
        replace(strike, in_evaluation=True, delay_s=rng.uniform(0, _LONGEST_DELAY_IN_EVALUATION_S))
        if strike.step + run.evaluation[0] < run.steps and rng.random() < 0.5
        else strike
        for strike in run.strikes
    )
    return replace(run, strikes=tuple(strikes))


def _lasting(rng: random.Random, run: DrawnRun) -> Failure:
    """Draw a failure that its worker survives."""
    # State that only one worker has is compared with no other.
    is_compared = run.dp > 1 and run.owners != 1
    kind = rng.choice([each for each in _LASTING if is_compared or each != "corrupt"])
    return Failure(
        step=rng.randrange(1, run.steps - 5),
        worker=rng.randrange(run.workers),
        # A gradient that is spoiled once all have its sum spoils the state.
        phase=rng.choice(("forward", "backward") if kind == "nan" else _IN_A_STEP),
        kind=kind,
        factor=rng.uniform(0.2, 0.9) if kind in SLOWNESS else None,
    )


def _describe(failure: Failure) -> str:
    kind = failure.kind if failure.factor is None else f"{failure.kind} ({failure.factor:.2f})"
    return f"{kind} {failure.worker} in {failure.phase} of {failure.step}"


def _failures(rng: random.Random, run: DrawnRun, count: int) -> tuple[Failure, ...]:
    """Spread `count` failures over a few steps; some happen during the recovery from others of their step."""
    everyone = range(run.workers)
    workers = rng.choices(everyone, k=count) if run.respawn else rng.sample(everyone, count)
    steps = sorted(rng.choice(range(1, run.steps - 1)) for _ in range(rng.randint(1, count)))
    of_step = {step: [worker for i, worker in enumerate(workers) if steps[i % len(steps)] == step] for step in steps}
    return tuple(failure for step in of_step for failure in _failures_of_step(rng, run, step, of_step[step]))


def _failures_of_step(rng: random.Random, run: DrawnRun, step: int, workers: Sequence[int]) -> list[Failure]:
    in_a_step: tuple[FailurePhase, ...] = (*_IN_A_STEP, "checkpoint") if run.checkpoint_every else _IN_A_STEP
    in_a_recovery = [
        phase
        for phase in _IN_A_RECOVERY
        if phase == "recovery" or run.policy in (_SALVAGING if phase in ("rest", "preparation") else _MOVING)
    ]
    at_once = rng.choice(in_a_step)
    failures = []
    for number, worker in enumerate(workers):
        follows = number > 0 and rng.random() < 0.7
        together = number > 0 and rng.random() < 0.5
        phase = rng.choice(in_a_recovery) if follows else at_once if together else rng.choice(in_a_step)
        kind = rng.choice(_KINDS)
        if kind == "hang" and step < _FIRST_HANG:
            kind = "kill"
        failures.append(Failure(step=step, worker=worker, phase=phase, kind=kind))
    return failures
