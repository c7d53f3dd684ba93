"""Redis keys that only inference knows; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations

from spo.redis_keys import digest


def engine_deaths(work: str) -> str:
    """Hash: in_company, alone (begun and never ended), reason; expires an hour after the last. Inference.

    `work` names what the engine was doing: a group, a weight version, the building of a model.
    """
    return f"spo:inference:engine_deaths:{digest(work)}"
