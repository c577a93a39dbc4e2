"""One replica under torchft: the whole model in one process, with its share of the micro-batches.

Runs in the environment that torchft is installed in. The gradients are in one flat buffer and are averaged by the
manager's fault tolerant all-reduce; the update follows when the manager commits. The share of a lost replica is lost
with it, by the design of torchft: the next steps have fewer samples.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo

from benchmarks._plain_ranks import flat_gradient, rank_config
from chameleon_ft.config import TrainConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job.reference import load_job
from chameleon_ft.models.build import build_layer
from chameleon_ft.storage.files import FaultLog

_HOST = "localhost"


class _Replica:
    """The training state of a replica."""

    def __init__(self, config: TrainConfig, out: Path, *, number: int, of: int, times: dict[str, timedelta]) -> None:
        self._config, self._out, self._number = config, out, number
        self._job = load_job(config.job, config)
        layers = [build_layer(self._job, layer, config.seed) for layer in range(self._job.num_layers)]
        self._model = nn.Sequential(*layers)
        self._parameters = list(self._model.parameters())
        self._optimizer = self._job.optimizer(self._parameters)
        self._order = SampleOrder(len(self._job.dataset), config.seed)
        self._share = config.batch.micro_batches // of
        self._gradient = flat_gradient(self._parameters)
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(**({"timeout": times["timeout"]} if "timeout" in times else {})),
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr=_HOST,
            store_port=self._store.port,
            hostname=_HOST,
            replica_id=f"replica_{number}",
            init_sync=False,  # all begin with equal weights
            **times,
        )

    def attempt(self, *, fail: bool = False) -> bool:
        """Attempt the next step; return whether it was committed. With `fail`, end by SIGKILL in its middle."""
        step = self.manager.current_step()
        size = self._config.batch.micro_batch_size
        first = step * self._config.batch.samples
        terms = 0.0
        self.manager.start_quorum()
        self._gradient.zero_()
        for number in range(self._share):
            if fail and number == self._share // 2:
                FaultLog(self._out / "faults.jsonl").append(
                    worker=self._number, kind="kill", phase="forward", step=step
                )
                os.kill(os.getpid(), signal.SIGKILL)
            start = first + (self._number * self._share + number) * size
            inputs, targets = load_micro_batch(self._job.dataset, self._order, start, size)
            self._job.loss(self._model(inputs), targets).backward()
            terms += float(self._job.loss_terms(targets))
        self._gradient.div_(terms)
        self.manager.allreduce(self._gradient).wait()
        if not self.manager.should_commit():
            return False
        if self._job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._job.clip_norm)
        for group in self._optimizer.param_groups:
            if self._job.learning_rate is not None:
                group["lr"] = self._job.learning_rate(step)
        self._optimizer.step()
        return True

    def _save(self) -> dict[str, object]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load(self, state: dict[str, object]) -> None:
        self._model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self._optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--heartbeat-ms", type=int, help="interval of the heartbeats; by default torchft's own")
    parser.add_argument("--timeout-ms", type=int, help="longest time of an operation; by default torchft's own")
    parser.add_argument("--kill-step", type=int, help="step in which this replica ends itself by SIGKILL")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = rank_config(arguments.config, out=arguments.out)
    times = {"heartbeat_interval": arguments.heartbeat_ms, "timeout": arguments.timeout_ms}
    replica = _Replica(
        config,
        arguments.out,
        number=arguments.replica,
        of=arguments.replicas,
        times={name: timedelta(milliseconds=value) for name, value in times.items() if value is not None},
    )
    _wait_for_all(arguments.out, number=arguments.replica, of=arguments.replicas)
    with (arguments.out / f"replica-{arguments.replica}.jsonl").open("a", encoding="utf-8", buffering=1) as records:
        while (step := replica.manager.current_step()) < config.steps:
            committed = replica.attempt(fail=arguments.kill_step == step)
            participants = replica.manager.num_participants()
            record = {"time": time.time(), "step": step, "committed": committed, "participants": participants}
            records.write(json.dumps(record) + "\n")
    # Its threads would keep the process alive.
    os._exit(0)


def _wait_for_all(out: Path, *, number: int, of: int) -> None:
    """Wait until every replica sends heartbeats, so that the first quorum has all of them."""
    (out / f"replica-{number}.ready").touch()
    while len(list(out.glob("replica-*.ready"))) < of:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
