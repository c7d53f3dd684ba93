"""Prometheus metrics of the platform. Names: spo_<service>_<what>_<unit>[_total]; ids are never labels."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, start_http_server

INFERENCE_TOKENS = Counter("spo_inference_tokens_total", "Response tokens generated")
INFERENCE_RUNNING = Gauge("spo_inference_running_sequences", "Sequences being decoded")
JUDGE_VERDICTS = Counter("spo_judge_verdicts_total", "Verdicts given", ["outcome"])
JUDGE_CACHE_HITS = Counter("spo_judge_cache_hits_total", "Verdicts answered from the cache")
JUDGE_PROGRAM_SECONDS = Histogram("spo_judge_program_seconds", "CPU seconds per judged program")
JUDGE_RECHECKED_PROGRAMS = Counter(
    "spo_judge_rechecked_programs_total", "Programs judged again to see whether it differs"
)
JUDGE_FLAKY_PROGRAMS = Counter("spo_judge_flaky_programs_total", "Of those, programs whose verdict differed")
JUDGE_SUSPECTED_HARD_CODED = Counter(
    "spo_judge_suspected_hard_coded_total", "Programs that seem to print remembered answers of public tests"
)
JUDGE_ISOLATION = Gauge("spo_judge_isolation", "1 for the isolation tier in force", ["tier"])
REPLAY_INSERTS = Counter("spo_replay_inserts_total", "Trajectories offered to the buffer", ["result"])
REPLAY_STORED = Counter("spo_replay_stored_total", "Trajectories written to the experience store")
REPLAY_MEMORY_SHARE = Gauge("spo_replay_memory_share", "Memory of Redis in use, as a share of its maxmemory")
REPLAY_SAMPLE_AGE = Histogram(
    "spo_replay_sample_age_versions",
    "Weight versions behind, mean of a batch's online trajectories",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64),
)
STREAM_LAG = Gauge("spo_stream_lag_entries", "Entries no consumer has seen", ["stream"])
STREAM_PENDING = Gauge("spo_stream_pending_entries", "Entries delivered and unfinished", ["stream"])
DEAD_LETTERS = Counter("spo_dead_letters_total", "Entries given up on", ["stream"])
POLICY_VERSION = Gauge("spo_policy_version", "Newest weight version", ["role"])
WEIGHTS_PUSH_SECONDS = Histogram("spo_weights_push_seconds", "Seconds to gather and write, or to load a version")
WEIGHTS_BYTES = Counter("spo_weights_bytes_total", "Bytes of weights moved")
TRAINER_STEP_SECONDS = Histogram("spo_trainer_step_seconds", "Seconds per optimiser step")
TRAINER_COLLAPSE_ALARMS = Counter("spo_trainer_collapse_alarms_total", "Signs of a collapse that began", ["alarm"])
TRAINER_WAIT_SECONDS = Histogram("spo_trainer_wait_batch_seconds", "Seconds the trainer waited for a batch")
VALUE_SAMPLES = Counter("spo_value_samples_total", "Samples of pi0 spent on value estimation")
PIVOTAL_ROLLOUTS = Counter("spo_pivotal_rollouts_total", "Rollouts of pi0 from prefixes, in search of pivotal tokens")
JOBS = Gauge("spo_jobs", "Jobs by state", ["state"])
CAPTURED = Counter("spo_captured_completions_total", "Completions whose capture was asked for", ["result"])
REPLICAS = Gauge("spo_replicas", "Live registered replicas", ["pool"])
DELETIONS_FAILING = Gauge("spo_deletions_failing", "Deleted jobs whose files could not be removed so far")
LEFTOVERS = Counter("spo_leftovers_total", "Jobs that were not there, and of which keys or files were, now removed")
WANTED_REPLICAS = Gauge("spo_wanted_replicas", "Replicas that the jobs need; 0: the pool is not needed", ["pool"])


def serve_metrics(host: str, port: int) -> None:
    """Expose /metrics on its own port; port 0 switches it off."""
    if port:
        start_http_server(port, addr=host)
