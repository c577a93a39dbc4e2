"""Optimizers of a model's named parameters, and schedules of their learning rates.

A job's `optimizer` is called with the `ModelParameters` of the whole model:

    optimizer=lambda parameters: torch.optim.AdamW(
        groups(parameters, {vectors: NO_DECAY, "0.*": NO_DECAY, "*.router.*": {"lr": 1e-4}}), lr=3e-4, weight_decay=0.1
    )
    schedule=cosine(warmup_steps=100, total_steps=config.steps)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import ModelParameters

__all__ = [
    "NO_DECAY",
    "Combined",
    "Schedule",
    "TorchSchedule",
    "adamw",
    "combined",
    "constant",
    "cosine",
    "ema",
    "groups",
    "linear",
    "matrices",
    "rate_shares",
    "scheduler",
    "vectors",
    "warmup_cosine",
    "wsd",
]

# --- parameters by name ----------------------------------------------------------------------------------------------

Selector: TypeAlias = str | Callable[[str, nn.Parameter], bool]
"""Chooses parameters: a pattern of their names, as of `fnmatch`, or a function of name and parameter."""

NO_DECAY: Final[Mapping[str, Any]] = {"weight_decay": 0.0}


def matrices(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has two dimensions."""
    return parameter.ndim == 2


def vectors(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has fewer than two dimensions, as biases and the weights of norms."""
    return parameter.ndim < 2


def groups(parameters: ModelParameters, options: Mapping[Selector, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Divide parameters into the groups of an optimizer.

    A parameter has the options of all selectors that choose it, where a later one wins over an earlier one, and those
    that choose none the optimizer's own. Parameters with equal options are one group.

    Raises:
        ConfigError: a selector chooses no parameter.
    """
    made = list[tuple[dict[str, Any], dict[str, Any]]]()
    chosen = set[Selector]()
    for name, parameter in parameters.named_parameters():
        selectors = [each for each in options if _chooses(each, name, parameter)]
        chosen.update(selectors)
        own = {key: value for each in selectors for key, value in options[each].items()}
        group = next((group for other, group in made if other == own), None)
        if group is None:
            made.append((own, group := {**own, "params": [], "param_names": []}))
        group["params"].append(parameter)
        group["param_names"].append(name)
    if idle := [each for each in options if each not in chosen]:
        raise _chooses_none(idle[0], parameters)
    return [group for _, group in made]


def _chooses(selector: Selector, name: str, parameter: nn.Parameter) -> bool:
    return fnmatchcase(name, selector) if isinstance(selector, str) else selector(name, parameter)


def _chooses_none(selector: Selector, parameters: ModelParameters) -> ConfigError:
    names = [name for name, _ in parameters.named_parameters()]
    shown = repr(selector) if isinstance(selector, str) else getattr(selector, "__name__", repr(selector))
    return ConfigError(
        f"{shown} chooses none of the {len(names)} parameters, which have names such as {', '.join(names[:4])}; a "
        'pattern is compared with the whole name, so begin and end it with "*" for a part of one'
    )


# --- optimizers ------------------------------------------------------------------------------------------------------


class Combined(torch.optim.Optimizer):
    """Several optimizers as one, with their groups and one state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.optimizers = tuple(optimizers)
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        for each in optimizers:
            self.state.update(each.state)
            each.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


def combined(
    parameters: ModelParameters, factories: Mapping[Selector, Callable[[ModelParameters], torch.optim.Optimizer]]
) -> Combined:
    """Make one optimizer of several: each parameter is updated by that of the first selector that chooses it.

    Such as Muon (Jordan et al. 2024) for the matrices of blocks, and AdamW for all else:

        combined(
            parameters,
            {
                "*embedding*": partial(torch.optim.AdamW, lr=3e-4),
                matrices: partial(torch.optim.Muon, lr=0.02),
                "*": partial(torch.optim.AdamW, lr=3e-4),
            },
        )

    Raises:
        ConfigError: a selector chooses no parameter, or no selector a parameter.
    """
    chosen: dict[Selector, list[tuple[str, nn.Parameter]]] = {each: [] for each in factories}
    for name, parameter in parameters.named_parameters():
        selector = next((each for each in factories if _chooses(each, name, parameter)), None)
        if selector is None:
            raise ConfigError(f'no optimizer is chosen for the parameter {name}: end with one for "*"')
        chosen[selector].append((name, parameter))
    if idle := [each for each, named in chosen.items() if not named]:
        raise _chooses_none(idle[0], parameters)
    return Combined([factories[each](ModelParameters(named)) for each, named in chosen.items()])


AVERAGE: Final = "ema"


def ema(optimizer: torch.optim.Optimizer, decay: float) -> torch.optim.Optimizer:
    """Have an optimizer keep an exponential moving average of each parameter, as "ema" in its state; return it.

    The average begins with the parameter after its first update: average = decay * average + (1 - decay) * parameter.
    It is part of checkpoints, from which ``load_checkpoint(run, average="ema")`` reads it, and moves with the layers.

    Raises ConfigError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"ema has the decay {decay:g}: it is at least 0, and less than 1, such as 0.999")

    @torch.no_grad()
    def average(own: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (each for group in own.param_groups for each in group["params"]):
            # Optimizers make their own state where there is none, at the first gradient.
            if parameter.grad is None and not own.state.get(parameter):
                continue
            state = own.state[parameter]
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter, 1 - decay)
            else:
                state[AVERAGE] = parameter.detach().clone()

    optimizer.register_step_post_hook(average)
    return optimizer


