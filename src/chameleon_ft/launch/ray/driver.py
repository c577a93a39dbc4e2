"""The driver of a run on Ray: starts the coordinator's actor, passes signals on to it and waits for the outcome."""

from __future__ import annotations

import signal
import time
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from chameleon_ft.config import Control, RunConfig
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.launch.coordinator import EXIT_CODES
from chameleon_ft.launch.processes import signals_passed_to, unattended
from chameleon_ft.launch.ray.actors import CoordinatorActor, Outcome
from chameleon_ft.launch.ray.cluster import (
    NAMESPACE,
    NodeRequest,
    connected,
    give_back,
    live_nodes,
    live_run,
    name_of,
    remove_leftovers,
)
from chameleon_ft.launch.ray.options import ClusterOptions
from chameleon_ft.storage.files import RunDirectory

_ASK_S: Final = 5.0
_LOOK_S: Final = 0.2
# Ray brings the last lines of the coordinator within this time.
_LOGS_S: Final = 1.5
_MAX_SIGNALS: Final = 2
"""Signals that a coordinator acts on: the first ends the run with a checkpoint, the second at once."""


def train(config: RunConfig, *, run: RunDirectory, resume: bool, options: ClusterOptions) -> int:
    """Train on the nodes of a Ray cluster; this process is the driver, on one of them. Returns the exit code.

    The run directory has to be on a file system that all nodes share, unless the run writes no checkpoints.

    Raises:
        ConfigError: no cluster answers, it has too few resources, a node does not see the run directory, or another
            driver runs this run.
        ChameleonError: the run cannot be started.
    """
    with unattended(), connected(options.address):
        request = NodeRequest.of(config, options, live_nodes())
        # No other node reaches this address.
        if config.control.host == Control().host:
            host = ray.util.get_node_ip_address()
            config = config.model_copy(update={"control": config.control.model_copy(update={"host": host})})
        remove_leftovers(name_of(run))
        # A coordinator that was killed may have left it, and one that Ray restarts would continue that one's run.
        run.remove_control()
        node = ray.get_runtime_context().get_node_id()
        actor = ray.remote(CoordinatorActor).options(
            name=name_of(run),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            # Its files are there.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        try:
            coordinator = actor.remote(config, run.path, resume=resume, request=request, wait_s=options.wait_s)
        except ValueError:
            # An actor of another start has taken the name just now.
            raise live_run(name_of(run)) from None
        outcome = _Driver(coordinator, run).wait()
    if isinstance(outcome, ChameleonError):
        raise outcome
    return EXIT_CODES[outcome]


class _Driver:
    """Waits for the outcome of a run, and passes the signals of this process on."""

    def __init__(self, coordinator: Any, run: RunDirectory) -> None:
        self._coordinator = coordinator
        self._run = run
        self._signals: list[signal.Signals] = []
        self._passed_on = 0

    def wait(self) -> Outcome:
        """Return the outcome. Raises ControlError if the coordinator is lost for good."""
        with signals_passed_to(self._signals.append):
            try:
                outcome = self._outcome()
            finally:
                time.sleep(_LOGS_S)
                ray.kill(self._coordinator)
                give_back(name_of(self._run))
        return outcome

    def _outcome(self) -> Outcome:
        asked = None
        while len(self._signals) <= _MAX_SIGNALS:
            asked = asked or self._coordinator.outcome.remote(_ASK_S)
            if ray.wait([asked], timeout=_LOOK_S)[0]:
                try:
                    outcome: Outcome | None = ray.get(asked)
                except ActorUnavailableError:
                    outcome = None
                except RayError as error:
                    reason = str(error).strip().partition("\n")[0]
                    raise ControlError(f"the coordinator of {self._run.path} is lost: {reason}") from None
                if outcome is not None:
                    return outcome
                asked = None
            if len(self._signals) > self._passed_on:
                self._passed_on = len(self._signals)
                self._coordinator.obey.remote(list(self._signals))
        status: RunStatus = "interrupted" if self._signals[-1] == signal.SIGINT else "terminated"
        print(f"the run is ended without a checkpoint: {status}", flush=True)
        return status
