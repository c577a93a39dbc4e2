"""Runs that begin with the weights of a model of transformers, and whose weights go back there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional

from chameleon_ft import ConfigError, Job, load_checkpoint
from chameleon_ft.cli import main
from chameleon_ft.config import Batch, Checkpoint, Failure, LlamaConfig, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.errors import CheckpointError
from chameleon_ft.models.build import tensor_bytes
from chameleon_ft.models.llama import llama_layers, llama_weights, next_token_loss, tied_parameters
from chameleon_ft.session.export import STATE_DICT, export_weights
from chameleon_ft.weights import INDEX, SINGLE
from chameleon_ft.worker.checkpoint import read_layer
from tests.golden import refused
from tests.harness import PATIENT, Ended, assert_as_the_plain_loop, fails, resume_here, train_here
from tests.models.transformers_llama import names_of, transformers_llama

MODEL = LlamaConfig(
    vocab_size=64, dim=32, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=48, seq_len=16, tie_embeddings=True
)


class Same:
    """One sample under every number, so that a step does not depend on those before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(17) * 7 % 64
        return ids[:-1], ids[1:]


def job(weights: str = "") -> Job:
    """The job that the runs of this file name."""
    return Job(
        layers=llama_layers(MODEL),
        loss=next_token_loss,
        loss_terms=Tensor.numel,
        dataset=Same(),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        tied=tied_parameters(MODEL),
        weights=llama_weights(MODEL, weights),
    )


def adapted_job(weights: str = "") -> Job:
    """The job with adapters in the last block alone, so that the first stage has nothing to train."""
    made = replace(job(weights), optimizer=partial(torch.optim.AdamW, lr=0.05))
    targets = ["q_proj", "v_proj", "down_proj"]
    return made.with_adapters(LoraConfig(r=2, lora_alpha=8, target_modules=targets, layers_to_transform=[2]))


def train(
    weights: Path,
    out: Path,
    *,
    steps: int,
    function: str = "job",
    precision: Literal["fp32", "bf16"] = "bf16",
    failures: tuple[Failure, ...] = (),
    every: int = 3,
    **changes: Any,
) -> Ended:
    config = RunConfig(
        job=f"{__file__}:{function}",
        job_arguments={"weights": str(weights)},
        workers=4,
        parallel=Parallel(dp=2, pp=2, optimizer_redundancy=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        steps=steps,
        precision=precision,
        checkpoint=Checkpoint(every=every, keep=3),
        recovery=Recovery(policy="reroute"),
        timeouts=PATIENT,
        failures=failures,
        **changes,
    )
    ended = train_here(config, out)
    assert ended.code == 0, ended.summary["reason"]
    return ended


@pytest.mark.multiprocess
def test_weights_come_from_transformers_and_go_back_as_they_were_trained(tmp_path: Path) -> None:
    """Through the loss of a worker, with slices of float32 masters on the others; a run goes on from an export."""
    transformers_llama(MODEL).save_pretrained(tmp_path / "model")
    ended = train(tmp_path / "model", tmp_path / "run", steps=5, failures=(fails(1, step=2),))
    assert ended.lost == {1}
    assert_as_the_plain_loop(ended)

    export_weights(ended.run, tmp_path / "export", step=3, file_bytes=1 << 13)
    assert (tmp_path / "export" / INDEX).is_file()
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tmp_path / "export")
    theirs, trained = model.state_dict(), load_checkpoint(ended.run.path, 3)
    named = {f"{n}.{ours}": name for n, names in enumerate(names_of(MODEL)) for ours, name in names.items()}
    assert trained.keys() == named.keys()
    assert all(torch.equal(trained[ours], theirs[name]) for ours, name in named.items())

    again = train(tmp_path / "export", tmp_path / "again", steps=2)
    losses, after = ({each.step: each.loss for each in one.run.steps()} for one in (ended, again))
    assert after == {step - 3: loss for step, loss in losses.items() if step >= 3}

    assert main(["export", str(ended.run.path), "--to", str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    newest = load_checkpoint(ended.run.path)
    stored = torch.load(tmp_path / "dcp.pt")
    assert stored.keys() == set(named.values()) - {"lm_head.weight"}
    assert all(torch.equal(newest[ours], stored[name]) for ours, name in named.items() if name in stored)
    made = export_weights(ended.run, tmp_path / "plain", form="state_dict", dtype="bfloat16")
    halves = torch.load(tmp_path / "plain" / STATE_DICT)
    assert (made.step, made.tensors) == (5, len(stored))
    assert all(torch.equal(halves[name], each.bfloat16()) for name, each in stored.items())
    with refused(ConfigError):
        export_weights(ended.run, tmp_path / "plain")
    assert not [*tmp_path.glob(".*")]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft uses it
@pytest.mark.multiprocess
def test_adapters_alone_are_trained_and_peft_reads_them(tmp_path: Path) -> None:
    """Through the loss of all holders of a stage, and a resume: what is not trained is read from the files again."""
    transformers_llama(MODEL).save_pretrained(tmp_path / "model")
    ended = train(
        tmp_path / "model",
        tmp_path / "run",
        steps=5,
        function="adapted_job",
        precision="fp32",
        failures=(fails(1, step=2), fails(3, step=4, phase="sync")),
        every=5,
        snapshots=Snapshots(every=2),
    )
    assert ended.lost == {1, 3}
    assert ended.failures[-1].policy == "snapshot"
    assert_as_the_plain_loop(ended)
    saved = sum(tensor_bytes(read_layer(ended.run.checkpoints, 5, layer)) for layer in range(5))
    assert 0 < saved < 0.3 * (tmp_path / "model" / SINGLE).stat().st_size
    ended = resume_here(ended, steps=8, failures=(fails(2, step=6, phase="backward"),))
    assert ended.code == 0
    assert 2 in ended.lost
    assert_as_the_plain_loop(ended)
    assert main(["export", str(ended.run.path), "--to", str(tmp_path / "lora"), "--step", "5", "--adapters"]) == 0

    from transformers import LlamaForCausalLM

    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "lora")
    ids, targets = Same()[0]
    loss = functional.cross_entropy(model(ids[None]).logits[0], targets)
    losses = {each.step: each.loss for each in ended.run.steps()}
    assert losses[0] > losses[5] == pytest.approx(loss.item(), rel=1e-5)
    with refused(ConfigError):
        export_weights(ended.run, tmp_path / "merged")
    assert main(["export", str(ended.run.path), "--to", str(tmp_path / "merged"), "--step", "5", "--merge"]) == 0
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert functional.cross_entropy(merged(ids[None]).logits[0], targets).item() == pytest.approx(loss.item(), rel=1e-5)
    base = model.get_base_model().state_dict()
    trained = load_checkpoint(ended.run.path, 5)
    assert torch.equal(trained["1.attention.query.weight"], base["model.layers.0.self_attn.q_proj.weight"])

    other = transformers_llama(MODEL)
    torch.nn.init.zeros_(other.model.layers[0].mlp.up_proj.weight)
    other.save_pretrained(tmp_path / "model")
    with refused(CheckpointError):
        resume_here(ended, steps=9)
    with refused(ConfigError):
        load_checkpoint(ended.run.path)
