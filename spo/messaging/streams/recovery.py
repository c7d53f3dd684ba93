"""What becomes of work that failed or killed its holder: retried, isolated, refused, or a dead letter.

What a process was doing when it died, so that a request, version or model that kills processes fails by itself.
A *death* is the end of a process with work in hand: *in company* of other work, any of which may be to blame, or
*alone*. After `DeathLimits.in_company` of them work is done alone, so that only what dies by itself is suspected
further, and after `DeathLimits.alone` it is given up on. That is so for entries of streams, which are counted by their
deliveries (`Consumer.begin_alone`), and for other work (`WorkDeaths`): it is noted in Redis before it begins, and the
note taken back when it ends, in whatever way but the death of its process. A trainer has nothing but its job in hand:
each of its deaths is one alone, and a step takes them back (`note_death` of the orchestrator's monitor).

Only what ended the process counts (`is_death`). A caller that goes away, a deadline, a cancelled job or a process that
is asked to stop (`asked_to_stop`) ends the work and kills nothing.

What becomes of an entry whose handling failed, and how a failure that lasts is told: to the log, and to the job.
InvalidInput                        dead letter: nobody will ever be able to handle it
NotFound with code unknown_run      dropped: its run is deleted
anything else                       tried again, for ever: somebody is away, full, broken or being repaired

Entries that were given up on: written aside and counted for their run, listed, redriven, dropped.
The facts of a letter are in a stream, its payload is in a hash beside it. Both are capped; the oldest letters go.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, cast
from weakref import WeakSet, WeakValueDictionary

import redis

from spo import observability, redis_keys
from spo.errors import InvalidInput, NotFound, SpoError
from spo.messaging.redis_client import RedisClient, StreamEntry, unless_away
from spo.messaging.streams import entries
from spo.messaging.streams.entries import NOTE_TROUBLE, Entry
from spo.observability import get_logger

log = get_logger("deaths")


@dataclass(frozen=True)
class DeathLimits:
    """How many deaths in company before work is done alone, and how many alone before it is given up on."""

    in_company: int
    alone: int


ENTRY_DEATHS = DeathLimits(in_company=2, alone=5)
# What is done of it takes long: an engine is built, a model loaded.
WORK_DEATHS = DeathLimits(in_company=1, alone=3)
# In place of a count of deaths: it fails in the same way each time.
HOPELESS = 1000
# After this long it is tried again: what killed may have been repaired.
REMEMBERED_SECONDS = 3600
MOST_REASON_CHARACTERS = 500

_AS_USUAL, _REFUSED, _ALONE = range(3)
# KEYS: deaths.  ARGV: limits in company and alone, seconds.  Returns {verdict as above, deaths, reason}.
_BEGIN = """#!lua flags=allow-oom
local known = redis.call('HMGET', KEYS[1], 'in_company', 'alone', 'reason')
local in_company, alone = tonumber(known[1] or 0), tonumber(known[2] or 0)
if alone >= tonumber(ARGV[2]) then return {1, alone, known[3] or ''} end
local suspected = in_company >= tonumber(ARGV[1])
redis.call('HINCRBY', KEYS[1], suspected and 'alone' or 'in_company', 1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {suspected and 2 or 0, alone, known[3] or ''}
"""
# KEYS: deaths.  ARGV: the field that was counted up.  The count as it was before; nothing stays of none.
_TAKE_BACK = """#!lua flags=allow-oom
local known = redis.call('HMGET', KEYS[1], 'in_company', 'alone')
local counts = {in_company = tonumber(known[1] or 0), alone = tonumber(known[2] or 0)}
if counts[ARGV[1]] > 0 then counts[ARGV[1]] = redis.call('HINCRBY', KEYS[1], ARGV[1], -1) end
if counts.in_company + counts.alone == 0 then redis.call('DEL', KEYS[1]) end
"""

SAY_SECONDS = 30.0
# A trouble that was not repeated for so long is over.
TROUBLE_SECONDS = 60.0
NOTE_SECONDS = 5.0
# What takes so long is told while it goes on: a place that is silent may end it minutes later, or never.
LASTS_TELL_SECONDS = 15.0

WAIT_SECONDS = 1.0

MAX_LETTERS = 1000
MAX_BYTES = 256 << 20
MAX_LETTER_REASON = 2000
_PAGE = 200


_FURTHER = "For further information visit"


def last_line(error: BaseException) -> str:
    """The type and the last line of an exception, which says the most; pydantic's is where more is to be read."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and _FURTHER not in line]
    return f"{type(error).__name__}: {lines[-1] if lines else 'without a message'}"[:MOST_REASON_CHARACTERS]


def is_death(error: BaseException) -> bool:
    """Whether an engine or what else the process lives by has died, and the process ends with it."""
    return isinstance(error, SpoError) and error.code == "engine_failed"


# At worst work is done alone when it is asked for again.
_NOT_NOTED = "what was done is not noted"


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
            if is_death(error) or (ends_process and isinstance(error, Exception) and not isinstance(error, SpoError)):
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
        return int(in_company or 0) >= WORK_DEATHS.in_company

    @contextmanager
    def ending(self, work: str, *, alone: bool) -> Iterator[None]:
        """Take the result of work that was not noted beforehand: a death is noted, a good end alone clears it."""
        try:
            yield
        except SpoError as error:
            if is_death(error):
                # The process ends and tells nobody else: work that fails engines would come back for ever.
                self.died(work, error, alone=alone)
            raise
        if alone:
            self._forget(work)

    def died(self, work: str, error: SpoError, *, alone: bool) -> None:
        """Note that a process failed with work in hand that was not noted beforehand, unless it was asked to stop."""
        if self._stopping:
            return
        self._tell(work, error.message, ("HINCRBY", "alone" if alone else "in_company", 1))

    def give_up(self, work: str, error: Exception) -> None:
        """Note that work failed of what it is made of, not of its process: it is refused from now on, at once."""
        self._tell(work, last_line(error), ("HSET", "alone", HOPELESS))

    def stop(self) -> None:
        """The process was asked to stop: what is in hand is taken back, and nothing is noted any more."""
        with self._lock:
            self._stopping = True
            left = list(self._in_hand)
        for number in left:
            self._take_back(number)

    def _begin(self, work: str) -> tuple[int, bool]:
        found: object = None
        limits = WORK_DEATHS.in_company, WORK_DEATHS.alone, REMEMBERED_SECONDS
        with unless_away("what is done is not noted", work=work):
            found = self._client.eval(_BEGIN, 1, self._key(work), *limits)
        if found is None:
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
        self._forget(work)

    def _forget(self, work: str) -> None:
        with unless_away(_NOT_NOTED, work=work):
            self._client.delete(self._key(work))

    def _take_back(self, number: int) -> None:
        with self._lock:
            work, field = self._in_hand.pop(number, ("", ""))
        if work:
            with unless_away(_NOT_NOTED, work=work):
                self._client.eval(_TAKE_BACK, 1, self._key(work), field)

    def _note(self, number: int, error: BaseException) -> None:
        with self._lock:
            work, _ = self._in_hand.pop(number, ("", ""))
        if work:
            self._tell(work, error.message if isinstance(error, SpoError) else last_line(error))

    def _tell(self, work: str, reason: str, *counts: tuple[str, str, int]) -> None:
        """Write down why, and what counts: a command, its field and number."""
        key = self._key(work)
        with unless_away(_NOT_NOTED, work=work), self._client.pipeline(transaction=True) as pipe:
            for command, field, number in counts:
                pipe.execute_command(command, key, field, number)
            pipe.hset(key, "reason", reason[:MOST_REASON_CHARACTERS])
            pipe.expire(key, REMEMBERED_SECONDS)
            pipe.execute()

    def _refuse_after(self, work: str, deaths: int, reason: bytes) -> None:
        if deaths >= WORK_DEATHS.alone:
            why = reason.decode() or "the process was killed"
            if deaths >= HOPELESS:
                raise InvalidInput(f"{work} is given up on: {why}", code=self._code)
            raise InvalidInput(
                f"{work} is given up on: {self._who} died of it {deaths} times with nothing else to do; last: {why}",
                code=self._code,
            )


def asked_to_stop() -> None:
    """Take back the notes of all that this process has in hand: it ends because somebody asked it to."""
    for deaths in list(_OF_THIS_PROCESS):
        deaths.stop()


_OF_THIS_PROCESS: WeakSet[WorkDeaths] = WeakSet()


class Fate(StrEnum):
    """What becomes of an entry whose handling failed."""

    DEAD_LETTER = "dead letter"
    DROP = "drop"
    RETRY = "retry"


def fate_of(error: Exception) -> Fate:
    """What becomes of an entry after this error of its handler."""
    if isinstance(error, InvalidInput):
        return Fate.DEAD_LETTER
    if isinstance(error, NotFound) and error.code == "unknown_run":
        return Fate.DROP
    return Fate.RETRY


def reason_of(error: Exception) -> str:
    """An error as people read it: one line, not too long."""
    text = str(error) if isinstance(error, SpoError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MOST_REASON_CHARACTERS]


class Outage:
    """A failure that lasts: one line when it begins, one each SAY_SECONDS with a count, one when it is over."""

    def __init__(self, what: str, **facts: str) -> None:
        self.what = what
        self.facts = facts
        self._lock = threading.Lock()
        self._reason = ""
        self._failures = 0
        self._began = self._said = self._failed = 0.0

    @property
    def reason(self) -> str:
        """Why, while it lasts; else ""."""
        return self._reason

    def failed(self, error: Exception) -> None:
        """Note a failure. Only one that nobody foresaw shows where it came from, and once."""
        now = time.monotonic()
        with self._lock:
            self._failed = now
            begins = not self._reason
            self._reason = reason_of(error)
            if begins:
                self._began = self._said = now
                self._failures = 0
            self._failures += 1
            failures, due = self._failures, now - self._said >= SAY_SECONDS
            if due:
                self._said = now
        if begins and not isinstance(error, SpoError | redis.RedisError):
            log.exception(self.what, **self.facts, reason=self._reason, exc_info=error)
        elif begins:
            log.warning(self.what, **self.facts, reason=self._reason)
        elif due:
            lasted = round(now - self._began)
            log.warning(
                f"{self.what}, still", **self.facts, reason=self._reason, failures=failures, lasted_seconds=lasted
            )

    def over(self, begun: float = math.inf) -> None:
        """Say that it is over, where it was one: something worked that was begun then, in monotonic seconds.

        What was under way at the last failure, in another thread, says nothing.
        """
        if not self._reason or begun < self._failed:
            return
        with self._lock:
            was, self._reason = self._reason, ""
        if was:
            lasted = round(time.monotonic() - self._began, 1)
            log.info(f"{self.what}: over", **self.facts, failures=self._failures, lasted_seconds=lasted)


@dataclass(frozen=True)
class Trouble:
    """What keeps a run's work from being handled at a place: a stream, or a service of the platform."""

    place: str
    reason: str
    since_unix_ms: int
    at_unix_ms: int


class TroubleNotes:
    """Writes down why a run waits, so that its job can say so; each place at most every NOTE_SECONDS."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._noted: dict[tuple[str, str], float] = {}

    def note(self, run_id: str, place: str, reason: str) -> None:
        """Note it; the notes of a run vanish when they are not repeated."""
        now = time.monotonic()
        if not run_id or now - self._noted.get((run_id, place), float("-inf")) < NOTE_SECONDS:
            return
        if len(self._noted) > 1000:
            self._noted.clear()
        self._noted[run_id, place] = now
        keys = redis_keys.run_troubles(run_id), redis_keys.run_spec(run_id)
        arguments = place, reason[:MOST_REASON_CHARACTERS], int(TROUBLE_SECONDS * 1000)
        # Said in the log already; a server that is full is told by the orchestrator's own alarm.
        with unless_away("a wait reason was not noted", run=run_id):
            self.client.eval(NOTE_TROUBLE, len(keys), *keys, *arguments)

    @contextmanager
    def while_it_lasts(self, runs: Callable[[], Iterable[str]], place: str, what: str) -> Iterator[None]:
        """Note of runs, for as long as the block takes, that it has taken so long; nothing of a block that is quick."""
        began, over = time.monotonic(), threading.Event()

        def tell() -> None:
            while not over.wait(LASTS_TELL_SECONDS):
                with unless_away("a wait reason was not noted"):
                    for run_id in runs():
                        self.note(run_id, place, f"{what} has taken {time.monotonic() - began:.0f} s so far")

        threading.Thread(target=tell, name="tells-what-lasts", daemon=True).start()
        try:
            yield
        finally:
            over.set()


def troubles_of(client: RedisClient, run_id: str, now_unix_ms: int) -> list[Trouble]:
    """What keeps the run waiting right now, by place."""
    found = []
    for place, raw in sorted(client.hgetall(redis_keys.run_troubles(run_id)).items()):
        trouble = Trouble(place.decode(), **json.loads(raw))
        if now_unix_ms - trouble.at_unix_ms <= TROUBLE_SECONDS * 1000:
            found.append(trouble)
    return found


class HoldsEntries(Protocol):
    """A consumer, as its process knows it."""

    def give_back(self) -> None: ...


@dataclass(eq=False)
class StreamHolder:
    """What the consumers of one process share.

    proven: an entry was finished since the process started. A replica that dies whatever it takes never gets there, and
    its deaths say little about what it held.
    """

    proven: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _busy: int = field(default=0, init=False)
    _lone: bool = field(default=False, init=False)
    # Those of streams that some consumer of the process has.
    _reading: WeakValueDictionary[str, Outage] = field(default_factory=WeakValueDictionary, init=False)
    _handling: WeakValueDictionary[str, Outage] = field(default_factory=WeakValueDictionary, init=False)
    _consumers: WeakSet[HoldsEntries] = field(default_factory=WeakSet, init=False)

    def joined_by(self, consumer: HoldsEntries) -> None:
        """A consumer of this process."""
        with self._changed:
            self._consumers.add(consumer)

    def give_back(self) -> None:
        """The process was asked to stop, and ends with entries in hand: that is no death of theirs."""
        with self._changed:
            consumers = list(self._consumers)
        for consumer in consumers:
            consumer.give_back()

    @contextmanager
    def among_others(self) -> Iterator[None]:
        """Handle entries beside those of other threads; waits while one must be handled alone."""
        with self._changed:
            while self._lone:
                self._changed.wait(WAIT_SECONDS)
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Handle one entry while no other thread handles any; waits until that is so."""
        with self._changed:
            while self._lone:
                self._changed.wait(WAIT_SECONDS)
            self._lone = True
        try:
            with self._changed:
                while self._busy:
                    self._changed.wait(WAIT_SECONDS)
            yield
        finally:
            with self._changed:
                self._lone = False
                self._changed.notify_all()

    def reading(self, stream: str) -> Outage:
        """The trouble of reading a stream, the same for all threads that read it."""
        with self._changed:
            return self._reading.setdefault(stream, Outage("a stream cannot be read", stream=stream))

    def handling(self, stream: str) -> Outage:
        """The trouble of handling entries of a stream, the same for all threads that do."""
        with self._changed:
            return self._handling.setdefault(stream, Outage("entries cannot be handled", stream=stream))

    def obstacle(self) -> str:
        """Why some stream of this process cannot be read; "" when all can."""
        with self._changed:
            reasons = ((name, outage.reason) for name, outage in list(self._reading.items()))
            return next((f"cannot read {name}: {reason}" for name, reason in reasons if reason), "")


THIS_PROCESS = StreamHolder()


@dataclass(frozen=True)
class DeadLetter:
    """One entry that was given up on, without its payload; run_id is "" where it belongs to none."""

    letter_id: str
    stream: str
    run_id: str
    reason: str
    deliveries: int
    at_unix_ms: int
    size_bytes: int


@dataclass(frozen=True)
class DeadLetterCount:
    """How many entries of a run were given up on at a stream, and why the last one was."""

    stream: str
    count: int
    last_reason: str


def write(client: RedisClient, stream: str, group: str, entry: Entry, reason: str, run_id: str) -> None:
    """Move an entry to the dead letters of its stream, counted for its run; nothing when it was finished before."""
    keys = (
        stream,
        *_kept(stream),
        redis_keys.entries_in_flight(entry.run_id),
        redis_keys.dead_letter_counts(run_id),
        redis_keys.run_spec(run_id),
        redis_keys.lone_deliveries(stream),
    )
    facts = (entry.payload, reason[:MAX_LETTER_REASON], entry.deliveries, entry.run_id, run_id, entry.trace)
    arguments = (group, entry.entry_id, *facts, MAX_LETTERS, MAX_BYTES)
    gone = cast(int, client.eval(entries.DEAD_LETTER, len(keys), *keys, *arguments))
    if gone < 0:
        return
    observability.DEAD_LETTERS.labels(stream=_label(stream)).inc()
    log.error("dead letter", stream=stream, entry=entry.entry_id, run=run_id, reason=reason[:500])
    if gone:
        log.warning("dead letters went to make room for newer ones", stream=stream, letters=gone)


def counts_of(client: RedisClient, run_id: str) -> dict[str, DeadLetterCount]:
    """What of a run was given up on, by stream."""
    found = {name.decode(): value for name, value in client.hgetall(redis_keys.dead_letter_counts(run_id)).items()}
    return {
        name: DeadLetterCount(name, int(value), found.get(f"{name}:reason", b"").decode(errors="replace"))
        for name, value in found.items()
        if not name.endswith(":reason")
    }


def gone_of(client: RedisClient, stream: str) -> int:
    """How many letters of a stream gave way to newer ones."""
    return int(client.hget(redis_keys.dead_letter_totals(stream), "gone") or 0)


def newest(client: RedisClient, stream: str, run_id: str, before: str = "") -> Iterator[DeadLetter]:
    """The letters of a run on a stream ("": of no run), the newest first, those older than an id where one is given."""
    last = f"({before}" if before else "+"
    while True:
        page = client.xrevrange(redis_keys.dead_letters(stream), max=last, count=_PAGE)
        yield from (letter for letter in (_letter(stream, raw) for raw in page) if letter.run_id == run_id)
        if len(page) < _PAGE:
            return
        last = f"({page[-1][0].decode()}"


def find(client: RedisClient, stream: str, letter_id: str, run_id: str) -> tuple[DeadLetter, bytes]:
    """A letter of a run and its payload. Raises NotFound (dead_letter_not_found)."""
    page = client.xrange(redis_keys.dead_letters(stream), min=letter_id, max=letter_id)
    payload = client.hget(redis_keys.dead_letter_payloads(stream), letter_id)
    found = [letter for letter in (_letter(stream, raw) for raw in page) if letter.run_id == run_id]
    if not found or payload is None:
        raise NotFound(f"there is no dead letter {letter_id} on {stream}", code="dead_letter_not_found")
    return found[0], payload


def redrive(client: RedisClient, letter: DeadLetter) -> bool:
    """Put the entry back at the end of its stream, counted for its run again; False when it is no letter any more.

    Raises NotFound (unknown_run) when its run is deleted.
    """
    run_id, stream = letter.run_id, letter.stream
    counts = redis_keys.entries_in_flight(run_id), redis_keys.dead_letter_counts(run_id)
    keys = (stream, *_kept(stream), *counts, redis_keys.run_spec(run_id))
    moved = client.eval(entries.REDRIVE, len(keys), *keys, letter.letter_id)
    if moved == -1:
        raise NotFound(f"there is no run {run_id}", code="unknown_run")
    if moved:
        log.info("dead letter redriven", stream=stream, letter=letter.letter_id, run=run_id)
    return bool(moved)


def drop(client: RedisClient, stream: str, letter_ids: Sequence[str]) -> int:
    """Forget letters; their run goes on counting them as lost. Returns how many were there."""
    kept = _kept(stream)
    return cast(int, client.eval(entries.DROP, len(kept), *kept, *letter_ids)) if letter_ids else 0


def drop_run(client: RedisClient, streams: Sequence[str], run_id: str) -> int:
    """Forget all letters of a run on streams that runs share."""
    return sum(drop(client, name, [letter.letter_id for letter in newest(client, name, run_id)]) for name in streams)


def _kept(stream: str) -> tuple[str, str, str]:
    payloads, totals = redis_keys.dead_letter_payloads(stream), redis_keys.dead_letter_totals(stream)
    return redis_keys.dead_letters(stream), payloads, totals


def _letter(stream: str, raw: StreamEntry) -> DeadLetter:
    letter_id, fields = raw
    return DeadLetter(
        letter_id.decode(),
        stream,
        fields.get(b"run", b"").decode(),
        fields[b"reason"].decode(errors="replace"),
        int(fields[b"deliveries"]),
        int(fields[b"at_unix_ms"]),
        int(fields.get(b"bytes", 0)),
    )


def show_none(stream: str) -> None:
    """Export the stream's count from 0 on: of one that appears with the first letter nobody sees an increase."""
    observability.DEAD_LETTERS.labels(stream=_label(stream))


def _label(stream: str) -> str:
    return stream.rsplit(":", 1)[-1]