def adamw(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) that decays matrices and larger tensors, but not vectors.

    The state is per parameter (``step``, ``exp_avg``, ``exp_avg_sq``), so that a layer can move between workers with
    it. `parameters` may be empty, for a layer without any.
    """
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=lr,
        betas=betas,
        eps=eps,
        # On the CPU too, where it takes 0.4 times as long as the alternatives for a worker's share of a small Llama.
        fused=True,
    )


# --- schedules -------------------------------------------------------------------------------------------------------

Shape: TypeAlias = Literal["linear", "cosine", "sqrt"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Step (from 0) -> factor of the rate: linear up to 1, constant, and down to `floor`, where it stays.

    Step ``warmup_steps - 1`` is the first at 1, and step ``total_steps - 1`` the first at `floor`.

    Attributes:
        decay_steps: steps from 1 to `floor`, the last ones; 0 if it stays at 1.
        shape: of the decay, with x from 0 to 1: 1 - x, (1 + cos(pi x)) / 2, or 1 - sqrt(x).

    Raises ConfigError if the steps do not fit.
    """

    warmup_steps: int = 0
    decay_steps: int = 0
    total_steps: int = 0
    floor: float = 0.0
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        if min(self.warmup_steps, self.decay_steps) < 0 or (
            self.decay_steps and self.warmup_steps + self.decay_steps > self.total_steps
        ):
            raise ConfigError(
                f"a schedule of {self.total_steps} steps cannot have {self.warmup_steps} of warm-up and "
                f"{self.decay_steps} of decay: give 0 or more of each, and together at most as many as there are"
            )
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"a schedule has the floor {self.floor:g}: it is a factor of the rate, from 0 to 1")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        x = (step + 1 - self.total_steps + self.decay_steps) / self.decay_steps if self.decay_steps else 0.0
        x = min(max(x, 0.0), 1.0)
        shapes = {"linear": 1 - x, "cosine": 0.5 * (1 + math.cos(math.pi * x)), "sqrt": 1 - math.sqrt(x)}
        return self.floor + (1 - self.floor) * shapes[self.shape]


def constant(*, warmup_steps: int = 0) -> Schedule:
    """Return a schedule that stays at 1 after a linear warm-up."""
    return Schedule(warmup_steps)


