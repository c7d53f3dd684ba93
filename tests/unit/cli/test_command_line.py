"""The command line's promises to scripts: exit codes, machine-readable output, errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml

from spo import errors
from spo.cli.app import app
from spo.console import EXIT_CODES, ExitCode, exit_code_of
from spo.demo.demo import RECIPE
from spo.errors import catalogue
from spo.spec.job_spec import parse_job_spec
from tests.support import command_line

ROOT = Path(__file__).parents[3]


def spo(*arguments: str, folder: Path, url: str = "http://127.0.0.1:1") -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "SPO_API_URL": url,
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "spo.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command(tmp_path: Path) -> None:
    shown = spo("--help", folder=tmp_path)
    assert shown.returncode == 0
    for command in ("up", "down", "demo", "doctor", "judge", "job", "key", "scale", "audit", "trajectory", "weights"):
        assert f" {command} " in shown.stdout


def test_the_version_is_told(tmp_path: Path) -> None:
    shown = spo("--version", folder=tmp_path)
    assert (shown.returncode, shown.stdout) == (0, f"spo {version('spo-platform')}\n")


def test_an_api_that_is_away_is_exit_code_6_with_its_address(tmp_path: Path) -> None:
    failed = spo("job", "list", folder=tmp_path)
    assert failed.returncode == 6
    assert "http://127.0.0.1:1" in failed.stderr
    assert "spo doctor" in failed.stderr
    assert failed.stdout == ""


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_file_that_is_no_spec_is_exit_code_3(tmp_path: Path, text: str) -> None:
    spec_file = tmp_path / "job.yaml"
    spec_file.write_text(text)
    failed = command_line.spo("job", "submit", spec_file, environment={"SPO_API_URL": "http://127.0.0.1:1"})
    assert failed.returncode == 3
    assert str(spec_file) in failed.stderr


def test_stopping_nothing_says_so(tmp_path: Path) -> None:
    failed = spo("down", folder=tmp_path)
    assert failed.returncode == 4
    assert "no platform runs here" in failed.stderr


def test_of_several_platforms_none_is_stopped_unasked(tmp_path: Path) -> None:
    started = [subprocess.Popen(["sleep", "250"]) for _ in range(2)]
    try:
        for name, process in zip(("mine", "theirs"), started, strict=True):
            state = {"name": name, "pid": process.pid, "pid_created": psutil.Process(process.pid).create_time()}
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / "state.json").write_text(json.dumps(state))
        refused = spo("down", folder=tmp_path)
        assert refused.returncode == 3
        assert "2 platforms run here: mine, theirs" in refused.stderr
        assert "--all" in refused.stderr
        assert [process.poll() for process in started] == [None, None]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_every_kind_of_error_has_its_stable_exit_code() -> None:
    codes = {
        errors.InvalidInput: 3,
        errors.NotFound: 4,
        errors.Conflict: 5,
        errors.LeaseLost: 5,
        errors.Unreachable: 6,
        errors.NotReady: 6,
        errors.InternalError: 1,
        errors.IntegrityError: 1,
        errors.ResourceExhausted: 1,
    }
    assert {kind: exit_code_of(kind("x")) for kind in codes} == codes


def test_the_next_step_is_the_one_of_the_error_code() -> None:
    environment = {"SPO_API_URL": "http://127.0.0.1:1"}

    failed = command_line.spo("job", "mirror", "--to", "nowhere:x", "--all", "job_1", environment=environment)

    assert failed.returncode == 3
    assert "which_job" in failed.stderr
    assert catalogue()["which_job"].remedy in " ".join(failed.stderr.split())


def test_every_command_that_shows_something_can_show_it_to_a_program() -> None:
    without = {
        " ".join(path)
        for path, command in leaves(typer.main.get_command(app), ())
        if "--output" not in {option for each in command.params for option in each.opts}
    }

    # They run until they are stopped, or write files.
    assert without == {
        "agents run",
        "agents harbor",
        "agents harbor-problems",
        "agents-demo",
        "up",
        "down",
        "demo",
        "demo-experience",
        "demo-loop",
        "real-demo",
        "reproduce",
        "export",
        "job mirror",
        "toy-model",
        "continual rm",
        "init",
        "convert rows",
        "convert config",
    }


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children: dict[str, Any] = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from leaves(child, (*path, name))


def test_the_shell_completes_commands_once_completion_is_installed(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "spo"
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash", "SPO_API_URL": "http://127.0.0.1:1"}
    # The last command would be executed in the shell's place, and the shell not be recognized.
    install = ["bash", "-c", f"{program} --install-completion; true"]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "completion installed" in done.stdout, done.stderr
    assert "spo.sh" in (tmp_path / ".bashrc").read_text()

    asked = {**environment, "_SPO_COMPLETE": "complete_bash", "COMP_WORDS": "spo weights ", "COMP_CWORD": "2"}
    shown = subprocess.run([program], env=asked, capture_output=True, text=True, timeout=60, check=True)
    assert {"ls", "push", "rollback"} <= set(shown.stdout.split())


def test_every_exit_code_is_documented() -> None:
    codes = {value for name, value in vars(ExitCode).items() if name.isupper()}

    assert {code for code, _ in EXIT_CODES} == codes | {0, 2}


def test_the_demo_recipe_is_a_valid_spec_once_it_has_a_model() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    assert "path" not in recipe["model"]
    recipe["model"]["path"] = "/models/pi0"
    spec = parse_job_spec(json.loads(json.dumps(recipe)))
    assert spec.name == "demo"
