"""The public names of each module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import chameleon_ft
from tests.test_architecture import MODULES, PURE, modules_in


def exported(path: Path) -> list[str] | None:
    """Return the `__all__` of a file, or None if it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return [str(name) for name in ast.literal_eval(node.value)]
    return None


SURFACE = {
    "": ["BoundarySpec", "ChameleonError", "ConfigError", "Job", "RunConfig", "TrainConfig", "__version__"],
    "job": [
        "BoundarySpec",
        "Dataset",
        "Job",
        "Precision",
        "call_function",
        "check_job_reference",
        "load_job",
        "random_key",
    ],
    "job_record": ["ACCEPTABLE", "Change", "Fact", "JobRecord"],
    "keys": ["Purpose", "generator_lock", "init_key", "random_key", "seeded", "step_key"],
    "optim": ["adamw", "rate_shares", "warmup_cosine"],
    "quantities": ["ROUNDING", "SUM_ROUNDING", "counted", "data_size", "duration", "in_ranges", "listed", "rate"],
    "launch.ray": ["ClusterOptions", "train"],
    "verify": ["TOLERANCES", "StepComparison", "UsersLoop", "Verification", "WeightComparison", "repeat_run"],
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
        "MAX_WORKERS",
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
    "data": [
        "DataSummary",
        "SampleOrder",
        "SkippedFile",
        "check_data",
        "load_tokens",
        "prepare_data",
        "read_sample",
    ],
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
    "workload": ["MAX_MICRO_BATCHES", "LayerCost", "TiedParameters", "Workload", "is_recomputed"],
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
    "sync": [
        "Segment",
        "SyncRounds",
        "gradient_rounds",
        "gradient_segments",
        "issue_points",
        "segment_bytes",
        "tied_segments",
    ],
    "transfer": [
        "Holding",
        "Message",
        "Transfer",
        "assign_roles",
        "choose_sources",
        "holdings_of",
        "min_moved_bytes",
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
    for module, path in modules_in(name):
        if "._" in module:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_names_are_imported_on_first_use() -> None:
    assert all(hasattr(chameleon_ft, name) for name in chameleon_ft.__all__)
    assert set(dir(chameleon_ft)) == set(chameleon_ft.__all__)


def test_a_name_that_is_not_there_is_missed_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = chameleon_ft.Trainer
