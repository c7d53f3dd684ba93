"""The toy contest's recipes name no model: the command line and the page find or make one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from services.orchestrator.http.pages.jobs import with_toy_model
from spo.cli.app import app
from spo.demo.demo import RECIPE, copy_toy_model, toy_model
from spo.tasks.toy import newest_model, wanted_difficulty


def made(models: Path, name: str, at: int) -> Path:
    (models / name).mkdir(parents=True)
    config = models / name / "config.json"
    config.write_text("{}")
    os.utime(config, (at, at))
    return models / name


def test_the_model_built_last_is_found_by_its_difficulty(tmp_path: Path) -> None:
    assert newest_model(tmp_path / "nowhere", "standard") is None
    newest = made(tmp_path, "toy-standard-b", 2)
    made(tmp_path, "toy-standard-a", 1)
    made(tmp_path, "toy-hard-a", 3)
    (tmp_path / "toy-standard-unfinished").mkdir()

    assert newest_model(tmp_path, "standard") == newest


def test_only_a_spec_of_the_contest_without_a_model_wants_one() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())

    assert wanted_difficulty(recipe) == "standard"
    assert wanted_difficulty({"tasks": {"kind": "toy", "difficulty": "hard"}}) == "hard"
    for other in ({}, {"tasks": []}, {"tasks": {"kind": "taco"}}, recipe | {"model": {"path": "/m"}}, {"model": 3}):
        assert wanted_difficulty(other) is None


def test_the_pages_recipe_runs_once_the_model_is_there(tmp_path: Path) -> None:
    assert with_toy_model(RECIPE.read_text(), tmp_path) is None

    folder = made(tmp_path, 'toy-standard-"x"', 1)

    filled = with_toy_model(RECIPE.read_text(), tmp_path) or ""
    recipe = yaml.safe_load(RECIPE.read_text())
    assert yaml.safe_load(filled) == recipe | {"model": {"path": str(folder), **recipe["model"]}}
    assert with_toy_model("tasks: {kind: taco}", tmp_path) == "tasks: {kind: taco}"


@pytest.mark.parametrize(
    ("asked", "is_found"),
    [("", True), ("http://localhost:8081/", True), ("http://127.0.0.1:8081", True), ("http://elsewhere:8081", False)],
)
def test_a_submit_without_a_model_takes_pi0_of_the_platform_on_this_machine_that_it_goes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, *, is_found: bool
) -> None:
    other, state = tmp_path / "other", tmp_path / "state"
    folder = made(state / "cache" / "models", "toy-standard-a", 1)
    made(other / "cache" / "models", "toy-standard-b", 2)
    platforms = [
        {"http_url": "http://127.0.0.1:8081", "state_path": str(state)},
        {"http_url": "http://127.0.0.1:8082", "state_path": str(other)},
    ]
    monkeypatch.setattr("spo.cli.jobs.running_platforms", lambda _: platforms)
    monkeypatch.setenv("SPO_API_URL", asked)
    sent: list[dict[str, Any]] = []

    def validate(_: object, document: dict[str, Any]) -> dict[str, Any]:
        sent.append(document)
        return {}

    monkeypatch.setattr("spo.client.Client.validate", validate)

    CliRunner().invoke(app, ["job", "submit", str(RECIPE), "--validate-only"], catch_exceptions=False)

    assert sent[0]["model"].get("path") == (str(folder) if is_found else None)


def test_a_model_that_is_there_is_not_built_again(tmp_path: Path) -> None:
    folder = made(tmp_path / "cache" / "models", "toy-hard-a", 1)

    assert toy_model("hard", tmp_path) == folder
    assert not (tmp_path / "cache" / "toy-model.log").exists(), "no process was started"
    assert copy_toy_model("hard", tmp_path / "mine" / "pi0", tmp_path) == tmp_path / "mine" / "pi0"
    assert (tmp_path / "mine" / "pi0" / "config.json").read_text() == "{}"
