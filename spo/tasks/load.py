"""From the task section of a JobSpec to its problems."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from spo.errors import InvalidInput
from spo.observability.logs import get_logger
from spo.spec.job_spec import TasksSpec
from spo.tasks.code_contests import CodeContestsRecord, code_contests_problem, read_code_contests
from spo.tasks.jsonl import ProblemRow, jsonl_problem, read_jsonl
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.records import Record
from spo.tasks.splits import split_problems
from spo.tasks.taco import TacoRecord, read_taco, taco_problem
from spo.tasks.toy.problems import toy_tasks

log = get_logger("tasks")

# Columns of each format, and what makes a problem of a row (None: of a kind that no judge here can decide).
PARSERS: dict[str, tuple[Iterable[str], Callable[[Record], Problem | None]]] = {
    "code_contests": (CodeContestsRecord.model_fields, code_contests_problem),
    "taco": (TacoRecord.model_fields, taco_problem),
    "jsonl": (ProblemRow.model_fields, jsonl_problem),
}
READERS = {"code_contests": read_code_contests, "taco": read_taco, "jsonl": read_jsonl}


def load_tasks(spec: TasksSpec) -> TaskSets:
    """Return the training and held-out problems a job names; InvalidInput names the file, line and reason."""
    tasks = _read(spec)
    return tasks if spec.reward.tests == "all" else replace(tasks, train=_decided_by_public_tests(tasks.train))


def _read(spec: TasksSpec) -> TaskSets:
    match spec.kind:
        case "toy":
            return toy_tasks(spec.train_problems, spec.evaluation_problems, spec.seed)
        case "dataset":
            raise InvalidInput("uploaded datasets are known to the orchestrator alone", code="dataset_unusable")
        case "code_contests" | "taco" | "jsonl":
            return split_problems(spec, READERS[spec.kind], READERS[spec.evaluation_kind or spec.kind])


def _decided_by_public_tests(problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """The problems with only the tests that the policy may see; those without such tests have nothing to decide by."""
    decided = tuple(replace(problem, tests=problem.public_tests) for problem in problems if problem.public_tests.tests)
    if not decided:
        raise InvalidInput("no training problem has public tests to decide the reward", code="no_public_tests")
    if len(decided) < len(problems):
        log.warning("training problems without public tests are left out", left_out=len(problems) - len(decided))
    return decided