def linear(*, total_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> Schedule:
    """Return a schedule that falls linearly after a linear warm-up."""
    return _decaying(total_steps, warmup_steps, floor, "linear")


def cosine(*, total_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> Schedule:
    """Return a schedule that falls by half a cosine after a linear warm-up (Loshchilov and Hutter 2017)."""
    return _decaying(total_steps, warmup_steps, floor, "cosine")


def wsd(
    *, total_steps: int, decay_steps: int, warmup_steps: int = 0, floor: float = 0.0, shape: Shape = "linear"
) -> Schedule:
    """Return a schedule of warm-up, stable rate and decay (Hu et al. 2024)."""
    return Schedule(warmup_steps, decay_steps, total_steps, floor, shape)


def _decaying(total_steps: int, warmup_steps: int, floor: float, shape: Shape) -> Schedule:
    # A warm-up as long as the run, or longer, never decays.
    return Schedule(warmup_steps, max(0, total_steps - warmup_steps), max(total_steps, warmup_steps), floor, shape)


def scheduler(make: Callable[..., LRScheduler], *arguments: Any, **options: Any) -> TorchSchedule:
    """Return a schedule by a scheduler of torch: `make(optimizer, *arguments, **options)` returns it.

    Such as ``scheduler(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=config.steps)``. It is stepped once
    for each step, and may set other options of groups than the rate, too.
    """
    return TorchSchedule(lambda optimizer: make(optimizer, *arguments, **options))


class TorchSchedule:
    """The options of an optimizer's groups in each step, as a scheduler of torch sets them; see `scheduler`.

    The scheduler belongs to an optimizer without parameters, and is stepped as often as the number of the step says. So
    the options depend on that number alone, also after a return to an earlier step, or a resume.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
        self._make = make
        self._made: tuple[torch.optim.Optimizer, LRScheduler] | None = None
        self._step = 0

    def options(
        self, step: int, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the options of each group in a step (from 0).

        Args:
            groups: The groups of the optimizer as it was made.
            defaults: its defaults.

        Raises:
            ConfigError: the scheduler depends on more than the number of steps.
        """
        if self._made is None or step < self._step:
            self._made, self._step = self._begun(groups, defaults), 0
        optimizer, scheduler = self._made
        while self._step < step:
            optimizer.step()
            scheduler.step()
            self._step += 1
        return [
            {key: own[key] for key in group if key not in _PARAMETERS}
            for group, own in zip(groups, optimizer.param_groups, strict=True)
        ]

    def _begun(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> tuple[torch.optim.Optimizer, LRScheduler]:
        alike = ({key: value for key, value in group.items() if key not in _PARAMETERS} for group in groups)
        optimizer = _Idle([{**own, "params": [nn.Parameter(torch.empty(0))]} for own in alike], dict(defaults))
        made: Any = self._make(optimizer)
        if isinstance(made, ReduceLROnPlateau) or not isinstance(made, LRScheduler):
            raise ConfigError(
                f"`schedule` is {type(made).__name__}, whose rate is not a function of the step: take one of steps, "
                "such as chameleon_ft.optim.wsd, and to lower the rate when a loss no longer falls, resume with --fork"
            )
        return optimizer, made


_PARAMETERS: Final = ("params", "param_names")


class _Idle(torch.optim.Optimizer):
    """Changes nothing."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


def warmup_cosine(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 0): linear up to `peak`, then half a cosine down to `floor`.

    Step ``warmup_steps - 1`` is the first at `peak`; step ``total_steps - 1`` and all later ones are at `floor`. A
    warm-up as long as the run, or longer, never decays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = total_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps + 1) / decay_steps) if decay_steps > 0 else 1.0
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return, for each group of an optimizer, its learning rate as a multiple of `Job.learning_rate`.

    The groups keep the ratio of the rates that they were made with, as by torch's LambdaLR. The multiple is 1 for the
    optimizer's default rate, or if no group has that, for the largest rate of a group.
    """
    default = float(optimizer.defaults.get("lr", 0.0))
    rates = [float(group.get("initial_lr", group.get("lr", default))) for group in optimizer.param_groups]
    used = [rate for rate, group in zip(rates, optimizer.param_groups, strict=True) if group["params"]]
    base = default if default > 0 and default in used else max(used, default=default)
    return [1.0 if rate == base else rate / base for rate in rates]
