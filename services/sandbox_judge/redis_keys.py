"""Redis keys that only the sandbox judge knows; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations


def tests(digest: str) -> str:
    """String: serialized TestSet. Written by whoever uploads tests, content-addressed; read by judges."""
    return f"spo:sandbox-judge:tests:{digest}"


def verdict(digest: str) -> str:
    """String: serialized Verdict by digest of (program, tests, limits, language, judge version). Judge."""
    return f"spo:sandbox-judge:verdict:{digest}"


def verdict_order() -> str:
    """List: `size:key` of the cached verdicts, the oldest first. Judge."""
    return "spo:sandbox-judge:verdict_order"


def verdict_bytes() -> str:
    """String: the sum of the sizes in the list of cached verdicts. Judge."""
    return "spo:sandbox-judge:verdict_bytes"
