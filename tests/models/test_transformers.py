"""Models of transformers as layers compute what they compute there."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from chameleon_ft import Job
from chameleon_ft.data.samples import TokenWindows, collated
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Precision
from chameleon_ft.models.precision import with_declared
from chameleon_ft.models.transformers import causal_loss, causal_terms, next_token_loss, next_token_terms
from chameleon_ft.models.transformers_walk import Walk
from chameleon_ft.models.weights import check_weights
from chameleon_ft.side_outputs import collecting
from tests.golden import refused
from tests.models.transformers_families import COMPARED, VOCAB, family, load_layers, whole_model

pytest.importorskip("transformers", reason="the development extra has it")
LENGTH = 12


def build(walk: Walk) -> list[nn.Module]:
    return [factory().train() for factory in walk.layers()]


def run(layers: list[nn.Module], ids: Tensor, **fields: Tensor) -> Tensor:
    return reduce(lambda x, layer: layer(x, **fields), layers, ids)


def loud(model: nn.Module) -> nn.Module:
    """Give parameters values of which each is to be seen in the logits."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2, generator=generator)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", COMPARED)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    config, labels = family(name), tokens(3, LENGTH)
    model, walk = loud(whole_model(config)), Walk.of(config)
    layers = build(walk)
    load_layers(walk, layers, model)
    labels[0, :4] = -100
    # Masks and positions are kept from one forward to the next of the same shape.
    for length in (LENGTH, 5):
        run(layers, tokens(3, length))

    run(layers, tokens(3, LENGTH))
    loss = causal_loss(run(layers, tokens(3, LENGTH)), labels) / causal_terms(labels)
    loss.backward()
    expected = model(tokens(3, LENGTH), labels=labels).loss
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    theirs, seen = dict(model.named_parameters(remove_duplicate=False)), set()
    for index, layer in enumerate(layers, -1):
        for own, parameter in layer.named_parameters():
            seen.add(named := walk.names(index)[own])
            torch.testing.assert_close(parameter.grad, theirs[named].grad, rtol=1e-5, atol=1e-5)
    # A parameter may have two names in one layer.
    assert {id(theirs[name]) for name in seen} == set(map(id, theirs.values()))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_loss_of_routers_is_that_of_transformers(name: str, is_padded: bool) -> None:
    config = family(name, output_router_logits=True, router_aux_loss_coef=0.5)
    model, walk = loud(whole_model(config)), Walk.of(config)
    layers, ids = build(walk), tokens(3, LENGTH)
    load_layers(walk, layers, model)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [9]])).long() if is_padded else None
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)

    with collecting() as side:
        logits = run(layers, ids, **({} if mask is None else {"attention_mask": mask}))
    ((auxiliary, terms),) = side.losses
    loss = causal_loss(logits, labels) / causal_terms(labels) + auxiliary / (terms or 0)
    loss.backward()
    expected = model(ids, labels=labels, attention_mask=mask).loss
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    theirs = dict(model.named_parameters(remove_duplicate=False))
    for index, layer in enumerate(layers, -1):
        for own, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[walk.names(index)[own]].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", COMPARED)
