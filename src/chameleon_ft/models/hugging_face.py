"""Conversion of weights from and to the names of transformers' ``LlamaForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = {"tokens.weight": "model.embed_tokens.weight"}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_HEAD = {"norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def to_hugging_face(layer_states: Mapping[int, Mapping[str, Tensor]], num_blocks: int) -> dict[str, Tensor]:
    """Convert state dicts of layers, by layer number, to (part of) one of ``LlamaForCausalLM``; tensors are shared.

    Raises:
        ConfigError: a layer is not one of a Llama with `num_blocks` blocks.
    """
    exported = {}
    for layer, state in layer_states.items():
        names = _names(layer, num_blocks)
        _require_same(set(names), set(state), f"layer {layer} of a Llama with {num_blocks} blocks")
        exported.update({names[name]: tensor for name, tensor in state.items()})
    return exported


def from_hugging_face(state: Mapping[str, Tensor], layer: int, num_blocks: int) -> dict[str, Tensor]:
    """Return the state dict of one layer from that of a whole ``LlamaForCausalLM``; tensors are shared.

    Raises:
        ConfigError: `state` lacks a tensor of the layer.
    """
    names = _names(layer, num_blocks)
    if layer == num_blocks + 1 and _HEAD["output.weight"] not in state:
        names = {**names, "output.weight": _EMBEDDING["tokens.weight"]}  # the state dict omits a tied head
    _require_same(set(names.values()), set(names.values()) & set(state), f"the weights for layer {layer}")
    return {name: state[theirs] for name, theirs in names.items()}


def _names(layer: int, num_blocks: int) -> dict[str, str]:
    """Return our name -> their name for the parameters of one layer."""
    if not 0 <= layer < num_blocks + 2:
        raise ConfigError(
            f"there is no layer {layer} in a Llama with {num_blocks} blocks: it has {num_blocks + 2} layers"
        )
    if layer == 0:
        return _EMBEDDING
    if layer == num_blocks + 1:
        return _HEAD
    return {ours: f"model.layers.{layer - 1}.{theirs}" for ours, theirs in _BLOCK.items()}


def _require_same(expected: set[str], found: set[str], source: str) -> None:
    if expected != found:
        raise ConfigError(
            f"{source}: missing {sorted(expected - found) or 'nothing'}, "
            f"unexpected {sorted(found - expected) or 'nothing'}; give the weights of a Llama of the same shape"
        )
