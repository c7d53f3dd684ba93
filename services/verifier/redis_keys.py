"""Redis keys that only the verifiers know; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations


def verifier_tests(digest: str) -> str:
    """String: serialized TestSet. Written by whoever uploads it, content-addressed; read by verifiers."""
    return f"spo:verifier:tests:{digest}"


def environment_key() -> str:
    """String: the secret by which replicas know the states of episodes that one of them has given out. First wins."""
    return "spo:verifier:environment_key"
