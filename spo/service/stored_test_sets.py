"""Test sets: stored in Redis by digest, kept parsed in memory while they are in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

from spo.errors import IntegrityError, NotFound
from spo.v1.verdict_pb2 import TestSet

_KEPT_BYTES = 64 << 20


class KeptBytes(Protocol):
    """Where test sets are kept by key: Redis, or memory in a process that serves one command."""

    def get(self, name: str, /) -> bytes | None: ...

    def set(self, name: str, value: bytes, /) -> object: ...


class StoredTestSets:
    """The uploaded test sets of a pool of judges; at most _KEPT_BYTES of them stay in memory.

    key: the store's key of a digest; require_usable raises InvalidInput on what the pool cannot judge by.
    """

    def __init__(self, store: KeptBytes, key: Callable[[str], str], require_usable: Callable[[TestSet], None]) -> None:
        self._store = store
        self._key = key
        self._require_usable = require_usable
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[int, TestSet]] = OrderedDict()
        self._kept_bytes = 0

    def upload(self, test_set: TestSet) -> str:
        """Store a test set; returns its digest. Raises InvalidInput."""
        self._require_usable(test_set)
        serialized = test_set.SerializeToString(deterministic=True)
        digest = blake3(serialized).hexdigest()
        self._store.set(self._key(digest), serialized)
        return digest

    def get(self, digest: str) -> TestSet:
        """The test set of a digest. Raises NotFound, IntegrityError or InvalidInput."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest][1]
        serialized = self._store.get(self._key(digest))
        if serialized is None:
            raise NotFound(f"no test set {digest!r}; upload it first", code="tests_not_found")
        if blake3(serialized).hexdigest() != digest:
            raise IntegrityError(f"test set {digest!r} does not match its digest")
        test_set = TestSet.FromString(serialized)
        self._require_usable(test_set)
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
