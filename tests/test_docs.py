"""The documentation says what is so: the reference, the links, the examples and the commands."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chameleon_ft.cli.main import COMMANDS, main
from chameleon_ft.config import DEVICES, LlamaConfig, RunConfig, config_type, parse_fields
from chameleon_ft.models.build import initial_layer
from chameleon_ft.models.checks import boundary_specs, check_loss
from chameleon_ft.models.optimizer_checks import check_learning_rate, check_optimizer
from chameleon_ft.models.sample_checks import SampleReads
from chameleon_ft.models.weights import check_weights
from chameleon_ft.side_outputs import collecting
from chameleon_ft.worker.inspection import inspect_job
from tests.models.transformers_families import family, whole_model
from tests.models.transformers_llama import transformers_llama

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS: dict[str, set[str]] = {}
"""Those of each command, once its help has been read."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_reference_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert load_script("reference").with_reference(page) == page, "run `python docs/reference.py`"


def test_the_tables_of_records_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert load_script("events").with_tables(page) == page, "run `python docs/events.py`"


def test_the_picture_of_the_architecture_is_that_of_the_code() -> None:
    script = load_script("architecture")
    assert script.picture() == script.PICTURE.read_text(encoding="utf-8"), "run `python docs/architecture.py`"
    assert script.described()[0].keys() >= script.imports().nodes, "describe the package in docs/architecture.md"


def files_called(name: str) -> list[Path]:
    """Return the files that a page means by a name: a path in the package or the repository, or the end of one."""
    folders = (ROOT / "src" / "chameleon_ft", ROOT / "tests", ROOT / "benchmarks", ROOT / "docs")
    return [path for folder in folders for path in folder.rglob("*.py") if f"/{path}".endswith(f"/{name}")]


def test_the_files_and_names_on_the_page_on_architecture_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [name for name in sorted(set(re.findall(r"`([\w/]+\.py)`", page))) if not files_called(name)] == []
    inside = re.findall(r"`([\w.]+)`\s+(?:in|of)\s+`([\w/]+\.py)`", page)
    assert len(inside) > 20
    missing = []
    for name, file in inside:
        if not any(re.search(rf"\b{name.split('.')[-1]}\b", each.read_text("utf-8")) for each in files_called(file)):
            missing.append(f"{name} in {file}")
    assert missing == []


def test_the_picture_of_memory_has_the_predictions() -> None:
    pytest.importorskip("matplotlib")
    script = load_script("memory")
    drawn = script.PICTURE.read_text(encoding="utf-8")
    for precision, owners in script.CASES:
        assert f"<!-- {script.predicted(precision, owners).label} -->" in drawn, "run `python docs/memory.py`"


