"""Which models of transformers are trained as they are there?

Each type of configuration with a model for causal language modelling gets a tiny model with random weights, which is
saved to a folder and trained from it. Loss and gradients of its layers are compared with those of the model itself, in
float32, with eager attention and dropout, with padding on both sides, with documents in one sample, and with the loss
of its routers. A model that is not equal has to be refused with a reason. Layers are cut into two stages, between which
only the output of the first one passes.

Values of parameters are larger than initial ones, so that each is seen in the loss. Dropout is replaced by a function
that needs no random numbers.
"""

from __future__ import annotations

import copy
import inspect
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from benchmarks._common import Bar, Report, new_folder, report_arguments
from chameleon_ft import Job
from chameleon_ft.errors import ConfigError
from chameleon_ft.models.build import initial_layer
from chameleon_ft.models.transformers_walk import Walk
from chameleon_ft.models.weights import check_weights
from chameleon_ft.side_outputs import collecting

VOCAB: Final = 97
LENGTH: Final = 12
_TOLERANCE: Final = 1e-5
# A tiny model of a type that does not know the names of `_SIZES` is not tiny.
_MAX_PARAMETERS: Final = 20_000_000
_TYPE_TIMEOUT_S: Final = 300
_SEED: Final = 5

# By the names that configurations have for them. Windows are shorter than a sample, so that they count.
_SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim", "lru_width"),
        32,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "inner_dim", "ffn_hidden_size", "ffn_hidden"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "mlp_hidden_size", "shared_intermediate_size", "d_inner"),
        ),
        48,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"),
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            *("chunk_size", "mamba_chunk_size", "time_step_rank", "rotary_dim", "index_topk"),
        ),
        4,
    ),
    **dict.fromkeys(
        (
            *("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "index_n_heads", "n_group"),
            *("num_experts_per_tok", "moe_k", "moe_topk", "mamba_expand", "altup_num_inputs", "num_codebooks"),
            *("num_memory_blocks", "num_mem_blocks", "num_channels", "index_topk_freq", "max_window_layers"),
            *("global_attn_every_n_layers",),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("head_dim", "attention_head_dim", "d_kv", "d_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
            *("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "mamba_d_state", "state_size"),
            *("ssm_state_size", "query_pre_attn_scalar", "hidden_size_per_layer_input"),
        ),
        8,
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 5),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "conv_L_cache": 3,
    "zero_expert_num": 1,
    "audio_vocab_size": 33,
    "is_decoder": True,
}
_GONE: Final = object()
_MULTI_HEAD: Final = {"head_dim": _GONE, "num_key_value_heads": 4}
# For types that number positions by what is no padding.
_PADDED: Final = {"pad_token_id": 1}
# Types whose sizes have to fit together in other ways.
_OTHERS: Final[Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(
        (
            *("AXK1Config", "AXK2Config", "DeepseekV2Config", "DeepseekV3Config", "DeepseekV32Config"),
            *("Glm4MoeLiteConfig", "MiniCPM3Config", "YoutuConfig"),
        ),
        _MULTI_HEAD,
    ),
    "CwmConfig": {"bos_token_id": 1, "eos_token_id": 2},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.0},
    },
    "DiffLlamaConfig": {"attention_dropout": 0.0},
    "DogeConfig": {"is_moe": True},
    "FalconH1Config": {"mamba_d_ssm": 64},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "KimiLinearConfig": {"linear_attn_config": _GONE, "linear_num_heads": 4, "linear_head_dim": 8},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "ModernBertDecoderConfig": dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1
    ),
    "ReformerConfig": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    **dict.fromkeys(
        (
            *("CamembertConfig", "Data2VecTextConfig", "RobertaConfig", "RobertaPreLayerNormConfig"),
            *("XLMRobertaConfig", "XLMRobertaXLConfig"),
        ),
        _PADDED,
    ),
    "RoCBertConfig": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "XmodConfig": {"pad_token_id": 1, "default_language": "en_XX"},
    "Zamba2Config": {"num_hidden_layers": _GONE},
    "ZayaConfig": {"num_experts_per_tok": 1},
}


class NotComparedError(Exception):
    """A type of which transformers makes no tiny model."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one type.

    Attributes:
        result: one of equal, refused, wrong, not compared.
        reason: of a refusal or a difference.
        refused: what a model that is otherwise equal refuses, with the reason.
    """

    type_name: str
    result: str
    reason: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)


