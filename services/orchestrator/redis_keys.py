"""Redis keys that only the orchestrator knows; those that others read are in spo.redis_keys. Same conventions."""

from __future__ import annotations

from spo.redis_keys import digest


def tenant_jobs(tenant: str) -> str:
    """Sorted set: the tenant's job ids by creation time (unix ms). Orchestrator."""
    return f"spo:orchestrator:tenant:{tenant}:jobs"


def labelled_jobs(label: str) -> str:
    """Sorted set: ids of jobs with a label, `key` or `key:value`, by creation time (unix ms). Orchestrator."""
    return f"spo:orchestrator:label:{digest(label)}:jobs"


def listing(indexes_digest: str) -> str:
    """Sorted set: job ids that several of the sets above share, made for a listing and soon gone. Orchestrator."""
    return f"spo:orchestrator:listing:{indexes_digest}"


def api_keys() -> str:
    """Hash: key id -> JSON of the API key with its digest. Orchestrator."""
    return "spo:orchestrator:api_keys"


def audit_log() -> str:
    """Stream: at, principal, tenant, method, path, status, request_id of changes and refusals. Orchestrator."""
    return "spo:orchestrator:audit"


def deleted_jobs() -> str:
    """Set: ids of deleted jobs whose keys and folders are still to be removed. Orchestrator."""
    return "spo:orchestrator:retired"


def open_evaluations() -> str:
    """Sorted set, all scores 0: ids of evaluations asked for and not yet ended, oldest first. Orchestrator."""
    return "spo:orchestrator:open_evaluations"


def resuming() -> str:
    """Sorted set: paused jobs that wait for a place to go on, by creation time (unix ms). Orchestrator."""
    return "spo:orchestrator:resuming"


def assignments() -> str:
    """Hash: id of a live inference replica -> the run it is to serve, "" for none. Orchestrator."""
    return "spo:orchestrator:assignments"


def forks_under_way() -> str:
    """Set: ids of jobs whose folders are being made; one left by a dead process is removed. Orchestrator."""
    return "spo:orchestrator:forks_under_way"


def datasets() -> str:
    """Hash: dataset id -> JSON of the dataset with its report. Orchestrator."""
    return "spo:orchestrator:datasets"


def dataset_index(tenant: str | None) -> str:
    """Sorted set, all scores 0: ids of a tenant's datasets, or with None of all; they sort by time. Orchestrator."""
    return "spo:orchestrator:datasets:all" if tenant is None else f"spo:orchestrator:tenant:{tenant}:datasets"


def open_datasets() -> str:
    """Set: ids of datasets that are uploaded or examined. Orchestrator."""
    return "spo:orchestrator:open_datasets"


def experience_upkeep() -> str:
    """String: token of who prunes or compacts the experience store; expires. Orchestrator."""
    return "spo:orchestrator:experience_upkeep"


def job_logs(job_id: str) -> str:
    """Stream: service, replica_id, level, at_unix_ms, line (JSON) of the latest 20,000 log lines. Orchestrator."""
    return f"spo:{job_id}:orchestrator:logs"
