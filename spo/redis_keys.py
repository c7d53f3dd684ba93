"""The Redis keys of all services but the orchestrator's own: one function per key, its docstring is its schema.

`spo:{run}:owner:noun[:id]`; the owner is the only service that writes the key unless the docstring says otherwise.
A key of a run takes its `run_id`, whoever alone reads it: the orchestrator deletes a run's keys by these functions and
imports no other service. What a job has in Redis is thus: every function here and in
`services/orchestrator/redis_keys.py` that takes a `run_id` or `job_id` (the same string).
"""

from __future__ import annotations

from blake3 import blake3

# Consumer groups, one per stage of the pipeline.
INFERENCE_GROUP = "inference"
JUDGE_GROUP = "sandbox-judge"
INGEST_GROUP = "replay-buffer"
VALUE_GROUP = "value-estimation"
VERIFIER_GROUP = "verifier"


def prompts(run_id: str) -> str:
    """Stream: PromptGroup. Dispatcher -> inference replicas of the run."""
    return f"spo:{run_id}:prompts"


def rollouts() -> str:
    """Stream: RolloutGroup without verdicts, of prompts that name no pool. Inference -> judges, all runs."""
    return "spo:rollouts"


def verifier_rollouts() -> str:
    """Stream: RolloutGroup without verdicts, of prompts that name the pool of verifiers. Inference -> verifiers."""
    return "spo:verifier:rollouts"


def rollouts_of(verifier_pool: str) -> str:
    """The stream of judges that a `Prompt.verifier_pool` names: that of the sandbox judge or of the verifiers."""
    return verifier_rollouts() if verifier_pool else rollouts()


def verdicts() -> str:
    """Stream: RolloutGroup with verdicts. Judges and verifiers -> replay ingest, all runs."""
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
    """Stream: WeightAnnouncement, append only. Orchestrator -> inference replicas (no consumer group)."""
    return f"spo:{run_id}:weights"


def dead_letters(stream: str) -> str:
    """Stream: entries given up on, fields reason, deliveries, at_unix_ms, run it belongs to, counted (the run that it
    was counted for), trace, bytes. Capped: the oldest go."""
    return f"{stream}:dead"


def dead_letter_payloads(stream: str) -> str:
    """Hash: id of a dead letter -> its payload, apart from the facts so that listing letters costs no payloads."""
    return f"{stream}:dead:payloads"


def dead_letter_totals(stream: str) -> str:
    """Hash: bytes of the payloads that are kept, gone (letters that gave way to newer ones)."""
    return f"{stream}:dead:totals"


def lone_deliveries(stream: str) -> str:
    """Hash: id of an entry that is handled alone -> weight of the deaths of its holders. Gone with the entry."""
    return f"{stream}:lone"


def stream_clock(stream: str) -> str:
    """Redis' time in ms when a member last looked for entries of silent members; shows steps of that clock. A day."""
    return f"{stream}:clock"


def dead_letter_counts(run_id: str) -> str:
    """Hash: stream -> entries of the run given up on and not redriven, `stream:reason` -> why the last one was.

    Counted in the step that moves the entry; a letter that is dropped or gives way stays counted.
    """
    return f"spo:{run_id}:dead_letters"


def run_troubles(run_id: str) -> str:
    """Hash: stream or service -> JSON of why the run's work waits there and since when. Whoever cannot do it writes it;
    it vanishes by itself."""
    return f"spo:{run_id}:troubles"


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


def job_checkpoints(job_id: str) -> str:
    """Hash: step -> JSON of a checkpoint that is kept, for whoever resumes. Orchestrator; read by replay."""
    return f"spo:{job_id}:orchestrator:checkpoints"


def dispatch_cursor(run_id: str) -> str:
    """Hash: position (groups dispatched), passed_over (prompts without a value when their turn came). Orchestrator."""
    return f"spo:{run_id}:orchestrator:dispatcher"


def scale() -> str:
    """Hash: pool -> how many replicas it should have. Orchestrator; the launcher of a local platform follows it."""
    return "spo:orchestrator:scale"


def platform() -> str:
    """Hash: schema_version (MAJOR.MINOR of the newest joined), epoch (this Redis' data), id. Every service.

    The id is what lock files in state folders name.
    """
    return "spo:platform"