# --- tiny models -----------------------------------------------------------------------------------------------------


def types() -> dict[str, Any]:
    """Return the types of configurations that have a model for causal language modelling, by name."""
    import transformers

    return {each.__name__: each for each in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny(kind: Any, dropout: float = 0.0, **changes: Any) -> Any:
    """Return a small configuration of a type."""
    known = set[str]()
    for each in kind.__mro__:
        known |= set(getattr(each, "__annotations__", ()))
        if "__init__" in vars(each):
            known |= set(inspect.signature(each.__init__).parameters)
    values = {name: value for name, value in _SIZES.items() if name in known}
    values |= {
        name: dropout
        for name in known
        if ("dropout" in name or "pdrop" in name or "drop_rate" in name) and not name.startswith("use")
    }
    values |= {"layerdrop": 0.0} if "layerdrop" in known else {}
    values |= {name: 0.0 for name in known if name.endswith("_layerdrop")}
    values |= {**_OTHERS.get(kind.__name__, {}), **changes}
    try:
        return kind(**{name: value for name, value in values.items() if value is not _GONE})
    except Exception as error:
        raise NotComparedError(f"no tiny configuration ({_short(error)})") from error


def built(config: Any, device: str) -> Any:
    """Return transformers' model of a configuration as it is initialised there."""
    import transformers

    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with torch.device(device):
            return kind(copy.deepcopy(config))
    except Exception as error:
        raise NotComparedError(f"transformers builds no tiny model ({_short(error)})") from error


def whole_model(config: Any, attention: str | None = None) -> Any:
    """Return transformers' model of a configuration, whose values are large enough to be seen in the loss."""
    config = copy.deepcopy(config)
    if attention is not None:
        config._attn_implementation = attention
    number = sum(each.numel() for each in built(config, "meta").parameters())
    if number > _MAX_PARAMETERS:
        raise NotComparedError(f"the model of a tiny configuration has {number:,} parameters")
    torch.manual_seed(0)
    model = built(config, "cpu").float().train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(values * (0.2 if parameter.shape[-1] <= 64 else 0.1))
            elif parameter.numel() > 1:
                parameter.add_(values * 0.1)
    return model


# --- comparison ------------------------------------------------------------------------------------------------------


class Compared:
    """The layers of a job, read from the folder of a model, beside that model."""

    def __init__(self, config: Any, *, attention: str | None = None, targets: Any = "labels") -> None:
        self.model = whole_model(config, attention)
        self.walk = Walk.of(config, attention)
        with TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            # Of the values that each sample has, a job is to see none before it runs.
            self.job = Job.from_transformers(
                folder, attention=attention, targets=targets, dataset=[(0, 0)], optimizer=torch.optim.AdamW
            )
            check_weights(self.job)
            self.layers = [initial_layer(self.job, layer, seed=1).train() for layer in range(self.job.num_layers)]
        for (first, name), *others in self.job.tied:
            for layer, other in others:
                module, _, leaf = other.rpartition(".")
                setattr(self.layers[layer].get_submodule(module), leaf, self.layers[first].get_parameter(name))

    def loss(self, ids: Tensor, labels: Tensor, **fields: Tensor) -> Tensor:
        """Run the layers as two stages, forwards and backwards, and return their loss."""
        cut = len(self.layers) // 2
        # Some routers draw random numbers.
        torch.manual_seed(_SEED)
        with collecting() as side:
            sent = reduce(lambda x, layer: layer(x, **fields), self.layers[:cut], ids)
            received = pytree.tree_map(lambda x: x.detach().requires_grad_(x.is_floating_point()), sent)
            logits = reduce(lambda x, layer: layer(x, **fields), self.layers[cut:], received)
        self.logits = logits.detach()
        terms: Any = self.job.loss_terms
        loss: Tensor = self.job.loss(logits, labels) / terms(labels)
        for value, own in side.losses:
            loss = loss + value / (own or terms(labels))
        loss.backward()
        pairs = [
            (x, y.grad)
            for x, y in zip(pytree.tree_leaves(sent), pytree.tree_leaves(received), strict=True)
            if x.requires_grad and y.grad is not None
        ]
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        return loss.detach()

    def differs(self, loss: Tensor, expected: Tensor) -> str:
        """Return in what the layers differ from the model, after both went backwards; empty if in nothing."""
        if not _close(loss, expected, abs(expected.item())):
            return f"loss {loss.item():.6f}, expected {expected.item():.6f}"
        theirs, seen = dict(self.model.named_parameters(remove_duplicate=False)), set()
        largest = max(each.grad.abs().max().item() for each in theirs.values() if each.grad is not None)
        for index, layer in enumerate(self.layers, -1):
            for own, parameter in layer.named_parameters():
                name = self.walk.names(index)[own]
                seen.add(id(theirs[name]))
                found, wanted = (
                    torch.zeros_like(each) if each.grad is None else each.grad for each in (parameter, theirs[name])
                )
                if not _close(found, wanted, largest):
                    return f"gradient of {name}: {(found - wanted).abs().max():.2g} of {largest:.2g}"
        missing = [name for name, each in theirs.items() if id(each) not in seen and each.grad is not None]
        return f"no layer has {missing[0]}" if missing else ""

    def forget(self) -> None:
        for module in (self.model, *self.layers):
            module.zero_grad()


def _close(found: Tensor, expected: Tensor, scale: float) -> bool:
    return bool(((found - expected).abs() <= _TOLERANCE * max(1.0, scale)).all())


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def _plain(compared: Compared, *, has_own_loss: bool = True, **fields: Tensor) -> str:
    """Compare with the model's own logits and, unless its loss has another form, with the loss that it returns."""
    ids, labels = tokens(3, LENGTH), tokens(3, LENGTH, seed=2)
    labels[0, :4] = -100
    if (mask := fields.get("attention_mask")) is not None:
        labels = labels.masked_fill(mask == 0, -100)
    own: Any = {"labels": labels} if has_own_loss else {}
    torch.manual_seed(_SEED)
    try:
        output = compared.model(input_ids=ids, use_cache=False, **fields, **own)
    except Exception as error:
        raise NotComparedError(f"the model itself fails ({_short(error)})") from error
    loss = compared.loss(ids, labels, **fields)
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    found, wanted = compared.logits[kept], output.logits.detach()[kept]
    if not _close(found, wanted, wanted.abs().max().item()):
        return f"logits {(found - wanted).abs().max():.2g} of {wanted.abs().max():.2g}"
    terms: Any = compared.job.loss_terms
    expected = output.loss if has_own_loss else compared.job.loss(output.logits, labels) / terms(labels)
    if expected is None:
        raise NotComparedError("the model returns no loss")
    expected.backward()
    return compared.differs(loss, expected.detach())


def _padded(compared: Compared) -> str:
    places = torch.arange(LENGTH)
    mask = torch.stack([places >= 0, places < 7, places >= 3]).long()
    return _plain(compared, has_own_loss=False, attention_mask=mask)


def _documents(compared: Compared) -> str:
    lengths, ids, labels = [5, 3, 4], tokens(1, LENGTH), tokens(1, LENGTH, seed=2)
    numbers = torch.repeat_interleave(torch.tensor([7, 8, 9]), torch.tensor(lengths))[None]
    # Of the first token of a document, none before it is to be its context.
    labels[:, [0, 5, 8]] = -100
    # Random numbers would be others in each document.
    for module in (compared.model, *compared.layers):
        module.eval()
    loss = compared.loss(ids, labels, document_ids=numbers)
    logits = [compared.model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    whole = compared.model(input_ids=ids, use_cache=False).logits[:, : lengths[0]]
    if not _close(logits[0], whole, 100 * whole.abs().max().item()):
        raise NotComparedError("in the model itself, tokens see the ones after them")
    terms: Any = compared.job.loss_terms
    expected = compared.job.loss(torch.cat(logits, 1), labels) / terms(labels)
    expected.backward()
    return compared.differs(loss, expected.detach())


@contextmanager
def _without_random_numbers() -> Iterator[None]:
    """Let dropout scale its input by a factor that depends on its rate."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * (1 + p) if training else x

    with mock.patch.object(functional, "dropout", dropout):
        yield


def _begins_alike(kind: Any) -> str:
    """Return how layers without files begin otherwise than the model; empty if they do not."""
    config = tiny(kind)
    torch.manual_seed(0)
    model = built(config, "cpu").float()
    walk, theirs = Walk.of(config), {}
    job = Job.from_transformers(config, targets="next tokens", dataset=[(0, 0)], optimizer=torch.optim.AdamW)
    for index, factory in enumerate(job.layers, -1):
        for path in walk.paths_of(index):
            module = model.get_submodule(path)
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                theirs[f"{walk.name_of(path)}.{name}"] = value
        layer = factory()
        for name, found in layer.named_buffers():
            if not torch.equal(found, theirs[name]):
                return f"buffer {name} of layer {index + 1}"
        for name, parameter in layer.named_parameters():
            ours, own = (each.detach().float() for each in (parameter, theirs[name]))
            deviations = [each.std(correction=0).item() for each in (ours, own)]
            mean = abs(ours.mean().item() - own.mean().item())
            # Of few values that are drawn, the mean says nothing.
            if ((own.numel() >= 256 or not deviations[1]) and mean > 0.1 + deviations[1]) or ours.isnan().any():
                return f"mean of {name} of layer {index + 1}"
            if own.numel() >= 256 and not deviations[1] / 2 <= deviations[0] <= deviations[1] * 2:
                return f"deviation of {name} of layer {index + 1}"
    return ""


def verdict(kind: Any) -> Verdict:
    """Compare a type with transformers' own model."""
    name, refused = kind.__name__, dict[str, str]()

    def compare(what: str, run: Callable[[], str]) -> None:
        try:
            if difference := run():
                raise AssertionError(f"{what}: {difference}")
        except ConfigError as error:
            refused[what] = _short(error)
        except NotComparedError as error:
            refused[what] = f"not compared: {_short(error)}"

    try:
        config = tiny(kind)
        if (text := getattr(config, "text_config", None)) is not None:
            return Verdict(name, "composite", f"its text model is {type(text).__name__}")
        built(config, "meta")
        targets = "labels" if Walk.of(config).shifts_labels else "next tokens"
        compared = Compared(config, targets=targets)
        if difference := _plain(compared):
            raise AssertionError(difference)
        for what, run in (("padding", _padded), ("documents", _documents)):
            compared.forget()
            compare(what, lambda run=run: run(compared))  # type: ignore[misc]
        with _without_random_numbers():
            compare("eager", lambda: _plain(Compared(tiny(kind, 0.1), attention="eager", targets=targets)))
        if hasattr(config, "output_router_logits"):
            routed = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
            compare("router loss", lambda: _plain(Compared(tiny(kind, **routed), targets=targets)))
        compare("without files", lambda: _begins_alike(kind))
    except ConfigError as error:
        return Verdict(name, "refused", _short(error))
    except NotComparedError as error:
        return Verdict(name, "not compared", _short(error))
    except Exception as error:  # noqa: BLE001 - of any class: what is not refused has to be equal
        return Verdict(name, "wrong", f"{type(error).__name__}: {_short(error)}", refused)
    return Verdict(name, "equal", refused=refused)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# --- report ----------------------------------------------------------------------------------------------------------


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"took over {_TYPE_TIMEOUT_S} s")


def report_of(verdicts: Sequence[Verdict]) -> Report:
    """Return the table of types, with counts."""
    counts = {
        result: sum(each.result == result for each in verdicts)
        for result in ("equal", "refused", "composite", "not compared", "wrong")
    }
    return Report(
        benchmark="transformers_types",
        columns=("type", "result", "reason"),
        rows=tuple(
            (
                each.type_name.removesuffix("Config"),
                each.result,
                "; ".join(filter(None, [each.reason, *(f"{what}: {why}" for what, why in each.refused.items())])),
            )
            for each in verdicts
        ),
        bars=(Bar(name="types that are trained wrongly", value=counts["wrong"], limit=0),),
        results={"counts": counts, "types": [asdict(each) for each in verdicts]},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report_arguments(__doc__, name="transformers_types")
    parser.add_argument("types", nargs="*", help="names of types, such as LlamaConfig; all by default")
    flags = parser.parse_args(arguments)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    # So small a model gains nothing by more.
    torch.set_num_threads(1)
    known = types()
    if unknown := [name for name in flags.types if name not in known]:
        parser.error(f"{unknown[0]}: no type with a model for causal language modelling")
    folder, verdicts = new_folder(flags.out), list[Verdict]()
    signal.signal(signal.SIGALRM, _out_of_time)
    for name in flags.types or sorted(known):
        signal.alarm(_TYPE_TIMEOUT_S)
        verdicts.append(verdict(known[name]))
        signal.alarm(0)
        print(*asdict(verdicts[-1]).values(), file=(folder / "verdicts.txt").open("a"), flush=True)
    report = report_of(verdicts)
    code = report.emit(folder, as_json=flags.json)
    print(report.results["counts"])
    return code


if __name__ == "__main__":
    raise SystemExit(main())
