"""Redis keys that only the verifiers know; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations


def verifier_tests(digest: str) -> str:
    """String: serialized TestSet. Written by whoever uploads it, content-addressed; read by verifiers."""
    return f"spo:verifier:tests:{digest}"


def remembered(digest: str) -> str:
    """String: serialized Verdict by digest of (response, test set, verifier version). Written and read by verifiers."""
    return f"spo:verifier:remembered:{digest}"


def remembered_order() -> str:
    """List: `size:key` of the remembered verdicts, the oldest first. Verifiers."""
    return "spo:verifier:remembered_order"


def remembered_bytes() -> str:
    """String: the sum of the sizes in the list of remembered verdicts. Verifiers."""
    return "spo:verifier:remembered_bytes"


def environment_key() -> str:
    """String: the secret by which replicas know the states of episodes that one of them has given out. First wins."""
    return "spo:verifier:environment_key"
