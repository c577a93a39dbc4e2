"""Models of transformers, trained through failures, beside their own forward in a plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chameleon_ft import Job, load_checkpoint
from chameleon_ft.config import (
    Batch,
    Checkpoint,
    LlamaConfig,
    Optimizer,
    Parallel,
    Recovery,
    RunConfig,
    TrainConfig,
    config_to_toml,
)
from chameleon_ft.data import SampleOrder, sample_order
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job.reference import load_job
from chameleon_ft.models.build import initial_layer
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.models.fields import with_fields
from chameleon_ft.models.sample_checks import first_micro_batch
from chameleon_ft.models.transformers import causal_terms, next_token_loss
from chameleon_ft.models.transformers_walk import Walk
from chameleon_ft.session.export import export_weights
from chameleon_ft.storage.files import RunDirectory
from tests.harness import TEXT, Command, assert_trained_as_if_nothing_failed, fails, small_config, train_here
from tests.models.transformers_families import VOCAB, family, whole_model
from tests.worker.interrupted import BATCH, Cluster, plan_of_pairs
from tests.worker.toy import SEED, PlainStep, examined

pytest.importorskip("transformers", reason="the development extra has it")
LENGTH = 12


class Sentences:
    """Tokens, of which those at the end are padding in some samples."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        mask = torch.arange(LENGTH) < LENGTH - index % 3
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def job(folder: str = "") -> Job:
    return Job.from_transformers(
        folder, dataset=Sentences(), optimizer=partial(torch.optim.AdamW, lr=3e-3, fused=True), clip_norm=1.0
    )


@pytest.mark.parametrize(
    ("name", "ways"),
    [("mixtral", [(False, False), (True, True)]), ("qwen3_moe", [(True, False), (False, True)])],
)
def test_routers_have_the_gradients_of_transformers_however_a_step_is_computed(
    name: str, ways: list[tuple[bool, bool]], tmp_path: Path
) -> None:
    """A backward is fused or split, activations are kept or recomputed.

    One of the pipelines has a detour; then a worker is lost at some point of the step."""
    model = family(name, output_router_logits=True, router_aux_loss_coef=0.5)
    whole_model(model).save_pretrained(tmp_path)
    whole = job(str(tmp_path))
    own = with_fields(whole, *first_micro_batch(whole, BATCH.micro_batch_size, SEED))
    own = examined(own, BATCH.micro_batch_size)
    specs = boundary_specs(own, BATCH.micro_batch_size)
    own = replace(own, boundaries=lambda size: [each.unflatten(each.leaves) for each in specs])
    plain = step_of_transformers(own, tmp_path)
    for split, recompute in ways:
        plan = plan_of_pairs(split=split, recompute=recompute)
        for worker, share in ((-1, 0.0), (1, 0.3), (4, 0.6)):
            cluster = Cluster(plan, tied=False, job=own)
            if worker < 0:
                cluster.run()
            else:
                cluster.run(stop=(worker, int(share * len(cluster.program[worker]))))
                cluster.lose(worker)
                cluster.run(cluster.rest())
            cluster.assert_is_the_whole_step(plain)


def step_of_transformers(job: Job, folder: Path) -> PlainStep:
    """Return the first step by transformers' own model, with its own loss."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    order, size = SampleOrder(len(job.dataset), SEED), BATCH.micro_batch_size
    batches = [load_micro_batch(job.dataset, order, first, size) for first in range(0, BATCH.samples, size)]
    total, auxiliary, terms = 0.0, 0.0, sum(causal_terms(labels) for _, labels in batches)
    for fields, labels in batches:
        output, share = model(**fields, labels=labels), causal_terms(labels) / terms
        (output.loss * share).backward()
        total += output.loss.item() * share
        auxiliary += output.aux_loss.item() * model.config.router_aux_loss_coef * share
    theirs, walk = dict(model.named_parameters()), Walk.of(model.config)
    gradients = {
        (layer, own): theirs[walk.names(layer - 1)[own]].grad
        for layer in range(job.num_layers)
        for own, _ in job.layers[layer]().named_parameters()
    }
    return PlainStep(total, auxiliary, terms, grad_norm=0.0, gradients=gradients, weights={})


@pytest.mark.multiprocess
def test_a_model_goes_through_two_failures_as_in_a_plain_loop(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = family("qwen3_moe", tie_word_embeddings=True, output_router_logits=True, router_aux_loss_coef=0.1)
    whole_model(model).save_pretrained(folder)
    base = small_config(
        tmp_path,
        steps=20,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        recovery=Recovery(policy="repartition"),
        failures=(fails(1, step=5, phase="backward"), fails(2, step=12, phase="sync")),
    )
    own = base.model_dump(exclude={"model", "data", "optimizer"})
    config = RunConfig.model_validate({**own, "job": f"{__file__}:job", "job_arguments": {"folder": str(folder)}})

    ended = train_here(config, tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {1, 2}
    expected = losses_of_transformers(config, folder)
    assert [record.loss for record in ended.run.steps()] == pytest.approx(expected, rel=1e-5)


def losses_of_transformers(config: RunConfig, folder: Path) -> list[float]:
    """Return the loss of each step by transformers' own model, with its own loss and tying, and torch's AdamW."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    job = load_job(config.job, config)
    optimizer, order = torch.optim.AdamW(model.parameters(), lr=3e-3), SampleOrder(len(job.dataset), config.seed)
    losses: list[float] = []
    for step in range(config.steps):
        first, size = step * config.batch.samples, config.batch.micro_batch_size
        batches = [load_micro_batch(job.dataset, order, first + n, size) for n in range(0, config.batch.samples, size)]
        terms = [causal_terms(labels) for _, labels in batches]
        optimizer.zero_grad()
        losses.append(0.0)
        for (fields, labels), own in zip(batches, terms, strict=True):
            loss = model(**fields, labels=labels).loss * own / sum(terms)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.multiprocess
