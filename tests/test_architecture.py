"""Import rules between packages, and what an import loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import chameleon_ft

ROOT = Path(chameleon_ft.__file__).parent
# In the order in which they may import each other.
PURE = (
    "quantities",
    "errors",
    "registry",
    "job_arguments",
    "job_record",
    "workload",
    "cluster",
    "plan",
    "schedule",
    "sync",
    "cost",
    "transfer",
    "search",
    "recovery",
)
JOBS = {"keys", "config", "weights", "job", "data", "models", "optim", "side_outputs", "trees"}
RECORDS = {"clock", "config", "events", "storage"}

# An impure part and the others that it may import when it runs.
MAY_IMPORT = {
    "keys": set[str](),
    "clock": set[str](),
    "optim": {"errors", "job"},
    "side_outputs": {"errors"},
    "trees": {"errors"},
    "config": {"errors", "registry", "workload"},
    "weights": {"errors"},
    "job": {"errors", "job_arguments", "keys", "config", "weights"},
    "data": {"errors", "quantities", "keys", "config", "job"},
    "events": {"errors", "quantities"},
    "storage": {*PURE, *RECORDS},
    "protocol": {*PURE, *RECORDS},
    "host": {"errors", "events", "protocol"},
    "models": {
        "errors",
        "job_record",
        "keys",
        "config",
        "weights",
        "job",
        "data",
        "optim",
        "side_outputs",
        "trees",
        "cost",
        "storage",
    },
    "report": {*PURE, *RECORDS},
    "simulate": {*PURE, *RECORDS, "report"},
    "verify": {*JOBS - {"models", "optim"}, "errors", "events", "storage"},
    "coordinator": {*PURE, *RECORDS, "protocol", "host"},
    "worker": {*PURE, *JOBS, *RECORDS, "protocol", "host"},
    "lab": {*PURE, *JOBS, *RECORDS, "report", "simulate", "host", "worker"},
    "launch": {*PURE, *RECORDS, "protocol", "report", "host", "coordinator", "worker"},
    "session": {
        *PURE,
        *JOBS - {"keys", "optim", "side_outputs", "trees"},
        *RECORDS,
        "protocol",
        "report",
        "host",
        "coordinator",
        "worker",
        "launch",
        "simulate",
        "verify",
    },
    "cli": {
        *PURE,
        *RECORDS,
        "job",
        "data",
        "protocol",
        "report",
        "host",
        "worker",
        "launch",
        "simulate",
        "verify",
        "session",
    },
}
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


def parts_imported_at_runtime(path: Path) -> set[str]:
    """Return the parts that a file imports when it runs; imports for type checkers only do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("chameleon_ft.")}


def part(module: str) -> str:
    return module.split(".")[0]


MODULES = list(modules())


def modules_in(*parts: str) -> list[tuple[str, Path]]:
    return [(module, path) for module, path in MODULES if part(module) in parts]


def test_the_pure_part_imports_only_itself_and_nothing_impure() -> None:
    for module, path in modules_in(*PURE):
        assert parts_imported(path) <= set(PURE), module
        names = imports(path)
        assert not (names | {name.split(".")[0] for name in names}) & IMPURE, module


def test_what_only_computes_and_records_imports_no_torch() -> None:
    for module, path in modules_in("events", "storage", "protocol", "report", "simulate", "host", "coordinator"):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, module


def test_no_package_imports_the_command_line() -> None:
    for module, path in MODULES:
        assert part(module) in {"cli", "__main__"} or "cli" not in parts_imported(path), module


# The pure part of the coordinator, which receives the time and reads nothing.
DECIDING = [["coordinator", name] for name in ("state_machine", "handlers", "detectors", "state", "events", "commands")]


