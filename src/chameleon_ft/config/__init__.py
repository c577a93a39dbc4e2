"""The configuration of a run: its fields, how it is read, and what is refused.

Importing this package imports neither torch nor anything that reads a clock or the environment.
"""

from __future__ import annotations

from chameleon_ft.config.devices import BACKENDS, DEVICES, Backend, BackendName, DeviceLibrary, DeviceName
from chameleon_ft.config.llama import Data, LlamaConfig, Optimizer
from chameleon_ft.config.run import LLAMA_JOB, MAX_WORKERS, STAND_IN_JOB, RunConfig, TrainConfig, config_type
from chameleon_ft.config.saved_state import Checkpoint, Forked, Skip, Snapshots, Store
from chameleon_ft.config.sections import (
    LASTING_KINDS,
    SLOWNESS,
    Batch,
    Control,
    Emulation,
    Evaluation,
    Failure,
    FailureKind,
    FailurePhase,
    Health,
    Loading,
    Parallel,
    PolicyName,
    Preflight,
    RampStage,
    Recovery,
    Timelines,
    Timeouts,
)
from chameleon_ft.config.validation import (
    config_to_toml,
    load_config,
    parse_config,
    parse_fields,
    read_recorded_toml,
    read_toml,
)

__all__ = [
    "BACKENDS",
    "DEVICES",
    "LASTING_KINDS",
    "LLAMA_JOB",
    "MAX_WORKERS",
    "SLOWNESS",
    "STAND_IN_JOB",
    "Backend",
    "BackendName",
    "Batch",
    "Checkpoint",
    "Control",
    "Data",
    "DeviceLibrary",
    "DeviceName",
    "Emulation",
    "Evaluation",
    "Failure",
    "FailureKind",
    "FailurePhase",
    "Forked",
    "Health",
    "LlamaConfig",
    "Loading",
    "Optimizer",
    "Parallel",
    "PolicyName",
    "Preflight",
    "RampStage",
    "Recovery",
    "RunConfig",
    "Skip",
    "Snapshots",
    "Store",
    "Timelines",
    "Timeouts",
    "TrainConfig",
    "config_to_toml",
    "config_type",
    "load_config",
    "parse_config",
    "parse_fields",
    "read_recorded_toml",
    "read_toml",
]
