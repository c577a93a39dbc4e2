"""Is silent corruption found, and what does looking for it cost?

Corruption: one run of two workers that hold all layers. In drawn steps a random bit of a random tensor of the
parameters or of the optimizer's state of a drawn worker flips. Each time, all return to a checkpoint from before, and
train on. A flip counts as found if the first check after it finds it: of the state after the next multiple of
--every updates, or sooner, because a loss or gradient that is not finite has the state compared at once.

Cost: one run of two workers with so much state each, of whose steps every second one compares it. The share is the
difference of the medians of both kinds, over ten steps.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks._chameleon import event_lines
from benchmarks._common import Bar, Report, arguments, base_config, new_folder, run_child, write_config
from chameleon_ft.config import Batch, Checkpoint, Failure, Health, LlamaConfig, Parallel, Recovery, Timelines
from chameleon_ft.storage.files import RunDirectory

_APART: Final = 3  # checks between two flips, so that holders agree, and a checkpoint is written
_INTERVAL: Final = 10  # steps between two checks, for the cost
_LIMIT: Final = 0.005
_WARM_UP: Final = 4


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    found = _flips(given, folder) if given.flips else None
    cost = _cost(given, folder) if given.cost_steps else None
    return _report(found, cost).emit(folder, as_json=given.json)


def _flips(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train through drawn flips; return how many of them were found in time."""
    rng = random.Random(given.seed)
    every = given.every
    flips = [
        Failure(step=every * _APART * number + rng.randrange(every), worker=rng.randrange(2), kind="corrupt")
        for number in range(1, given.flips + 1)
    ]
    config = base_config(
        given.config,
        stamped=False,
        workers=2,
        steps=every * _APART * (given.flips + 2),
        parallel=Parallel(dp=2, pp=1, optimizer_redundancy="all"),
        batch=Batch(micro_batches=2, micro_batch_size=1),
        model=LlamaConfig(dim=32, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32),
        checkpoint=Checkpoint(every=every, keep=1),
        timelines=Timelines(every=0),
        recovery=Recovery(policy="reroute", respawn=True, respawn_delay_s=0.0, max_respawns=given.flips),
        health=Health(check_every=every),
        failures=tuple(flips),
    )
    run = _train(given, folder, "flips", config)
    events = event_lines(run)
    differed = [event for event in events if event["event"] == "state_differs"]
    logs = "".join(run.logs.joinpath(f"worker-{worker}.log").read_text() for worker in range(2))
    injected = len(re.findall(r"a fault was injected: bit \d", logs))
    in_time = 0
    for flip in flips:
        first_check = (flip.step // every + 1) * every
        in_time += any(flip.step <= event["step"] <= first_check for event in differed)
    return {
        "flips": injected,
        "found": in_time,
        "others": len(differed) - in_time,
        "losses": [record.cause for record in run.failures()],
        "bad_steps": sum(event["event"] == "bad_step" for event in events),
    }


def _cost(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare steps with and without a check, which take turns."""
    config = base_config(
        given.config,
        stamped=False,
        workers=2,
        steps=given.cost_steps,
        parallel=Parallel(dp=2, pp=1, optimizer_redundancy="all"),
        batch=Batch(micro_batches=given.micro_batches, micro_batch_size=1),
        model=LlamaConfig(dim=given.dim, num_layers=given.layers, num_heads=8, num_kv_heads=8, ffn_dim=4 * given.dim),
        checkpoint=Checkpoint(every=0),
        timelines=Timelines(every=0),
        health=Health(check_every=2),
    )
    run = _train(given, folder, "cost", config)
    rows = [row for row in run.steps() if row.step >= _WARM_UP and row.step < config.steps - 1]
    with_check = [row.step_s for row in rows if row.step % 2 == 0]
    without = [row.step_s for row in rows if row.step % 2 == 1]
    params = config.model.num_layers * (4 + 12) * given.dim**2 + 2 * config.model.vocab_size * given.dim
    share = (statistics.median(with_check) - statistics.median(without)) / (_INTERVAL * statistics.median(without))
    return {
        "state_bytes": 12 * params,  # parameters and two moments, in float32
        "with_s": with_check,
        "without_s": without,
        "share": share,
    }


def _train(given: argparse.Namespace, folder: Path, name: str, config: Any) -> RunDirectory:
    run, file = RunDirectory(folder / name), write_config(config, folder / f"{name}.toml")
    command = [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run.path)]
    run_child(command, log=folder / f"{name}.log", timeout_s=given.timeout)
    return run


def _report(found: dict[str, Any] | None, cost: dict[str, Any] | None) -> Report:
    rows, bars = [], []
    if found is not None:
        rows.append(("flipped bits found at the next check", f"{found['found']} of {found['flips']}"))
        rows.append(("other disagreements", str(found["others"])))
        missed = found["flips"] - found["found"]
        bars.append(Bar(name="flipped bits that were missed", value=float(missed), limit=0.0))
    if cost is not None:
        rows.append(("state of a worker", f"{cost['state_bytes'] / 1e6:.0f} MB"))
        for name, key in (("step with a check", "with_s"), ("step without", "without_s")):
            rows.append((name, f"{statistics.median(cost[key]):.3f} s"))
        rows.append((f"cost of a check every {_INTERVAL} steps", f"{cost['share']:.3%} of a step"))
        bars.append(Bar(name="cost as a share of a step", value=cost["share"], limit=_LIMIT))
    return Report(
        benchmark="corruption",
        columns=("", "result"),
        rows=tuple(rows),
        bars=tuple(bars),
        results={"flips": found, "cost": cost},
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="corruption")
    parser.add_argument("--flips", type=int, default=100, help="flipped bits; 0: only the cost")
    parser.add_argument("--every", type=int, default=4, help="steps between two checks, for the flips")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost-steps", type=int, default=44, help="steps that measure the cost; 0: only the flips")
    parser.add_argument("--dim", type=int, default=512, help="width of the model that measures the cost")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
