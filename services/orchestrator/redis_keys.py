"""Redis keys that only the orchestrator knows; those that others read are in spo.redis_keys. Same conventions.

Deletion finds the keys of a run in both modules, by the parameters `run_id` or `job_id` of their functions.
"""

from __future__ import annotations

from spo.redis_keys import digest


def leader() -> str:
    """Hash: holder, epoch, expires_unix_ms, renewed_unix_ms, since_unix_ms (has served without an outage since then),
    away_unix_ms (and was away from then on), identity of its process, address; times by Redis' clock. Orchestrator."""
    return "spo:orchestrator:leader"


def tenant_jobs(tenant: str) -> str:
    """Sorted set: the tenant's job ids by creation time (unix ms). Orchestrator."""
    return f"spo:orchestrator:tenant:{tenant}:jobs"


def labelled_jobs(label: str) -> str:
    """Sorted set: ids of jobs with a label, `key` or `key:value`, by creation time (unix ms). Orchestrator."""
    return f"spo:orchestrator:label:{digest(label)}:jobs"


def listing(indexes_digest: str) -> str:
    """Sorted set: intersection of several of the sets above, for one listing; expires. Orchestrator."""
    return f"spo:orchestrator:listing:{indexes_digest}"


def api_keys() -> str:
    """Hash: key id -> JSON of the API key with its digest. Orchestrator."""
    return "spo:orchestrator:api_keys"


def audit_log() -> str:
    """Stream: at, principal, tenant, method, path, status, request_id of changes and refusals. Orchestrator."""
    return "spo:orchestrator:audit"


def deleted_jobs() -> str:
    """Set: ids of deleted jobs whose keys and folders are still to be removed. Orchestrator."""
    return "spo:orchestrator:deleted_jobs"


def failing_deletions() -> str:
    """Hash: id of a deleted job -> JSON {reason, attempts, at_unix_ms}: why its files are still there. Orchestrator."""
    return "spo:orchestrator:failing_deletions"


def open_evaluations() -> str:
    """Sorted set, all scores 0: ids of evaluations asked for and not yet ended, oldest first. Orchestrator."""
    return "spo:orchestrator:open_evaluations"


def resuming() -> str:
    """Sorted set: paused jobs that wait for a place to go on, by creation time (unix ms). Orchestrator."""
    return "spo:orchestrator:resuming"


def replica_ends() -> str:
    """Sorted set: pool, replica id and pid of processes that ended without draining, by unix ms; the newest 500.
    Orchestrator."""
    return "spo:orchestrator:replica_ends"


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


def continual_jobs() -> str:
    """Hash: tenant/name -> JSON of a continual job. Orchestrator."""
    return "spo:orchestrator:continual_jobs"


def wanted_rounds() -> str:
    """Set: tenant/name of continual jobs whose next round somebody asked for. Orchestrator."""
    return "spo:orchestrator:wanted_rounds"


def continual_waits() -> str:
    """Hash: tenant/name -> JSON of what a continual job waits for, and since when. Orchestrator."""
    return "spo:orchestrator:continual_waits"


def continual_rounds(tenant_and_name: str) -> str:
    """Hash: number -> JSON of a round of a continual job, the newest 200. Orchestrator."""
    return f"spo:orchestrator:continual:{digest(tenant_and_name)}:rounds"


def experience_maintenance() -> str:
    """String: token of who prunes or compacts the experience store; expires. Orchestrator."""
    return "spo:orchestrator:experience_maintenance"


def job_logs(job_id: str) -> str:
    """Stream: service, replica_id, level, at_unix_ms, line (JSON) of the latest 20,000 log lines. Orchestrator."""
    return f"spo:{job_id}:orchestrator:logs"


def job_events(job_id: str) -> str:
    """Stream: the newest events {seq, at, actor, kind, body}; entry id `<seq>-0`: seq is gapless. Older ones are in
    files below the state folder. Orchestrator."""
    return f"spo:{job_id}:orchestrator:events"


def job_metrics(job_id: str) -> str:
    """Sorted set: JSON {"step", ...named scalars} scored by step; one member per (series group, step). Orchestrator."""
    return f"spo:{job_id}:orchestrator:metrics"


def job_platform_series(job_id: str) -> str:
    """Sorted set: JSON {"at_unix_ms", "step", queue depths} scored by unix ms. Orchestrator."""
    return f"spo:{job_id}:orchestrator:platform_series"


def job_alarms(job_id: str) -> str:
    """Hash: epoch:step:alarm -> what was told of it (JSON), epoch:step:pause -> weight version. Orchestrator."""
    return f"spo:{job_id}:orchestrator:alarms"


def job_trainer_deaths(job_id: str) -> str:
    """Hash: epoch of the last trainer's death that was told, deaths without a step in between, step, out_of_memory (how
    many of them), message. Orchestrator."""
    return f"spo:{job_id}:orchestrator:trainer_deaths"


def job_lease(job_id: str) -> str:
    """Hash: trainer_id, epoch, expires_unix_ms. Orchestrator."""
    return f"spo:{job_id}:orchestrator:lease"


