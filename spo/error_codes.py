"""The catalogue of error codes: what each means, and what to do about it.

The type of a problem is `/errors/<code>`, where the orchestrator serves its entry; `docs/reference/errors.md` has all.
A test holds that every code raised anywhere is here, and no other.
"""

from __future__ import annotations

from dataclasses import dataclass

# A code with its meaning, and below it what to do.
_CATALOGUE = """
already_running: A platform of this name runs already.
  Use it, stop it with `spo down`, or start another with `spo up --name other`.
already_written: The folder of a version or checkpoint was written by another owner.
  Nothing: the other owner goes on. Two owners for long: look at the lease events of the job.
api_unreachable: No orchestrator answers at this address.
  Start one with `spo up`, or set SPO_API_URL.
bad_experience: A file of the experience store is not what its name says.
  Restore it from a backup, or remove it with `spo experience prune`.
bad_heartbeat: A replica registered without an id or with an unknown pool.
  Bring its version in line with the orchestrator's.
bad_pattern: The pattern is no regular expression.
  Correct RUNS.
bad_request: The request could not be read.
  Correct it as the detail says.
bad_rows: Rows of an import are not valid; `errors` names each.
  Correct them, or import the good ones only with `keep_good`.
bad_tests: A file of tests cannot be read.
  Correct it as the message says; docs/judge.md has the formats.
bad_upload: The uploaded file cannot be read as a whole.
  Check its format and its Content-Type; cut very large files into several.
batch_not_divisible: A batch cannot be split evenly over the trainer's processes and minibatches.
  Choose a batch_size that is a multiple of both.
body_timeout: The body of the request did not arrive in time.
  Send it again over a faster connection, or in several parts.
body_too_large: The body is larger than this platform takes.
  Send less, or raise SPO_ORCHESTRATOR_MAX_BODY_BYTES (MAX_IMPORT_BYTES for imports).
cache_lost: Somebody else removed weights from this machine's cache while they were in use.
  Nothing: they are fetched again. Leave the cache to the platform.
cannot_follow: The job cannot follow the run that it names; `errors` says why.
  Correct `rollout.follow`, or the fields that both must share.
checkpoint_layout: The checkpoint was written by another number of processes or at another ZeRO stage.
  Resume it with the numbers that the message names.
conflict: The request does not fit what is there now.
  Read the resource again and decide anew.
cross_site: The request comes from another site, or names another host than localhost on a platform without a key.
  Ask from the platform's own address; set SPO_ORCHESTRATOR_API_KEY to serve others.
dataset_not_found: There is no such dataset, or it is another tenant's.
  `spo dataset ls` shows those there are.
dataset_too_large: The dataset is larger than this platform takes.
  Cut it, or raise SPO_ORCHESTRATOR_MAX_DATASET_BYTES.
dataset_unusable: The dataset that the tasks name is not there or not ready; `errors` says which.
  Wait for its report, correct the rows that it names, and upload again.
demo_timeout: The demo did not end in its time.
  Look at the logs that it names; a loaded machine needs longer.
digest_mismatch: Orchestrator and judge compute different digests of the same tests.
  Bring their versions in line.
draining: The orchestrator is stopping.
  Try again: another takes over, or it is restarted.
empty_sequence: A sequence to be scored has no prompt or no response.
  Leave it out.
evaluation_not_found: There is no such evaluation, or it is another tenant's.
  `GET /v1/evaluations` lists yours.
evaluation_timeout: An evaluation of the reproduction did not end in its time.
  Run it again: it goes on where it was.
experience_busy: Stored experience is being pruned or compacted by somebody else.
  Try again when that is over.
experience_in_use: Jobs that have not ended still add to what is to be removed.
  Wait for them, cancel them, or choose a smaller part.
experience_not_found: Nothing is stored under this name, or it is another tenant's.
  `spo experience ls` lists what there is.
experience_on_its_way: The job's trajectories are still being stored.
  Try again in a moment.
experience_store: The place of the experience store cannot be read or written.
  Check SPO_EXPERIENCE_URL, its credentials and its disk.
experience_url: SPO_EXPERIENCE_URL names no place that can be opened.
  Correct it; other places than folders need the extra `s3`.
fetch_refused: The platform fetches nothing from addresses.
  Upload the file: `spo dataset upload FILE`.
file_not_found: There is no such file.
  Correct the path.
forbidden: The key lacks the scope that the detail names.
  Ask an admin for a key with it: `spo key create --scope ...`.
foreign_tokens: A token id is outside the model's vocabulary.
  Check that the trajectory belongs to this model.
fork_start_lost: The weights or the checkpoint that a fork would start from are damaged or no longer kept.
  Choose another version or checkpoint; `spo weights ls` and `spo job checkpoints` show them.
http_ended: The HTTP server of the orchestrator could not listen or ended.
  Free the port, or set SPO_ORCHESTRATOR_HTTP_PORT.
idempotency_mismatch: This Idempotency-Key was used with another body.
  Take a new key for a new request.
illegal_transition: The job's state does not allow this; the detail names what is legal.
  Wait for a state that does, or choose another verb.
integrity: Something stored is damaged: its digest or its form is wrong.
  Nothing is used of it; restore it, or go on from an older version.
internal: A fault of the platform.
  The log of the service has it, with the X-Request-Id of the answer; please report it.
invalid_evaluation: The job has no such weight version or checkpoint to evaluate.
  The detail names those that it has.
invalid_fork: The fork cannot be made from there; `errors` points at the reason.
  Correct the field it names.
invalid_input: A value is not valid.
  Correct it as the message says.
invalid_job_spec: Fields of the job spec are wrong; `errors` points at each.
  Correct them; `spo job submit FILE --validate-only` checks without submitting.
invalid_request: Parameters or fields of the request are wrong; `errors` points at each.
  Correct them; docs/openapi.json has their types.
invalid_scale: The wished number of replicas is outside the bounds.
  Stay within `minimum` and `maximum` of GET /v1/scale.
invalid_tasks: The description of the tasks is not valid; `errors` points at each fault.
  Correct it.
job_did_not_succeed: A job of the demo ended otherwise than expected.
  Its events and logs say why.
job_not_active: The job does not run, so it takes or serves no weights.
  Do it while it runs.
job_not_found: There is no such job, or it is another tenant's.
  `spo job list` lists yours.
judge_fault: The sandbox broke, not the program.
  It is tried again; when it lasts, look at the judge's log and `spo doctor`.
judge_incomplete: The judge could not judge every sample.
  It is tried again; when it lasts, look at the judge's log.
key_not_found: There is no such API key.
  `spo key ls` lists them.
kubernetes_unreachable: The Kubernetes API does not answer the orchestrator.
  Check SPO_ORCHESTRATOR_KUBERNETES_URL and the network policy.
lease_lost: Another trainer has taken the job over.
  Nothing: the new owner goes on from the newest checkpoint.
lone_group: Group-relative advantages need two trajectories of each prompt at least.
  Raise the number of samples per prompt.
malformed_entry: An entry of a stream cannot be decoded.
  It is put aside; bring the versions of the services in line.
malformed_json: The body is not JSON, has a key twice, or is nested too deep.
  Correct it as the detail says.
malformed_task: A line of a task set is not valid; the message names file and line.
  Correct that line.
method_not_allowed: This path has no such method.
  The header Allow names those that it has.
model_not_loadable: The weights or the config of the model cannot be loaded.
  Check the folder with the version of transformers that is installed.
model_refused: The model folder holds something that may not be loaded, or lacks something.
  Use a folder of safetensors and JSON, without pickles and code.
model_timeout: The reference model was not built in its time.
  Look at the log that the message names.
name_taken: The name belongs to another kind of experience or another tenant.
  Choose another name.
no_annotations: The objective needs token values, and the batch has none.
  Set `value` in the job spec, or choose another objective.
no_critic: The loss needs a critic, and the job has none.
  Set `algorithm.critic`.
no_isolation: The judge found no isolation that works and that it accepts.
  `make system-deps`; `spo doctor` says which tiers work and why not.
no_markers: The README lacks the lines between which the report goes.
  Put them back.
no_prompts: No training prompt has a value that the mix takes, so nothing can be fed.
  Lower `min_value_spread`, set `value.unsolved`, or take easier problems.
no_public_tests: No training problem has public tests to decide the reward.
  Choose another reward, or tasks with public tests.
no_reference: Only a reference that the trainer holds can change.
  Set `trainer.reference` to in_trainer.
no_runs: No planned run matches the pattern.
  Correct RUNS.
no_samples: The run keeps no samples of pi0 to be measured by.
  Ask for fresh continuations while it runs, or keep reference samples.
no_value: The prompt has no value in this run.
  Wait until it is estimated; unsolved prompts may never have one.
no_verdict: A trajectory without a verdict was to earn a reward.
  Have it judged first.
not_a_file: The path is not a file.
  Correct it.
not_asked_for: The run asks for no pivotal tokens.
  Set `value.pivotal` in the job spec.
not_durable: Redis did not write its append-only file in time, so the change may be lost with the power.
  Try again with the same Idempotency-Key; its disk is slow or full.
not_finite: A loss, value or gradient became infinite or not a number.
  The batch is put aside; lower the learning rate when it happens often.
not_found: There is nothing at this path, or it is another tenant's.
  Check the path and the id.
not_ready: What was asked is not ready yet.
  Try again.
other_run: This replica serves another run.
  Try again: it is assigned anew, or ask while that run is served.
part_digest_mismatch: A part of an upload arrived damaged.
  Send the part again.
platform_not_found: No platform of this name runs here.
  `spo up`, or give its --name.
platform_not_ready: A service did not become ready in time.
  The message shows the end of its log; `spo doctor`.
precondition_failed: What the request builds on has changed.
  Read it again and decide anew.
prompt_not_found: The job has no such prompt.
  Its task set has the ids.
prompt_too_long: The prompt has more tokens than the model takes.
  Raise model.max_prompt_tokens, or leave the problem out.
quota_exceeded: This key has as many jobs that have not ended as it may.
  Wait for one, or cancel one.
rate_limited: Too many requests in a short time.
  Wait as long as Retry-After says.
redis_full: Redis refuses writes: its memory or its disk is full.
  Make room; nothing acknowledged is lost, and work goes on by itself.
redis_unreachable: Redis does not answer.
  Try again; check SPO_REDIS_URL and the server.
reference_mismatch: Q_t of an untrained policy departs from Qhat_0.
  Trainer and value-estimation must use the same model and dtype.
reference_model_failed: The demo's reference model could not be built.
  Look at the log that the message names.
refused_prompt: The inference engine refuses the prompt.
  The message has its reason.
resource_exhausted: Too much at once.
  Try again later, with less.
run_ended: The run has ended, so no engine serves it.
  Ask for stored samples instead of fresh continuations.
run_timeout: A run of the reproduction did not end in its time.
  Start it again: it goes on where it was.
scaling_refused: Kubernetes refused to scale the pool.
  Install the orchestrator's Role; the message has the reason.
scaling_unavailable: Nobody scales this platform.
  Set the replicas where it was installed.
secret_in_target: The target of a mirror holds a password.
  Leave it out; the sink's library reads its own environment variables.
sink_missing: The library of this sink is not installed.
  pip install 'spo-platform[sinks]', in an environment of its own with constraints/sinks.txt.
source_empty: A source of the replay mix has nothing to give, and nothing more will come.
  Take it out of the mix, or provide its experience.
stop_timeout: Services did not stop in time.
  `spo down` again; look at their logs.
tests_not_found: The judge does not know this set of tests.
  It is uploaded again; with your own client, call UploadTests first.
token_out_of_range: A token id is outside the model's vocabulary.
  Check that the trajectory belongs to this model.
too_few_problems: The task set is too small for the split that is asked for.
  Ask for fewer held-out problems, or bring more.
too_long: A sequence has more tokens than the model has positions.
  Lower the prompt's or the response's length.
too_many_dead_letters: So many entries were given up on that the job was stopped.
  Field `reason` of `<stream>:dead`, and `spo job logs JOB --level error`.
too_many_uploads: Too many uploads of this tenant are unfinished.
  Finish them; those that nobody continues are removed after a day.
unauthorized: No key, a wrong one, or one that was revoked or expired.
  Send `Authorization: Bearer <key>`; the command line reads SPO_API_KEY.
unknown_batch: No batch was drawn for this step.
  Steps begin at 1; the newest is the job's `step`.
unknown_checker: There is no such checker.
  docs/judge.md lists them.
unknown_experience: The job names stored experience that is not there, or not yours.
  `spo experience ls` lists what there is.
unknown_language: The judge does not know this language.
  docs/judge.md lists them.
unknown_run: There is no such run, or Redis was emptied.
  Submit the job again; its checkpoints are still on disk.
unknown_setting: There is no such setting to reproduce.
  The message lists them.
unknown_sink: Nothing here writes to such a target.
  Use tensorboard:FOLDER, mlflow:TRACKING_URI or wandb:PROJECT.
unknown_version: The run has no such weight version.
  `spo weights ls JOB` lists them.
unreachable: A service did not answer in time; the message names it.
  Try again; look at its log and at GET /v1/replicas.
unreadable_file: The file cannot be read.
  Check the path and the rights.
unreadable_program: The program's file is not text.
  Save it as UTF-8.
unreadable_report: The report cannot be read.
  Make it again.
unreadable_spec: The file is no YAML or JSON mapping.
  Correct it.
unsupported_file: The file has none of the formats that can be imported.
  Use .jsonl or .parquet.
unsupported_media_type: The Content-Type or the Content-Encoding is not taken here.
  Send one that the detail names, uncompressed.
unusable_trajectory: A trajectory cannot be learnt from; `errors` says why.
  It is put aside; correct whoever made it.
unwritable_file: The file cannot be written.
  Check the path, the rights and the disk.
upload_complete: The dataset has all its bytes; it takes no further part.
  Begin a new upload for other bytes.
upload_offset_mismatch: The part does not begin where the bytes so far end.
  Go on at `uploaded_bytes` of the dataset; the SDK and `spo dataset upload --resume` do.
upload_overflow: The parts are more than the size that was announced.
  Begin a new upload with the right size.
version_taken: The version was published before with other bytes.
  Publish under a new number.
wait_timeout: Only the waiting ended; the job goes on.
  Wait again.
weight_store_url: Weights cannot be kept at this address.
  Correct SPO_WEIGHT_STORE_URL as the message says; a bucket needs the package obstore.
weight_version_not_found: The job has no such weight version.
  `spo weights ls JOB` lists them.
which_job: Neither a job nor --all is named, or both.
  Name a job or give --all.
which_problems: The problems are not named.
  Give --job or --tasks.
"""


@dataclass(frozen=True)
class Entry:
    """What a code means, and what to do."""

    meaning: str
    remedy: str


def _entries() -> dict[str, Entry]:
    lines = _CATALOGUE.strip().splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {line.partition(": ")[0]: Entry(line.partition(": ")[2], remedy.strip()) for line, remedy in pairs}


CATALOGUE = _entries()
