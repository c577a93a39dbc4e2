"""The plain loop that drawn runs are compared with: that of `chameleon verify`, which also evaluates samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from chameleon_ft.config import RunConfig
from chameleon_ft.data import read_sample
from chameleon_ft.job.job import Job
from chameleon_ft.models.precision import as_loss_input
from chameleon_ft.verify.plain_loop import PlainLoop, PlainStep


@dataclass
class Repeated:
    """Results of a plain loop.

    Attributes:
        steps: by the number of the step.
        evaluations: loss and metrics by name, by the number of the step before.
    """

    steps: dict[int, PlainStep] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)

    def loop(self, config: RunConfig, job: Job) -> PlainLoop:
        """Return a loop whose results are kept here."""
        return _Loop(config, job, self)


class _Loop(PlainLoop):
    def __init__(self, config: RunConfig, job: Job, results: Repeated) -> None:
        super().__init__(config, job)
        self._results = results

    def run_step(self, step: int, scheduling: Job) -> PlainStep:
        made = self._results.steps[step] = super().run_step(step, scheduling)
        every = self._config.evaluation.every
        if every and (step + 1) % every == 0:
            model = nn.ModuleList(self._layers).eval()
            with torch.no_grad():
                self._results.evaluations[step] = self._evaluate()
            model.train()
        return made

    def _evaluate(self) -> dict[str, float]:
        """Evaluate one sample after the other."""
        job, config = self._job, self._config
        assert job.evaluation is not None
        sums, terms = dict.fromkeys(("loss", *job.metrics), 0.0), 0.0
        for index in range(min(len(job.evaluation), config.evaluation.samples or len(job.evaluation))):
            sample = read_sample(job.evaluation, index, seed=config.seed)
            inputs, targets = (each[None].to(self._device) for each in sample)
            output = as_loss_input(job, self._forward(inputs, targets, 0, 0)[0])
            for name, function in {"loss": job.loss, **job.metrics}.items():
                sums[name] += float(function(output, targets))
            terms += float(job.loss_terms(targets))
        return {name: total / terms for name, total in sums.items()}
