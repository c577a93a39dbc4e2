"""Jobs of decoder-only models of transformers: their own modules, one layer for each decoder layer.

Layer 0 is what a model does before its first decoder layer, the last layer what it does after its last one: mostly the
embedding, and the norm with the head; see `chameleon_ft.models.transformers_walk`. Weights are those of a folder, under
the names that transformers saves them by.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from chameleon_ft.data.samples import IGNORED
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.transformers_walk import Walk, sources_first
from chameleon_ft.weights import INDEX, SINGLE, Pieces, StoredName, Weights, files_of, names_of

# Files beside the weights of a model that an export copies.
_BESIDE: Final = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json", "*.jinja")


def job_from_transformers(
    model: Any, *, attention: str | None = None, targets: Literal["labels", "next tokens"] = "labels", **fields: Any
) -> Job:
    """Return the job of a decoder-only model of transformers; see `Job.from_transformers`."""
    config, folder = _config_of(model)
    walk = Walk.of(config, attention)
    if folder is not None and getattr(config, "text_config", None) is not None and "weights" not in fields:
        raise ConfigError(
            f"{folder} has a model of {config.model_type}, of which only the text model can be trained: give a folder "
            f"of a {type(walk.model).__name__} alone, which has other names of weights; or `weights` with the names"
        )
    is_shifted = targets == "next tokens"
    if not (is_shifted or walk.shifts_labels or "loss" in fields):
        raise ConfigError(
            f"{type(walk.model).__name__} computes a loss of its own from labels, maybe without shifting them: "
            'give labels of next tokens and targets="next tokens", or a `loss`'
        )
    own: dict[str, Any] = {
        "layers": walk.layers(),
        "loss": next_token_loss if is_shifted else causal_loss,
        "loss_terms": next_token_terms if is_shifted else causal_terms,
        "layer_costs": walk.layer_costs(),
        "tied": walk.tied(),
        "weights": weights_of(walk, folder),
    }
    return Job(**{**own, **fields})


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the loss terms that transformers averages: labels are the tokens themselves, (batch, time)."""
    return next_token_loss(logits, _shifted(labels))


def causal_terms(labels: Tensor) -> int:
    """Return the number of terms of `causal_loss`."""
    return next_token_terms(_shifted(labels))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in float32 of logits (batch, time, vocabulary) and next tokens (batch, time)."""
    logits = logits.flatten(0, -2).float()
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token_terms(targets: Tensor) -> int:
    """Return the number of terms of `next_token_loss`."""
    return int((targets != IGNORED).sum())


def _shifted(labels: Tensor) -> Tensor:
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _config_of(model: Any) -> tuple[Any, Path | None]:
    """Return the configuration of a model, and its folder if it is given by that."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("a model of transformers needs the package: pip install 'transformers>=5'") from None
    if isinstance(model, transformers.PreTrainedConfig):
        return model, None
    if isinstance(model, nn.Module):
        raise ConfigError(
            "a model is given, of which each worker would build the whole: save it by save_pretrained(FOLDER), and "
            "give the folder, of which each worker reads its own layers; or give the model's `config`"
        )
    path = Path(model).expanduser().absolute()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is no folder with a config.json: give the folder of a model, or a configuration of transformers. "
            "Models are not downloaded; `hf download NAME --local-dir FOLDER` gets one"
        )
    return transformers.AutoConfig.from_pretrained(path, local_files_only=True), path


# --- weights ---------------------------------------------------------------------------------------------------------


