"""Redis keys that only the orchestrator knows; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations


def tenant_jobs(tenant: str) -> str:
    """Sorted set: the tenant's job ids by creation time (unix ms). Orchestrator."""
    return f"spo:orchestrator:tenant:{tenant}:jobs"


def tenant_jobs_in_state(tenant: str, state: str) -> str:
    """Sorted set: the tenant's job ids in one state, made for a listing and soon gone. Orchestrator."""
    return f"spo:orchestrator:tenant:{tenant}:jobs:{state}"


def api_keys() -> str:
    """Hash: key id -> JSON of the API key with its digest. Orchestrator."""
    return "spo:orchestrator:api_keys"


def audit_log() -> str:
    """Stream: at, caller, tenant, method, path, status, request_id of changes and refusals. Orchestrator."""
    return "spo:orchestrator:audit"


def retired_jobs() -> str:
    """Set: ids of deleted jobs whose keys and folders are still to be removed. Orchestrator."""
    return "spo:orchestrator:retired"


def open_examinations() -> str:
    """Sorted set, all scores 0: ids of evaluations asked for and not yet ended, oldest first. Orchestrator."""
    return "spo:orchestrator:open_examinations"


def job_logs(job_id: str) -> str:
    """Stream: service, replica_id, level, at_unix_ms, line (JSON) of the latest 20,000 log lines. Orchestrator."""
    return f"spo:{job_id}:orchestrator:logs"
