"""`chameleon coordinator`: run the coordinator of a run that spans several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc

from chameleon_ft.cli.arguments import Page, StartArguments, page_beside, parse_start, with_page_address
from chameleon_ft.errors import ConfigError, LiveRunError
from chameleon_ft.session.configuration import AUTO
from chameleon_ft.session.joining import StandbyRequest
from chameleon_ft.session.start import give_way, lost_run, prepare_run
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, kw_only=True)
class CoordinatorArguments(StartArguments):
    """Run the coordinator of a run that spans several machines. It decides, records and displays; it does not compute.

    Set control.host to an address that the other machines reach, or to auto. The coordinator prints the address and the
    token that `chameleon agent` and `chameleon worker` need, and waits until all `workers` have joined.
    """

    page: Page = None
    take_over: Annotated[Path | None, "RUN"] = None
    """Directory of a live run whose coordinator is lost; this one continues the run."""
    standby: Annotated[
        Path | None,
        "RUN",
        Doc(
            "Directory of a run with a coordinator elsewhere: stand by, and continue the run, at an address of this "
            "machine, when that coordinator is lost."
        ),
    ] = None
    or_standby: bool = False
    """With --resume auto: if the run is live, stand by, so that a scheduler may start this command at any time."""
    host: Annotated[str | None, "ADDRESS"] = None
    """With --standby: address of this machine, or its interface; by default that of the route to the coordinator."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(CoordinatorArguments, with_page_address(arguments), command="coordinator")
    if given.take_over is not None:
        if flags or given.config is not None or given.resume is not None:
            raise ConfigError(f"--take-over {given.take_over}: the run continues as it is; leave out all but --page")
        lost = lost_run(given.take_over)
        with page_beside(given.page) as shown, shown(lost):
            from chameleon_ft.launch.coordinator import take_over

            return take_over(lost.own(lost.config()), run=lost)
    if given.standby is not None:
        if flags or given.config is not None or given.resume is not None:
            raise ConfigError(
                f"--standby {given.standby}: the run continues as it is; leave out all but --host and --page"
            )
        return _stand_by(given.standby, host=given.host, page=given.page)
    if given.host is not None:
        raise ConfigError("--host: is for --standby; for this coordinator, set --control.host")
    if given.or_standby:
        return _coordinate_or_stand_by(given, flags)
    return _coordinate(given, flags)


def _coordinate(given: CoordinatorArguments, flags: dict[str, Any]) -> int:
    with page_beside(given.page) as shown:
        prepared = prepare_run(given.request(flags))
        from chameleon_ft.launch.coordinator import coordinate

        with shown(prepared.directory):
            return prepared.start(coordinate)


def _stand_by(path: Path, *, host: str | None, page: str | None) -> int:
    with page_beside(page) as shown:
        if StandbyRequest(run=path).find_coordinator() is None:
            return 0
        directory = RunDirectory.open(path)
        from chameleon_ft.launch.coordinator import stand_by

        with shown(directory):
            return stand_by(directory.own(directory.config()), run=directory, host=host)


def _coordinate_or_stand_by(given: CoordinatorArguments, flags: dict[str, Any]) -> int:
    if given.resume != AUTO or "output_dir" not in flags:
        raise ConfigError("--or-standby: needs --resume auto and --output-dir")
    run = RunDirectory(Path(flags["output_dir"]))
    try:
        if run.control_file.exists():
            give_way(run)
        return _coordinate(given, flags)
    except LiveRunError as error:
        print(f"{error}; this coordinator stands by", flush=True)
        return _stand_by(run.path, host=flags.get("control", {}).get("host"), page=given.page)
