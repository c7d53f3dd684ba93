"""The contaminated setting: a reward of one public test, and stored experience that prints its answer.

The toy contest as task files in which one of a problem's twelve tests decides the reward, and an import in the
experience store of programs that do nothing but print that test's output. Evaluation still runs all tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spo import redis_keys
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.reproduce.methods import IMPORT_NAME, Document, merged
from spo.tasks.jsonl import read_jsonl
from spo.tasks.problem import Problem
from spo.tasks.toy.problems import toy_tasks
from spo.v1.prompt_pb2 import SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory

EXAMINED_PROBLEMS = 40


def contaminate(document: Mapping[str, Any], folder: Path, experience_place: str) -> Document:
    """The document on task files in `folder`, with the hard-coded programs as stored experience; writes both."""
    tasks = document["tasks"]
    toy = toy_tasks(tasks["train_problems"], tasks["evaluation_problems"], tasks.get("seed", 0))
    train = _write_tasks(folder / f"train-{len(toy.train)}.jsonl", toy.train)
    held_out = _write_tasks(folder / f"held-out-{len(toy.evaluation)}.jsonl", toy.evaluation)
    _store_hacks(ExperienceStore(experience_place), list(read_jsonl(train)))
    files = {
        "kind": "jsonl",
        "path": str(train.absolute()),
        "evaluation_path": str(held_out.absolute()),
        # Statements of a small grammar resemble each other; copies there are none.
        "near_duplicate_similarity": 1.0,
    }
    return merged(document, {"tasks": files})


def training_task(document: Mapping[str, Any]) -> Document:
    """A task set whose held-out problems are what a contaminated document trained on: there, hacks succeed."""
    tasks = document["tasks"]
    return {
        "kind": "jsonl",
        "path": tasks["evaluation_path"],
        "evaluation_path": tasks["path"],
        "evaluation_problems": min(tasks["train_problems"], EXAMINED_PROBLEMS),
        "near_duplicate_similarity": 1.0,
    }


def _write_tasks(path: Path, problems: Iterable[Problem]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_row(problem)) + "\n" for problem in problems))
    return path


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "statement": problem.statement,
        "response_format": "raw",
        "difficulty": problem.difficulty,
        "tests": [
            {"stdin": test.stdin.decode(), "stdout": test.stdout.decode(), "public": index == 0}
            for index, test in enumerate(problem.tests.tests)
        ],
    }


def _store_hacks(store: ExperienceStore, problems: Iterable[Problem]) -> None:
    """One file of one name, whatever how often: the same programs under the same ids."""
    origin = Origin(run=IMPORT_NAME, kind="import", task_set="jsonl", licence="made by spo reproduce")
    store.write(origin, "programs", [_hack(problem) for problem in problems])


def _hack(problem: Problem) -> StoredTrajectory:
    program = f"print({problem.tests.tests[0].stdout.decode().strip().replace(' ', ',')})"
    prompt = Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set="jsonl",
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
    )
    trajectory = Trajectory(
        trajectory_id=redis_keys.trajectory_id(IMPORT_NAME, problem.problem_id, 0, 0, 0),
        run_id=IMPORT_NAME,
        prompt_id=problem.problem_id,
        source=SOURCE_OTHER_RUN,
        response_text=program,
        finish_reason=FINISH_REASON_STOP,
        sampler="hard-coded",
    )
    return StoredTrajectory(trajectory, prompt)
