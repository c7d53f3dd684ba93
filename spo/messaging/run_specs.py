"""What every service reads of a run: its spec, state and tenant."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar, cast

from spo import redis_keys
from spo.errors import NotFound
from spo.messaging.redis_client import RedisClient
from spo.spec.job_spec import JobSpec, spec_from_json
from spo.spec.section import JobState, decode_state

# Runs whose tenant is remembered.
_MOST_TENANTS = 10_000


class RunSpecs:
    """Each run's spec, read once: it never changes within a run."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._known: dict[str, JobSpec] = {}

    def of(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound (code "unknown_run") for a run nobody started."""
        if run_id not in self._known:
            stored = self.client.get(redis_keys.run_spec(run_id))
            if stored is None:
                raise NotFound(f"there is no run {run_id}", code="unknown_run")
            self._known[run_id] = spec_from_json(stored)
        return self._known[run_id]

    def forget(self, run_id: str) -> None:
        """Read the run's spec again next time, since the run may be deleted."""
        self._known.pop(run_id, None)


def run_state(client: RedisClient, run_id: str) -> JobState | None:
    """The run's state; None for a run that was never submitted, or is deleted."""
    stored = client.get(redis_keys.run_state(run_id))
    return decode_state(stored if isinstance(stored, bytes) else None)


def estimates_are_pending(client: RedisClient, run_id: str) -> bool:
    """Whether a job that trains already still waits for values of its prompts."""
    return bool(client.hexists(redis_keys.job_record(run_id), "estimates_pending"))


def run_tenant(client: RedisClient, run_id: str) -> str | None:
    """The tenant whose run it is, "" for the operator's own; None where no record names one."""
    stored = client.hget(redis_keys.job_record(run_id), "tenant")
    return stored.decode() if isinstance(stored, bytes) else None


class RunTenants:
    """Whose each run is, read once: it never changes. Safe from several threads."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._known: dict[str, str] = {}

    def of(self, run_id: str) -> str:
        """The run's tenant, "" the operator, who also has what no record names. Raises redis.RedisError."""
        known = self._known.get(run_id)
        if known is None:
            found = run_tenant(self._client, run_id) if run_id else ""
            known = found or ""
            if found is not None:
                if len(self._known) >= _MOST_TENANTS:
                    self._known.clear()
                self._known[run_id] = known
        return known


class OfTenant(Protocol):
    @property
    def tenant(self) -> str: ...


Waiting = TypeVar("Waiting", bound=OfTenant)


def tenants_in_turn(waiting: Sequence[Waiting], has: Iterable[str], size_of: Callable[[Waiting], int]) -> list[Waiting]:
    """What waits for something scarce in the order in which it gets some: next is the tenant that has the least of it,
    with what it was given before; a tenant's own stay in their order.

    has: the tenant of each piece that is taken; size_of: how many pieces one gets.
    """
    own: dict[str, deque[Waiting]] = {}
    for each in waiting:
        own.setdefault(each.tenant, deque()).append(each)
    if len(own) < 2:
        return list(waiting)
    taken = Counter(has)
    found: list[Waiting] = []
    while own:
        tenant = min(own, key=lambda name: taken[name])
        found.append(own[tenant].popleft())
        taken[tenant] += size_of(found[-1])
        if not own[tenant]:
            del own[tenant]
    return found


# KEYS[1]: the run's spec, which goes first when a job is deleted. ARGV: per command the number of its words, the words.
_WRITE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0} end
local at, reply = 1, 0
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  reply = redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
return {1, reply}
"""


def write_of_run(client: RedisClient, run_id: str, *commands: Sequence[str | bytes | int]) -> int:
    """Run commands that write keys of a run, in one atomic step; returns the last one's reply, a number.

    Raises NotFound (code "unknown_run") where the run is deleted, with nothing written: no key of it comes back.
    """
    words = (word for command in commands for word in (len(command), *command))
    is_there, reply = cast("tuple[int, int]", client.eval(_WRITE, 1, redis_keys.run_spec(run_id), *words))
    if not is_there:
        raise NotFound(f"there is no run {run_id}", code="unknown_run")
    return int(reply)
