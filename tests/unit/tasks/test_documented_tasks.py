"""docs/datasets.md and the recipes of tasks: every example is one that the platform takes, every field is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.spec.tasks import ColumnsSpec, HuggingFaceSpec, TaskKind
from spo.tasks.load import load_tasks
from spo.tasks.records import AnswerRow, CodeTestsRow, LimitsRow, ProblemRow, Record, jsonl_problem

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "datasets.md").read_text()
RECIPES = sorted((ROOT / "deploy" / "recipes" / "tasks").glob("*.yaml"))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SPECS = [yaml.safe_load(text)["tasks"] for language, text in BLOCKS if language == "yaml"]
ROWS = [json.loads(line) for _, text in BLOCKS for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("tasks", SPECS, ids=[tasks["kind"] for tasks in SPECS])
def test_every_example_of_tasks_is_valid(tasks: dict[str, Any]) -> None:
    assert TasksSpec.model_validate(tasks).kind == tasks["kind"]


def test_every_kind_and_every_field_of_a_row_is_told() -> None:
    told = set(re.findall(r"`([a-z_0-9.]+)`", PAGE))
    fields = {*ProblemRow.model_fields, *AnswerRow.model_fields, *CodeTestsRow.model_fields, *LimitsRow.model_fields}
    wanted = fields | set(get_args(TaskKind)) | (HuggingFaceSpec.model_fields.keys() - {"columns"})
    assert sorted(wanted - told) == []
    assert sorted(name for name in ColumnsSpec.model_fields if not {name, f"columns.{name}"} & told) == []


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_every_example_of_a_row_is_read(row: dict[str, Any]) -> None:
    problem = jsonl_problem(Record("the page", row))
    assert problem.tests.ByteSize() > 0 or problem.arguments_json


def test_there_is_an_example_of_each_thing_that_decides() -> None:
    assert {name for row in ROWS for name in row} >= {"tests", "code_tests", "answer", "arguments"}


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_of_tasks_is_valid_and_its_problems_are_there(path: Path) -> None:
    spec = parse_job_spec(yaml.safe_load(path.read_text()))

    assert path.stem in (spec.tasks.kind, spec.tasks.evaluation_kind)
    if spec.tasks.kind in ("gsm8k", "mbpp"):
        tasks = load_tasks(spec.tasks.model_copy(update={"train_problems": 20}))
        assert len(tasks.evaluation) == spec.tasks.evaluation_problems


def test_each_kind_beside_contests_and_own_files_has_a_recipe() -> None:
    assert {path.stem for path in RECIPES} == {"gsm8k", "human_eval", "huggingface", "mbpp", "reasoning_gym"}
