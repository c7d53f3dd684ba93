"""Test sets: stored in Redis by digest, kept parsed in memory while they are in use."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Any, Protocol

from blake3 import blake3

from services.sandbox_judge import redis_keys as own_keys
from services.sandbox_judge.languages import languages
from spo.errors import FieldViolation, IntegrityError, InvalidInput, NotFound
from spo.v1.verdict_pb2 import Checker, TestSet

MAX_TESTS = 10_000
MAX_MEMORY_BYTES = 16 << 30
MAX_SECONDS = 600.0
_KEPT_BYTES = 64 << 20


class Store(Protocol):
    """Where test sets and verdicts are kept by key: Redis, or memory in a judge that serves one command."""

    def get(self, name: str, /) -> Any: ...

    def mget(self, keys: list[str], /) -> Any: ...

    def set(self, name: str, value: bytes, /, *, ex: int | None = None) -> Any: ...


class TestSets:
    """The uploaded test sets; at most _KEPT_BYTES of them stay in memory."""

    __test__ = False  # not a pytest class

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[int, TestSet]] = OrderedDict()
        self._kept_bytes = 0

    def upload(self, test_set: TestSet) -> str:
        """Store a test set; returns its digest. Raises InvalidInput."""
        require_usable(test_set)
        serialized = test_set.SerializeToString(deterministic=True)
        digest = blake3(serialized).hexdigest()
        self._store.set(own_keys.tests(digest), serialized)
        return digest

    def get(self, digest: str) -> TestSet:
        """The test set of a digest. Raises NotFound, IntegrityError or InvalidInput."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest][1]
        serialized: bytes | None = self._store.get(own_keys.tests(digest))
        if serialized is None:
            raise NotFound(f"no test set {digest!r}; upload it first", code="tests_not_found")
        if blake3(serialized).hexdigest() != digest:
            raise IntegrityError(f"test set {digest!r} does not match its digest")
        test_set = TestSet.FromString(serialized)
        require_usable(test_set)
        self._keep(digest, len(serialized), test_set)
        return test_set

    def _keep(self, digest: str, size_bytes: int, test_set: TestSet) -> None:
        with self._lock:
            if digest in self._kept or size_bytes > _KEPT_BYTES:
                return
            self._kept[digest] = (size_bytes, test_set)
            self._kept_bytes += size_bytes
            while self._kept_bytes > _KEPT_BYTES:
                _, (freed, _) = self._kept.popitem(last=False)
                self._kept_bytes -= freed


def require_usable(test_set: TestSet) -> None:
    """Raises InvalidInput naming each field that cannot be judged by."""
    limits = test_set.limits
    special = test_set.checker == Checker.CHECKER_SPECIAL
    rules = {
        "/tests": (0 < len(test_set.tests) <= MAX_TESTS, f"between 1 and {MAX_TESTS} tests"),
        "/checker": (test_set.checker in Checker.values(), "a checker that this judge knows"),
        "/limits/cpu_seconds": (_within(limits.cpu_seconds, MAX_SECONDS), "not negative, at most 600"),
        "/limits/wall_seconds": (_within(limits.wall_seconds, 2 * MAX_SECONDS), "not negative, at most 1200"),
        "/limits/memory_bytes": (_within(limits.memory_bytes, MAX_MEMORY_BYTES), "not negative, at most 16 GiB"),
        "/limits/output_bytes": (_within(limits.output_bytes, 1 << 30), "not negative, at most 1 GiB"),
        "/limits/processes": (_within(limits.processes, 256), "not negative, at most 256"),
        "/absolute_tolerance": (_within(test_set.absolute_tolerance, math.inf), "finite and not negative"),
        "/relative_tolerance": (_within(test_set.relative_tolerance, math.inf), "finite and not negative"),
        "/checker_program": (special == bool(test_set.checker_program), "there exactly for CHECKER_SPECIAL"),
        "/checker_language": (
            (checker := languages().get(test_set.checker_language or "python")) is not None and not checker.run,
            "a language of this judge without a runtime of its own",
        ),
    }
    violations = tuple(
        FieldViolation(pointer, f"must be {rule}") for pointer, (holds, rule) in rules.items() if not holds
    )
    if violations:
        raise InvalidInput("this test set cannot be judged by", violations=violations)


def _within(value: float, most: float) -> bool:
    return math.isfinite(value) and 0 <= value <= most
