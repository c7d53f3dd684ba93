"""Problems of a job: loaded once, checked at submission, encoded as prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from spo.spec.job_spec import JobSpec, TasksSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, TaskSets
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
        key = (spec, _stamp(spec.path), _stamp(spec.evaluation_path))
        # One at a time: many submits of one spec load its problems once.
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = load_tasks(spec)
                while len(self._loaded) > REMEMBERED:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(key)
            return self._loaded[key]


def _stamp(path: str | None) -> tuple[float, int] | None:
    if path is None or not Path(path).exists():
        return None
    facts = Path(path).stat()
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
    )
