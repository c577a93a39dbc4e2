"""Import rules between packages, and their public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import chameleon_ft

ROOT = Path(chameleon_ft.__file__).parent
# In the order in which they may import each other.
PURE = (
    "quantities",
    "errors",
    "workload",
    "cluster",
    "plan",
    "presets",
    "schedule",
    "sync",
    "estimate",
    "transfer",
    "search",
    "recovery",
)
# Modules that make a decision depend on the time, the place or the process.
IMPURE = frozenset(
    {
        "torch",
        "numpy.random",
        "time",
        "datetime",
        "socket",
        "asyncio",
        "threading",
        "multiprocessing",
        "subprocess",
        "os",
        "pathlib",
        "logging",
        "random",
        "secrets",
        "uuid",
    }
)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def imports(path: Path) -> frozenset[str]:
    """Return all imports of a file, also those for type checkers only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def parts_imported(path: Path) -> set[str]:
    """Return the parts of Chameleon (its top-level modules and packages) that a file imports."""
    names = (name.split(".") for name in imports(path))
    return {name[1] for name in names if name[0] == "chameleon_ft" and len(name) > 1}


def exported(path: Path) -> list[str] | None:
    """Return the `__all__` of a file, or None if it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return [str(name) for name in ast.literal_eval(node.value)]
    return None


def part(module: str) -> str:
    return module.split(".")[0]


MODULES = list(modules())


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if part(m[0]) in PURE])
def test_the_pure_part_imports_only_itself_and_nothing_impure(module: str, path: Path) -> None:
    assert parts_imported(path) <= set(PURE), module
    names = imports(path)
    assert not (names | {name.split(".")[0] for name in names}) & IMPURE, module


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if part(m[0]) in {"simulate", "control"}])
def test_simulate_and_control_import_only_the_pure_part_and_what_records(module: str, path: Path) -> None:
    allowed = {*PURE, "observe", "config", "profiles", part(module)}
    assert parts_imported(path) <= allowed, module
    assert "torch" not in {name.split(".")[0] for name in imports(path)}, module


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if part(m[0]) not in {"cli", "__main__"}])
def test_no_package_imports_the_command_line(module: str, path: Path) -> None:
    assert "cli" not in parts_imported(path), module


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if part(m[0]) == "runtime"])
def test_the_runtime_knows_of_control_only_what_they_say_to_each_other(module: str, path: Path) -> None:
    names = ["wire.codec", "wire.messages", "wire.parts", "wire.address", "wire.connection", "job_info"]
    names += ["host_process", "hung_process"]  # of the processes of this host
    spoken = tuple(f"chameleon_ft.control.{name}" for name in names)
    known = {name for name in imports(path) if name.startswith("chameleon_ft.control")}
    assert all(name.startswith(spoken) for name in known), module


# The pure part of control, which receives the time and reads nothing.
DECIDING = [["control", name] for name in ("state_machine", "handlers", "detectors", "state", "events", "commands")]


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m[0].split(".")[:2] in DECIDING])
def test_what_decides_in_control_reads_no_clock_and_touches_nothing(module: str, path: Path) -> None:
    names = imports(path)
    assert not (names | {name.split(".")[0] for name in names}) & IMPURE, module
    shell = {f"chameleon_ft.control.{name}" for name in ("coordinator", "agent", "wire.server", "wire.connection")}
    assert not names & shell, module


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {f"chameleon_ft.{module}": path for module, path in MODULES if module != "__init__"}
    imported = {name: set(imports(path)) & files.keys() - {name} for name, path in files.items()}
    for name, found in imported.items():
        # `from package import module` imports the module; the package itself is not what is used.
        imported[name] = {other for other in found if not any(deeper.startswith(f"{other}.") for deeper in found)}
    TopologicalSorter(imported).prepare()


def test_the_check_of_a_run_shares_no_code_with_what_ran_it() -> None:
    assert not parts_imported(ROOT / "verify.py") & {"runtime", "control", "plan", "schedule", "sync", "recovery"}


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m[0].startswith("search.baselines")])
def test_published_planners_share_only_what_places_and_predicts_plans_with_our_search(module: str, path: Path) -> None:
    ours = {name for name in imports(path) if name.startswith("chameleon_ft.search.")}
    shared = ("baselines", "placement.candidates", "placement.hosts", "result", "pipelines.worker_classes")
    allowed = tuple(f"chameleon_ft.search.{name}" for name in shared)
    assert all(name.startswith(allowed) for name in ours), module


def test_the_parts_depend_on_each_other_in_one_direction() -> None:
    for module, path in MODULES:
        if part(module) in PURE:
            below = set(PURE[: PURE.index(part(module)) + 1])
            assert parts_imported(path) <= below, module


def test_no_part_imports_private_modules_or_names_of_another() -> None:
    for module, path in MODULES:
        private = {
            name
            for name in imports(path)
            if name.startswith("chameleon_ft.") and part(module) != name.split(".")[1] and "._" in name
        }
        assert not private, module


def test_the_pure_part_is_imported_without_torch() -> None:
    code = (
        "import sys; import chameleon_ft.recovery, chameleon_ft.sync; "
        "print(sorted({'torch', 'scipy', 'networkx', 'pydantic', 'asyncio', 'socket'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SURFACE = {
    "": ["BoundarySpec", "ChameleonError", "ConfigError", "Job", "RunConfig", "TrainConfig", "__version__"],
    "job": ["BoundarySpec", "Dataset", "Job", "Precision", "check_job_reference", "load_job", "random_key"],
    "keys": ["Purpose", "init_key", "random_key", "step_key"],
    "optim": ["adamw", "warmup_cosine"],
    "quantities": ["ROUNDING", "SUM_ROUNDING", "counted", "data_size", "duration", "in_ranges", "listed", "rate"],
    "deploy": ["BatchScript", "KubernetesRun", "Machines", "to_yaml", "with_reachable_host"],
    "launch": ["coordinate", "run_agent", "stand_by", "take_over", "train", "work"],
    "launch.ray": ["ClusterOptions", "train"],
    "verify": ["TOLERANCES", "StepComparison", "Verification", "repeat_run"],
    "cli": ["main"],
    "simulate": [
        "MODELS",
        "ORACLE",
        "SIMULATED_POLICIES",
        "Bursts",
        "DecisionRecord",
        "Event",
        "Fault",
        "FaultModel",
        "IncidentSizes",
        "Parameters",
        "Poisson",
        "PolicyResult",
        "Repairs",
        "Results",
        "Scene",
        "SpotModel",
        "Stragglers",
        "Sweep",
        "Throughput",
        "Trace",
        "TraceStatistics",
        "Weibull",
        "generate_trace",
        "load_trace",
        "load_trace_for",
        "parse_trace",
        "save_trace",
        "simulate",
        "sweep",
        "trace_statistics",
        "trace_to_jsonl",
    ],
    "config": [
        "BACKENDS",
        "DEVICES",
        "LASTING_KINDS",
        "LLAMA_JOB",
        "MOST_WORKERS",
        "RENAMED_KEYS",
        "SLOWNESS",
        "STAND_IN_JOB",
        "Backend",
        "BackendName",
        "Batch",
        "Checkpoint",
        "Control",
        "Data",
        "DeviceKind",
        "DeviceName",
        "Emulation",
        "Failure",
        "FailureKind",
        "FailurePhase",
        "Forked",
        "Health",
        "LlamaConfig",
        "Optimizer",
        "Parallel",
        "PolicyName",
        "Preflight",
        "Recovery",
        "RunConfig",
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
    ],
    "data": ["DataSummary", "SampleOrder", "SkippedFile", "check_data", "load_tokens", "prepare_data"],
    "search": [
        "DEFAULT_EFFORT",
        "BaselinePlan",
        "BoundFamily",
        "FoundPlan",
        "InfeasibleError",
        "SearchResult",
        "SizeFigures",
        "equal_layouts",
        "find_plan",
        "find_plan_of_sizes",
        "oobleck_plan",
        "paper_plan",
        "pareto_front",
        "recut_plan",
        "reroute",
        "shared_hops",
    ],
    "profiles": [
        "AllReduceTime",
        "Fingerprint",
        "LayerTimes",
        "Profile",
        "Spread",
        "cached_profile",
        "costs_of_run",
        "derived_profile",
        "hosts_of_run",
        "profile_cache",
        "profile_cache_file",
        "profile_of_run",
        "read_profile",
        "write_profile",
    ],
    "observe": [
        "ControlAddress",
        "CostsFrom",
        "Directory",
        "FailureCostRecord",
        "FailureRecord",
        "FaultLog",
        "FileQueue",
        "GenerationPlan",
        "JoinRecord",
        "NoticedBy",
        "OtherRecord",
        "OutcomeRecord",
        "RecordLine",
        "RecordedReduction",
        "RecordedStep",
        "Recorder",
        "RunDirectory",
        "RunInfo",
        "RunRecord",
        "RunStatus",
        "StepPart",
        "StepRecord",
        "Storage",
        "Summary",
        "TimelineLog",
        "View",
        "checked_files",
        "checkpoint_model",
        "checkpoint_storage",
        "complete_checkpoints",
        "damage_of",
        "detach",
        "discard_checkpoint",
        "has_checksums",
        "incomplete_checkpoints",
        "is_complete",
        "layer_directory",
        "layer_part",
        "link_checkpoint",
        "line_of",
        "mark_complete",
        "mark_damaged",
        "open_for_appending",
        "prune_checkpoints",
        "read_generation_plans",
        "read_lines",
        "read_recorded_steps",
        "record_copies",
        "replace_file",
        "seal_layer",
        "slice_directory",
        "slice_part",
        "slices_of",
        "sound_checkpoint",
        "storage_of",
        "summarize",
    ],
    "errors": [
        "ChameleonError",
        "CheckpointError",
        "ConfigError",
        "ControlError",
        "DamagedCheckpointError",
        "DataError",
        "DeposedError",
        "LeaseError",
        "LiveRunError",
        "NoHolderError",
        "PlanError",
        "ProfileError",
        "ProgramError",
        "StoreError",
    ],
    "workload": ["MOST_MICRO_BATCHES", "LayerCost", "TiedParameters", "Workload", "is_recomputed"],
    "cluster": ["Cluster", "Link", "Worker"],
    "plan": [
        "Hop",
        "LayerRange",
        "PipelineLayout",
        "Placement",
        "Plan",
        "RecomputedLayers",
        "Route",
        "data_pipeline_plan",
        "pipelines_plan",
        "split_layers",
    ],
    "schedule": [
        "CostModel",
        "InFlightLimit",
        "Operation",
        "OperationKind",
        "PipelineSchedule",
        "PipelineTimes",
        "Preference",
        "Program",
        "Resend",
        "ScheduledProgram",
        "ScheduledRest",
        "TimedOperation",
        "Timeline",
        "best_program",
        "check_program",
        "check_rest",
        "default_limits",
        "list_schedule",
        "pipeline_schedule",
        "replay",
        "rest_schedules",
    ],
    "presets": [
        "DEVICES",
        "MODELS",
        "PRECISIONS",
        "STATE_POLICIES",
        "Attention",
        "Bias",
        "DType",
        "Device",
        "Execution",
        "FeedForward",
        "ModelShape",
        "Norm",
        "Recompute",
        "StatePolicy",
        "TokenWork",
        "derive_workload",
        "device",
        "from_hugging_face",
        "layer_work",
        "model_shape",
        "state_policy",
    ],
    "sync": [
        "Segment",
        "SyncRounds",
        "gradient_rounds",
        "gradient_segments",
        "issue_points",
        "segment_bytes",
        "tied_segments",
    ],
    "estimate": [
        "LEAST_SNAPSHOT_COST",
        "SNAPSHOT_SHARE",
        "MemoryUse",
        "MessageBuffers",
        "PartsEstimate",
        "PipelineTimes",
        "RestEstimate",
        "SnapshotChoice",
        "SnapshotMemory",
        "SnapshotRule",
        "StallModel",
        "StepEstimate",
        "SyncEstimate",
        "TimedReduction",
        "TransitionEstimate",
        "WorkerMemory",
        "choose_snapshots",
        "estimate_parts",
        "estimate_rest",
        "estimate_step",
        "estimate_sync",
        "expected_snapshot_s",
        "host_bytes",
        "lost_share_s",
        "part_bytes",
        "peak_bytes_of",
        "pipeline_bound_s",
        "pipeline_times",
        "plan_bound_s",
        "program_memory",
        "received_layers",
        "reduction_times",
        "snapshot_memory",
        "snapshots_fit",
        "state_bytes",
        "total_work_bound_s",
        "workload_memory",
    ],
    "transfer": [
        "Holding",
        "Message",
        "Transfer",
        "assign_roles",
        "choose_sources",
        "holdings_of",
        "least_moved_bytes",
        "message_rounds",
        "missing_between",
        "moved_bytes",
        "remap_placement",
        "remap_plan",
        "plan_transfer",
        "pull_s",
        "sums_s",
        "transfer_s",
        "transfer_to",
        "worker_kinds",
    ],
    "recovery": [
        "LONGEST_BETWEEN_SNAPSHOTS_S",
        "POLICIES",
        "STAY",
        "Candidate",
        "Checkpoints",
        "Course",
        "Decision",
        "DecisionContext",
        "FailureModel",
        "HolderSets",
        "LossClass",
        "LossRisk",
        "Policy",
        "Proposal",
        "Prospect",
        "SalvagedStep",
        "Snapshots",
        "best_of",
        "classes_to_prepare",
        "complete_step",
        "decide",
        "decide_for_class",
        "largest_symmetric_layout",
        "prefers_rerouting",
        "remap_decision",
        "reroute",
        "rescore",
        "return_gap_s",
        "risk_of",
        "score",
        "uniform_limits",
        "warm_up",
        "without_shadow_holders",
    ],
}


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_the_surface_changes_only_on_purpose(name: str) -> None:
    path = dict(MODULES)[name]
    assert sorted(exported(path) or ()) == sorted(SURFACE[name])


@pytest.mark.parametrize("name", sorted(PURE))
def test_everything_public_in_the_pure_part_is_explained(name: str) -> None:
    module = importlib.import_module(f"chameleon_ft.{name}")
    for each in module.__all__:
        assert getattr(module, each).__doc__, f"{name}.{each} has no docstring"


def test_every_public_module_that_defines_something_says_what_it_exports() -> None:
    for module, path in MODULES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign) for node in body)
        private = any(name.startswith("_") for name in module.split("."))
        assert private or not defines or exported(path) is not None, f"{path} has no __all__"
