"""Parsing of command lines: arguments as dataclasses, and a flag for every field of a configuration.

The arguments of a command are a frozen dataclass: its docstring is the help of the command, and the docstring below a
field is the help of that argument. Flags of a configuration are parsed into a dataclass made from its fields, which
checks types only. The values are validated once, together with those of the configuration file, so a flag may correct
what does not fit together in the file, and all mistakes are reported in the same words.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Optional,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import Doc
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from chameleon_ft.config import RunConfig, TrainConfig
from chameleon_ft.config.sections import OrInstalled
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.configuration import NamedStep, RunRequest
from chameleon_ft.storage.files import RunDirectory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_Own = TypeVar("_Own", bound="DataclassInstance")


# Starts set these, and no user does.
_SET_BY_STARTS = ("forked", "skips", "run_id")
_OF_JOB_FLAG: Final = "--job."
_FAILURE_PARTS = ("step", "worker", "phase", "kind")
_FAILURE_FORM = "STEP:WORKER[:PHASE[:KIND]]"
_NONE = "none"


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


def parse_arguments(
    own: type[_Own], arguments: Sequence[str], *, command: str, positional: Collection[str] = ()
) -> _Own:
    """Parse `arguments` as the dataclass `own`. The process ends at --help and at a mistake."""
    # Lines that are not indented tyro would join to long ones.
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(own.__doc__ or "").split("\n\n")
    text = "\n".join(textwrap.fill(each, width, initial_indent=" ", subsequent_indent=" ") for each in paragraphs)
    with _RULES:
        parsed = tyro.cli(
            _described(own, positional),
            prog=f"chameleon {command}",
            description=text,
            args=arguments,
            config=(tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff),
        )
    return _as(own, parsed)


def _described(own: type[_Own], positional: Collection[str] = ()) -> type[_Own]:
    """Return a dataclass that tyro reads as commands show arguments.

    A text among the metadata of an annotation is the form of a value, groups of arguments have no prefix, and the help
    writes no default beside what may be left out.
    """
    hints, described = get_type_hints(own, include_extras=True), list[tuple[str, Any, Any]]()
    for field in dataclasses.fields(own):
        kind, default, extras = hints[field.name], field.default, list[Any]()
        if get_origin(kind) is Annotated:
            kind, extras = kind.__origin__, list(kind.__metadata__)
        if dataclasses.is_dataclass(default):
            kind, extras = _described(type(default)), [tyro.conf.OmitArgPrefixes]
            default = kind()
        elif get_origin(kind) is tuple:
            extras.append(tyro.conf.UseAppendAction)
        elif isinstance(kind, UnionType):
            # For `X | None`, tyro loads a type checker, which takes a tenth of a second.
            kind = Union[get_args(kind)]  # noqa: UP007
        form = next((extra for extra in extras if isinstance(extra, str)), None)
        shown = tyro.conf.arg(metavar=form, help_behavior_hint="" if default in (None, False, (), "") else None)
        extras = [shown, *extras, *([tyro.conf.Positional] if field.name in positional else ())]
        values: dict[str, Any] = {"default": default, "default_factory": field.default_factory}
        given = {name: value for name, value in values.items() if value is not MISSING}
        described.append((field.name, Annotated[kind, *extras], dataclasses.field(**given)))
    found = dataclasses.make_dataclass(own.__name__, described, bases=(own,), frozen=True, kw_only=True)
    found.__doc__ = own.__doc__
    return found


def _as(own: type[_Own], parsed: _Own) -> _Own:
    """Return what was parsed as values of the original types, which check themselves. Raises ConfigError."""
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(own)}
    for field in dataclasses.fields(own):
        if dataclasses.is_dataclass(field.default):
            values[field.name] = _as(type(field.default), values[field.name])
    try:
        return own(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flag, value, why = first["loc"][0], first["input"], first["msg"].removeprefix("Input ")
        text = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(f"--{str(flag).replace('_', '-')} {text}: {why}") from None


def parse_with_flags(
    own: type[_Own],
    model: type[BaseModel],
    arguments: Sequence[str],
    *,
    command: str,
    positional: Collection[str] = (),
    without: Collection[str] = (),
) -> tuple[_Own, dict[str, Any]]:
    """Parse `arguments` as the dataclass `own`, and flags for the fields of `model`, except those in `without`.

    Returns:
        The own arguments; and the values by key, sections as dictionaries, only those given and not validated yet.

    Raises:
        ConfigError: a failure or a mixture is malformed. The process ends at --help, an unknown flag and a value of a
            wrong type.
    """
    both = dataclasses.make_dataclass(own.__name__, _flags(model, without), bases=(own,), frozen=True, kw_only=True)
    both.__doc__ = own.__doc__
    values = dataclasses.asdict(parse_arguments(both, arguments, command=command, positional=positional))
    own_values = {field.name: values.pop(field.name) for field in dataclasses.fields(own)}
    given = _without_none(values)
    if "failures" in given:
        text = given["failures"]
        given["failures"] = [] if text == _NONE else [_failure(part) for part in text.split(",")]
    if "mixture" in given.get("data", {}):
        given["data"]["mixture"] = [_source(part) for part in given["data"]["mixture"].split(",")]
    if "ramp" in given.get("batch", {}):
        text = given["batch"]["ramp"]
        given["batch"]["ramp"] = [] if text == _NONE else [_ramp_stage(part) for part in text.split(",")]
    return own(**own_values), given


def named_checkpoint(flag: str, text: str | None) -> NamedStep:
    """Return the checkpoint that the value of a flag names. Raises ConfigError unless it is a step, or best."""
    if text == "best":
        return "best"
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{flag} {text}: should be the step of a checkpoint, or best")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class StartArguments:
    """Arguments of all commands that start a run."""

    config: Annotated[Path | None, "[CONFIG]"] = None
    """TOML file with the configuration; flags override it."""
    resume: Annotated[
        str | None,
        "RUN|auto",
        Doc(
            "Directory of a run, or the URL of its object store, to resume from its newest checkpoint; the number of "
            "workers may change. With auto: resume the run in --output-dir, or in its store, if it has a checkpoint, "
            "and otherwise start it, so that the same command does both."
        ),
    ] = None
    fork: bool = False
    """With --resume: continue in the new directory of --output-dir, maybe with another batch or optimizer."""
    from_step: Annotated[
        str | None,
        "STEP|best",
        Doc(
            "With --resume: begin with the checkpoint of this step, or with the best one, instead of the newest; later "
            "steps are trained again."
        ),
    ] = None

    skip_samples: OptionalInt = None
    """With --resume: leave out so many samples before the first step; recorded, so that later resumes do, too."""

    def request(self, flags: Mapping[str, Any]) -> RunRequest:
        """Return the run that is asked for."""
        step = named_checkpoint("--from-step", self.from_step)
        return RunRequest(
            file=self.config,
            changes=flags,
            resume=self.resume,
            fork=self.fork,
            from_step=step,
            skip_samples=self.skip_samples,
        )


def parse_start(
    own: type[_Own],
    arguments: Sequence[str],
    *,
    command: str,
    positional: Collection[str] = ("config",),
    own_job: bool = False,
) -> tuple[_Own, dict[str, Any]]:
    """Parse the arguments of a command that starts a run; see `parse_with_flags`.

    `own_job`: whether the command trains a job of the user. Its configuration may have the sections of the Llama; the
    help shows only those that every job has.
    """
    arguments, of_job = take_job_arguments(arguments)
    refuse_foreign_flags(arguments, own_job=own_job)
    model: type[RunConfig] = TrainConfig
    without: tuple[str, ...] = ("job",) if own_job else ()
    if own_job and {"-h", "--help"} & set(arguments):
        model, without = RunConfig, ("job", "emulation")
    given, flags = parse_with_flags(own, model, arguments, command=command, positional=positional, without=without)
    return given, {**flags, "job_arguments": of_job} if of_job else flags


def take_job_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take each `--job.NAME VALUE` out of the arguments.

    Returns:
        The other arguments, and the values by name, as texts: only the function of the job tells their types.

    Raises:
        ConfigError: a value is missing.
    """
    rest, of_job = list[str](), dict[str, str]()
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith(_OF_JOB_FLAG):
            rest.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        if not equals and (value := next(remaining, "--")).startswith("--"):
            raise ConfigError(
                f"{flag}: give the value of this argument of the job, as in {flag} VALUE; a bool is true or false"
            )
        of_job[flag.removeprefix(_OF_JOB_FLAG).replace("-", "_")] = value
    return rest, of_job


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in given.items() if value is not None and value != {}}