def job_weights(job_id: str) -> str:
    """Hash: version -> JSON of the published version. Orchestrator."""
    return f"spo:{job_id}:orchestrator:weight_versions"


def applied_versions(job_id: str) -> str:
    """Hash: replica id -> highest weight version it has served, of replicas that live. Orchestrator."""
    return f"spo:{job_id}:orchestrator:applied_versions"


def evaluations(job_id: str) -> str:
    """Hash: step -> JSON of an evaluation result. Orchestrator."""
    return f"spo:{job_id}:orchestrator:evaluations"


def evaluation_failures(job_id: str) -> str:
    """Hash: step -> JSON of why its evaluation has no result: failed_attempts, code, message. Orchestrator."""
    return f"spo:{job_id}:orchestrator:evaluation_failures"


def requested_evaluations(job_id: str) -> str:
    """Sorted set, all scores 0: ids of the evaluations of a job that somebody asked for. Orchestrator."""
    return f"spo:{job_id}:orchestrator:requested_evaluations"


def tenant_evaluations(tenant: str) -> str:
    """Sorted set, all scores 0: ids of the evaluations that a tenant asked for, the newest 10,000. Orchestrator."""
    return f"spo:orchestrator:tenant:{tenant}:evaluations"


def on_demand_evaluations() -> str:
    """Hash: evaluation id -> JSON of an evaluation that somebody asked for, with its result. Orchestrator."""
    return "spo:orchestrator:on_demand_evaluations"


def evaluated_run() -> str:
    """String: the run whose weights are being evaluated while no job is active; expires. Orchestrator."""
    return "spo:orchestrator:evaluated_run"


def runs_in_use() -> str:
    """Sorted set: runs that have ended and whose policies were asked for lately, by when that is forgotten (unix s).
    Orchestrator."""
    return "spo:orchestrator:runs_in_use"


def kept_warm() -> str:
    """Hash: run -> replicas that stay for it whoever asks, by the names that are served. Orchestrator."""
    return "spo:orchestrator:kept_warm"


def capture_policies() -> str:
    """Hash: tenant:<tenant> -> JSON of how its traffic is captured where that is asked for. Orchestrator."""
    return "spo:orchestrator:capture_policies"


def captured(tenant: str, completion_id: str) -> str:
    """Hash: document (JSON of a captured completion), feedback:<choice> (JSON); expires. Orchestrator."""
    return f"spo:orchestrator:captured:{digest(tenant, completion_id)}"


def captured_index(tenant: str) -> str:
    """Sorted set: ids of captured completions by time (unix ms). Orchestrator."""
    return f"spo:orchestrator:tenant:{tenant}:captured"


def served_models() -> str:
    """Hash: name/tenant -> JSON of what the name means since its last change. Orchestrator."""
    return "spo:orchestrator:served_models"


def served_model_changes(name: str) -> str:
    """List, newest first: JSON of the changes of a name (name/tenant), the last 1,000. Orchestrator."""
    return f"spo:orchestrator:served_model:{digest(name)}:changes"


def agent_sessions(job_id: str) -> str:
    """Sorted set: ids of the job's agent sessions by when they end (unix ms). Orchestrator."""
    return f"spo:{job_id}:orchestrator:agent_sessions"


def open_agent_sessions(tenant: str) -> str:
    """Sorted set: ids of a tenant's sessions that are open and were not leased, by when they end (unix ms)."""
    return f"spo:orchestrator:open_agent_sessions:{tenant}"


def agent_episodes(job_id: str) -> str:
    """Hash: group id/sample -> JSON of an episode of a group that is open. Orchestrator."""
    return f"spo:{job_id}:orchestrator:agent_episodes"


def agent_lost(job_id: str) -> str:
    """Hash: group id/sample -> why the episode is missing from its group that was passed on. Orchestrator."""
    return f"spo:{job_id}:orchestrator:agent_lost"


def agent_session(session_id: str) -> str:
    """Hash: record (JSON of the session), calls, tokens and bytes so far, spelled (tokens after the first prompt with
    each branch written out), closed (why), ended (unix ms), outcome (JSON); expires. Orchestrator."""
    return f"spo:orchestrator:agent_session:{session_id}"


def agent_nodes(session_id: str) -> str:
    """Hash of a session's calls: number -> JSON of it, number:read and number:sampled -> int32 tokens,
    number:logprobs -> float32, number:above -> int32 numbers of the calls before it, the nearest first and at most 64;
    expires. Orchestrator."""
    return f"spo:orchestrator:agent_session:{session_id}:nodes"


def agent_states(session_id: str) -> str:
    """Hash: digest of messages up to an answer, or retry:<digest of a request> -> number of the call that gave it;
    child:<number> -> 1 once a call has gone on from it; expires. Orchestrator."""
    return f"spo:orchestrator:agent_session:{session_id}:states"


def idempotency(key_digest: str) -> str:
    """Hash: job_id, body_digest of a POST with an Idempotency-Key; expires after a day. Orchestrator."""
    return f"spo:orchestrator:idempotency:{key_digest}"


def job_dead_letters_told(job_id: str) -> str:
    """Hash: stream's name -> how many dead letters the job's events tell of."""
    return f"spo:{job_id}:orchestrator:dead_letters_told"
