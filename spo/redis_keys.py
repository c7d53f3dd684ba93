"""Every Redis key of the platform: one function per key, its docstring is the key's schema.

`spo:{run}:owner:noun[:id]`; the owner is the only service that writes the key unless the docstring says otherwise.
"""

from __future__ import annotations

from blake3 import blake3

# Consumer groups, one per stage of the belt.
INFERENCE_GROUP = "inference"
JUDGE_GROUP = "sandbox-judge"
INGEST_GROUP = "replay-buffer"
VALUE_GROUP = "value-estimation"


def prompts(run_id: str) -> str:
    """Stream: PromptGroup. Feeder -> inference replicas of the run."""
    return f"spo:{run_id}:prompts"


def rollouts() -> str:
    """Stream: RolloutGroup without verdicts. Inference -> judges, all runs."""
    return "spo:rollouts"


def verdicts() -> str:
    """Stream: RolloutGroup with verdicts. Judges -> replay ingest, all runs."""
    return "spo:verdicts"


def estimates() -> str:
    """Stream: EstimateRequest. Orchestrator -> value-estimation, all runs."""
    return "spo:estimates"


def pivotal() -> str:
    """Stream: PivotalRequest. Orchestrator -> value-estimation, all runs."""
    return "spo:pivotal"


def entries_in_flight(run_id: str) -> str:
    """Hash: stream shared by all runs -> the run's unfinished entries on it. Moved in the same step as the entries."""
    return f"spo:{run_id}:entries_in_flight"


def weights(run_id: str) -> str:
    """Stream: WeightAnnouncement, append only. Orchestrator -> inference replicas (read from the newest, no group)."""
    return f"spo:{run_id}:weights"


def dead_letters(stream: str) -> str:
    """Stream: entries given up on, fields payload, reason, deliveries, at_unix_ms."""
    return f"{stream}:dead"


def run_spec(run_id: str) -> str:
    """String: canonical JSON of the JobSpec. Written once by the orchestrator, read by every service."""
    return f"spo:{run_id}:orchestrator:spec"


def run_prompts(run_id: str) -> str:
    """Hash: prompt id -> serialized Prompt of each training problem. Orchestrator; read by replay."""
    return f"spo:{run_id}:orchestrator:prompts"


def run_state(run_id: str) -> str:
    """String: the job's state, for services that must know whether a run is still wanted. Orchestrator."""
    return f"spo:{run_id}:orchestrator:state"


def job_index() -> str:
    """Sorted set: job id by creation time (unix ms). Orchestrator."""
    return "spo:orchestrator:jobs"


def jobs_in_state(state: str) -> str:
    """Sorted set: job id by creation time (unix ms), one set per state, moved with the transition. Orchestrator."""
    return f"spo:orchestrator:jobs:{state}"


def job_record(job_id: str) -> str:
    """Hash: created_at, name, labels, idempotency facts and what the fold of events needs. Orchestrator."""
    return f"spo:{job_id}:orchestrator:job"


def job_events(job_id: str) -> str:
    """Stream: append-only events {seq, at, actor, kind, body}; entry id `<seq>-0`: seq is gapless. Orchestrator."""
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


def job_lease(job_id: str) -> str:
    """Hash: trainer_id, epoch, expires_unix_ms. Orchestrator."""
    return f"spo:{job_id}:orchestrator:lease"


def job_checkpoints(job_id: str) -> str:
    """Hash: step -> JSON of the checkpoint manifest's head. Orchestrator."""
    return f"spo:{job_id}:orchestrator:checkpoints"


def job_weights(job_id: str) -> str:
    """Hash: version -> JSON of the published version. Orchestrator."""
    return f"spo:{job_id}:orchestrator:weight_versions"


def evaluations(job_id: str) -> str:
    """Hash: step -> JSON of an evaluation result. Orchestrator."""
    return f"spo:{job_id}:orchestrator:evaluations"


def on_demand_evaluations() -> str:
    """Hash: evaluation id -> JSON of an evaluation that somebody asked for, with its result. Orchestrator."""
    return "spo:orchestrator:examinations"


def evaluated_run() -> str:
    """String: the run whose weights are being evaluated while no job is active; expires. Orchestrator."""
    return "spo:orchestrator:evaluated_run"


def dispatch_cursor(run_id: str) -> str:
    """Hash: next prompt position, groups dispatched, so that a restarted dispatcher goes on. Orchestrator."""
    return f"spo:{run_id}:orchestrator:dispatcher"


def idempotency(key_digest: str) -> str:
    """Hash: job_id, body_digest of a POST with an Idempotency-Key; expires after a day. Orchestrator."""
    return f"spo:orchestrator:idempotency:{key_digest}"


def scale() -> str:
    """Hash: pool -> replicas wished for. Orchestrator; the launcher of a local platform follows it."""
    return "spo:orchestrator:scale"


def replicas() -> str:
    """Hash: replica id -> time and serialized HeartbeatRequest. Orchestrator; read by whoever asks inference."""
    return "spo:orchestrator:replicas"


def tests(digest: str) -> str:
    """String: serialized TestSet. Written by whoever uploads tests, content-addressed; read by judges."""
    return f"spo:sandbox-judge:tests:{digest}"


def verdict(digest: str) -> str:
    """String: serialized Verdict by digest of (program, tests, limits, language, judge version). Judge."""
    return f"spo:sandbox-judge:verdict:{digest}"


def run_values_under(run_id: str, version: int) -> str:
    """Hash: prompt id -> PromptValue under a version that is, or shall be, the reference. Value-estimation."""
    return f"spo:{run_id}:value-estimation:values:{version}"


