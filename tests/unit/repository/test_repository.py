"""The rules of the repository, executed: sizes, names, layers. CONTRIBUTING.md says why."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.orchestrator.replicas import POOLS

ROOT = Path(__file__).parents[3]
GENERATED = ROOT / "spo" / "v1"
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_MAIN_LINES = 40
BANNED_WORDS = frozenset(
    {"data", "info", "item", "items", "manager", "helper", "helpers", "util", "utils", "handle", "common", "misc"}
)
# One per service by design.
SHARED_CLASS_NAMES = frozenset({"Settings"})
STREAM_METHODS = frozenset({"xadd", "xreadgroup", "xack", "xautoclaim", "xclaim", "xgroup_create"})
# Heavy package -> the places that know it; of vLLM's weight transfer a trainer has the other end.
ENGINES = {
    "vllm": ("services/inference", "spo/weights/broadcast.py", "spo/model/tool_calls.py"),
    "deepspeed": ("services/trainer/deepspeed_engine.py", "services/trainer/deepspeed_fields.py"),
}
LIGHT_MODULES = (
    "spo.api",
    "spo.cli",
    "spo.client",
    "spo.demo.demo",
    "services.agent_runner.__main__",
    "services.orchestrator.__main__",
    "services.sandbox_judge.__main__",
    "services.verifier.__main__",
    "services.replay_buffer.__main__",
)


def _python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents]


SOURCES = _python_files("spo", "services", "benchmarks")
TESTS = _python_files("tests")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _length(path: Path) -> int:
    return len(path.read_text().splitlines())


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _words(name: str) -> set[str]:
    return set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


# One test for a rule and not one for a file: thousands of them would take longer to be told than to be run.
def test_a_file_can_be_read_in_one_sitting() -> None:
    lines = {_name(path): _length(path) for path in SOURCES + TESTS}
    assert len(lines) > 600
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_a_function_fits_a_screen() -> None:
    lines = {
        f"{_name(path)}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == {}


def test_names_say_what_a_thing_is() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    # A command of Redis has the name that Redis gave it, a callback of a protocol or a server that of its library.
    theirs = {("redis_client.py", "info"), ("middleware.py", "data_received"), ("containers.py", "handle_error")}
    vague = []
    for path in SOURCES:
        names = [path.stem, *(node.name for node in ast.walk(_tree(path)) if isinstance(node, kinds))]
        banned = [name for name in names if _words(name) & BANNED_WORDS]
        vague += [f"{_name(path)}::{name}" for name in banned if (path.name, name) not in theirs]
    assert vague == []


def test_a_module_begins_with_what_it_is_for() -> None:
    # What runs inside the sandbox is also a module with a reader.
    assert [_name(path) for path in SOURCES if not ast.get_docstring(_tree(path))] == []


def test_main_wires_and_serves_and_decides_nothing() -> None:
    mains = {_name(path): _length(path) for path in _python_files("services") if path.name == "__main__.py"}
    assert len(mains) > 7
    assert {name: count for name, count in mains.items() if count > MAX_MAIN_LINES} == {}


def test_the_heartbeat_of_every_service_that_beats_is_taken() -> None:
    # A pool that is not known is refused once a second, and the service says so for ever.
    mains = [path.read_text() for path in (ROOT / "services").glob("*/__main__.py")]
    calls = [found for text in mains for found in re.findall(r'ServiceProcess\("([a-z-]+)"([^)]*)\)', text)]
    beats = {name for name, options in calls if "heartbeats=False" not in options}

    assert "tinker" in beats
    assert beats == set(POOLS)


def test_init_files_only_describe_and_export() -> None:
    kinds = ast.Expr | ast.Import | ast.ImportFrom | ast.Assign
    acting = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name == "__init__.py" and not all(isinstance(node, kinds) for node in _tree(path).body)
    ]
    assert acting == []


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in _python_files("spo", "services"):
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    doubled = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in doubled.items() if name not in SHARED_CLASS_NAMES} == {}


def test_every_redis_key_documents_its_schema() -> None:
    modules = [ROOT / "spo" / "redis_keys.py", ROOT / "services" / "orchestrator" / "redis_keys.py"]
    functions = [node for path in modules for node in _tree(path).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 50
    names = Counter(node.name for node in functions)
    assert [name for name, count in names.items() if count > 1] == []
    assert [node.name for node in functions if not ast.get_docstring(node)] == []


def test_no_service_hides_a_key_of_a_run_from_the_orchestrator_that_deletes_it() -> None:
    own = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("services/**/redis_keys.py")]
    assert own == ["services/orchestrator/redis_keys.py"]


def test_a_service_imports_no_other_service() -> None:
    others = []
    for path in _python_files("services"):
        own = ".".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py")
        imported = [name for name in _imported(path) if name.startswith("services.")]
        others += [f"{_name(path)}: {name}" for name in imported if not f"{name}.".startswith(f"{own}.")]
    assert others == []


def test_only_the_pipeline_speaks_the_stream_commands() -> None:
    speakers = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STREAM_METHODS
    }
    outside = {place for place in speakers if not place.startswith("spo/messaging/streams/")}
    assert outside <= {"spo/messaging/redis_client.py"}


def test_work_streams_are_never_trimmed() -> None:
    # The prompts of a cancelled run are emptied, since nobody wants them any more; records are not work.
    # So are events of a job, which move to files. The typed view of Redis only names the parameter.
    allowed = {
        "services/orchestrator/jobs.py",
        "services/orchestrator/steps.py",
        "spo/messaging/redis_client.py",
    }
    trims = re.compile(r"\.xtrim\(|['\"]XTRIM['\"]|xadd\([^)]*maxlen|['\"]MAXLEN['\"]")
    trimming = {path.relative_to(ROOT).as_posix() for path in SOURCES if trims.search(path.read_text())}
    assert trimming <= allowed


@pytest.mark.parametrize("package", sorted(ENGINES))
def test_a_heavy_engine_is_known_in_one_place(package: str) -> None:
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(name.split(".")[0] == package for name in _imported(path))
    }
    assert [path for path in knowing if not path.startswith((*ENGINES[package], "benchmarks/"))] == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_role_starts_without_torch_and_scipy(module: str) -> None:
    heavy = {"scipy", "torch", "transformers", "vllm"}
    check = f"import sys, {module}; sys.exit(str(sorted({heavy} & set(sys.modules))))"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert finished.stderr.strip() == "[]"


def test_calls_and_messages_of_the_contract_are_named_alike() -> None:
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    assert protos
    for proto in protos:
        text = proto.read_text()
        for call, request, response in re.findall(r"rpc (\w+)\(([\w.]+)\) returns \(([\w.]+)\)", text):
            assert (request, response) == (f"{call}Request", f"{call}Response"), proto.name
        for enum, first in re.findall(r"enum (\w+) \{\s*(?://[^\n]*\s*)*(\w+ = 0);", text):
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum).upper()
            assert first == f"{prefix}_UNSPECIFIED = 0", proto.name


def test_every_make_target_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    documented = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    assert set(phony.group(1).split()) == documented


def test_tests_are_named_as_sentences() -> None:
    terse = [
        f"{path.name}::{node.name}"
        for path in TESTS
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name.count("_") < 3
    ]
    assert terse == []


def test_contributings_tree_is_what_the_packages_say() -> None:
    program = "import folder_tree as tree; print(tree.with_tree((tree.ROOT / 'CONTRIBUTING.md').read_text()), end='')"
    command = [sys.executable, "-c", program]
    written = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, timeout=60, check=True)
    assert (ROOT / "CONTRIBUTING.md").read_text() == written.stdout, "run: make tree"


def _constants_of_seconds() -> dict[tuple[str, str], str]:
    """File and name -> value as written, of every module's constants that end in _SECONDS."""
    found = {}
    for path in _python_files("spo", "services"):
        for node in _tree(path).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id.endswith("_SECONDS") and not isinstance(value, ast.Call):
                found[_name(path), target.id] = ast.unparse(value) if value else ""
    return found


