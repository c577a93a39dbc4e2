"""Training under torchrun: starting it and reading its records."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import run_child, write_config
from benchmarks._stamped_job import read_stamps
from chameleon_ft.config import TrainConfig
from chameleon_ft.data.corpus import prepare_data
from chameleon_ft.storage.files import FaultLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A rank that ends itself by SIGKILL in the middle of the forwards of a step."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The recovery of torchrun from a kill. Times are in seconds."""

    rank: int
    stall_s: float
    """From the kill to the first forward of layer 0 in the new processes."""
    until_commit_s: float
    """From the kill to the update of the step in which the rank was killed."""
    steps_repeated: int


def train(
    config: TrainConfig, *, out: Path, timeout_s: float, checkpoint_every: int = 0, kill: Kill | None = None
) -> None:
    """Train in the new directory `out` to the end. Exits if that fails."""
    out.mkdir(parents=True)
    prepare_data(config, out)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={config.workers}", f"--max-restarts={0 if kill is None else 1}"),
        *("-m", "benchmarks._pipeline_rank", "--config", str(write_config(config, out / "config.toml"))),
        *("--out", str(out), "--checkpoint-every", str(checkpoint_every)),
    ]
    if kill is not None:
        command += ["--kill-rank", str(kill.rank), "--kill-step", str(kill.step)]
    # By default the ranks of all attempts share one store under the same names, and in torch 2.13 gloo then connects to
    # the addresses of the attempt before, for ever.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run_child(command, log=out / "output.log", timeout_s=timeout_s, environment=environment)


def restart_of(out: Path, kill: Kill) -> Restart:
    """Return the recovery of the run in `out` from its only kill."""
    fault = FaultLog(out / "faults.jsonl").last(kill.rank)
    if fault is None:
        raise SystemExit(f"{out}: the kill was not recorded")
    failed_at = float(fault["time"])
    stamps = read_stamps(out)
    old = {stamp.process for stamp in stamps if stamp.time < failed_at}
    new = [stamp for stamp in stamps if stamp.process not in old]
    first_update = min(stamp.step for stamp in new if stamp.step is not None)
    return Restart(
        rank=kill.rank,
        stall_s=next(stamp.time for stamp in new if stamp.event == "forward") - failed_at,
        until_commit_s=next(stamp.time for stamp in new if stamp.step == kill.step) - failed_at,
        steps_repeated=kill.step - first_update,
    )


def losses_of(out: Path, config: TrainConfig) -> list[float]:
    """Return the mean loss of each step."""
    sums: dict[int, float] = defaultdict(float)
    for file in out.glob("rank-*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            sums[record["step"]] += record["loss_sum"]
    terms = config.batch.samples * config.model.seq_len
    return [sums[step] / terms for step in sorted(sums)]
