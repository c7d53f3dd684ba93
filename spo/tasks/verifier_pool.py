"""Which pool of judges decides by a test set: the sandbox judge, or the verifiers that ask what lies outside."""

from __future__ import annotations

from collections.abc import Iterator

from spo.v1.verdict_pb2 import TestSet

SANDBOX_JUDGE = "sandbox-judge"
VERIFIER = "verifier"


def pool_of(test_set: TestSet) -> str:
    """`Prompt.verifier_pool` of a problem: "verifier" where its test set asks a service or a model, else ""."""
    return VERIFIER if any(True for _ in asking(test_set)) else ""


def judges_named(pool: str) -> str:
    """The service that a `Prompt.verifier_pool` stands for."""
    return pool or SANDBOX_JUDGE


def asking(test_set: TestSet) -> Iterator[TestSet]:
    """What of a test set asks a service or a model: itself, or parts of its composition."""
    if test_set.HasField("http") or test_set.HasField("model"):
        yield test_set
    for part in test_set.composition.parts:
        yield from asking(part.verifier)
