"""One release's part of a run, as a process: the job, its trajectories and its batches; run in the release's folder.

Arguments: URL of Redis, the first step and the last (1 submits the job), and `later` for a release that adds fields.
Prints the ids of each step's batch.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import redis

from services.orchestrator import redis_keys as own_keys
from spo import redis_keys
from spo.spec.job_spec import parse_job_spec
from spo.v1.replay_service_pb2 import SampleBatchRequest


def at_home(name: str, *modules: str) -> Any:
    """What a release calls by this name, in the first of the modules that has it: releases differ in where it is."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(modules)} has {name}")


JobStore = at_home("JobStore", "services.orchestrator.jobs", "services.orchestrator.jobs.store")
BatchSampler = at_home("BatchSampler", "services.replay_buffer.sampling", "services.replay_buffer.sampler")
ReplayStore = at_home("ReplayStore", "services.replay_buffer.store")
JobState = at_home("JobState", "spo.spec.section", "spo.spec.job_state")
RUN, start_run, trajectory = (
    at_home(name, "spo.testing.runs", "spo.testing.replay") for name in ("RUN", "start_run", "trajectory")
)
PER_STEP = 8
REPLAY = {"min_online": 4, "max_times_sampled": 4, "mix": [{"source": "online", "share": 1}]}
ORDER = (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING, JobState.PAUSING)


def add_fields(client: redis.Redis, job_id: str) -> None:
    """What a later release may have written everywhere."""
    for run_id in (RUN, job_id):
        spec = json.loads(client.get(redis_keys.run_spec(run_id)))
        for section in (spec, spec["replay"], spec["algorithm"]["losses"][0]):
            section["of_a_later_release"] = {"nested": [1]}
        client.set(redis_keys.run_spec(run_id), json.dumps(spec))
    for key in (redis_keys.job_record(job_id), "spo:platform"):
        client.hset(key, "of_a_later_release", "1")
    for raw in client.zrange(redis_keys.replay_ids(RUN), 0, -1):
        # Field 999 of the message, a string.
        client.append(redis_keys.replay_trajectory(RUN, raw.decode()), b"\xba\x3e\x05later")
    # Where the release before has it in another module.
    checkpoints = getattr(redis_keys, "job_checkpoints", None) or own_keys.job_checkpoints
    client.hset(checkpoints(job_id), "1", json.dumps({**CHECKPOINT, "of_a_later_release": 1}))


CHECKPOINT = {"step": 1, "path": "p", "manifest_digest": "d", "weight_version": 1}


def main() -> None:
    url, first, last, *flags = sys.argv[1:]
    client = redis.Redis.from_url(url)
    jobs, sampler = JobStore(client), BatchSampler(ReplayStore(client))
    if first == "1":
        start_run(client, replay=REPLAY, trainer={"batch_size": PER_STEP})
        jobs.submit(parse_job_spec({"model": {"path": "/pi0"}}))
    job_id = client.zrange(redis_keys.job_index(), 0, -1)[0].decode()
    assert jobs.spec(job_id).model.path == "/pi0"
    assert jobs.transition(job_id, next(state for state in ORDER if jobs.state(job_id) in _before(state)), "test")
    for step in range(int(first), int(last) + 1):
        sampler.store.append(RUN, [trajectory(PER_STEP * step + number) for number in range(PER_STEP)])
        request = SampleBatchRequest(run_id=RUN, batch_size=PER_STEP, step=step, wait_seconds=0)
        sampler.sample(request)
        print(step, *sampler.store.batch(RUN, step))
    if "later" in flags:
        add_fields(client, job_id)


def _before(state: Any) -> set[Any]:
    at = ORDER.index(state)
    return {ORDER[at - 1]} if at else {JobState.QUEUED}


if __name__ == "__main__":
    main()
