"""References of functions, such as that of a job: checking, importing and calling them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Compile, Precision
from chameleon_ft.job.job import Job
from chameleon_ft.job_arguments import JobArgument, bound_arguments, settable_arguments
from chameleon_ft.keys import Purpose, random_key, seeded

if TYPE_CHECKING:
    from types import ModuleType

    from chameleon_ft.config import RunConfig


def check_job_reference(reference: str, kind: str = "job") -> None:
    """Check that the file or module of a reference exists, without importing more than the packages around it.

    Args:
        reference: The reference of a function, as for `load_job`.
        kind: what the function is, which is also its name where the reference names none.

    Raises:
        ConfigError: the reference is malformed, or its file or module does not exist.
    """
    location, _ = _split_reference(reference, kind)
    if _is_file(location):
        if not Path(location).is_file():
            raise ConfigError(f"{kind} {reference!r}: there is no file {location}")
        return
    if location == "__main__":
        raise ConfigError(
            f"{kind} {reference!r}: `__main__` is this program alone, and each worker is a process of its own; put the "
            f"function into a file, and name that, such as my_{kind}.py"
        )
    # An installed command, unlike `python -m`, does not look in the working directory. Appended, so that no local file
    # shadows an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if not _module_exists(location):
        raise ConfigError(
            f"{kind} {reference!r}: there is no module {location}; a file is named with its ending, {location}.py"
        )


def load_job(reference: str, config: RunConfig) -> Job:
    """Call the function that `reference` names and return its job, with the precision of `config`.

    The random generators of torch on the CPU, Python and NumPy are seeded before its module is loaded and before it is
    called, so that every worker gets the same data, and the same modules if the function builds them itself.

    Args:
        reference: ``package.module:function`` or ``path/to/file.py:function``; without ``:function`` it is ``job``.
            Modules are also looked for in the working directory. The folder of a file is put on the import path, as
            for a script.
        config: passed to the function if it requires an argument, with the horizon of the schedule as its steps. Its
            `job_arguments` are passed by their names.

    Raises:
        ConfigError: there is no such function, it has no such arguments, or it returns no `Job`. Errors of the function
            itself pass through.
    """
    function = _import_function(reference, config, kind="job")
    arguments = bound_arguments(function, config.job_arguments, job=reference)
    # A schedule is not to move when a run resumes with more steps.
    job = _call(function, config.model_copy(update={"steps": config.horizon}), arguments)
    if not isinstance(job, Job):
        _, name = _split_reference(reference, "job")
        raise ConfigError(f"job {reference!r}: {name}() returned {type(job).__name__}, not a chameleon_ft.Job")
    return replace(
        job,
        precision=Precision(config.precision, config.fp32_modules),
        compile=Compile(config.compile, config.compile_backend),
        arguments=arguments,
    )


def arguments_of_job(reference: str, config: RunConfig) -> tuple[JobArgument, ...]:
    """Return the arguments of a job's function that a configuration may set. Raises as `load_job`."""
    return tuple(settable_arguments(_import_function(reference, config, kind="job")).values())


def call_function(reference: str, config: RunConfig, *, kind: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Import the function that `reference` names, call it, and return its result.

    As `load_job`, but for any kind of function, and for any arguments. Raises ConfigError if there is none.
    """
    return _call(_import_function(reference, config, kind=kind), config, arguments or {})


def _call(function: Callable[..., Any], config: RunConfig, arguments: Mapping[str, Any]) -> Any:
    with seeded(random_key(config.seed, Purpose.JOB)):
        return function(*((config,) if _needs_an_argument(function, arguments) else ()), **arguments)


def _import_function(reference: str, config: RunConfig, *, kind: str) -> Callable[..., Any]:
    check_job_reference(reference, kind)
    location, name = _split_reference(reference, kind)
    with seeded(random_key(config.seed, Purpose.JOB)):
        module = _import_file(Path(location)) if _is_file(location) else importlib.import_module(location)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{kind} {reference!r}: {location} has no function {name!r}; name one as {location}:FUNCTION")
    if not callable(function):
        raise ConfigError(f"{kind} {reference!r}: {name!r} is not a function; name one that returns a {kind}")
    return function  # type: ignore[no-any-return]


def _split_reference(reference: str, kind: str) -> tuple[str, str]:
    head, colon, tail = reference.rpartition(":")
    # A path may contain a colon; the one that separates the function is followed by an identifier.
    location, name = (head, tail) if colon and tail.isidentifier() else (reference, kind)
    if not (_is_file(location) or all(part.isidentifier() for part in location.split("."))):
        raise ConfigError(f"{kind} {reference!r}: write it as package.module:function or path/to/file.py:function")
    return location, name


def _is_file(location: str) -> bool:
    return location.endswith(".py")


def _module_exists(location: str) -> bool:
    try:
        return importlib.util.find_spec(location) is not None
    except ModuleNotFoundError as error:
        # A parent package that exists but fails to import something else is another error.
        if f"{location}.".startswith(f"{error.name}."):
            return False
        raise


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    # The name is derived from the path, so that other processes, and pickle, find the module under the same name.
    name = f"chameleon_job_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"job {str(path)!r}: this file cannot be imported")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _needs_an_argument(function: Callable[..., Any], given: Collection[str]) -> bool:
    # A parameter with a default may be meant for anything.
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in given]
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