def test_the_page_on_devices_has_all_of_the_registry() -> None:
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) ?\|", page, re.MULTILINE)
    assert {(device, backend): run_on for device, backend, run_on in rows} == {
        (name, backend): kind.run_on.get(backend, "**not run**")
        for name, kind in DEVICES.items()
        for backend in kind.backends
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    assert [name for name, _ in targets if not (page.parent / name).exists()] == []
    in_pages = [(page.parent / name if name else page, anchor) for name, anchor in targets if anchor]
    assert [f"{target.name}#{anchor}" for target, anchor in in_pages if anchor not in anchors(target)] == []


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_that_are_shown_are_valid(page: Path) -> None:
    for block in blocks(page, "toml"):
        data = tomllib.loads(block)
        parse_fields(config_type(data), data, source=page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist_with_their_flags(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flags in commands_shown(page):
        assert name.split()[0] in COMMANDS
        if name not in FLAGS:
            with pytest.raises(SystemExit):
                main([*name.split(), "--help"])
            FLAGS[name] = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
        # A job says itself which arguments it has.
        flags = {flag for flag in flags if not flag.startswith("--job.")}
        assert flags <= FLAGS[name], f"chameleon {name} has no {sorted(flags - FLAGS[name])}"


def commands_shown(page: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield (command, flags) for every command line on a page, in blocks and in running text."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"\bchameleon ([a-z]+ [^`\n]*)", text):
        name, _, arguments = line.partition(" ")
        if name == "data":
            subcommand, _, arguments = arguments.partition(" ")
            name = f"data {subcommand}"
        if name.split()[0] in COMMANDS or "--" in arguments:
            yield name, set(re.findall(r"(?<!\S)--[\w.-]+", arguments))


def test_the_code_on_the_page_on_data_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    Path("rows.json").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(200)))
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "data.md", "python"):
        packages = set(re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE))
        # tests/data/test_page.py runs those that need corpora.
        if "open_corpus" not in block and all(importlib.util.find_spec(package) for package in packages):
            exec(block, names)
    streams = [names["Lines"]("text.txt"), *([names["Rows"]("rows.json")] if "Rows" in names else [])]
    jobs = [replace(names["job"](), dataset=stream) for stream in streams]
    if "masked_language_model" in names:
        tokenizers = importlib.import_module("tokenizers")
        words = {word: number for number, word in enumerate(["<pad>", "<mask>", "line", *map(str, range(253))])}
        model = tokenizers.models.WordLevel(words, unk_token="<mask>")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save("tokenizer.json")
        jobs.append(names["masked_language_model"]())
    for job in jobs:
        reads = SampleReads(job, seed=0)
        boundary = boundary_specs(job, 2)[-1]
        assert boundary.leaves[0].shape == (2, 64, 256)
        check_loss(job, boundary, 2, device=torch.device("cpu"))
        reads.check()


def test_the_code_on_the_page_on_models_runs(tmp_path: Path) -> None:
    code, experts, router = blocks(ROOT / "docs" / "models.md", "python")
    file = tmp_path / "translate.py"
    file.write_text(code)
    info = inspect_job(RunConfig(job=str(file)))
    assert [len(boundary.leaves) for boundary in info.layers.boundaries] == [3] * 5 + [1]
    assert not info.hints
    names: dict[str, Any] = {}
    exec(experts, names)
    exec(router, names)
    with collecting() as beside:
        assert names["Experts"]()(torch.randn(2, 5, 64)).shape == (2, 5, 64)
    assert set(beside.names) == {"auxiliary_loss", "largest_load"}
    own = names["Router"]()
    own(torch.randn(2, 5, 64))
    assert own.load.sum() == 10
    own.after_step({"load": own.load})
    assert own.bias.abs().max() > 0


def test_the_code_on_the_page_on_optimizers_runs() -> None:
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "optimizers.md", "python"):
        exec(block, names)
    job = names["job"](RunConfig(job="job.py", steps=1000))
    for each in (job, replace(job, optimizer=names["adamw"])):
        check_optimizer(each, device=torch.device("cpu"))
    check_learning_rate(job)


@pytest.mark.multiprocess
def test_the_code_on_the_page_on_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, session = blocks(ROOT / "docs" / "transformers.md", "python")
    Path("finetune.py").write_text(first)
    config = family("qwen3_moe", tie_word_embeddings=True)
    before = whole_model(config)
    before.save_pretrained("model")
    names: dict[str, Any] = {}
    exec(session, names)
    trained = names["model"]
    assert type(trained) is type(before)
    changes = [(trained.state_dict()[name] - value).abs().max() for name, value in before.state_dict().items()]
    assert all(0 < change < 0.1 for change in changes)


@pytest.mark.multiprocess
def test_the_code_on_the_page_on_weights_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, session, adapters = blocks(ROOT / "docs" / "weights.md", "python")
    Path("finetune.py").write_text(first)
    Path("pretrained").mkdir()
    block = {
        "ln.weight": (16,),
        "ln.bias": (16,),
        "up.weight": (32, 16),
        "gate.weight": (32, 16),
        "down.weight": (32, 16),
    }
    shapes = {f"blocks.{n}.{name}": shape for n in (0, 1) for name, shape in block.items()}
    shapes |= {"embed.weight": (16, 8), "embed.bias": (16,), "lm_head.weight": (9, 16)}
    stored = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(stored, "pretrained/model.safetensors")
    exec(session, {})
    trained = load_file("out/model.safetensors")
    assert trained.keys() == stored.keys() - {"lm_head.weight"} | {"classifier.weight", "classifier.bias"}
    assert all(0 < (trained[name] - stored[name]).abs().max() < 0.1 for name in trained.keys() & stored.keys())
    transformers_llama(LlamaConfig(vocab_size=50, num_layers=2, dim=16, ffn_dim=24)).save_pretrained("model")
    names: dict[str, Any] = {}
    exec(adapters, names)
    job = names["job"]()
    check_weights(job)
    own = [[name for name, each in initial_layer(job, n, 0).named_parameters() if each.requires_grad] for n in range(4)]
    assert [len(each) for each in own] == [0, 4, 4, 0]


def test_the_diff_in_the_readme_is_that_of_the_examples() -> None:
    (diff,) = blocks(ROOT / "README.md", "diff")
    sides = {"-": "own_model_plain.py", "+": "own_model.py", " ": "own_model.py"}
    for line in diff.splitlines():
        name = sides[line[0]]
        assert line[1:] in (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines(), f"{name}: {line}"
