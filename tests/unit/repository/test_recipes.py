"""Every recipe is a job that would be accepted, and says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from spo.errors import InvalidInput
from spo.reproduce.plan import FULL, QUICK, SETTINGS, runs
from spo.spec.job_spec import JobSpec, parse_job_spec

RECIPES = Path(__file__).parents[3] / "deploy" / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))


def parsed(path: Path) -> JobSpec:
    document = yaml.safe_load(path.read_text())
    document["model"].setdefault("path", "/models/pi0")
    return parse_job_spec(document)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(RECIPES))) for path in FILES])
def test_a_recipe_is_a_valid_job_that_names_itself(path: Path) -> None:
    spec = parsed(path)

    assert spec.labels["recipe"] == path.relative_to(RECIPES).with_suffix("").as_posix()
    assert path.read_text().startswith("# ")


def test_the_papers_run_has_the_papers_numbers() -> None:
    spec = parsed(RECIPES / "paper" / "half_online.yaml")

    assert (spec.trainer.steps, spec.trainer.batch_size, spec.trainer.warmup_steps) == (100_000, 128, 200)
    assert (spec.trainer.learning_rate, spec.trainer.update_interval) == (6e-8, 10)
    assert (spec.rollout.temperature, spec.rollout.top_p) == ((0.1, 0.8), 0.95)
    assert (spec.evaluation.samples, spec.evaluation.temperature, spec.evaluation.top_p) == (20, 0.4, 0.95)
    assert spec.value is not None
    assert spec.value.samples == 800
    assert spec.replay.online_share == 0.5


@pytest.mark.parametrize(("size", "quick"), [(FULL, False), (QUICK, True)])
def test_every_planned_run_is_a_valid_job_and_every_setting_has_some(size: object, quick: bool) -> None:
    assert size in (FULL, QUICK)
    planned = runs(FULL if size is FULL else QUICK, quick=quick)

    for run in planned:
        parse_job_spec({**run.document, "model": {**run.document["model"], "path": "/models/pi0"}})
    assert {run.setting for run in planned} == set(SETTINGS)
    assert len({run.name for run in planned}) == len(planned)


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_an_adapter_has_ten_times_the_rate_of_all_weights(size: str) -> None:
    full, lora = (parsed(RECIPES / "real" / f"llama3_{size}_{kind}.yaml") for kind in ("full", "lora"))

    assert lora.model.lora is not None
    assert lora.trainer.learning_rate == pytest.approx(10 * full.trainer.learning_rate)


@pytest.mark.parametrize(
    ("online", "batch", "fits"),
    [(0.667, 48, True), (2 / 3, 48, True), (0.667, 96, True), (0.66, 48, True), (0.667, 90, False), (0.5, 40, False)],
)
def test_the_first_tutorials_job_is_valid_and_shares_may_be_rounded_as_batches_are(
    online: float, batch: int, fits: bool
) -> None:
    page = (RECIPES.parents[1] / "docs" / "tutorials" / "first_job.md").read_text()
    document = yaml.safe_load(page.split("<<'END'\n")[1].split("\nEND")[0])
    document["trainer"]["batch_size"] = batch
    document["replay"]["mix"] = [{"source": "online", "share": online}, {"source": "memory", "share": 1 - online}]
    if fits:
        assert parse_job_spec(document).replay.remembers
    else:
        with pytest.raises(InvalidInput, match="no whole number of groups"):
            parse_job_spec(document)
