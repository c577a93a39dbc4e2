"""Adapters of peft on the layers of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from chameleon_ft import ConfigError, Job
from chameleon_ft.models.build import initial_layer
from chameleon_ft.models.llama import llama_layers, llama_weights
from chameleon_ft.models.weights import check_weights
from tests.golden import refused
from tests.models.jobs import CONFIG, Zeros, make_job
from tests.models.transformers_llama import transformers_llama

MODEL = CONFIG.model_copy(update={"dropout": 0.0})


def llama(path: Path | None = None) -> Job:
    layers, dataset = llama_layers(MODEL), Zeros(8, dtype=torch.int64)
    return make_job(layers, dataset, weights=llama_weights(MODEL, path))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft uses it
def test_modules_are_those_that_peft_adapts_in_the_whole_model(tmp_path: Path) -> None:
    """Also the head, and one module of a rank of its own: by their names in the model of transformers."""
    model: Any = transformers_llama(MODEL)
    model.save_pretrained(tmp_path)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj", "lm_head"], rank_pattern={r"layers\.1\.mlp\.down_proj": 3}
    )
    job = llama(tmp_path).with_adapters(config)
    check_weights(job)
    layers = [initial_layer(job, layer, 0) for layer in range(job.num_layers)]
    ours = {
        job.stored_as(number, name): tuple(each.shape)
        for number, layer in enumerate(layers)
        for name, each in layer.named_parameters()
        if each.requires_grad
    }
    theirs = get_peft_model_state_dict(get_peft_model(model, config), save_embedding_layers=False)
    assert ours == {name: tuple(each.shape) for name, each in theirs.items()}
    base = layers[1].get_parameter("attention.query.base_layer.weight")
    assert torch.equal(base, model.state_dict()["model.layers.0.self_attn.q_proj.base_layer.weight"])


REFUSED: dict[str, dict[str, Any]] = {
    "no such modules": {"target_modules": ["query_key_value"]},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
    "of a norm": {"target_modules": ["input_layernorm"]},
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_a_layer_cannot_have_is_refused(options: str) -> None:
    with refused(ConfigError):
        llama().with_adapters(LoraConfig(**REFUSED[options]))
