"""Problems of a job: loaded once, checked at submission, encoded as prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from spo.spec.job_spec import JobSpec, TasksSpec
from spo.spec.verifier import verifiers_in
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.verifier_pool import pool_of
from spo.v1.prompt_pb2 import Prompt

REMEMBERED = 4


class TaskLibrary:
    """Loads task sets, remembering the last few; a changed file is read again. Safe from several threads."""

    def __init__(self) -> None:
        # Replaces the id of an uploaded dataset by its file.
        self.resolve: Callable[[TasksSpec], TasksSpec] = lambda spec: spec
        self._lock = threading.Lock()
        self._loaded: OrderedDict[tuple[object, ...], TaskSets] = OrderedDict()

    def load(self, spec: TasksSpec) -> TaskSets:
        """The problems of a task set. Raises InvalidInput naming the file, the line and the reason."""
        spec = self.resolve(spec)
        functions = tuple(_stamp(one.path) for _, one in verifiers_in(spec.verifier) if one.kind == "python")
        key = (spec.model_dump_json(), _stamp(spec.path), _stamp(spec.evaluation_path), *functions)
        # One at a time: many submits of one spec load its problems once.
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = load_tasks(spec)
                while len(self._loaded) > REMEMBERED:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(key)
            return self._loaded[key]


def _stamp(path: str | None) -> tuple[float, int] | None:
    if path is None:
        return None
    try:
        facts = Path(path).stat()
    except (OSError, ValueError):
        # Whoever reads it says what is wrong.
        return None
    return facts.st_mtime, facts.st_size


def prompt_of(problem: Problem, spec: JobSpec) -> Prompt:
    """The problem as the policy sees it."""
    return Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set=spec.tasks.kind,
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
        verifier_pool=pool_of(problem.tests),
        environment=problem.environment,
        environment_json=problem.environment_json,
    )
