"""Activation bytes against the formulas of Korthikanti et al. in the paper's own setting, and against autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.config import LlamaConfig
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import DEVICES, STATE_POLICIES, Attention, Execution, Recompute, model_shape
from chameleon_ft.cost.shapes import BlockShape, ModelShape
from chameleon_ft.models.llama import Block, Head, next_token_loss
from tests.cost.shapes import gpt

# Table 3 of the paper: 22B, 175B, 530B and 1T with 51,200 words and sequences of 2,048.
MODELS = [
    gpt(hidden=hidden, blocks=blocks, heads=heads, seq_len=2048, vocab=51_200)
    for hidden, blocks, heads in [(6144, 48, 64), (12_288, 96, 96), (20_480, 105, 128), (25_600, 128, 160)]
]


def block_bytes(shape: ModelShape, execution: Execution, *, micro_batch_size: int) -> tuple[int, int]:
    """Return the bytes that a block keeps from F to B, and from I to W."""
    workload = derive_workload(
        shape, DEVICES["a100-80g"], micro_batch_size=micro_batch_size, micro_batches=1, execution=execution
    )
    return workload.layers[1].activation_bytes, workload.layers[1].weight_grad_bytes


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: str(shape.hidden))
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("t", [1, 8])
def test_a_block_keeps_what_the_paper_says(shape: ModelShape, b: int, t: int) -> None:
    s, h, a = shape.seq_len, shape.hidden, shape.blocks[0].heads
    sbh = s * b * h

    def kept(recompute: Recompute, *, sequence_parallel: bool) -> int:
        execution = Execution(attention=Attention.EAGER, recompute=recompute, tp=t, sequence_parallel=sequence_parallel)
        return block_bytes(shape, execution, micro_batch_size=b)[0]

    assert kept(Recompute.NONE, sequence_parallel=False) == pytest.approx(sbh * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept(Recompute.NONE, sequence_parallel=True) == pytest.approx(sbh / t * (34 + 5 * a * s / h))
    assert kept(Recompute.SELECTIVE, sequence_parallel=True) == pytest.approx(34 * sbh / t)
    assert kept(Recompute.SELECTIVE, sequence_parallel=False) == pytest.approx(sbh * (10 + 24 / t))
    assert kept(Recompute.FULL, sequence_parallel=False) == 2 * sbh


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("t", [1, 8])
def test_a_block_that_is_recomputed_selectively_drops_norms_activation_function_and_scores(
    attention: Attention, t: int
) -> None:
    shape = MODELS[0]
    workload = derive_workload(
        shape, DEVICES["a100-80g"], micro_batch_size=1, micro_batches=1, execution=Execution(attention=attention, tp=t)
    )
    block, sbh = workload.layers[1], shape.seq_len * shape.hidden

    # Of 34 s b h, outputs of two norms have 2 each, and of the activation function 8; flash attention keeps 4 a s b.
    core = 4 * shape.seq_len * shape.blocks[0].heads if attention is Attention.FLASH else 0
    assert block.selective_bytes == pytest.approx(((34 - 4 - 8) * sbh + core) / t)
    assert 0 < block.selective_s < 0.3 * block.forward_s
    assert workload.layers[0].selective_bytes is workload.layers[-1].selective_bytes is None


def test_a_block_leaves_for_its_weight_gradients_what_zero_bubble_says() -> None:
    shape = MODELS[0]

    assert block_bytes(shape, Execution(), micro_batch_size=2)[1] == 32 * shape.seq_len * 2 * shape.hidden


def test_the_last_layer_keeps_its_inputs_and_the_logits() -> None:
    shape = MODELS[1]
    head = derive_workload(shape, DEVICES["a100-80g"], micro_batch_size=1, micro_batches=1).layers[-1]

    sbh = shape.seq_len * shape.hidden
    assert head.activation_bytes == pytest.approx(4 * sbh * (1 + shape.vocab / shape.hidden))


def test_a_llama_block_keeps_each_tensor_of_its_graph() -> None:
    shape = model_shape("llama3-8b")
    h, kv, f = 4096, 1024, 14_336
    elements = {
        "inputs of both norms": 2 * h,
        "input of query, key and value": h,
        "query, key, value": h + 2 * kv,
        "input of the output projection": h,
        "input of gate and up": h,
        "gate, silu(gate), up": 3 * f,
        "input of down": f,
    }

    kept = block_bytes(shape, Execution(), micro_batch_size=1)[0]

    row_statistics = 4 * shape.blocks[0].heads
    assert kept == shape.seq_len * (2 * sum(elements.values()) + row_statistics)


def test_less_is_kept_the_more_is_computed_again() -> None:
    for name in ("llama2-7b", "qwen2.5-72b"):
        kept = [
            block_bytes(
                model_shape(name), Execution(attention=Attention.EAGER, recompute=recompute), micro_batch_size=1
            )[0]
            for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
        ]
        assert kept == sorted(kept, reverse=True)
        assert len(set(kept)) == 3


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_autograd_keeps_what_is_counted(kv_heads: int) -> None:
    """Tensors that autograd really saves for this package's own Llama, on the CPU and in float32.

    There the norm is several operations, each of which keeps something: its input divided by the root, as wide as the
    input, and a root for each token. Where it is one, as on CUDA, only the latter is more than what is counted.
    """
    config = LlamaConfig(
        vocab_size=512, dim=256, num_layers=1, num_heads=4, num_kv_heads=kv_heads, ffn_dim=704, seq_len=128
    )
    of_block = BlockShape(hidden=256, heads=4, kv_heads=kv_heads, head_dim=64, ffn=704)
    shape = ModelShape(name="small", blocks=(of_block,), vocab=512, seq_len=128)
    workload = derive_workload(
        shape, DEVICES["a100-80g"], micro_batch_size=2, micro_batches=1, state=STATE_POLICIES["fp32"]
    )
    block, head = Block(config), Head(config)
    boundary = torch.randn(2, 128, 256, requires_grad=True)
    targets = torch.randint(512, (2, 128))
    tokens, norm_bytes = 256, 256 * 4 + 4

    saved_by_block = saved_bytes(block, lambda: block(boundary))
    saved_by_head = saved_bytes(head, lambda: next_token_loss(head(boundary), targets))

    total_weight_and_targets = 4 + 8 * tokens
    assert saved_by_block == workload.layers[1].activation_bytes + 2 * tokens * norm_bytes
    assert saved_by_head == workload.layers[2].activation_bytes + tokens * norm_bytes + total_weight_and_targets


def saved_bytes(module: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd keeps in a forward, each once, without those of the module itself."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    # Kept alive to the end, so that no two storages are at the same place.
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(num_bytes for place, num_bytes in storages.items() if place not in own)
