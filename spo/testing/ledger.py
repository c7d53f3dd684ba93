"""The law that no trajectory is lost or doubled, for whoever has a platform at work: tests, the composed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from spo import redis_keys
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.testing.waiting import wait_until
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.trajectory_pb2 import Trajectory


def check_ledger(
    client: RedisClient,
    job_id: str,
    samples_per_prompt: int = 4,
    dead_letters: Mapping[str, int] | None = None,
    experience: ExperienceStore | None = None,
) -> int:
    """Every dispatched sample is in the ledger once, or its group still waits as a prompt; returns how many are.

    dead_letters: how many each stream may have, none by default. experience: where trajectories are that have left
    Redis; without it none may have. Waits a minute for the pipeline to empty. Raises
    AssertionError that begins with how many were lost and doubled where any were, TimeoutError.
    """
    moving = redis_keys.rollouts(), redis_keys.verifier_rollouts(), redis_keys.verdicts()
    wait_until(lambda: sum(map(client.xlen, moving)) == 0, "the pipeline is empty")
    for stream in (redis_keys.prompts(job_id), *moving, redis_keys.estimates()):
        given_up = client.xlen(redis_keys.dead_letters(stream))
        assert given_up <= (dead_letters or {}).get(stream, 0), f"{given_up} dead letters of {stream}"
    numbered = client.zrange(redis_keys.replay_ids(job_id), 0, -1, withscores=True)
    ids = [raw.decode() for raw, _ in numbered]
    payloads = client.mget([redis_keys.replay_trajectory(job_id, trajectory_id) for trajectory_id in ids])
    ledger = [Trajectory.FromString(payload) for payload in payloads if payload]
    # What has left the window is in the experience store, and nowhere else.
    missing = [trajectory_id for trajectory_id, payload in zip(ids, payloads, strict=True) if not payload]
    stored = int(client.hget(redis_keys.replay_stored(job_id), "written") or 0)
    assert all(number <= stored for (_, number), payload in zip(numbered, payloads, strict=True) if not payload)
    archived = _archived(experience, job_id, set(missing)) if missing else []
    assert sorted(trajectory.trajectory_id for trajectory in archived) == sorted(missing)
    ledger += archived
    for trajectory in ledger:
        assert len(trajectory.reference_logprobs) == len(trajectory.response_token_ids) > 0
        assert trajectory.HasField("reward")
    online = Counter((entry.group_id, entry.sample_index) for entry in ledger if entry.source == SOURCE_ONLINE)
    waiting = client.xrange(redis_keys.prompts(job_id))
    still_prompts = {PromptGroup.FromString(fields[b"payload"]).group_id for _, fields in waiting}
    dispatched = int(client.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
    expected = {
        (f"{job_id}-{number}", sample)
        for number in range(dispatched)
        if f"{job_id}-{number}" not in still_prompts
        for sample in range(samples_per_prompt)
    }
    lost, doubled = len(expected - set(online)), sum(online.values()) - len(online)
    unknown = sorted(set(online) - expected)[:5]
    assert (lost, doubled, unknown) == (0, 0, []), f"{lost} lost, {doubled} doubled; never dispatched: {unknown}"
    counters = client.hgetall(redis_keys.replay_counters(job_id))
    inserted = {name: int(count) for name, count in counters.items() if name.startswith(b"inserted:")}
    assert sum(inserted.values()) == len(ledger)
    assert inserted[b"inserted:online"] == len(online)
    return len(online)


def _archived(experience: ExperienceStore | None, job_id: str, wanted: set[str]) -> list[Trajectory]:
    assert experience is not None, f"{len(wanted)} trajectories have left Redis; where is the experience store?"
    rows = (row.trajectory for file in experience.files(job_id) for batch in experience.batches(file) for row in batch)
    return [trajectory for trajectory in rows if trajectory.trajectory_id in wanted]