def test_documents_in_a_sample_do_not_see_each_other(name: str) -> None:
    # Without sdpa, too; the test above has the usual one.
    config, ids = family(name), tokens(1, LENGTH)
    config._attn_implementation = "eager"
    model, walk = loud(whole_model(config)), Walk.of(config, "eager")
    layers = build(walk)
    load_layers(walk, layers, model)

    logits = run(layers, ids, document_ids=torch.tensor([[7] * 5 + [8] * 3 + [9] * 4]))

    expected = torch.cat([model(part).logits for part in ids.split([5, 3, 4], dim=1)], dim=1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_packed_corpus_have_the_losses_of_its_documents() -> None:
    model, walk = loud(whole_model(family("qwen3"))), Walk.of(family("qwen3"))
    layers, ids = build(walk), tokens(2 * (LENGTH + 1))
    load_layers(walk, layers, model)
    rows = TokenWindows(ids.numpy(), LENGTH, starts=np.array([0, 5, 8, 17]))

    fields, labels = collated([rows[0], rows[1]], None, seed=0, place=(0, 0))
    loss = next_token_loss(run(layers, fields.pop("input_ids"), **fields), labels)

    # A row ends inside the third document.
    parts = [part for part in ids.split([5, 3, 5, 4, 9]) if len(part) > 1]
    terms = [len(part) - 1 for part in parts]
    expected = sum(
        model(part[None], labels=part[None]).loss.item() * own for part, own in zip(parts, terms, strict=True)
    )
    assert next_token_terms(labels) == sum(terms)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def test_layers_begin_as_transformers_initialises_them(name: str) -> None:
    torch.manual_seed(0)
    config = family(name)
    model, walk = whole_model(config), Walk.of(config)
    theirs = model.state_dict()
    for index, layer in enumerate((part() for part in walk.layers()), -1):
        for own, value in layer.state_dict().items():
            expected = theirs[walk.names(index)[own]]
            assert value.float().mean().item() == pytest.approx(expected.float().mean().item(), abs=0.05)
            if value.numel() > 1000:
                deviations = (each.float().std(correction=0).item() for each in (value, expected))
                assert next(deviations) == pytest.approx(next(deviations), rel=0.2, abs=1e-7)


def test_decoder_layers_that_compute_alike_share_a_factory() -> None:
    windows = Walk.of(family("gemma3")).layers()
    assert windows[1] is windows[3] is not windows[2]
    # GPT-2 scales the attention of each layer by its number.
    assert len(set(map(id, Walk.of(family("gpt2")).layers()))) == 5
    # MiniMax computes buffers of a layer from its number.
    linear = Walk.of(family("minimax")).layers()
    assert linear[1] is not linear[3]


@pytest.mark.parametrize("name", ["minimax", "bart"])
def test_documents_are_refused_that_would_see_each_other(name: str) -> None:
    layer = build(Walk.of(family(name)))[1]
    with refused(ConfigError):
        layer(torch.zeros(1, LENGTH, 32), document_ids=torch.zeros(1, LENGTH, dtype=torch.int64))


class Samples:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = tokens(8, LENGTH)[index]
        return ids, ids


def job_of(model: Any, **fields: Any) -> Job:
    return Job.from_transformers(model, dataset=Samples(), optimizer=torch.optim.AdamW, **fields)


def test_a_job_has_what_the_model_says(tmp_path: Path) -> None:
    config = family("gpt_oss", tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    job = job_of(tmp_path, clip_norm=1.0)
    assert job.num_layers == 5
    assert job.tied == (((0, "embed_tokens.weight"), (4, "lm_head.weight")),)
    assert job.clip_norm == 1.0
    precision = with_declared(job.layers[1](), Precision("bf16"))
    assert precision.keeps("block.input_layernorm")
    assert precision.keeps("rotary_emb.inv_freq")
    assert not precision.keeps("block.self_attn.q_proj")
    # A token passes two of four experts.
    assert job.layer_costs is not None
    assert job.layer_costs[1] < sum(each.numel() for each in job.layers[1]().parameters()) * 0.7


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "gemma3"])
def test_weights_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    config = family(name)
    model, walk = whole_model(config), Walk.of(config)
    model.save_pretrained(tmp_path)

    job = job_of(tmp_path)

    check_weights(job)
    assert job.weights is not None
    for layer, factory in enumerate(job.layers):
        state = factory().state_dict()
        stored = {own: job.weights.stored_as(layer, own) for own in state if own not in tied_copies(job, layer)}
        job.weights.read([(name, state[own]) for own, name in stored.items() if name is not None])
        for own in stored:
            assert torch.equal(state[own], model.state_dict()[walk.names(layer - 1)[own]])


def tied_copies(job: Job, layer: int) -> set[str]:
    """Return the names of parameters that another layer gives the values of."""
    return {name for copies in job.tied for other, name in copies[1:] if other == layer}


def test_weights_of_a_model_without_its_head_are_read(tmp_path: Path) -> None:
    model = whole_model(family("gpt2"))
    model.transformer.save_pretrained(tmp_path)
    job = job_of(tmp_path)
    check_weights(job)
    assert job.weights is not None
    assert job.weights.stored_as(0, "wte.weight") == "wte.weight"


def test_what_cannot_be_walked_is_refused(tmp_path: Path) -> None:
    import transformers

    with refused(ConfigError):
        job_of(tmp_path)
    with refused(ConfigError):
        job_of(nn.Linear(2, 2))
    with refused(ConfigError):
        job_of(transformers.ViTConfig())
    transformers.Gemma3Config(text_config=family("gemma3").to_dict()).save_pretrained(tmp_path)
    with refused(ConfigError):
        job_of(tmp_path)
    quantised = family("llama")
    quantised.quantization_config = {"quant_method": "fp8"}
    with refused(ConfigError):
        job_of(quantised)
    family("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with refused(ConfigError):
        job_of(tmp_path)


def test_settings_that_change_what_is_trained_are_refused(tmp_path: Path) -> None:
    for name, values in (
        # Its own loss does not shift labels; see `targets`.
        ("bart", {}),
        ("bert", {"is_decoder": False}),
        # Some parameters have no values but those of the class.
        ("apertus", {}),
    ):
        with refused(ConfigError):
            job_of(family(name, **values))
    assert job_of(family("bart"), targets="next tokens").num_layers == 5


@pytest.mark.parametrize("name", ["Zamba2Config", "Gemma3nTextConfig", "DeepseekV4Config", "LongcatFlashConfig"])
def test_families_that_cannot_be_cut_name_the_part_in_the_way(name: str) -> None:
    import transformers

    with refused(ConfigError):
        job_of(getattr(transformers, name)())