def _flags(model: type[BaseModel], without: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return (name, annotation, default) of each field, as `dataclasses.make_dataclass` takes them."""
    return [
        _flag(name, info)
        for name, info in model.model_fields.items()
        if name not in (*without, *_SET_BY_STARTS, "job_arguments")
    ]


def _flag(name: str, info: FieldInfo) -> tuple[str, Any, Any]:
    kind: Any = info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        section: Any = dataclasses.make_dataclass(kind.__name__, _flags(kind), frozen=True)
        return name, Annotated[section, tyro.conf.arg(help=kind.__doc__)], dataclasses.field(default_factory=section)
    for choice in info.metadata:
        kind = choice.choices(kind) if isinstance(choice, OrInstalled) else kind
    form, text, default = None, info.description, info.get_default()
    if name == "failures":
        kind, form, default = str, "FAILURE[,FAILURE ...]", _NONE
        text = f"{text} Each as {_FAILURE_FORM}; or {_NONE}."
    elif name == "ramp":
        kind, form, default = str, "MICRO_BATCHES:UNTIL_STEP[,...]", _NONE
    elif name == "mixture":
        kind, form, default = str, "PATH=WEIGHT[,PATH=WEIGHT ...]", ""
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


def _ramp_stage(text: str) -> dict[str, int]:
    count, colon, step = text.partition(":")
    if not (colon and count.isdecimal() and step.isdecimal()):
        raise ConfigError(
            f'--batch.ramp "{text}": should be MICRO_BATCHES:UNTIL_STEP, such as 8:1000; put commas between several'
        )
    return {"micro_batches": int(count), "until_step": int(step)}


def _source(text: str) -> dict[str, Any]:
    path, equals, weight = text.rpartition("=")
    try:
        return {"path": path, "weight": float(weight)} if equals else {"path": text}
    except ValueError:
        raise ConfigError(f'--data.mixture "{text}": should be PATH=WEIGHT; put commas between several') from None


_STEPS: Final = "training is counted in --steps, and one epoch is the samples over --batch.micro-batches times "
_HERE: Final = {
    "epochs num-epochs num-train-epochs max-epochs": f"{_STEPS}--batch.micro-batch-size",
    "max-steps train-iters max-iters iterations": "take --steps",
    "fp16 half amp mixed-precision": "take --precision bf16, whose range needs no loss scaling; there is no fp16",
    "bf16": "take --precision bf16",
    "precision=fp16 precision=16 precision=float16": "take bf16, whose range needs no loss scaling; there is no fp16",
    "start-step skip-steps resume-step": "--resume RUN continues from the newest checkpoint, and with --from-step from "
    "an earlier one",
    "resume-from resume-from-checkpoint load ckpt checkpoint-path": "take --resume RUN, the directory of a run",
    "save save-dir out out-dir output output-directory": "take --output-dir",
    "save-every save-steps save-interval checkpoint-every ckpt-every": "take --checkpoint.every",
    "batch-size global-batch-size per-device-train-batch-size micro-batch-size": "a step has --batch.micro-batches of "
    "--batch.micro-batch-size samples each, over all workers",
    "gradient-accumulation-steps accumulate-grad-batches grad-accum": "take --batch.micro-batches, over all workers",
    "rampup-batch-size batch-size-rampup batch-size-warmup": "take --batch.ramp, whose stages end at steps",
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
    "Job(schedule=...)",
    "warmup warmup-steps": "take --optimizer.warmup-steps",
    "weight-decay wd": "take --optimizer.weight-decay",
    "grad-clip clip-grad max-grad-norm gradient-clip-val": "take --optimizer.clip-norm",
    "seq-length max-seq-len sequence-length block-size": "take --model.seq-len",
}
_OF_JOB: Final = (
    "it is set in the job: by `optimizer`, `schedule`, `clip_norm` or `dataset` of chameleon_ft.Job; an argument "
    "of its function is a flag, such as --job.lr"
)


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


DEFAULT_ADDRESS: Final = "127.0.0.1:8790"

Page = Annotated[
    str | None,
    "[HOST:PORT]",
    Doc(
        f"Show the run on a page in the browser, by default at {DEFAULT_ADDRESS}, for this machine alone. See "
        "docs/watching.md."
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
