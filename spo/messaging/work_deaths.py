"""What a process was doing when it died, so that a request, version or model that kills processes fails by itself.

Work is noted in Redis before it begins, and the note taken back when it ends, in whatever way but the death of its
process; a replica that finds a note knows that one died of this work or beside it. Such work is done alone, so that
only what dies by itself is suspected further, and is refused after MOST_DEATHS_ALONE of them.

Only what ended the process counts. A caller that goes away, a deadline, a cancelled job or a process that is asked to
stop (`asked_to_stop`) ends the work and kills nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from spo.errors import InvalidInput, SpoError
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger

log = get_logger("deaths")

MOST_DEATHS_ALONE = 3
# In place of a count of deaths: it fails in the same way each time.
HOPELESS = 1000
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
# KEYS: deaths.  ARGV: the field that was counted up.  The count as it was before; nothing stays of none.
_TAKE_BACK = """#!lua flags=allow-oom
local known = redis.call('HMGET', KEYS[1], 'in_company', 'alone')
local counts = {in_company = tonumber(known[1] or 0), alone = tonumber(known[2] or 0)}
if counts[ARGV[1]] > 0 then counts[ARGV[1]] = redis.call('HINCRBY', KEYS[1], ARGV[1], -1) end
if counts.in_company + counts.alone == 0 then redis.call('DEL', KEYS[1]) end
"""


def last_line(error: BaseException) -> str:
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
        self._lock = threading.Lock()
        # What this process has in hand: the field in which each is counted, by the order of its beginning.
        self._in_hand: dict[int, tuple[str, str]] = {}
        self._begun = 0
        self._stopping = False
        _OF_THIS_PROCESS.add(self)

    @contextmanager
    def during(self, work: str, *, ends_process: bool = False) -> Iterator[bool]:
        """Do work, noted as long as it goes on; yields whether it has to be done alone.

        ends_process: whether an error that is no SpoError ends this process; else only code "engine_failed" is a death.
        Raises InvalidInput (with the code of these deaths) when it has killed too often.
        """
        number, alone = self._begin(work)
        try:
            yield alone
        except (Exception, GeneratorExit, KeyboardInterrupt, SystemExit) as error:
            died = isinstance(error, SpoError) and error.code == "engine_failed"
            if died or (ends_process and isinstance(error, Exception) and not isinstance(error, SpoError)):
                self._note(number, error)
            else:
                self._take_back(number)
            raise
        self._end(number, work)

    def suspected(self, work: str) -> bool:
        """Whether work that is not noted beforehand has to be done alone: one has failed with it in hand.

        Raises InvalidInput as `during` does, redis.RedisError.
        """
        in_company, alone, reason = self._client.hmget(self._key(work), ["in_company", "alone", "reason"])
        self._refuse_after(work, int(alone or 0), reason or b"")
        return in_company is not None

    def died(self, work: str, error: SpoError, *, alone: bool) -> None:
        """Note that a process failed with work in hand that was not noted beforehand, unless it was asked to stop."""
        if self._stopping:
            return
        key = self._key(work)
        with _unless_away(), self._client.pipeline(transaction=True) as pipe:
            pipe.hincrby(key, "alone" if alone else "in_company", 1)
            pipe.hset(key, "reason", error.message[:MOST_REASON_CHARACTERS])
            pipe.expire(key, REMEMBERED_SECONDS)
            pipe.execute()

    def give_up(self, work: str, error: Exception) -> None:
        """Note that work failed of what it is made of, not of its process: it is refused from now on, at once."""
        try:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(self._key(work), "alone", HOPELESS)
                pipe.hset(self._key(work), "reason", last_line(error))
                pipe.expire(self._key(work), REMEMBERED_SECONDS)
                pipe.execute()
        except redis.RedisError as failure:
            log.warning("what cannot be done is not noted: Redis does not answer", reason=str(failure))

    def cleared(self, work: str) -> None:
        """Forget what was suspected and has ended well."""
        with _unless_away():
            self._client.delete(self._key(work))

    def stop(self) -> None:
        """The process was asked to stop: what is in hand is taken back, and nothing is noted any more."""
        with self._lock:
            self._stopping = True
            left = list(self._in_hand)
        for number in left:
            self._take_back(number)

    def _begin(self, work: str) -> tuple[int, bool]:
        try:
            found = self._client.eval(_BEGIN, 1, self._key(work), MOST_DEATHS_ALONE, REMEMBERED_SECONDS)
        except redis.RedisError as error:
            log.warning("what is done is not noted: Redis does not answer", reason=str(error))
            return 0, False
        assert isinstance(found, list)
        verdict, deaths, reason = found
        if verdict == _REFUSED:
            self._refuse_after(work, deaths, reason)
        alone = bool(verdict == _ALONE)
        if alone:
            log.warning("it killed, or something beside it did: it is done alone", work=work)
        with self._lock:
            self._begun += 1
            number = self._begun
            self._in_hand[number] = (work, "alone" if alone else "in_company")
            stopping = self._stopping
        if stopping:
            self._take_back(number)
        return number, alone

    def _end(self, number: int, work: str) -> None:
        with self._lock:
            self._in_hand.pop(number, None)
        self.cleared(work)

    def _take_back(self, number: int) -> None:
        with self._lock:
            work, field = self._in_hand.pop(number, ("", ""))
        if work:
            with _unless_away():
                self._client.eval(_TAKE_BACK, 1, self._key(work), field)

    def _note(self, number: int, error: BaseException) -> None:
        with self._lock:
            work, _ = self._in_hand.pop(number, ("", ""))
        if not work:
            return
        key = self._key(work)
        reason = error.message if isinstance(error, SpoError) else last_line(error)
        with _unless_away(), self._client.pipeline(transaction=True) as pipe:
            pipe.hset(key, "reason", reason[:MOST_REASON_CHARACTERS])
            pipe.expire(key, REMEMBERED_SECONDS)
            pipe.execute()

    def _refuse_after(self, work: str, deaths: int, reason: bytes) -> None:
        if deaths >= MOST_DEATHS_ALONE:
            why = reason.decode() or "the process was killed"
            if deaths >= HOPELESS:
                raise InvalidInput(f"{work} is given up on: {why}", code=self._code)
            raise InvalidInput(
                f"{work} is given up on: {self._who} died of it {deaths} times with nothing else to do; last: {why}",
                code=self._code,
            )


_OF_THIS_PROCESS: weakref.WeakSet[WorkDeaths] = weakref.WeakSet()


def asked_to_stop() -> None:
    """Take back the notes of all that this process has in hand: it ends because somebody asked it to."""
    for deaths in list(_OF_THIS_PROCESS):
        deaths.stop()


@contextmanager
def _unless_away() -> Iterator[None]:
    """At worst work is done alone when it is asked for again."""
    try:
        yield
    except redis.RedisError as error:
        log.warning("what was done is not noted: Redis does not answer", reason=str(error))