def weights_of(walk: Walk, folder: Path | None) -> Weights:
    """Return the weights of a model's folder, if it has any, and their names in it or, without one, in an export.

    Raises:
        ConfigError: they are not in safetensors, or transformers changes them on saving in a way that keeps no views.
    """
    stored = _stored_names(walk.model)
    save = partial(_save_beside, walk.model, folder)
    path, found = None, frozenset[str]()
    if folder is not None:
        if any((folder / name).is_file() for name in (INDEX, SINGLE)):
            path, found = folder, frozenset(files_of(folder))
            stored = {name: _as_found(own, found, walk.model.base_model_prefix) for name, own in stored.items()}
        elif others := sorted(
            each.name for pattern in ("*.bin", "*.pt*", "*.safetensors") for each in folder.glob(pattern)
        ):
            raise ConfigError(
                f"{folder} has its weights in {others[0]}, and not in {SINGLE} or {INDEX}: load the model by "
                "from_pretrained, and save it by save_pretrained; or give its configuration, to train from the start"
            )
    for name, is_stored in walk.uninitialized():
        if path is None or not is_stored:
            remedy = (
                "give a folder with weights, saved by save_pretrained" if is_stored else "no layer can have it alone"
            )
            raise ConfigError(
                f"{type(walk.model).__name__}: transformers initialises {name} only with the whole model: {remedy}"
            )
    names = [
        {own: stored[name] for own, name in walk.names(index).items() if name in stored}
        for index in range(-1, walk.num_blocks + 1)
    ]
    return Weights(path, names, ignored=_ignored(walk.model, stored.values(), found), save_config=save)


def _stored_names(model: Any) -> dict[str, StoredName]:
    """Return the names by which transformers saves parameters and buffers, by their names in the model.

    It converts some on saving, such as the experts of a layer, which are one parameter, to one tensor for each. The
    conversion of tensors on the meta device shows the place of each in the parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state, first = dict[str, Tensor](), dict[int, str]()
    for name, tensor in sources_first(model, model.state_dict(keep_vars=True).items()):
        # Tied parameters are saved once.
        if first.setdefault(id(tensor), name) == name:
            state[name] = tensor.detach()
    places = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    parts: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in state}
    with _WithoutCopies():
        for stored, part in revert_weight_conversion(model, state).items():
            if (place := places.get(part.untyped_storage()._cdata)) is not None:
                parts[place].append((stored, part))
    for name, own in parts.items():
        if sum(part.numel() for _, part in own) != state[name].numel():
            raise ConfigError(
                f"{type(model).__name__}: transformers saves {name!r} together with other tensors, so that no layer "
                "can read it alone; give the job `weights` of your own, or None"
            )
    return {name: _as_views(own, state[name]) for name, own in parts.items()}


class _WithoutCopies(TorchFunctionMode):
    """Leaves out copies that only change how a tensor lies in memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.contiguous, Tensor.clone) else func(*args, **(kwargs or {}))


def _as_views(parts: Sequence[tuple[str, Tensor]], whole: Tensor) -> StoredName:
    if len(parts) == 1 and parts[0][1].shape == whole.shape and parts[0][1].stride() == whole.stride():
        return parts[0][0]
    geometries = [(part.size(), part.stride(), int(part.storage_offset())) for _, part in parts]
    return Pieces(tuple(name for name, _ in parts), partial(_strided, geometries))


def _strided(geometries: Iterable[tuple[Any, Any, int]], whole: Tensor) -> list[Tensor]:
    return [whole.as_strided(size, stride, whole.storage_offset() + offset) for size, stride, offset in geometries]


def _as_found(stored: StoredName, found: frozenset[str], prefix: str) -> StoredName:
    """Return names as files have them: those of a model without its head lack the prefix."""

    def own(name: str) -> str:
        bare = name.removeprefix(f"{prefix}.")
        return bare if name not in found and bare in found else name

    return own(stored) if isinstance(stored, str) else Pieces(tuple(map(own, stored.names)), stored.views)


def _ignored(model: Any, stored: Iterable[StoredName], found: frozenset[str]) -> tuple[str, ...]:
    """Return the tensors of files that transformers would not load either: those it names, and copies of tied ones."""
    patterns = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    patterns.append(re.compile(r"rotary_emb\.inv_freq"))
    known = {name for each in stored for name in names_of(each)}
    tied = set(model.all_tied_weights_keys)
    return tuple(
        name for name in sorted(found - known) if name in tied or any(pattern.search(name) for pattern in patterns)
    )


def _save_beside(model: Any, source: Path | None, folder: Path) -> None:
    """Write the configuration of a model, and what its folder has for tokens, into that of an export."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True) if source else model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for file in (file for pattern in _BESIDE for file in (source.glob(pattern) if source else ())):
        shutil.copyfile(file, folder / file.name)
