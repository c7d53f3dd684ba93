"""Which pool of judges decides by a test set: the sandbox judge, or the verifiers that ask what lies outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spo.spec.verifier import SERVED
from spo.v1.verdict_pb2 import ModelScore, TestSet

SANDBOX_JUDGE = "sandbox-judge"
VERIFIER = "verifier"
# Before a run's id, where that run's pi0 judges: in the address of a model, and in the versions of what it said.
OF_RUN = "run:"
_KINDS = ("composition", "http", "model", "answer", "code_tests", "scoring_function")


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


def own_judges(test_set: TestSet) -> list[str]:
    """The policies of this platform that a test set asks, as `judge_version` names them, in the order of its parts."""
    models = [one.model for one in asking(test_set) if one.HasField("model")]
    named = [one.address if one.address.startswith(OF_RUN) else one.model for one in models if _is_own(one)]
    return list(dict.fromkeys(name for name in named if name.startswith((OF_RUN, SERVED))))


def _is_own(model: ModelScore) -> bool:
    return not model.address or model.address.startswith(OF_RUN)


def kind_of(test_set: TestSet) -> str:
    """What decides by a test set, by the name of its field; "program" where tests of a program do."""
    return next((name for name in _KINDS if test_set.HasField(name)), "program")  # type: ignore[arg-type]


def deciders(test_set: TestSet) -> str:
    """Pool and kinds in words: "verifier: composition of http, answer"."""
    kind = kind_of(test_set).replace("_", " ")
    parts = (kind_of(part.verifier) for part in test_set.composition.parts if part.HasField("verifier"))
    inner = ", ".join(dict.fromkeys(name.replace("_", " ") for name in parts))
    return f"{judges_named(pool_of(test_set))}: {kind}{f' of {inner}' if inner else ''}"


def composed_version(*versions: str) -> str:
    """The version of a verdict that several pools have made, the composing one's first."""
    return " ".join(dict.fromkeys(version for version in versions if version))


def versions_of_today(test_set: TestSet, versions: Mapping[str, str]) -> set[str]:
    """The versions that a verdict by this test set may have if today's judges made it; versions: by pool.

    Of a composition whose verifiers' gate failed the sandbox judge has seen nothing.
    """
    pool, judges = pool_of(test_set), own_judges(test_set)
    alone = composed_version(versions[pool], *judges)
    if pool == VERIFIER and test_set.HasField("composition") and "" in versions:
        return {alone, composed_version(versions[pool], versions[""], *judges)}
    return {alone}


def is_of_pool(version: str, pool_version: str) -> bool:
    """Whether a verdict's version is that of a pool, alone or with the judge of a composition's parts; what a run's
    pi0 has said is of that run, and what a served policy has said of the jobs that name it."""
    first, *others = version.split(" ")
    return first == pool_version and not any(other.startswith((OF_RUN, SERVED)) for other in others)