def test_a_folder_is_trained_by_a_file_in_bfloat16_and_exported(tmp_path: Path) -> None:
    import transformers

    whole_model(family("qwen3", vocab_size=256)).save_pretrained(tmp_path / "model")
    config = small_config(
        tmp_path,
        steps=20,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        precision="bf16",
        recovery=Recovery(policy="repartition"),
        failures=(fails(1, step=5, phase="backward"), fails(2, step=12, phase="sync")),
        model=LlamaConfig(hf=str(tmp_path / "model"), seq_len=LENGTH),
    )
    (tmp_path / "train.toml").write_text(config_to_toml(config))
    run, trained = RunDirectory(tmp_path / "run"), tmp_path / "trained"

    train = "train", tmp_path / "train.toml", "--output-dir", run.path
    for words in (train, ("export", run.path, "--to", trained)):
        with Command(*words) as command:
            assert command.wait() == 0, command.printed

    losses = [record.loss for record in run.steps()]
    assert losses == pytest.approx(losses_in_bfloat16(config), rel=2e-3)
    model = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    theirs, checkpoint, walk = model.state_dict(), load_checkpoint(run.path), Walk.of(model.config)
    again = Job.from_transformers(trained, dataset=Sentences(), optimizer=torch.optim.AdamW)
    for layer in range(again.num_layers):
        # A run that begins with the export has the values that this one would go on with.
        imported = initial_layer(again, layer, seed=1).state_dict()
        for own, name in walk.names(layer - 1).items():
            assert torch.equal(checkpoint[f"{layer}.{own}"], theirs[name])
            assert torch.equal(imported[own], theirs[name])


def losses_in_bfloat16(config: TrainConfig) -> list[float]:
    """Return the loss of each step by transformers' own model, with float32 masters of its parameters."""
    import transformers

    load = partial(transformers.AutoModelForCausalLM.from_pretrained, config.model.hf)
    model, masters = load(dtype=torch.bfloat16).train(), [*load(dtype=torch.float32).parameters()]
    job, order = load_job(config.job, config), sample_order(load_job(config.job, config).dataset, config.seed)
    optimizer, rate = job.optimizer(masters), job.learning_rate
    assert rate is not None
    losses: list[float] = []
    for step in range(config.steps):
        inputs, targets = load_micro_batch(job.dataset, order, step * config.batch.samples, config.batch.samples)
        loss = next_token_loss(model(inputs).logits, targets) / targets.numel()
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


@pytest.mark.multiprocess
def test_a_run_that_begins_with_an_export_goes_on_as_the_exported_one(tmp_path: Path) -> None:
    """The optimizer keeps nothing from step to step, as no export has its state, and each step has all samples."""
    whole_model(family("mixtral", vocab_size=256)).save_pretrained(tmp_path / "model")
    config = small_config(
        tmp_path,
        steps=4,
        workers=1,
        parallel=Parallel(dp=1, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        checkpoint=Checkpoint(every=2),
        optimizer=Optimizer(lr=0.1, min_lr=0.1, warmup_steps=0, beta1=0.0, beta2=0.0, eps=1.0),
        model=LlamaConfig(hf=str(tmp_path / "model"), seq_len=LENGTH),
    )
    (tmp_path / "text.txt").write_text(TEXT[: config.batch.samples * (LENGTH + 1)])

    run = train_here(config, tmp_path / "run").run
    export_weights(run, tmp_path / "exported", step=2)
    model = config.model.model_copy(update={"hf": str(tmp_path / "exported")})
    again = train_here(config.model_copy(update={"model": model, "steps": 2}), tmp_path / "again").run

    losses = [record.loss for record in run.steps()]
    assert [record.loss for record in again.steps()] == pytest.approx(losses[2:], rel=1e-5)
    theirs = load_checkpoint(again.path)
    for name, value in load_checkpoint(run.path).items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-5)
