"""Problems of a job: loaded once, checked at submission, encoded as prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import redis

from spo.errors import SpoError
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec, TasksSpec
from spo.spec.verifier import verifiers_in
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.verifier_pool import pool_of
from spo.v1.prompt_pb2 import Prompt

log = get_logger("task-library")

MOST_BYTES = 512 << 20
# Of a problem without its texts: objects, digests, its message.
PROBLEM_BYTES = 2048

_Key = tuple[object, ...]


class TaskLibrary:
    """Loads task sets and remembers them; a changed file is read again. Safe from several threads.

    Loads of different sets run side by side, those who want one set share one load, and a load that failed is tried
    again by who asks next. Beyond `most_bytes` those go that were used longest ago and that no active job uses.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        # Replaces the id of an uploaded dataset by its file.
        self.resolve: Callable[[TasksSpec], TasksSpec] = lambda spec: spec
        # The tasks of all active jobs, resolved.
        self.in_use: Callable[[], Iterable[TasksSpec]] = tuple
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._loads: OrderedDict[_Key, Future[TaskSets]] = OrderedDict()
        self._sizes: dict[_Key, int] = {}

    def load(self, spec: TasksSpec) -> TaskSets:
        """The problems of a task set. Raises InvalidInput naming the file, the line and the reason."""
        spec = self.resolve(spec)
        key = _key(spec)
        with self._lock:
            found = self._loads.get(key)
            load = self._loads.setdefault(key, Future())
            self._loads.move_to_end(key)
        if found is None:
            self._fill(load, key, spec)
        # Whoever fills it ends it, with the problems or with the reason: no wait is longer than the load.
        return load.result()

    def _fill(self, load: Future[TaskSets], key: _Key, spec: TasksSpec) -> None:
        try:
            tasks = load_tasks(spec)
            with self._lock:
                self._sizes[key] = size_of(tasks)
        except BaseException as error:
            with self._lock:
                del self._loads[key]
            load.set_exception(error)
            return
        load.set_result(tasks)
        self._make_room(key)

    def _make_room(self, newest: _Key) -> None:
        with self._lock:
            if sum(self._sizes.values()) <= self._most_bytes:
                return
        try:
            kept = {newest, *(_key(spec) for spec in self.in_use())}
        except (SpoError, redis.RedisError) as error:
            log.warning("which task sets are in use cannot be seen; all are kept", reason=str(error))
            return
        with self._lock:
            for key in [key for key in self._loads if key in self._sizes and key not in kept]:
                if sum(self._sizes.values()) <= self._most_bytes:
                    break
                del self._loads[key], self._sizes[key]


def size_of(tasks: TaskSets) -> int:
    """About the bytes of memory that problems take."""
    return sum(sum(_sizes(problem)) for part in (tasks.train, tasks.evaluation) for problem in part)


def _sizes(problem: Problem) -> Iterator[int]:
    yield PROBLEM_BYTES + problem.tests.ByteSize()
    texts = (problem.statement, problem.arguments_json, problem.environment_json)
    yield from map(len, (*texts, *problem.human_solutions, *problem.wrong_solutions))


def _key(spec: TasksSpec) -> _Key:
    functions = tuple(_stamp(one.path) for _, one in verifiers_in(spec.verifier) if one.kind == "python")
    return (spec.model_dump_json(), _stamp(spec.path), _stamp(spec.evaluation_path), *functions)


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