def test_every_constant_of_seconds_stands_in_docs_defaults_with_why_no_job_can_need_more() -> None:
    document = (ROOT / "docs" / "defaults.md").read_text()
    section = document[document.index("## Limits of time") :]
    rows = re.findall(r"^\| `([\w/]+\.py)` `(\w+)` \| ([\d., e+]+) \| (.+) \|$", section, re.MULTILINE)
    kinds = section[: section.index("| Constant |")]
    harmless = set(re.findall(r"\b[A-Z]{2,}\b", kinds))
    listed = {(file, name): value for file, name, value, _ in rows}
    constants = _constants_of_seconds()
    unlisted = [
        f"{file} {name} = {value}"
        for (file, name), value in constants.items()
        if (file, name) not in listed and name.removesuffix("_SECONDS").rsplit("_", 1)[-1] not in harmless
    ]
    assert not unlisted, "say in docs/defaults.md what it bounds, and why no job can need more"
    assert not listed.keys() - constants.keys(), "docs/defaults.md lists what is not there"
    wrong = {
        f"{file} {name}: {listed[file, name]}, in the code {constants[file, name]}"
        for file, name in listed
        if _numbers(listed[file, name]) != _numbers(constants[file, name])
    }
    assert not wrong


def _numbers(text: str) -> list[float]:
    """The factors of a product, multiplied, of each element of a tuple."""
    found = []
    for part in text.strip("()").split(","):
        product = 1.0
        for factor in part.split("*"):
            product *= float(factor.replace("_", ""))
        found.append(product)
    return found
