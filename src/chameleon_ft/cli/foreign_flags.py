"""Flags that other training tools have, and what there is instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from chameleon_ft.errors import ConfigError

_STEPS: Final = "training is counted in --steps, and one epoch is the samples over --batch.micro-batches times "
_HERE: Final = {
    "epochs num-epochs num-train-epochs max-epochs": f"{_STEPS}--batch.micro-batch-size",
    "max-steps train-iters max-iters iterations": "take --steps",
    "fp16 half amp mixed-precision": "take --precision bf16, whose range needs no loss scaling; there is no fp16",
    "bf16": "take --precision bf16",
    "precision=fp16 precision=16 precision=float16": "take bf16, whose range needs no loss scaling; there is no fp16",
    "from-step start-step skip-steps resume-step": "--resume RUN continues from the newest checkpoint; to begin with "
    "an earlier one, remove those after it from a copy of the run",
    "resume-from resume-from-checkpoint load ckpt checkpoint-path": "take --resume RUN, the directory of a run",
    "save save-dir out out-dir output output-directory": "take --output-dir",
    "save-every save-steps save-interval checkpoint-every ckpt-every": "take --checkpoint.every",
    "batch-size global-batch-size per-device-train-batch-size micro-batch-size": "a step has --batch.micro-batches of "
    "--batch.micro-batch-size samples each, over all workers",
    "gradient-accumulation-steps accumulate-grad-batches grad-accum": "take --batch.micro-batches, over all workers",
    "tp tensor-parallel tensor-model-parallel-size fsdp zero zero-stage": "a worker is one device; there are "
    "--parallel.dp, --parallel.pp and --parallel.optimizer-redundancy",
    "pp pipeline-parallel pipeline-model-parallel-size": "take --parallel.pp",
    "dp data-parallel": "take --parallel.dp",
    "nproc-per-node nproc num-gpus gpus world-size": "take --workers",
    "restarts max-restarts": "a lost worker ends nothing; --recovery.respawn starts it again",
}
_OF_LLAMA: Final = {
    "lr learning-rate": "take --optimizer.lr",
    "schedule lr-schedule lr-scheduler lr-scheduler-type optimizer.schedule": "the rate rises for "
    "--optimizer.warmup-steps and falls by a cosine to --optimizer.min-lr; a job of your own may have any other, by "
    "Job(learning_rate=...)",
    "warmup warmup-steps": "take --optimizer.warmup-steps",
    "weight-decay wd": "take --optimizer.weight-decay",
    "grad-clip clip-grad max-grad-norm gradient-clip-val": "take --optimizer.clip-norm",
    "seq-length max-seq-len sequence-length block-size": "take --model.seq-len",
}
_OF_JOB: Final = "it is set in the job: by `optimizer`, `learning_rate`, `clip_norm` or `dataset` of chameleon_ft.Job"


def refuse_foreign_flags(arguments: Iterable[str], *, own_job: bool) -> None:
    """Raise ConfigError, with what to give instead, for a flag that other tools have.

    `own_job`: whether the command trains a job of the user, whose optimizer is no part of the configuration.
    """
    texts = {
        name: text
        for table, replaced in ((_HERE, ""), (_OF_LLAMA, _OF_JOB if own_job else ""))
        for names, own in table.items()
        for name in names.split()
        for text in (replaced or own,)
    }
    given = list(arguments)
    for argument, value in zip(given, (*given[1:], ""), strict=False):
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        for known in (name, argument.removeprefix("--"), f"{name}={value}"):
            if argument.startswith("--") and known in texts:
                raise ConfigError(f"--{known.replace('=', ' ')}: {texts[known]}")