def test_what_decides_in_the_coordinator_reads_no_clock_and_touches_nothing() -> None:
    shell = {f"chameleon_ft.coordinator.{name}" for name in ("coordinator", "agent", "wire.server", "wire.connection")}
    deciding = [(module, path) for module, path in MODULES if module.split(".")[:2] in DECIDING]
    assert {module.split(".")[1] for module, _ in deciding} == {name for _, name in DECIDING}
    for module, path in deciding:
        names = imports(path)
        assert not (names | {name.split(".")[0] for name in names}) & IMPURE, module
        assert not names & shell, module


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {f"chameleon_ft.{module}": path for module, path in MODULES if module != "__init__"}
    imported = {name: set(imports(path)) & files.keys() - {name} for name, path in files.items()}
    for name, found in imported.items():
        # `from package import module` imports the module; the package itself is not what is used.
        imported[name] = {other for other in found if not any(deeper.startswith(f"{other}.") for deeper in found)}
    TopologicalSorter(imported).prepare()


def test_the_check_of_a_run_shares_no_code_with_what_ran_it() -> None:
    shared = {"models", "worker", "coordinator", "plan", "schedule", "sync", "recovery"}
    for _, path in modules_in("verify"):
        assert not parts_imported(path) & shared, path


def test_published_planners_share_only_what_places_and_predicts_plans_with_our_search() -> None:
    shared = ("placement", "result", "worker_classes", "FoundPlan")
    allowed = tuple(f"chameleon_ft.search.{name}" for name in shared)
    for module, path in modules_in("lab"):
        # Simulations of thousands of workers count on a knapsack for pipelines by class.
        if module != "lab.by_class":
            ours = {name for name in imports(path) if name.startswith("chameleon_ft.search.")}
            assert all(name.startswith(allowed) for name in ours), module


def test_what_only_comparisons_need_is_reached_through_the_registry() -> None:
    for module, path in MODULES:
        assert part(module) == "lab" or "lab" not in parts_imported(path), module


def test_the_parts_depend_on_each_other_in_one_direction() -> None:
    for module, path in MODULES:
        if part(module) in PURE:
            below = set(PURE[: PURE.index(part(module)) + 1])
            assert parts_imported(path) <= below, module


def test_imports_point_one_way() -> None:
    forbidden = {}
    for module, path in MODULES:
        if part(module) not in {*PURE, "", "__main__"}:
            forbidden[module] = sorted(parts_imported_at_runtime(path) - MAY_IMPORT[part(module)] - {part(module)})
    assert {module: parts for module, parts in forbidden.items() if parts} == {}


def test_the_page_on_architecture_has_these_rules() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    paragraphs = dict(re.findall(r"^- \*\*`(\w+)`\*\*: (.*?)(?=\n- |\n\n)", page, re.MULTILINE | re.DOTALL))
    assert tuple(paragraphs)[: len(PURE)] == PURE
    described = {}
    for name in paragraphs.keys() - set(PURE):
        _, rule = re.split(r"May\s+import", paragraphs[name])
        described[name] = set(re.findall(r"`(\w+)`", rule)) | (
            set(PURE) if "the pure part" in " ".join(rule.split()) else set()
        )
    assert described == {name: rule - {name} for name, rule in MAY_IMPORT.items()}


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


def loading(module: str, *parts: str) -> str:
    """Import parts of the package, one after the other in a new process, and return the first that loads a module."""
    code = (
        "import importlib, sys\n"
        "for part in sys.argv[2:]:\n"
        "    importlib.import_module('chameleon_ft' + part)\n"
        "    if sys.argv[1] in sys.modules:\n"
        "        sys.exit(f'chameleon_ft{part}')\n"
    )
    return subprocess.run([sys.executable, "-c", code, module, *parts], capture_output=True, text=True).stderr


def test_what_does_not_compute_loads_no_torch() -> None:
    parts = (
        "",
        ".config",
        ".job",
        ".data",
        ".models",
        ".report",
        ".storage",
        ".coordinator",
        ".launch",
        ".cli",
        ".simulate",
    )
    assert loading("torch", *parts) == ""


def test_to_import_is_not_to_compile() -> None:
    parts = ("", ".cli", ".protocol.messages", ".worker.rank", ".recovery", ".simulate")
    assert loading("numba", *parts) == ""
