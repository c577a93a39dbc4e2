"""One rank of the training by torch alone: Schedule1F1B, an all-reduce of the gradients, checkpoints, AdamW.

Started by torchrun. Job, layout, micro-batches and sample order are those of a Chameleon run of the configuration, so
the losses are equal. It does only what the training needs: gradients are in one flat buffer, the norm for clipping is
summed over the stages of one pipeline only, and the loss is written where it is computed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks._plain_ranks import attach_gradients, flat_gradient, rank_config
from chameleon_ft.config import TrainConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.models.build import build_layer
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.storage.files import FaultLog

_CPU = torch.device("cpu")
_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class _Stage(nn.Module):
    """The layers of one stage, named by their number in the whole model, so that a checkpoint's names are unique."""

    def __init__(self, job: Job, layers: range, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): build_layer(job, layer, seed) for layer in layers})

    def forward(self, boundary: Tensor) -> Tensor:
        for layer in self.layers.values():
            boundary = layer(boundary)
        return boundary


class _Rank:
    """The training state of a rank."""

    def __init__(self, config: TrainConfig, out: Path) -> None:
        parallel, self._batch = config.parallel, config.batch
        mesh = init_device_mesh("cpu", (parallel.dp, parallel.pp), mesh_dim_names=("dp", "pp"))
        self._config = config
        self._job = load_job(config.job, config)
        self._pipeline, stage = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        self._first, self._last = stage == 0, stage == parallel.pp - 1
        self._dp, self._pp = mesh.get_group("dp"), mesh.get_group("pp")
        self._module = _Stage(self._job, _layers(config, self._job, dist.get_rank()), config.seed)
        parameters = list(self._module.parameters())
        self._gradient = flat_gradient(parameters)
        self._optimizer = self._job.optimizer(parameters)
        self._order = SampleOrder(len(self._job.dataset), config.seed)
        self._schedule = Schedule1F1B(
            PipelineStage(self._module, stage, parallel.pp, _CPU, group=self._pp),
            n_microbatches=self._batch.micro_batches // parallel.dp,
            loss_fn=self._job.loss,
            scale_grads=False,
        )
        self._checkpoints = out / "checkpoints"

    def run_step(self, step: int) -> float:
        """Run one step; return the sum of the loss over this pipeline's micro-batches, 0 unless on its last stage."""
        self._gradient.zero_()
        inputs, targets = self._samples(step)
        losses: list[Tensor] = []
        self._schedule.step(
            *([inputs] if self._first else []),
            target=targets if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        dist.all_reduce(self._gradient, group=self._dp)
        self._update(step, terms=self._terms(targets))
        return float(torch.stack(losses).sum()) if losses else 0.0

    def save(self, step: int) -> None:
        """Write a checkpoint from which training resumes with `step`."""
        save(self._state(), checkpoint_id=self._checkpoints / str(step))

    def restore(self) -> int:
        """Load the newest complete checkpoint, if there is one, and return the step to resume with."""
        # The metadata is written last.
        steps = [int(file.parent.name) for file in self._checkpoints.glob("*/.metadata")]
        if not steps:
            return 0
        state = self._state()
        load(state, checkpoint_id=self._checkpoints / str(max(steps)))
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        return max(steps)

    def fail_in_forward(self) -> None:
        """End this process by SIGKILL in the middle of the forwards of the next step."""
        left = [self._batch.micro_batches // self._config.parallel.dp // 2]

        def hook(*_: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                if self._config.output_dir is not None:
                    log = FaultLog(self._config.output_dir / "faults.jsonl")
                    log.append(worker=dist.get_rank(), kind="kill", phase="forward", step=None)
                os.kill(os.getpid(), signal.SIGKILL)

        self._module.register_forward_pre_hook(hook)

    def _samples(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of this pipeline's micro-batches, concatenated."""
        share = self._batch.samples // self._config.parallel.dp
        return load_micro_batch(
            self._job.dataset, self._order, step * self._batch.samples + self._pipeline * share, share
        )

    def _terms(self, targets: Tensor) -> float:
        return float(self._job.loss_terms(targets)) * self._config.parallel.dp

    def _update(self, step: int, *, terms: float) -> None:
        scale = 1.0 / terms
        if self._job.clip_norm is not None:
            square_sum = torch.linalg.vector_norm(self._gradient, dtype=torch.float64) ** 2
            dist.all_reduce(square_sum, group=self._pp)
            norm = math.sqrt(float(square_sum)) / terms
            scale *= min(1.0, self._job.clip_norm / (norm + _CLIP_EPSILON))
        self._gradient.mul_(scale)
        if self._job.learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._job.learning_rate(step)
        self._optimizer.step()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(
            self._module, self._optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        # Getting the optimizer's state creates it if missing, and clears the gradients.
        attach_gradients(self._gradient, list(self._module.parameters()))
        return {"model": model, "optimizer": optimizer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0 for none")
    parser.add_argument("--kill-rank", type=int, help="rank that ends itself, once, by SIGKILL")
    parser.add_argument("--kill-step", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = rank_config(arguments.config, out=arguments.out)
    rank = _Rank(config, arguments.out)
    first_step = rank.restore()
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    with (arguments.out / f"rank-{dist.get_rank()}.jsonl").open("a", encoding="utf-8", buffering=1) as records:
        for step in range(first_step, config.steps):
            if first_life and arguments.kill_rank == dist.get_rank() and step == arguments.kill_step:
                rank.fail_in_forward()
            start = time.perf_counter()
            loss_sum = rank.run_step(step)
            step_s = time.perf_counter() - start
            records.write(json.dumps({"step": step, "loss_sum": loss_sum, "step_s": step_s}) + "\n")
            if arguments.checkpoint_every and (step + 1) % arguments.checkpoint_every == 0:
                rank.save(step + 1)
    dist.destroy_process_group()


def _layers(config: TrainConfig, job: Job, rank: int) -> range:
    plan = data_pipeline_plan(
        layer_costs=job.relative_costs,
        dp=config.parallel.dp,
        pp=config.parallel.pp,
        micro_batches=config.batch.micro_batches,
    )
    (layers,) = plan.placement.ranges_of(rank)
    return range(layers.start, layers.stop)


if __name__ == "__main__":
    main()