def run_values(run_id: str) -> str:
    """Hash: prompt id -> serialized PromptValue. Value-estimation; read by replay and orchestrator."""
    return f"spo:{run_id}:value-estimation:values"


def value_counts(value_key_digest: str) -> str:
    """Hash: part -> `samples:successes`, with rewards where they are shares; outlives runs. Value-estimation."""
    return f"spo:value-estimation:counts:{value_key_digest}"


def value_population(population_digest: str) -> str:
    """Hash: prompt id -> JSON {samples, successes, features} of prompts sampled alike, outlives runs. Value-estimation.

    The digest is of (reference hash, sampler, judge version, reward).
    """
    return f"spo:value-estimation:population:{population_digest}"


def value_origin(value_key_digest: str, extra_sampler: str) -> str:
    """String: id of a run whose replay buffer holds the counted and the extra samples, scored. Value-estimation."""
    return f"spo:value-estimation:origin:{digest(value_key_digest, extra_sampler)}"


def value_progress(run_id: str, prompt_id: str) -> str:
    """Hash: what this run has done for a prompt, chunk -> `samples:successes`. Value-estimation."""
    return f"spo:{run_id}:value-estimation:progress:{prompt_id}"


def run_pivotal(run_id: str) -> str:
    """Hash: prompt id -> trajectories annotated, once its search is over. Value-estimation; read by orchestrator."""
    return f"spo:{run_id}:value-estimation:pivotal"


def pivotal_visits(run_id: str) -> str:
    """Set: `labels digest:position` of every prefix this run has rolled out or is rolling out. Value-estimation."""
    return f"spo:{run_id}:value-estimation:pivotal_visits"


def pivotal_labels(labels_digest: str) -> str:
    """Hash: position -> `rollouts:successes` of pi0 from that prefix, outlives runs. Value-estimation.

    The digest is of (reference hash, prompt, tests, sampler, judge version, response tokens).
    """
    return f"spo:value-estimation:labels:{labels_digest}"


def replay_trajectory(run_id: str, trajectory_id: str) -> str:
    """String: serialized Trajectory (judged, with reference log-probs). Replay."""
    return f"spo:{run_id}:replay-buffer:trajectory:{trajectory_id}"


def replay_ids(run_id: str) -> str:
    """Sorted set: trajectory id by insertion number; the ledger of everything acknowledged. Replay."""
    return f"spo:{run_id}:replay-buffer:ids"


def replay_source(run_id: str, source: str) -> str:
    """Sorted set: trajectory ids of a source by insertion number; only ever grows. Replay."""
    return f"spo:{run_id}:replay-buffer:source:{source}"


def replay_facts(run_id: str) -> str:
    """Hash: trajectory id -> `correct:policy version:reward:group:prompt id`, what sampling must know of it. Replay."""
    return f"spo:{run_id}:replay-buffer:facts"


def replay_prompts(run_id: str) -> str:
    """Sorted set, all scores 0: `prompt id:insertion number, 16 digits:trajectory id`, to list by prompt. Replay."""
    return f"spo:{run_id}:replay-buffer:prompts"


def replay_duplicates(run_id: str) -> str:
    """Hash: id of an acknowledged trajectory whose content was there already -> id that stands for it. Replay."""
    return f"spo:{run_id}:replay-buffer:duplicates"


def replay_copies(run_id: str) -> str:
    """Hash: trajectory id -> how many acknowledged duplicates it stands for. Replay."""
    return f"spo:{run_id}:replay-buffer:copies"


def replay_content(run_id: str) -> str:
    """Hash: digest of (prompt, source, reward, normalised content) -> trajectory id, for deduplication. Replay."""
    return f"spo:{run_id}:replay-buffer:content"


def replay_counters(run_id: str) -> str:
    """Hash: number (last insertion), drawn (last draw), policy_version (newest named), inserted, correct, sampled by
    source; followed (position in the ledger of the run it follows), left_out. Replay."""
    return f"spo:{run_id}:replay-buffer:counters"


def replay_batch(run_id: str, step: int) -> str:
    """String: ids of the batch drawn for a step, joined by spaces: a repeated request gets the same batch. Replay."""
    return f"spo:{run_id}:replay-buffer:batch:{step}"


def replay_stored(run_id: str) -> str:
    """Hash: written (last insertion number in the experience store), planned (last of the file under way). Replay."""
    return f"spo:{run_id}:replay-buffer:stored"


def replay_unstored() -> str:
    """Set: ids of runs whose ledgers hold more than the experience store. Replay."""
    return "spo:replay-buffer:unstored"


def replay_draws(run_id: str) -> str:
    """Sorted set: step by the number of its draw; the log of all batches. Replay."""
    return f"spo:{run_id}:replay-buffer:draws"


def value_key(reference_hash: str, prompt_id: str, tests_digest: str, sampler: str, judge_version: str) -> str:
    """Digest under which a prompt's success counts outlive runs; beta is not in it (docs: keys that outlive a run)."""
    return digest(reference_hash, prompt_id, tests_digest, sampler, judge_version)


def digest(*parts: str) -> str:
    """blake3 hex of the parts, unambiguous in their boundaries."""
    hasher = blake3()
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little"))
        hasher.update(encoded)
    return hasher.hexdigest(32)


def trajectory_id(run_id: str, group_id: str, sample_index: int, attempt: int, policy_version: int) -> str:
    """Id of one sample: the same work done twice gets the same id, so every write of it is idempotent.

    group_id names the prompt and its dispatch number, so two dispatches of one prompt differ.
    """
    return "traj_" + digest(run_id, group_id, str(sample_index), str(attempt), str(policy_version))[:32]