def replicas() -> str:
    """Hash: replica id -> time and serialized HeartbeatRequest. Orchestrator; read by whoever asks inference."""
    return "spo:orchestrator:replicas"


def run_values_under(run_id: str, version: int) -> str:
    """Hash: prompt id -> PromptValue under a version that is, or shall be, the reference. Value-estimation."""
    return f"spo:{run_id}:value-estimation:values:{version}"


def run_values(run_id: str) -> str:
    """Hash: prompt id -> serialized PromptValue. Value-estimation; read by replay and orchestrator."""
    return f"spo:{run_id}:value-estimation:values"


def provisional_values(run_id: str) -> str:
    """Hash: prompt id -> serialized PromptValue of the rounds so far, until it is in `run_values`. Value-estimation;
    read by replay and orchestrator."""
    return f"spo:{run_id}:value-estimation:provisional"


def value_progress(run_id: str, prompt_id: str) -> str:
    """Hash: what this run has done for a prompt, chunk -> `samples:successes`. Value-estimation."""
    return f"spo:{run_id}:value-estimation:progress:{prompt_id}"


def prompts_in_progress(run_id: str) -> str:
    """Set: prompt ids with a `value_progress`, so that it is found when the run is deleted. Value-estimation."""
    return f"spo:{run_id}:value-estimation:in-progress"


def run_pivotal(run_id: str) -> str:
    """Hash: prompt id -> trajectories annotated, once its search is over. Value-estimation; read by orchestrator."""
    return f"spo:{run_id}:value-estimation:pivotal"


def pivotal_visits(run_id: str) -> str:
    """Set: `labels digest:position` of every prefix this run has rolled out or is rolling out. Value-estimation."""
    return f"spo:{run_id}:value-estimation:pivotal_visits"


def replay_trajectory(run_id: str, trajectory_id: str) -> str:
    """String: serialized Trajectory (judged, with reference log-probs); gone once it may never be served. Replay."""
    return f"spo:{run_id}:replay-buffer:trajectory:{trajectory_id}"


def replay_ids(run_id: str) -> str:
    """Sorted set: trajectory id by insertion number; the ledger: what is in Redis, and the newest beyond. Replay."""
    return f"spo:{run_id}:replay-buffer:ids"


def replay_source(run_id: str, source: str) -> str:
    """Sorted set: trajectory ids of a source that are in Redis by insertion number. Replay."""
    return f"spo:{run_id}:replay-buffer:source:{source}"


def replay_facts(run_id: str) -> str:
    """Hash: trajectory id -> `correct:policy version:reward:group:prompt id`, of those that are in Redis. Replay."""
    return f"spo:{run_id}:replay-buffer:facts"


def replay_prompts(run_id: str) -> str:
    """Sorted set, all scores 0: `prompt id:insertion number, 16 digits:trajectory id`, to list by prompt. Replay."""
    return f"spo:{run_id}:replay-buffer:prompts"


def replay_outcomes(run_id: str) -> str:
    """Hash: prompt id -> `rollouts:right answers:wrong rollouts since the last right one`, of runs that remember or
    choose prompts by need; memory's offline answers count as right. Replay.
    """
    return f"spo:{run_id}:replay-buffer:outcomes"


def replay_unsolved(run_id: str) -> str:
    """Set: ids of prompts that were tried and have no right answer, never or lately (rollout.unsolved). Replay."""
    return f"spo:{run_id}:replay-buffer:unsolved"


def replay_duplicates(run_id: str) -> str:
    """Hash: id of a duplicate that was accepted -> id of the stored trajectory with the same content. Replay."""
    return f"spo:{run_id}:replay-buffer:duplicates"


def replay_copies(run_id: str) -> str:
    """Hash: trajectory id -> how many acknowledged duplicates it stands for. Replay."""
    return f"spo:{run_id}:replay-buffer:copies"


def replay_content(run_id: str) -> str:
    """Hash: digest of (prompt, source, reward, normalised content) -> trajectory id, for deduplication. Replay."""
    return f"spo:{run_id}:replay-buffer:content"


def replay_counters(run_id: str) -> str:
    """Hash: number (last insertion), drawn (last draw), policy_version (newest named), inserted, correct, sampled by
    source; followed (position in the ledger of the run it follows), left_out; forgotten (the ledger has left out the
    ids up to this insertion number that are not in Redis); unsolved (changes of the set of unsolved prompts);
    equal (trajectories of groups without contrast, up to the insertion number equal_to). Replay."""
    return f"spo:{run_id}:replay-buffer:counters"


