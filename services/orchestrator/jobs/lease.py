"""One trainer's lease on a job, as it is at one moment of Redis' clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import LEASE_IS_LIVE
from spo.messaging.redis_client import RedisClient

# KEYS: lease, leader.  ARGV: lease ms.  Returns {trainer or '', epoch, 1 when it is live, expiry}.
_READ = f"""#!lua flags=allow-oom
{LEASE_IS_LIVE}
local live = lease_is_live(KEYS[1], KEYS[2], now_ms(), tonumber(ARGV[1]))
local held = redis.call('HMGET', KEYS[1], 'trainer_id', 'epoch', 'expires_unix_ms')
return {{held[1] or '', tonumber(held[2] or '0'), live and 1 or 0, tonumber(held[3] or '0')}}
"""


@dataclass(frozen=True)
class Lease:
    """Who holds a job, or held it last ("" nobody ever); live by Redis' clock when it was read."""

    trainer_id: str
    epoch: int
    live: bool
    expires_unix_ms: int


def read_leases(client: RedisClient, job_ids: Sequence[str], lease_ms: int) -> list[Lease]:
    """The leases of jobs, in one round trip; lease_ms is how long one lasts."""
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.eval(_READ, 2, own_keys.job_lease(job_id), own_keys.leader(), lease_ms)
        replies = pipe.execute()
    return [
        Lease(trainer_id.decode(), int(epoch), bool(live), int(expires_unix_ms))
        for trainer_id, epoch, live, expires_unix_ms in replies
    ]
