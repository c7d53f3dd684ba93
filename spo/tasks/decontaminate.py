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

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Copy:
    """Why a problem counts as a copy; similarity in [0, 1] is of shingles or of tests."""

    held_out_id: str
    reason: Literal["same statement", "similar statement", "same tests"]
    similarity: float


class ContaminationIndex:
    """Held-out problems, indexed by words and tests; `similarity` is the Jaccard index of word triples.

    Statements that are similar enough share a triple among the rarest few of each (prefix filtering; Chaudhuri, Ganti
    and Kaushik 2006), so only those are indexed, and none is missed.
    """

    def __init__(self, held_out: Sequence[Problem], similarity: float) -> None:
        self._similarity = similarity
        self._held_out = held_out
        self._shingles = [_shingles(problem) for problem in held_out]
        self._frequency = Counter(shingle for shingles in self._shingles for shingle in shingles)
        self._by_rare_shingle: dict[str, list[int]] = {}
        self._by_statement: dict[str, int] = {}
        self._by_test: dict[bytes, list[int]] = {}
        for index, problem in enumerate(held_out):
            for shingle in self._rarest(self._shingles[index]):
                self._by_rare_shingle.setdefault(shingle, []).append(index)
            self._by_statement.setdefault(_normal(problem), index)
            for test in _test_digests(problem):
                self._by_test.setdefault(test, []).append(index)

    def find_copy(self, problem: Problem) -> Copy | None:
        """Return the held-out problem that `problem` copies, if any."""
        same = self._by_statement.get(_normal(problem))
        if same is not None:
            return Copy(self._held_out[same].problem_id, "same statement", 1.0)
        return self._similar_statement(problem) or self._same_tests(problem)

    def without_copies(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """Yield the problems that copy no held-out one."""
        return (problem for problem in problems if self.find_copy(problem) is None)

    def _similar_statement(self, problem: Problem) -> Copy | None:
        shingles = _shingles(problem)
        near = {index for shingle in self._rarest(shingles) for index in self._by_rare_shingle.get(shingle, ())}
        best = max(((_jaccard(shingles, self._shingles[index]), index) for index in near), default=(0.0, 0))
        if best[0] < self._similarity:
            return None
        return Copy(self._held_out[best[1]].problem_id, "similar statement", best[0])

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


def _normal(problem: Problem) -> str:
    return " ".join(_WORD.findall(problem.statement.removesuffix(INSTRUCTION).casefold()))


def _shingles(problem: Problem) -> frozenset[str]:
    words = _normal(problem).split()
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    return frozenset(" ".join(words[start : start + SHINGLE_WORDS]) for start in range(last))


def _jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    return len(left & right) / max(1, len(left | right))


def _test_digests(problem: Problem) -> frozenset[bytes]:
    return frozenset(
        blake3(b"\0".join((b" ".join(test.stdin.split()), b" ".join(test.stdout.split())))).digest()
        for test in problem.tests.tests
    )
