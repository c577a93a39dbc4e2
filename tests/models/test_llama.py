"""The layered Llama computes the function of transformers' Llama with the same weights."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.config import LlamaConfig
from chameleon_ft.models.llama import (
    Block,
    layer_flops,
    llama_layers,
    next_token_loss,
    tied_parameters,
)
from tests.models.transformers_llama import names_of, transformers_llama

GROUPED = LlamaConfig(vocab_size=97, dim=48, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=80, seq_len=24)
TIED = GROUPED.model_copy(update={"tie_embeddings": True})
UNGROUPED = GROUPED.model_copy(update={"num_kv_heads": 6, "rope_theta": 500_000.0, "norm_eps": 1e-3})


def reference_model(config: LlamaConfig) -> Any:
    torch.manual_seed(0)
    model = transformers_llama(config)
    # Larger than at the start of a training, and norms that are not 1: a mistake in any part must show in the logits.
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model


def load_layers(config: LlamaConfig, model: Any) -> list[nn.Module]:
    layers = [factory() for factory in llama_layers(config)]
    for index, layer in enumerate(layers):
        layer.load_state_dict({ours: model.state_dict()[theirs] for ours, theirs in names_of(config)[index].items()})
    return layers


def tied_layers(config: LlamaConfig, model: Any) -> list[nn.Module]:
    layers = load_layers(config, model)
    for (first, name), (last, other) in tied_parameters(config):
        module, _, leaf = other.rpartition(".")
        setattr(layers[last].get_submodule(module), leaf, layers[first].get_parameter(name))
    return layers


def random_tokens(config: LlamaConfig, *shape: int) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def run(layers: list[nn.Module], ids: Tensor) -> Tensor:
    return reduce(lambda x, layer: layer(x), layers, ids)


def run_both(config: LlamaConfig, layers: list[nn.Module], model: Any) -> None:
    """Run a forward, whose logits have to be equal, and a backward of the summed loss."""
    window = random_tokens(config, 3, config.seq_len + 1)
    ids, targets = window[:, :-1], window[:, 1:]
    logits = run(layers, ids)
    next_token_loss(logits, targets).backward()
    expected = model(ids).logits
    nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [GROUPED, UNGROUPED], ids=["grouped", "ungrouped"])
def test_logits_and_gradients_are_those_of_transformers(config: LlamaConfig) -> None:
    model = reference_model(config)
    layers = load_layers(config, model)
    run_both(config, layers, model)
    named = zip(names_of(config), layers, strict=True)
    ours = {names[name]: _gradient(p) for names, layer in named for name, p in layer.named_parameters()}
    theirs = {name: _gradient(p) for name, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # Relative to the largest entry: gradients of a sum over 72 terms are far from 1.
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_a_tied_model_is_that_of_transformers_with_tied_embeddings() -> None:
    model = reference_model(TIED)
    layers = tied_layers(TIED, model)
    run_both(TIED, layers, model)
    ours, theirs = layers[-1].get_parameter("output.weight"), _gradient(model.lm_head.weight)
    assert ours is layers[0].get_parameter("tokens.weight")
    torch.testing.assert_close(_gradient(ours), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_a_shorter_input_has_the_same_logits_as_the_start_of_a_longer_one() -> None:
    layers = [factory() for factory in llama_layers(GROUPED)]
    ids = random_tokens(GROUPED, 2, GROUPED.seq_len)

    torch.testing.assert_close(run(layers, ids[:, :7]), run(layers, ids)[:, :7], rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_sum_in_float32() -> None:
    logits = torch.zeros(2, 3, GROUPED.vocab_size, dtype=torch.bfloat16)
    loss = next_token_loss(logits, random_tokens(GROUPED, 2, 3))

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, 6 * torch.tensor(float(GROUPED.vocab_size)).log())


def test_only_parameters_are_state() -> None:
    for factory in llama_layers(GROUPED):
        layer = factory()
        assert layer.state_dict().keys() == dict(layer.named_parameters()).keys()


def test_projections_into_the_residual_stream_begin_smaller() -> None:
    config = GROUPED.model_copy(update={"dim": 192, "ffn_dim": 256})
    torch.manual_seed(0)
    state = Block(config).state_dict()
    deviation = {name: float(tensor.std()) for name, tensor in state.items() if tensor.ndim == 2}

    scaled = {"attention.output.weight", "feed_forward.down.weight"}
    assert all(
        value == pytest.approx(0.02 / 6**0.5 if name in scaled else 0.02, rel=0.05) for name, value in deviation.items()
    )


def test_flops_are_two_for_each_weight_and_token_and_attention_on_top() -> None:
    embedding, *blocks, head = layer_flops(GROUPED)
    block = Block(GROUPED)
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    score_pairs = GROUPED.seq_len / 2  # a causal mask leaves half of them for an average token

    assert blocks == [2 * matrices + 2 * 2 * score_pairs * GROUPED.dim] * 3
    assert head == 2 * GROUPED.dim * GROUPED.vocab_size
    assert 0 < embedding < min(head, *blocks) / 10
