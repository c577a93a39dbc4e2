"""Parameters that layers share: trained as one, whoever holds the copies and whatever is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chameleon_ft.config import Batch, Checkpoint, LlamaConfig, Parallel, Recovery, TrainConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job.reference import load_job
from chameleon_ft.models.build import build_layer
from chameleon_ft.plan import LayerRange
from chameleon_ft.sync import Segment
from chameleon_ft.worker.checkpoint import read_layer
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayer, HeldLayers
from tests.harness import Ended, assert_trained_as_if_nothing_failed, fails, resume_here, small_config, train_here
from tests.models.transformers_llama import names_of, transformers_llama
from tests.worker.toy import IDS, SEED, WIDTH, toy_job

CPU = torch.device("cpu")
LAYERS = 4
TIED = Segment(LayerRange(0, 1), (0, 1), (0, LAYERS - 1))
MODEL = LlamaConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=16, tie_embeddings=True)


def held(*layers: int) -> HeldLayers:
    return HeldLayers(toy_job(LAYERS, tied=True), layers, seed=SEED, device=CPU)


def with_flag(value: float) -> Tensor:
    """Return the flat buffer of a tied parameter whose gradient has one value throughout."""
    return torch.cat([torch.full((IDS * WIDTH,), value), torch.ones(1)])


def test_several_copies_on_one_worker_have_one_gradient() -> None:
    both = held(0, 3)
    buffers = GradientBuffers(both, (Segment(LayerRange(0, 1), (0,)), Segment(LayerRange(3, 4), (0,)), TIED))
    ((embedding, head),) = both.tied((0, 3))

    (3 * embedding.sum() + 4 * head.sum()).backward()
    buffers.set_flags()

    (gradient,) = buffers.of(TIED)
    assert torch.equal(gradient, with_flag(7.0))
    assert torch.equal(embedding.grad, head.grad)  # type: ignore[arg-type]
    assert buffers.of(buffers.segments[0]) == (), "the embedding has nothing else"
    assert sum(part.numel() for part in buffers.of(buffers.segments[1])) == IDS + 1, "the head has a bias"
    assert buffers.square_sum(0) == pytest.approx(49.0 * IDS * WIDTH)
    assert buffers.square_sum(1) == 0.0, "it is counted once, by the first holder"


def test_only_holders_of_a_copy_take_part() -> None:
    for layers, expected in (((0, 1), True), ((2, 3), True), ((1, 2), False)):
        segments = GradientBuffers(held(*layers), (TIED,)).segments
        assert segments == ((TIED,) if expected else ())


def test_the_gradient_outlives_a_copy_that_is_dropped_before_it_has_arrived() -> None:
    """As after a loss during a migration, when the interrupted step is finished in the placement before it."""
    first = held(0, 1)
    first.expect({3: HeldLayer.blank(toy_job(LAYERS, tied=True), 3, seed=SEED, device=CPU)})
    buffers = GradientBuffers(first, (Segment(LayerRange(0, 1), (0,)), Segment(LayerRange(3, 4), (0, 1)), TIED))
    ((embedding, _),) = first.tied((0, 3))
    (3 * embedding.sum()).backward()
    buffers.totals.add((0, 3))

    first.keep_only({0, 1})
    buffers.regroup(first, (Segment(LayerRange(0, 1), (0,)), Segment(LayerRange(3, 4), (1,)), TIED))
    buffers.set_flags()

    (gradient,) = buffers.of(TIED)
    assert torch.equal(gradient, with_flag(3.0))
    assert gradient.data_ptr() == embedding.grad.data_ptr()  # type: ignore[union-attr]
    assert buffers.totals == {(0, 3)}


def tied_config(directory: Path, **changes: Any) -> TrainConfig:
    return small_config(directory, **{"model": MODEL, **changes})


def assert_copies_are_equal(ended: Ended) -> None:
    step = ended.run.config().steps
    embedding, head = (read_layer(ended.run.checkpoints, step, layer) for layer in (0, MODEL.partition_layers - 1))
    for kind in ("module/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq"):
        assert torch.equal(embedding[kind.format("tokens.weight")], head[kind.format("output.weight")])


@pytest.mark.multiprocess
@pytest.mark.parametrize("policy", ["reroute", "repartition"])
def test_a_tied_model_goes_through_kills(tmp_path: Path, policy: Any) -> None:
    failures = (fails(0, step=3, phase="backward"), fails(3, step=6, phase="sync"))
    config = tied_config(
        tmp_path,
        workers=8,
        parallel=Parallel(dp=4, pp=2),
        batch=Batch(micro_batches=8, micro_batch_size=2),
        recovery=Recovery(policy=policy),
        failures=failures,
    )

    ended = train_here(config, tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    assert ended.lost == {0, 3}
    assert_copies_are_equal(ended)


@pytest.mark.multiprocess
def test_a_tied_model_resumes_from_a_checkpoint_in_another_layout(tmp_path: Path) -> None:
    ended = train_here(tied_config(tmp_path, steps=5, checkpoint=Checkpoint(every=5)), tmp_path / "run")
    resumed = resume_here(ended, steps=8, workers=3, parallel=Parallel(dp=1, pp=3))
    assert_trained_as_if_nothing_failed(resumed)
    assert_copies_are_equal(resumed)


@pytest.mark.multiprocess
def test_a_tied_run_through_a_kill_has_the_losses_of_transformers(tmp_path: Path) -> None:
    config = tied_config(tmp_path, recovery=Recovery(policy="repartition"), failures=(fails(1, step=4, phase="vote"),))

    ended = train_here(config, tmp_path / "run")

    expected = losses_of_transformers(config.model_copy(update={"output_dir": ended.run.path}))
    assert [record.loss for record in ended.run.steps()] == pytest.approx(expected, rel=1e-5)


def losses_of_transformers(config: TrainConfig) -> list[float]:
    """The loss of each step, by transformers' own model with its own tying, and torch's AdamW."""
    job, shape = load_job(config.job, config), config.model
    model = transformers_llama(shape)
    states = {layer: build_layer(job, layer, config.seed).state_dict() for layer in range(job.num_layers)}
    names = names_of(shape)
    model.load_state_dict({names[n][name]: each for n, state in states.items() for name, each in state.items()})
    model.train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer, order = job.optimizer(list(model.parameters())), SampleOrder(len(job.dataset), config.seed)
    losses = []
    for step in range(config.steps):
        ids, targets = load_micro_batch(job.dataset, order, step * config.batch.samples, config.batch.samples)
        loss = functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            assert job.learning_rate is not None
            group["lr"] = job.learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses
