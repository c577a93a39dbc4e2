"""How much of a step passes while a device waits for launches?

A worker waits for the device after each operation, so that it knows when that has ended; the device is then idle until
the first kernel of the next operation begins. The pretended accelerator of tests/pretended trains here, whose kernels
begin --latency-s after they are launched, or at once; runs of both kinds alternate. A kernel that is launched while
another runs hides its latency, so the difference of two steps counts the latencies that are not hidden. The latency is
much longer than that of a real device, or the difference would drown in noise; the share of a step is that for
--real-latency-s, and for operations of --operation-s.
"""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import _chameleon
from benchmarks._common import Bar, Report, Spread, add_most_others, arguments, base_config, new_folder
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import Batch, Parallel, TrainConfig
from tests.backends import use_backend

_BACKEND = "pretended-nccl"
_LARGEST_SHARE = 0.02


def main() -> int:
    given = _arguments()
    use_backend(_BACKEND)
    neighbours, folder = Neighbours(most=given.max_others), new_folder(given.out)
    config = base_config(
        given.config,
        stamped=False,
        workers=1,
        steps=given.warmup + given.steps,
        device="npu",
        backend=_BACKEND,
        share_devices=True,
        parallel=Parallel(dp=1, pp=1, optimizer_redundancy="all"),
        batch=Batch(micro_batches=given.micro_batches, micro_batch_size=1),
    )
    found: dict[float, list[float]] = {0.0: [], given.latency_s: []}
    for number in range(given.rounds):
        for latency_s in list(found)[:: 1 if number % 2 == 0 else -1]:
            progress(f"round {number + 1} of {given.rounds}: kernels begin after {latency_s:g} s")
            measure = partial(_step_s, config, given, latency_s)
            found[latency_s].append(neighbours.undisturbed(measure, folder / f"{latency_s:g}-{number}"))
    at_once, late = (Spread(tuple(each)) for each in found.values())
    exposed = (late.median - at_once.median) / given.latency_s / (2 * given.micro_batches)
    share = exposed * given.real_latency_s / given.operation_s
    return Report(
        benchmark="launches",
        columns=("", "median (least to largest)"),
        rows=(
            ("step, kernels begin at once, s", at_once.shown()),
            (f"step, kernels begin after {given.latency_s:g} s, s", late.shown()),
            ("latencies that each operation waits for", f"{exposed:.2f}"),
        ),
        bars=(
            Bar(
                name=f"share of an operation of {given.operation_s:g} s, with {given.real_latency_s:g} s each",
                value=share,
                limit=_LARGEST_SHARE,
            ),
        ),
        results={"step_s": {name: each.to_json() for name, each in (("at once", at_once), ("late", late))}},
        neighbours=neighbours,
    ).emit(folder, as_json=given.json)


def _step_s(config: TrainConfig, given: Namespace, latency_s: float, path: Path) -> float:
    os.environ["PRETENDED_NPU_LAUNCH_S"] = str(latency_s)
    run = _chameleon.train(config, run=path, timeout_s=given.timeout)
    return median(row.step_s for row in run.steps()[given.warmup :])


def _arguments() -> Namespace:
    parser = arguments(__doc__, name="launches")
    add_most_others(parser)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run that are timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them that are not")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--latency-s", type=float, default=0.01, help="of the pretended accelerator")
    parser.add_argument("--real-latency-s", type=float, default=2e-5, help="of a launch to an idle GPU")
    parser.add_argument(
        "--operation-s", type=float, default=3.3e-3, help="the shortest: a forward of a single block in docs/gpu.md"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
