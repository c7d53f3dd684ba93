"""The law that no trajectory is lost or doubled, for whoever has a platform at work: tests, the composed one."""

from __future__ import annotations

from collections import Counter

from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.testing.waiting import wait_until
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.trajectory_pb2 import Trajectory


def check_ledger(client: RedisClient, job_id: str, samples_per_prompt: int = 4) -> None:
    """Every dispatched sample is in the ledger exactly once, or its group still waits as a prompt.

    Waits a minute for the pipeline to empty. Raises AssertionError, TimeoutError.
    """
    wait_until(
        lambda: client.xlen(redis_keys.rollouts()) + client.xlen(redis_keys.verdicts()) == 0, "the pipeline is empty"
    )
    for stream in (redis_keys.prompts(job_id), redis_keys.rollouts(), redis_keys.verdicts(), redis_keys.estimates()):
        assert client.xlen(redis_keys.dead_letters(stream)) == 0
    ids = client.zrange(redis_keys.replay_ids(job_id), 0, -1)
    payloads = client.mget([redis_keys.replay_trajectory(job_id, raw.decode()) for raw in ids])
    assert all(payloads)
    ledger = [Trajectory.FromString(payload) for payload in payloads if payload]
    assert [trajectory.trajectory_id for trajectory in ledger] == [raw.decode() for raw in ids]
    for trajectory in ledger:
        assert len(trajectory.reference_logprobs) == len(trajectory.response_token_ids) > 0
        assert trajectory.HasField("reward")
    online = Counter((entry.group_id, entry.sample_index) for entry in ledger if entry.source == SOURCE_ONLINE)
    assert set(online.values()) == {1}
    waiting = client.xrange(redis_keys.prompts(job_id))
    still_prompts = {PromptGroup.FromString(fields[b"payload"]).group_id for _, fields in waiting}
    dispatched = int(client.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
    expected = {
        (f"{job_id}-{number}", sample)
        for number in range(dispatched)
        if f"{job_id}-{number}" not in still_prompts
        for sample in range(samples_per_prompt)
    }
    assert set(online) == expected
    counters = client.hgetall(redis_keys.replay_counters(job_id))
    inserted = {name: int(count) for name, count in counters.items() if name.startswith(b"inserted:")}
    assert sum(inserted.values()) == len(ledger)
    assert inserted[b"inserted:online"] == len(online)
