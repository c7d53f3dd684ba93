"""For tests of a whole platform: polling, and the law that no trajectory is lost or doubled."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from spo import redis_keys
from spo.client import Client
from spo.client.models import Job
from spo.messaging.redis_client import RedisClient
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.trajectory_pb2 import Trajectory


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Poll until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def wait_for_progress(client: Client, job_id: str, reached: Callable[[Job], bool], seconds: float = 1200.0) -> None:
    """Poll until a job has come so far; fails at once when it ends before."""

    def come_so_far() -> bool:
        job = client.get(job_id)
        assert not job.is_final, f"the job ended early: {job.state} {job.failure}"
        return reached(job)

    wait_until(come_so_far, "the job's progress", seconds)


def check_ledger(store: RedisClient, job_id: str, samples_per_prompt: int = 4) -> None:
    """Conservation: each dispatched sample is in the ledger exactly once, or its group still waits as a prompt."""
    wait_until(
        lambda: store.xlen(redis_keys.rollouts()) + store.xlen(redis_keys.verdicts()) == 0, "the belt to empty", 60
    )
    for stream in (redis_keys.prompts(job_id), redis_keys.rollouts(), redis_keys.verdicts(), redis_keys.estimates()):
        assert store.xlen(redis_keys.dead_letters(stream)) == 0
    ids = store.zrange(redis_keys.replay_ids(job_id), 0, -1)
    payloads = store.mget([redis_keys.replay_trajectory(job_id, each.decode()) for each in ids])
    assert all(payloads)
    ledger = [Trajectory.FromString(payload) for payload in payloads if payload]
    assert [each.trajectory_id for each in ledger] == [each.decode() for each in ids]
    for each in ledger:
        assert len(each.reference_logprobs) == len(each.response_token_ids) > 0
        assert each.HasField("reward")
    online = Counter((each.group_id, each.sample_index) for each in ledger if each.source == SOURCE_ONLINE)
    assert set(online.values()) == {1}
    waiting = store.xrange(redis_keys.prompts(job_id))
    still_prompts = {PromptGroup.FromString(fields[b"payload"]).group_id for _, fields in waiting}
    dispatched = int(store.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
    expected = {
        (f"{job_id}-{number}", sample)
        for number in range(dispatched)
        if f"{job_id}-{number}" not in still_prompts
        for sample in range(samples_per_prompt)
    }
    assert set(online) == expected
    counters = store.hgetall(redis_keys.replay_counters(job_id))
    inserted = {name: int(count) for name, count in counters.items() if name.startswith(b"inserted:")}
    assert sum(inserted.values()) == len(ledger)
    assert inserted[b"inserted:online"] == len(online)
