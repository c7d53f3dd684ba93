"""The command line's promises to scripts: exit codes, machine-readable output, errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spo import errors
from spo.cli_output import exit_code_of
from spo.job_spec import parse_job_spec
from spo.local.demo import RECIPE


def spo(*arguments: str, folder: Path, url: str = "http://127.0.0.1:1") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "SPO_API_URL": url, "NO_COLOR": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "spo.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command(tmp_path: Path) -> None:
    shown = spo("--help", folder=tmp_path)
    assert shown.returncode == 0
    for command in ("up", "down", "demo", "doctor", "judge", "job", "key", "scale", "audit", "trajectory", "weights"):
        assert f" {command} " in shown.stdout


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
    failed = spo("job", "submit", str(spec_file), folder=tmp_path)
    assert failed.returncode == 3
    assert str(spec_file) in failed.stderr


def test_stopping_nothing_says_so(tmp_path: Path) -> None:
    failed = spo("down", folder=tmp_path)
    assert failed.returncode == 4
    assert "no platform runs here" in failed.stderr


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


def test_the_demo_recipe_is_a_valid_spec_once_it_has_a_model() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    assert "path" not in recipe["model"]
    recipe["model"]["path"] = "/models/pi0"
    spec = parse_job_spec(json.loads(json.dumps(recipe)))
    assert spec.name == "demo"
