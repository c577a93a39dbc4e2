"""Parsing of command lines: arguments as dataclasses, and a flag for every field of a configuration.

The arguments of a command are a frozen dataclass: its docstring is the help of the command, and the docstring below a
field is the help of that argument. Flags of a configuration are parsed into a dataclass made from its fields, which
checks types only. The values are validated once, together with those of the configuration file, so a flag may correct
what does not fit together in the file, and all mistakes are reported in the same words.

Flags that other training tools have, and what there is instead.

Arguments about hosts that `chameleon plan` and `chameleon simulate` share.

The flag `--page` of commands that start a run.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Optional, TypeVar, Union, get_args, get_origin

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from chameleon_ft.config import MAX_WORKERS
from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import RunDirectory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_Own = TypeVar("_Own", bound="DataclassInstance")


_SET_BY_STARTS = ("forked", "run_id")  # not by hand
_FAILURE_PARTS = ("step", "worker", "phase", "kind")
_FAILURE_FORM = "STEP:WORKER[:PHASE[:KIND]]"
_NO_FAILURES = "none"


def metavar(text: str, description: str | None = None) -> Any:
    """Annotate an argument that may be left out: the help writes its value as `text`, with no default beside it."""
    return tyro.conf.arg(metavar=text, help=description, help_behavior_hint="")


# Optional, because tyro loads a type checker, which takes a tenth of a second, for `X | None`.
OptionalInt = Annotated[Optional[int], metavar("INT")]  # noqa: UP045
OptionalFloat = Annotated[Optional[float], metavar("FLOAT")]  # noqa: UP045
OptionalStr = Annotated[Optional[str], metavar("STR")]  # noqa: UP045
OptionalPath = Annotated[Optional[Path], metavar("PATH")]  # noqa: UP045
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag without a value."""
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""The directory of a run."""

_RULES = ConstructorRegistry()


@_RULES.primitive_rule
def _read_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read a number; the error names the text and what is expected."""
    if info.type not in (int, float):
        return None
    expected = "a whole number" if info.type is int else "a number"

    def read(texts: list[str]) -> Any:
        try:
            return info.type(texts[0])
        except ValueError:
            raise ValueError(f'"{texts[0]}" should be {expected}') from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    )


@_RULES.primitive_rule
def _read_optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read an optional argument as its type, so that neither help nor errors mention None."""
    kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
    if NoneType not in get_args(info.type) or len(kinds) != 1:
        return None
    found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if not isinstance(found, PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        found,
        is_instance=lambda value: value is None or found.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else found.str_from_instance(value),
    )


def parse_arguments(own: type[_Own], arguments: Sequence[str], *, command: str) -> _Own:
    """Parse `arguments` as the dataclass `own`. The process ends at --help and at a mistake."""
    # Lines that are not indented tyro would join to long ones.
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(own.__doc__ or "").split("\n\n")
    text = "\n".join(textwrap.fill(each, width, initial_indent=" ", subsequent_indent=" ") for each in paragraphs)
    with _RULES:
        return tyro.cli(
            own, prog=f"chameleon {command}", description=text, args=arguments, config=(tyro.conf.DisallowNone,)
        )


def given_flags(arguments: DataclassInstance) -> Iterator[tuple[str, Any]]:
    """Yield the flag and the value of each argument that differs from its default, those of nested arguments too."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from given_flags(value)
        elif value != field.default:
            yield f"--{field.name.replace('_', '-')}", value


def parse_with_flags(
    own: type[_Own], model: type[BaseModel], arguments: Sequence[str], *, command: str, without: Collection[str] = ()
) -> tuple[_Own, dict[str, Any]]:
    """Parse `arguments` as the dataclass `own`, and flags for the fields of `model`, except those in `without`.

    Returns:
        The own arguments; and the values by key, sections as dictionaries, only those given and not validated yet.

    Raises:
        ConfigError: a failure is malformed. The process ends at --help, an unknown flag and a value of a wrong type.
    """
    mirror = dataclasses.make_dataclass(own.__name__, _flags(model, without), bases=(own,), frozen=True)
    mirror.__doc__ = own.__doc__
    values = dataclasses.asdict(parse_arguments(mirror, arguments, command=command))
    own_values = {field.name: values.pop(field.name) for field in dataclasses.fields(own)}
    given = _without_none(values)
    if "failures" in given:
        text = given["failures"]
        given["failures"] = [] if text == _NO_FAILURES else [_failure(part) for part in text.split(",")]
    return own(**own_values), given


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in given.items() if value is not None and value != {}}


