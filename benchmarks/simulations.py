"""Is `chameleon` first wherever it is simulated? Drawn models, clusters and failures, all policies on each.

Every simulation is drawn from --seed and its number: one of the presets of 7B to 72B, 16 to 3,200 workers, 1 to 8 to a
host, a generator of failures or a measured trace (--traces), and 0.1 to 30 times its rate with repairs as much faster.
A trace ends after --incidents changes, fewer if decisions are those of the runtime itself (32 workers or fewer).

The bars: in each simulation `chameleon` is first, or within 0.5% of the first, and trains 0.90 of the oracle's samples
if any policy does. Smaller clusters come first, and each simulation is printed when it is done.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks._common import Bar, Report, new_folder, report_arguments
from benchmarks._neighbours import progress
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import DEVICES, MODELS, device, model_shape
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import PlanError
from chameleon_ft.simulate import MODELS as GENERATORS
from chameleon_ft.simulate import Trace, generate_trace, load_trace, load_trace_for
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.results import Results
from chameleon_ft.simulate.run import SIMULATED_POLICIES, simulate
from chameleon_ft.workload import Workload

_WORKERS: Final = (16, 3_200)
_RATES: Final = (0.1, 30.0)
_MODELS: Final = sorted(set(MODELS) - {"llama3-405b"})
_NEAR: Final = 0.995
_OF_ORACLE: Final = 0.9
_DAY_S: Final = 86_400.0
_TRACE_DAYS: Final = 365.0
# The largest share of the memory of all workers for the state of the model.
_FULL: Final = 0.7
_EXACT_SHARE: Final = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSimulation:
    """A simulation; `failures` is the name of a generator, or the path of a trace."""

    number: int
    model: str
    device: str
    workers: int
    workers_per_host: int
    failures: str
    rate: float
    seed: int

    def __str__(self) -> str:
        cluster = f"{self.workers} x {self.device}, {self.workers_per_host} to a host"
        return f"{self.number}: {self.model} on {cluster}, {Path(self.failures).stem}, rate {self.rate:.2g}"

    @property
    def workload(self) -> Workload:
        """The workload of four micro-batches of one sequence for each worker."""
        return derive_workload(
            model_shape(self.model), device(self.device), micro_batch_size=1, micro_batches=4 * self.workers
        )


def draw(seed: int, number: int, traces: Sequence[Path] = ()) -> DrawnSimulation:
    """Draw a simulation whose model fits; equal arguments give equal simulations, on any machine."""
    generator = random.Random(f"simulation {seed} {number}")
    hosts_of = {str(path): load_trace(path).hosts for path in traces}
    while True:
        per_host = generator.choice((1, 2, 4, 8))
        hosts = max(2, round(_log_uniform(generator, _WORKERS) / per_host))
        drawn = DrawnSimulation(
            number=number,
            model=generator.choice(_MODELS),
            device=generator.choice(sorted(DEVICES)),
            workers=hosts * per_host,
            workers_per_host=per_host,
            failures=generator.choice((*GENERATORS, *hosts_of)),
            rate=round(_log_uniform(generator, _RATES), 2),
            seed=generator.randrange(1_000_000),
        )
        within = _WORKERS[0] <= drawn.workers <= _WORKERS[1] and hosts <= hosts_of.get(drawn.failures, hosts)
        memory_bytes = drawn.workers * device(drawn.device).memory_bytes
        if within and sum(map(state_bytes, drawn.workload.layers)) <= _FULL * memory_bytes:
            return drawn


def trace_of(drawn: DrawnSimulation, incidents: int) -> Trace:
    """Return the failures of a simulation, up to a number of changes."""
    hosts, per_host = drawn.workers // drawn.workers_per_host, drawn.workers_per_host
    if drawn.failures in GENERATORS:
        # Spot instances change about a thousand times as often as other hosts fail.
        days = min(_TRACE_DAYS, incidents / hosts * (1 if drawn.failures == "spot" else 1_000))
        model, duration_s = GENERATORS[drawn.failures], days * _DAY_S
        trace = generate_trace(model, hosts=hosts, workers_per_host=per_host, duration_s=duration_s, seed=drawn.seed)
    else:
        trace = load_trace_for(Path(drawn.failures), hosts=hosts, workers_per_host=per_host)
    times = [time_s for time_s, _ in trace.groups()]
    if len(times) > incidents:
        trace = trace.limited(math.nextafter(times[incidents], 0))
    return trace.compressed(drawn.rate)


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    numbers = range(given.draws) if given.draw is None else [given.draw]
    every = (draw(given.seed, number, given.traces) for number in numbers)
    drawn = sorted((each for each in every if each.workers >= given.min_workers), key=lambda each: each.workers)
    rows, raw = [], []
    for each in drawn:
        incidents = round(given.incidents * (_EXACT_SHARE if each.workers <= Parameters().exact_up_to else 1))
        start = time.process_time()
        try:
            results = _simulated(each, incidents)
        except PlanError as error:
            rows.append((str(each), "", "", str(error)))
            continue
        finding = _Finding.of(results)
        rows.append((str(each), f"{finding.by_first:.4f}", f"{finding.of_oracle:.4f}", finding.describe(results)))
        raw.append({**asdict(each), **asdict(finding), "shares": _shares(results)})
        progress(f"{' | '.join(rows[-1])} | {time.process_time() - start:.0f} s")
    return Report(
        benchmark="simulations",
        columns=("simulation", "chameleon by the best other", "of the oracle", "shares of the oracle"),
        rows=tuple(rows),
        bars=(
            Bar(name="first or within 0.5%", value=sum(each["first"] for each in raw), limit=len(raw), at_least=True),
            Bar(name="0.90 of the oracle", value=sum(each["near"] for each in raw), limit=len(raw), at_least=True),
        ),
        results={"seed": given.seed, "simulations": raw},
    ).emit(folder, as_json=given.json)


def _simulated(drawn: DrawnSimulation, incidents: int) -> Results:
    cluster = device(drawn.device).cluster(drawn.workers, workers_per_host=drawn.workers_per_host)
    return simulate(trace_of(drawn, incidents), drawn.workload, cluster, SIMULATED_POLICIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """Samples of `chameleon` relative to the best other policy and to the oracle, and which bars hold."""

    by_first: float
    of_oracle: float
    first: bool
    near: bool

    @classmethod
    def of(cls, results: Results) -> _Finding:
        shares = _shares(results)
        own = shares.pop("chameleon")
        best = max(shares.values())
        by_first = own / best if best else math.inf
        return cls(
            by_first=by_first,
            of_oracle=own,
            first=by_first >= _NEAR,
            near=own >= _OF_ORACLE or best < _OF_ORACLE,
        )

    def describe(self, results: Results) -> str:
        shares = sorted(_shares(results).items(), key=lambda item: -item[1])
        missed = "" if self.first and self.near else "MISSED "
        days = results.duration_s / _DAY_S
        return f"{missed}{days:.3g} days: " + ", ".join(f"{name} {share:.4f}" for name, share in shares)


def _shares(results: Results) -> dict[str, float]:
    return {name: result.share_of_oracle for name, result in results.policies.items() if name != "oracle"}


def _log_uniform(generator: random.Random, limits: tuple[float, float]) -> float:
    return math.exp(generator.uniform(*map(math.log, limits)))


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="simulations")
    parser.add_argument("--draws", type=int, default=60, help="how many simulations")
    parser.add_argument("--draw", type=int, help="only the one with this number")
    parser.add_argument("--min-workers", type=int, default=0, help="leave out those of fewer workers")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    parser.add_argument("--incidents", type=int, default=100, help="changes of a trace after which it ends")
    parser.add_argument("--traces", type=Path, nargs="*", default=(), help="measured traces to draw from too")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
