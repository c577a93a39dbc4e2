"""Does an evaluation take longer than plain forwards of its samples on as many processes?

Runs that evaluate after every step alternate with plain loops, whose processes each run the forwards of a share of the
samples, without gradients. So what else runs on the machine slows both down. Of each, the median counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import multiprocessing

from benchmarks._common import Bar, Report, Spread, new_folder, report_arguments
from chameleon_ft import Session
from chameleon_ft.config import RunConfig
from chameleon_ft.data.samples import SamplesInOrder
from chameleon_ft.job.reference import load_job

_BAR: Final = 1.1
_STEPS: Final = 6
_JOB: Final = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from chameleon_ft import Job

WIDTH = 1024


def samples(count):
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(0, WIDTH, (count,)))


def job():
    return Job(
        layers=[lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())] * 6,
        loss=nn.CrossEntropyLoss(reduction="sum"),
        dataset=samples(512),
        evaluation=samples({samples}),
        metrics={"accuracy": lambda output, targets: (output.argmax(1) == targets).sum()},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
"""
_LAYOUTS: Final = {"2 pipelines": (2, 1), "2 stages": (1, 2)}


def changes_of(dp: int, pp: int) -> dict[str, Any]:
    """Return the settings of a run with this layout."""
    return {
        "workers": dp * pp,
        "parallel": {"dp": dp, "pp": pp},
        "batch": {"micro_batches": 8, "micro_batch_size": 64},
        "checkpoint": {"every": 0},
        "snapshots": {"every": 0},
        "evaluation": {"every": 1},
        "steps": _STEPS,
    }


def evaluations_s(job: Path, out: Path, *, dp: int, pp: int) -> list[float]:
    """Train some steps, and return the seconds of each evaluation but the first."""
    with Session(job, {}, output_dir=str(out), **changes_of(dp, pp)) as run:
        run.wait()
        return [each.seconds for each in run.evaluations][1:]


def _forwards(number: int, job: str, count: int, barrier: Any, times: Any) -> None:
    torch.set_num_threads(1)
    config = RunConfig(job=job)
    found = load_job(job, config)
    assert found.evaluation is not None
    model, size = torch.nn.Sequential(*(factory() for factory in found.layers)).eval(), 64
    samples, share = SamplesInOrder(found.evaluation, 0), len(found.evaluation) // count
    for repeat in range(_STEPS):
        barrier.wait()
        begun_s = time.perf_counter()
        with torch.no_grad():
            for first in range(number * share, (number + 1) * share, size):
                inputs, targets = samples.micro_batch(first, size)
                output = model(inputs)
                float(found.loss(output, targets)), float(found.metrics["accuracy"](output, targets))
        barrier.wait()
        if number == 0 and repeat:
            times.put(time.perf_counter() - begun_s)


def plain_s(job: Path, count: int) -> list[float]:
    """Return the seconds that so many processes take together for the forwards of all samples, but the first time."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(count), context.SimpleQueue()
    processes = [
        context.Process(target=_forwards, args=(number, str(job), count, barrier, times)) for number in range(count)
    ]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    return [times.get() for _ in range(_STEPS - 1)]


def main() -> int:
    """Run the benchmark from the command line."""
    parser = report_arguments(__doc__, name="evaluation")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout, and as many plain loops")
    parser.add_argument("--samples", type=int, default=4096, help="held-out samples")
    arguments = parser.parse_args()
    folder = new_folder(arguments.out)
    job = folder.absolute() / "evaluated_job.py"
    job.write_text(_JOB.replace("{samples}", str(arguments.samples)))
    plain, own = list[float](), {name: list[float]() for name in _LAYOUTS}
    for number in range(arguments.rounds):
        for name, (dp, pp) in _LAYOUTS.items():
            own[name] += evaluations_s(job, folder / f"{name}-{number}".replace(" ", "-"), dp=dp, pp=pp)
            plain += plain_s(job, 2)
    ratios = {name: statistics.median(each) / statistics.median(plain) for name, each in own.items()}
    return Report(
        benchmark="evaluation",
        columns=("on two processes", "seconds"),
        rows=(
            ("plain forwards", Spread(tuple(plain)).shown()),
            *((name, Spread(tuple(each)).shown()) for name, each in own.items()),
        ),
        bars=tuple(
            Bar(name=f"{name}, as a multiple of plain", value=each, limit=_BAR) for name, each in ratios.items()
        ),
        results={"plain_s": plain, "evaluations_s": own},
    ).emit(folder, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
