"""The cache of verdicts: shared, bounded in bytes, the oldest let go of first."""

from __future__ import annotations

import redis

from spo import redis_keys
from spo.service.judge_stage import OVERHEAD_BYTES, VerdictCache
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

ACCEPTED = Verdict(outcome=OUTCOME_ACCEPTED, detail="x" * 100)
KEYS = [redis_keys.cached_verdict(f"{number:064x}") for number in range(400)]
ORDER, HELD = redis_keys.cached_verdict_order(), redis_keys.cached_verdict_bytes()


def size() -> int:
    return len(ACCEPTED.SerializeToString()) + OVERHEAD_BYTES


def test_no_more_than_the_limit_is_kept_and_the_oldest_goes_first(redis_client: redis.Redis) -> None:
    cache = VerdictCache(redis_client, 3600, 50 * size(), order=ORDER, held=HELD)
    for key in KEYS:
        cache.put(key, ACCEPTED)

    found = cache.find({key: key for key in KEYS})
    assert list(found) == KEYS[-50:]
    assert all(verdict.cached and verdict.detail == ACCEPTED.detail for verdict in found.values())
    assert redis_client.llen(ORDER) == 50
    assert int(redis_client.get(HELD) or 0) == 50 * size()  # type: ignore[arg-type]
    held = sum(redis_client.memory_usage(key) or 0 for key in redis_client.keys("*"))  # type: ignore[misc, union-attr]
    assert held <= 50 * size(), "no less is counted than Redis holds"


def test_the_first_verdict_of_a_program_stays_and_counts_once(redis_client: redis.Redis) -> None:
    cache = VerdictCache(redis_client, 3600, 50 * size(), order=ORDER, held=HELD)
    for verdict in (ACCEPTED, Verdict(outcome=OUTCOME_WRONG_ANSWER), ACCEPTED):
        cache.put(KEYS[0], verdict)

    assert cache.find({"program": KEYS[0]})["program"].outcome == OUTCOME_ACCEPTED
    assert redis_client.llen(ORDER) == 1


def test_switched_off_it_remembers_nothing(redis_client: redis.Redis) -> None:
    cache = VerdictCache(redis_client, 0, 50 * size(), order=ORDER, held=HELD)
    cache.put(KEYS[0], ACCEPTED)

    assert cache.find({"program": KEYS[0]}) == {}
    assert redis_client.dbsize() == 0