def _flags(model: type[BaseModel], without: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return (name, annotation, default) of each field, as `dataclasses.make_dataclass` takes them."""
    return [_flag(name, info) for name, info in model.model_fields.items() if name not in (*without, *_SET_BY_STARTS)]


def _flag(name: str, info: FieldInfo) -> tuple[str, Any, Any]:
    kind: Any = info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        section: Any = dataclasses.make_dataclass(kind.__name__, _flags(kind), frozen=True)
        return name, Annotated[section, tyro.conf.arg(help=kind.__doc__)], dataclasses.field(default_factory=section)
    form, text, default = None, info.description, info.get_default()
    if name == "failures":
        kind, form, default = str, "FAILURE[,FAILURE ...]", _NO_FAILURES
        text = f"{text} Each as {_FAILURE_FORM}; or {_NO_FAILURES}."
    elif Path in {get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(kind)}:
        kind, form = str, "PATH"
    hint = "" if default in (None, "") else f"(default: {default})"
    extra = info.json_schema_extra
    aliases = [str(extra["flag"])] if isinstance(extra, dict) and "flag" in extra else []
    described = tyro.conf.arg(metavar=form, help=text, help_behavior_hint=hint, aliases=aliases)
    return name, Annotated[kind | None, described], dataclasses.field(default=None)


def _failure(text: str) -> dict[str, Any]:
    step, *rest = text.split(":")
    if not 1 <= len(rest) < len(_FAILURE_PARTS) or not (step.isdecimal() and rest[0].isdecimal()):
        raise ConfigError(
            f'--failures "{text}": should be {_FAILURE_FORM}, such as 12:5:backward:kill; put commas between several'
        )
    return dict(zip(_FAILURE_PARTS, (int(step), int(rest[0]), *rest[1:]), strict=False))


_STEPS: Final = "training is counted in --steps, and one epoch is the samples over --batch.micro-batches times "
_HERE: Final = {
    "epochs num-epochs num-train-epochs max-epochs": f"{_STEPS}--batch.micro-batch-size",
    "max-steps train-iters max-iters iterations": "take --steps",
    "fp16 half amp mixed-precision": "take --precision bf16, whose range needs no loss scaling; there is no fp16",
    "bf16": "take --precision bf16",
    "precision=fp16 precision=16 precision=float16": "take bf16, whose range needs no loss scaling; there is no fp16",
    "from-step start-step skip-steps resume-step": "--resume RUN continues from the newest checkpoint; to begin with "
    "an earlier one, remove those after it from a copy of the run",
    "resume-from resume-from-checkpoint load ckpt checkpoint-path": "take --resume RUN, the directory of a run",
    "save save-dir out out-dir output output-directory": "take --output-dir",
    "save-every save-steps save-interval checkpoint-every ckpt-every": "take --checkpoint.every",
    "batch-size global-batch-size per-device-train-batch-size micro-batch-size": "a step has --batch.micro-batches of "
    "--batch.micro-batch-size samples each, over all workers",
    "gradient-accumulation-steps accumulate-grad-batches grad-accum": "take --batch.micro-batches, over all workers",
    "tp tensor-parallel tensor-model-parallel-size fsdp zero zero-stage": "a worker is one device; there are "
    "--parallel.dp, --parallel.pp and --parallel.optimizer-redundancy",
    "pp pipeline-parallel pipeline-model-parallel-size": "take --parallel.pp",
    "dp data-parallel": "take --parallel.dp",
    "nproc-per-node nproc num-gpus gpus world-size": "take --workers",
    "restarts max-restarts": "a lost worker ends nothing; --recovery.respawn starts it again",
}
_OF_LLAMA: Final = {
    "lr learning-rate": "take --optimizer.lr",
    "schedule lr-schedule lr-scheduler lr-scheduler-type optimizer.schedule": "the rate rises for "
    "--optimizer.warmup-steps and falls by a cosine to --optimizer.min-lr; a job of your own may have any other, by "
    "Job(learning_rate=...)",
    "warmup warmup-steps": "take --optimizer.warmup-steps",
    "weight-decay wd": "take --optimizer.weight-decay",
    "grad-clip clip-grad max-grad-norm gradient-clip-val": "take --optimizer.clip-norm",
    "seq-length max-seq-len sequence-length block-size": "take --model.seq-len",
}
_OF_JOB: Final = "it is set in the job: by `optimizer`, `learning_rate`, `clip_norm` or `dataset` of chameleon_ft.Job"


def refuse_foreign_flags(arguments: Iterable[str], *, own_job: bool) -> None:
    """Raise ConfigError, with what to give instead, for a flag that other tools have.

    `own_job`: whether the command trains a job of the user, whose optimizer is no part of the configuration.
    """
    texts = {
        name: text
        for table, replaced in ((_HERE, ""), (_OF_LLAMA, _OF_JOB if own_job else ""))
        for names, own in table.items()
        for name in names.split()
        for text in (replaced or own,)
    }
    given = list(arguments)
    for argument, value in zip(given, (*given[1:], ""), strict=False):
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        for known in (name, argument.removeprefix("--"), f"{name}={value}"):
            if argument.startswith("--") and known in texts:
                raise ConfigError(f"--{known.replace('=', ' ')}: {texts[known]}")


_MAX_MEMORY: Final = 1e9


@dataclass(frozen=True)
class HostArguments:
    """The hosts of the workers, and the state that they keep."""

    workers_per_host: int = 8
    """Workers per host. Links between hosts are slower, and a host fails as a whole."""
    host_memory: Annotated[
        Optional[float],  # noqa: UP045
        metavar(
            "FLOAT",
            "Memory of a host that is available for its workers, in 10^9 bytes: snapshots that would take more than "
            "half of it are not taken. Unlimited if not given.",
        ),
    ] = None
    optimizer_redundancy: Annotated[
        Optional[Union[int, Literal["all"]]],  # noqa: UP007, UP045
        metavar(
            "INT|{all}",
            "Holders of a layer that keep the same part of its optimizer state; by default that of the configuration, "
            "or 2 without one.",
        ),
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory of a host; None if not given. Raises ConfigError if it is no possible number."""
        if self.host_memory is None:
            return None
        if not 1e-9 <= self.host_memory <= _MAX_MEMORY:
            raise ConfigError(
                f"--host-memory {self.host_memory:g}: should be a number of 10^9 bytes above 0, {_MAX_MEMORY:g} at most"
            )
        return round(self.host_memory * 1e9)

    def owners(self, usual: int | None) -> int | None:
        """Return how many workers own each slice of the optimizer's state; None if every holder keeps all of it.

        Args:
            usual: the number if none is given.

        Raises:
            ConfigError: the given number is below one.
        """
        if self.optimizer_redundancy is None:
            return usual
        if self.optimizer_redundancy == "all":
            return None
        if self.optimizer_redundancy < 1:
            raise ConfigError(f"--optimizer-redundancy {self.optimizer_redundancy}: should be 1 or more")
        return self.optimizer_redundancy


USUAL_HOSTS: Final = HostArguments()

Hosts = Annotated[HostArguments, tyro.conf.OmitArgPrefixes]
"""Type of a dataclass field that holds these flags; on the command line they have no prefix."""


def hosts_of(workers: int, per_host: int) -> dict[int, str]:
    """Return the host of each worker. Raises ConfigError if a host would have no worker, or there are too many."""
    if per_host < 1:
        raise ConfigError(f"--workers-per-host {per_host}: should be 1 or more")
    if workers > MAX_WORKERS:
        raise ConfigError(f"--workers {workers}: should be {MAX_WORKERS} at most")
    return {worker: f"host{worker // per_host}" for worker in range(workers)}


DEFAULT_ADDRESS: Final = "127.0.0.1:8790"

Page = Annotated[
    OptionalStr,
    metavar(
        "[HOST:PORT]",
        f"Show the run on a page in the browser, by default at {DEFAULT_ADDRESS}, for this machine alone. See "
        "docs/watching.md.",
    ),
]

_ADDRESS = re.compile(r"(\S*:)?\d+")


def with_page_address(arguments: Sequence[str]) -> list[str]:
    """Give a `--page` without an address the default one."""
    found = list(arguments)
    for index, argument in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else ""
        if argument == "--page" and not _ADDRESS.fullmatch(following):
            found[index] = f"--page={DEFAULT_ADDRESS}"
    return found


@contextmanager
def page_beside(address: str | None) -> Iterator[Callable[[RunDirectory], AbstractContextManager[None]]]:
    """Take the address of the page for the block, if one is wanted; yield what serves the page of a run in another.

    Raises ConfigError if the address cannot be taken.
    """
    if address is None:
        yield lambda run: nullcontext()
        return
    from chameleon_ft.launch.page import PageServer

    with closing(PageServer(address)) as server:
        yield server.beside