def replay_batch(run_id: str, step: int) -> str:
    """String: ids of a step's batch, joined by spaces, while a trainer may ask again or it is a late one. Replay."""
    return f"spo:{run_id}:replay-buffer:batch:{step}"


def replay_stored(run_id: str) -> str:
    """Hash: written (last insertion number in the experience store), planned (last of the file under way). Replay."""
    return f"spo:{run_id}:replay-buffer:stored"


def replay_batch_log(run_id: str) -> str:
    """Sorted set: step by the number of its batch, in the order in which batches were drawn. Replay."""
    return f"spo:{run_id}:replay-buffer:batch_log"


def engine_deaths(work: str) -> str:
    """Hash: in_company, alone (begun and never ended), reason; expires an hour after the last. Inference.

    `work` names what the engine was doing: a group, a weight version, the building of a model.
    """
    return f"spo:inference:engine_deaths:{digest(work)}"


def replay_unstored() -> str:
    """Set: ids of runs whose ledgers hold more than the experience store. Replay."""
    return "spo:replay-buffer:unstored"


def replay_untrimmed() -> str:
    """Set: ids of runs of which something may leave Redis later, or has not yet. Replay."""
    return "spo:replay-buffer:untrimmed"


def judge_tests(digest: str) -> str:
    """String: serialized TestSet. Written by whoever uploads tests, content-addressed; read by judges."""
    return f"spo:sandbox-judge:tests:{digest}"


def cached_verdict(digest: str) -> str:
    """String: serialized Verdict by digest of (program, tests, limits, language, judge version). Judge."""
    return f"spo:sandbox-judge:verdict:{digest}"


def cached_verdict_order() -> str:
    """List: `size:key` of the cached verdicts, the oldest first. Judge."""
    return "spo:sandbox-judge:verdict_order"


def cached_verdict_bytes() -> str:
    """String: the sum of the sizes in the list of cached verdicts. Judge."""
    return "spo:sandbox-judge:verdict_bytes"


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


def value_counts(value_key_digest: str) -> str:
    """Hash: part -> `samples:successes`, with rewards where they are shares; outlives runs. Value-estimation."""
    return f"spo:value-estimation:counts:{value_key_digest}"


def reference_deaths(work: str) -> str:
    """Hash: in_company, alone (begun and never ended), reason of loading a reference; expires an hour after the last.
    Value-estimation."""
    return f"spo:value-estimation:deaths:{digest(work)}"


def value_population(population_digest: str) -> str:
    """Hash: prompt id -> JSON {samples, successes, features} of prompts sampled alike, outlives runs. Value-estimation.

    The digest is of (reference hash, sampler, judge version, reward).
    """
    return f"spo:value-estimation:population:{population_digest}"


def value_origin(value_key_digest: str, extra_sampler: str) -> str:
    """String: id of a run whose replay buffer holds the counted and the extra samples, scored. Value-estimation."""
    return f"spo:value-estimation:origin:{digest(value_key_digest, extra_sampler)}"


def pivotal_labels(labels_digest: str) -> str:
    """Hash: position -> `rollouts:successes` of pi0 from that prefix, outlives runs. Value-estimation.

    The digest is of (reference hash, prompt, tests, sampler, judge version, response tokens).
    """
    return f"spo:value-estimation:labels:{labels_digest}"


def digest(*parts: str) -> str:
    """blake3 hex of the parts, unambiguous in their boundaries."""
    return digest_of(framed(*parts))


def framed(*parts: str) -> bytes:
    """The parts one after the other, each behind its length."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)


def digest_of(content: bytes) -> str:
    """blake3 hex of framed parts."""
    return blake3(content).hexdigest(32)


def trajectory_id(run_id: str, group_id: str, sample_index: int, attempt: int, policy_version: int) -> str:
    """Id of one sample: the same work done twice gets the same id, so every write of it is idempotent.

    group_id names the prompt and its dispatch number, so two dispatches of one prompt differ.
    """
    return "traj_" + digest(run_id, group_id, str(sample_index), str(attempt), str(policy_version))[:32]
