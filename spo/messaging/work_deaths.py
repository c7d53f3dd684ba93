"""What a process was doing when it died, so that a request, version or model that kills processes fails by itself.

Work is noted in Redis before it begins and forgotten when it ends, in whatever way but the death of its process; a
replica that finds a note knows that one died of this work or beside it. Such work is done alone, so that only
what dies by itself is suspected further, and is refused after MOST_DEATHS_ALONE of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from spo.errors import InvalidInput, SpoError
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger

log = get_logger("deaths")

MOST_DEATHS_ALONE = 3
# After this long it is tried again: what killed may have been repaired.
REMEMBERED_SECONDS = 3600
MOST_REASON_CHARACTERS = 500

_AS_USUAL, _REFUSED, _ALONE = range(3)
# KEYS: deaths.  ARGV: most deaths alone, seconds.  Returns {verdict as above, deaths, reason}.
_BEGIN = """#!lua flags=allow-oom
local known = redis.call('HMGET', KEYS[1], 'in_company', 'alone', 'reason')
local in_company, alone = tonumber(known[1] or 0), tonumber(known[2] or 0)
if alone >= tonumber(ARGV[1]) then return {1, alone, known[3] or ''} end
local field = in_company == 0 and 'in_company' or 'alone'
redis.call('HINCRBY', KEYS[1], field, 1)
redis.call('EXPIRE', KEYS[1], ARGV[2])
return {in_company == 0 and 0 or 2, alone, known[3] or ''}
"""


def last_line(error: Exception) -> str:
    """The type and the last line of an exception, which says the most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'without a message'}"[:MOST_REASON_CHARACTERS]


class WorkDeaths:
    """The notes of all replicas of a service, in Redis; while Redis is away there are none."""

    def __init__(self, client: RedisClient, key: Callable[[str], str], who: str, *, code: str) -> None:
        """key: of the notes on work by its name. who: what dies of it, in words. code: of the refusal."""
        self._client = client
        self._key = key
        self._who = who
        self._code = code

    @contextmanager
    def during(self, work: str) -> Iterator[bool]:
        """Do work, noted as long as it goes on; yields whether it has to be done alone.

        Raises InvalidInput (with the code of these deaths) when it has killed too often.
        """
        alone = self._begin(work)
        try:
            yield alone
        except Exception as error:
            is_death = not isinstance(error, SpoError) or error.code == "engine_failed"
            self._tell(work, error if is_death else None)
            raise
        self._tell(work, None)

    def suspected(self, work: str) -> bool:
        """Whether work that is not noted beforehand has to be done alone: one has failed with it in hand.

        Raises InvalidInput as `during` does, redis.RedisError.
        """
        in_company, alone, reason = self._client.hmget(self._key(work), ["in_company", "alone", "reason"])
        self._refuse_after(work, int(alone or 0), reason or b"")
        return in_company is not None

    def died(self, work: str, error: SpoError, *, alone: bool) -> None:
        """Note that a process failed with work in hand that was not noted beforehand."""
        key = self._key(work)
        try:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.hincrby(key, "alone" if alone else "in_company", 1)
                pipe.hset(key, "reason", error.message[:MOST_REASON_CHARACTERS])
                pipe.expire(key, REMEMBERED_SECONDS)
                pipe.execute()
        except redis.RedisError as failure:
            log.warning("a death is not noted: Redis does not answer", reason=str(failure))

    def cleared(self, work: str) -> None:
        """Forget what was suspected and has ended well."""
        self._tell(work, None)

    def _begin(self, work: str) -> bool:
        try:
            found = self._client.eval(_BEGIN, 1, self._key(work), MOST_DEATHS_ALONE, REMEMBERED_SECONDS)
        except redis.RedisError as error:
            log.warning("what is done is not noted: Redis does not answer", reason=str(error))
            return False
        assert isinstance(found, list)
        verdict, deaths, reason = found
        if verdict == _REFUSED:
            self._refuse_after(work, deaths, reason)
        if verdict == _ALONE:
            log.warning("it killed, or something beside it did: it is done alone", work=work)
        return bool(verdict == _ALONE)

    def _end(self, work: str) -> None:
        self._client.delete(self._key(work))

    def _note(self, work: str, error: Exception) -> None:
        key = self._key(work)
        reason = error.message if isinstance(error, SpoError) else last_line(error)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(key, "reason", reason[:MOST_REASON_CHARACTERS])
            pipe.expire(key, REMEMBERED_SECONDS)
            pipe.execute()

    def _tell(self, work: str, death: Exception | None) -> None:
        try:
            if death is None:
                self._end(work)
            else:
                self._note(work, death)
        except redis.RedisError as error:
            # At worst the work is done alone when it is asked for again.
            log.warning("what was done is not noted: Redis does not answer", reason=str(error))

    def _refuse_after(self, work: str, deaths: int, reason: bytes) -> None:
        if deaths >= MOST_DEATHS_ALONE:
            why = reason.decode() or "the process was killed"
            raise InvalidInput(
                f"{work} is given up on: {self._who} died of it {deaths} times with nothing else to do; last: {why}",
                code=self._code,
            )
