"""Training problems that are copies of held-out ones: the same statement, nearly the same, or the same tests.

Copies in other words share their tests; copies with other tests share their words. Either is enough to be left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from spo.tasks.problem import Problem
from spo.tasks.published import INSTRUCTION

SHINGLE_WORDS = 3
# One or two shared tests happen by chance in problems about small numbers.
SHARED_TESTS_MINIMUM = 3
SHARED_TESTS_SHARE = 0.5

# What so large a share of held-out statements begin or end with, so many words or more, is no part of a problem.
SHARED_WORDS = 8
SHARED_SHARE = 0.02

# Signs count where they are arithmetic: 5 + 3 is not 5 - 3.
_WORD = re.compile(r"\w+|[+*/^=<>\u00d7\u00f7\u2212]|-(?=\s?\d)")


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
