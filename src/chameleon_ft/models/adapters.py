"""Adapters of peft, such as LoRA, on the layers of a job.

peft chooses modules by their names in the whole model, which are those in files of weights. So it is shown a tree that
has the modules of a layer at these places.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import build_on_meta
from chameleon_ft.weights import ADAPTERS, StoredName, Weights

# In the names of an adapter's parameters; peft leaves it out in files.
_ADAPTER_NAME: Final = ".default"
_UNSUPPORTED: Final = (
    "modules_to_save",
    "trainable_token_indices",
    "use_dora",
    "target_parameters",
    "layer_replication",
)


def with_adapters(job: Job, config: Any) -> Job:
    """Return a job whose layers have adapters, which alone are trained; see `Job.with_adapters`."""
    for option in _UNSUPPORTED:
        if getattr(config, option, None):
            raise ConfigError(f"`{option}` of the adapters is not supported: a layer gets adapters of modules alone")
    if getattr(config, "bias", "none") != "none":
        raise ConfigError(f'`bias` of the adapters is {config.bias!r}, but only adapters are trained: give bias="none"')
    layers = list[Callable[[], nn.Module]]()
    names: list[Mapping[str, StoredName]] = []
    renamed = dict[tuple[int, str], str]()
    known = dict[Any, Callable[[], nn.Module]]()
    every = list[str]()
    for layer, factory in enumerate(job.layers):
        module = build_on_meta(job, layer)
        before = {id(each): name for name, each in [*module.named_parameters(), *module.named_buffers()]}
        places = _places(job, layer, module)
        every += places.values()
        adapted = _adapt(module, places, config)
        # The blocks of a model mostly share one factory, and are examined once.
        is_alike = not (getattr(config, "rank_pattern", None) or getattr(config, "alpha_pattern", None))
        key = (id(factory), *adapted, "" if is_alike else layer)
        layers.append(known.setdefault(key, partial(_build, factory, places, config)))
        stored: dict[str, StoredName | None] = {}
        for name, each in [*module.named_parameters(), *module.named_buffers()]:
            if id(each) in before:
                renamed[layer, before[id(each)]] = name
                stored[name] = job.stored_as(layer, before[id(each)])
            else:
                path = next(path for path in adapted if name.startswith(f"{path}."))
                stored[name] = f"{ADAPTERS}{places[path]}{name.removeprefix(path).replace(_ADAPTER_NAME, '')}"
        names.append({name: each for name, each in stored.items() if each is not None})
    if not any(each.startswith(ADAPTERS) for own in names for each in own.values() if isinstance(each, str)):
        asked = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)
        raise ConfigError(
            f"the adapters have the target_modules {asked}, and no layer has such modules; name some of "
            f"{', '.join(every[:3])} and others"
        )
    source = job.weights or Weights()
    return replace(
        job,
        layers=layers,
        tied=[[(layer, renamed[layer, name]) for layer, name in copies] for copies in job.tied],
        weights=replace(
            source,
            names=names,
            initialized=(*source.initialized, f"{ADAPTERS}*"),
            save_adapters=partial(_save_config, config, source.path),
        ),
    )


def merge_adapters(job: Job, layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a layer, by name, with its adapters merged into the modules they are on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    module = build_on_meta(job, layer)
    # Copies, in a type that has room for the sum.
    module.load_state_dict(
        {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}, assign=True
    )
    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.merge()
    return {name: each.detach() for name, each in module.state_dict().items() if name in tensors}


def _places(job: Job, layer: int, module: nn.Module) -> dict[str, str]:
    """Return where in the whole model the modules of a layer are that have parameters and no other modules."""
    found = {}
    for path, part in module.named_modules():
        stored = [job.stored_as(layer, f"{path}.{name}") for name, each in part._parameters.items() if each is not None]
        if path and not part._modules and stored and isinstance(stored[0], str):
            found[path] = stored[0].rpartition(".")[0]
    return found


def _build(factory: Callable[[], nn.Module], places: Mapping[str, str], config: Any) -> nn.Module:
    module = factory()
    _adapt(module, places, config)
    return module


def _adapt(module: nn.Module, places: Mapping[str, str], config: Any) -> tuple[str, ...]:
    """Freeze a layer, and put adapters into it; return the modules that have got some."""
    import peft

    module.requires_grad_(False)
    tree = nn.Module()
    for path, place in places.items():
        parent, (*parents, own) = tree, place.split(".")
        for name in parents:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(own, module.get_submodule(path))
    try:
        with warnings.catch_warnings():
            # A pattern that is of other layers.
            warnings.simplefilter("ignore", RuntimeWarning)
            peft.inject_adapter_in_model(copy.deepcopy(config), tree)
    except ValueError as error:
        if type(error).__name__ == "NoMatchingPeftModuleError":
            return ()
        raise ConfigError(f"peft cannot adapt the modules of a layer: {error}") from error
    adapted = tuple(
        path for path, place in places.items() if tree.get_submodule(place) is not module.get_submodule(path)
    )
    for path in adapted:
        module.set_submodule(path, tree.get_submodule(places[path]))
    return adapted


def _save_config(config: Any, source: str | Path | None, folder: Path) -> None:
    saved = copy.deepcopy(config)
    if saved.base_model_name_or_path is None and source is not None:
        saved.base_model_name_or_path = str(source)
    saved.inference_mode = True
    saved.save_pretrained(folder)
