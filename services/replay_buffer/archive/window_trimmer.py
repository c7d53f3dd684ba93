"""Takes out of Redis what no batch will ever hold again: a run's memory ends at its window.

A trajectory of a live source leaves when all of this holds: it is older than the window; the experience store has it
(where experience is stored at all); no batch that a trainer may ask for again names it; no run that follows would still
take it. Offline trajectories are bounded by the prompts and stay. Of batches those stay that a trainer may ask for
again, that count for `max_times_sampled`, and the newest BATCHES_KEPT for people. Ids stay in the ledger for another
`ledger_trajectories` inserts, so that a late redelivery is recognised.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from services.replay_buffer import redis_keys as own_keys
from services.replay_buffer.archive.batch_records import BatchRecords
from services.replay_buffer.archive.following_runs import FollowingRun, runs_following
from services.replay_buffer.sampler import BatchSampler
from services.replay_buffer.settings import Settings
from services.replay_buffer.windows import read_fact
from spo import redis_keys
from spo.messaging.redis_client import RedisScript
from spo.messaging.run_status import run_state
from spo.observability.logs import get_logger
from spo.spec.job_state import TERMINAL
from spo.spec.section import LIVE_SOURCES

log = get_logger("window_trimmer")

POLL_SECONDS = 1.0
# A pass begins when this part of a window has come in, or so many trajectories, or after so long.
PASS_SHARE = 1 / 8
PASS_TRAJECTORIES = 2048
PASS_SECONDS = 30.0
IDS_PER_READ = 1000
IDS_PER_CALL = 128
IDS_FORGOTTEN_PER_CALL = 1000


@dataclass(frozen=True)
class RunFacts:
    """Where a run stands: last insertion number, last one in the experience store, what a trainer may resume from."""

    number: int
    stored: int
    has_ended: bool
    resumed_step: int
    resumed_version: int


class WindowTrimmer:
    """Trims every run that gets trajectories, some time after they came; several may work at once."""

    def __init__(self, sampler: BatchSampler, settings: Settings) -> None:
        self.sampler = sampler
        self.store = sampler.store
        self.client = sampler.store.client
        self.settings = settings
        # Per run: when it was looked at last, how far the ledger was then, since when it has ended.
        self._looked: dict[str, tuple[float, int]] = {}
        self._ended: dict[str, float] = {}
        here = Path(__file__).parent.parent / "lua"
        self._trim: RedisScript[int] = self.client.register_script((here / "trim.lua").read_text())
        self._remember: RedisScript[int] = self.client.register_script((here / "remember.lua").read_text())
        self._forget: RedisScript[int] = self.client.register_script((here / "forget.lua").read_text())
        self._note_equal: RedisScript[int] = self.client.register_script((here / "note_equal.lua").read_text())

    def run(self, stop: threading.Event) -> None:
        """Trim until stop is set; a run that fails is tried again and delays no other."""
        while not stop.wait(POLL_SECONDS):
            try:
                runs = self.client.smembers(own_keys.replay_untrimmed())
            except redis.RedisError as error:
                log.warning("Redis does not answer; trying again", reason=str(error))
                continue
            for run_id in map(bytes.decode, runs):
                try:
                    self.trim_when_due(run_id)
                except Exception as error:
                    # Whatever it was, nothing is lost by what stays.
                    log.warning("a run keeps what it might let go of; trying again", run=run_id, reason=str(error))

    def trim_when_due(self, run_id: str) -> int:
        """Trim a run if enough has come since the last time; returns how many trajectories left Redis."""
        if not self.client.exists(redis_keys.run_spec(run_id)):
            # Deleted: the orchestrator removes its keys.
            self._let_go(run_id)
            return 0
        spec = self.store.spec(run_id)
        facts = self._facts(run_id)
        looked_at, number = self._looked.get(run_id, (float("-inf"), 0))
        enough = min(PASS_TRAJECTORIES, max(1, int(spec.replay.online_capacity * PASS_SHARE)))
        if facts.number - number < enough and time.monotonic() - looked_at < PASS_SECONDS:
            return 0
        self._looked[run_id] = time.monotonic(), facts.number
        trimmed = self.trim(run_id, facts)
        left = (chunk for source in (*LIVE_SOURCES, "memory") for chunk in self._below(run_id, source, facts))
        if self._is_over(run_id, facts) and not any(left):
            self._let_go(run_id)
        return trimmed

    def trim(self, run_id: str, facts: RunFacts | None = None) -> int:
        """Take out all that may leave now; returns how many trajectories left Redis."""
        facts = facts or self._facts(run_id)
        batches = BatchRecords(self.client, run_id)
        followers = runs_following(self.store, run_id)
        trimmed = 0
        members = self._members(run_id, facts)
        for source in (*sorted(LIVE_SOURCES), "memory"):
            for chunk in self._below(run_id, source, facts):
                leaving = [pair for pair in chunk if pair[0] not in members]
                if len(leaving) < len(chunk) and source != "memory":
                    self._move_to_memory(run_id, source, [pair for pair in chunk if pair[0] in members])
                trimmed += self._take_out(run_id, source, leaving, facts, batches, followers)
        times_count = self.store.spec(run_id).replay.max_times_sampled is not None
        batches.forget(facts.resumed_step, keep_named=times_count)
        self._forget_ids(run_id, facts)
        if trimmed:
            log.debug("trajectories left Redis", run=run_id, trajectories=trimmed)
        return trimmed

    def _below(self, run_id: str, source: str, facts: RunFacts) -> Iterator[list[tuple[str, int]]]:
        """Chunks of (id, insertion number) below the window of a source and in the experience store."""
        index = self.sampler.index(run_id)
        kept: set[str] = set()
        if self._is_over(run_id, facts) or source == "memory":
            # What is in memory's set has left its window already.
            start = facts.number + 1
        else:
            with index.lock:
                index.refresh([source])
                start = index.window_start(source, facts.resumed_version)
                kept = index.groups_in_window(source)
                counted = index.read_to(source), index.without_contrast(source)
            if index.rule(source).contrast_only:
                # Who reads the ledger after this no longer meets them all.
                self._note_equal(keys=[redis_keys.replay_counters(run_id)], args=counted)
        last = min(start - 1, facts.stored if self.settings.store_experience else facts.number)
        after = 0
        while after < last:
            found = self.client.zrangebyscore(
                redis_keys.replay_source(run_id, source), f"({after}", last, start=0, num=IDS_PER_READ, withscores=True
            )
            if not found:
                return
            numbered = [(trajectory_id.decode(), int(number)) for trajectory_id, number in found]
            leaving = [pair for pair in numbered if pair[0] not in kept]
            if leaving:
                yield leaving
            after = numbered[-1][1]

    def _members(self, run_id: str, facts: RunFacts) -> set[str]:
        """Ids of what memory holds. What is no member now never becomes one: only newer answers do."""
        spec = self.store.spec(run_id)
        if not spec.replay.remembers or self._is_over(run_id, facts):
            return set()
        index = self.sampler.index(run_id)
        with index.lock:
            index.refresh(["memory"])
            return index.memory.members()

    def _move_to_memory(self, run_id: str, source: str, chunk: Sequence[tuple[str, int]]) -> None:
        keys = [redis_keys.replay_facts(run_id), *(redis_keys.replay_source(run_id, s) for s in (source, "memory"))]
        for start in range(0, len(chunk), IDS_PER_CALL):
            self._remember(keys=keys, args=[word for pair in chunk[start : start + IDS_PER_CALL] for word in pair])

    def _take_out(
        self,
        run_id: str,
        source: str,
        chunk: Sequence[tuple[str, int]],
        facts: RunFacts,
        batches: BatchRecords,
        followers: Sequence[FollowingRun],
    ) -> int:
        if followers and source == "online":
            chunk = self._unwanted(run_id, chunk, followers)
        trimmed = 0
        for start in range(0, len(chunk), IDS_PER_CALL):
            while True:
                # Nobody resumes an ended job.
                named = batches.named_after(facts.resumed_step) if not facts.has_ended else frozenset[str]()
                drawn = batches.drawn
                going = [pair for pair in chunk[start : start + IDS_PER_CALL] if pair[0] not in named]
                arguments = [word for pair in going for word in pair]
                result = self._trim(keys=_trim_keys(run_id, source), args=[drawn, *arguments]) if going else 0
                if result >= 0:
                    break
                batches.refresh()
            trimmed += result
        return trimmed

    def _unwanted(
        self, run_id: str, chunk: Sequence[tuple[str, int]], followers: Sequence[FollowingRun]
    ) -> list[tuple[str, int]]:
        found = self.client.hmget(redis_keys.replay_facts(run_id), [trajectory_id for trajectory_id, _ in chunk])
        versions = [read_fact("", fact.decode())[0].version if fact else 0 for fact in found]
        return [
            pair
            for pair, version in zip(chunk, versions, strict=True)
            if not any(follower.would_take(pair[1], version) for follower in followers)
        ]

    def _forget_ids(self, run_id: str, facts: RunFacts) -> None:
        last = facts.number - (0 if self._is_over(run_id, facts) else self.settings.ledger_trajectories)
        keys = [redis_keys.replay_ids(run_id), redis_keys.replay_facts(run_id), redis_keys.replay_counters(run_id)]
        while last > 0 and self._forget(keys=keys, args=[last, IDS_FORGOTTEN_PER_CALL]) == IDS_FORGOTTEN_PER_CALL:
            pass

    def _facts(self, run_id: str) -> RunFacts:
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hget(redis_keys.replay_counters(run_id), "number")
            pipe.hget(redis_keys.replay_stored(run_id), "written")
            pipe.hgetall(redis_keys.job_checkpoints(run_id))
            number, stored, checkpoints = pipe.execute()
        kept = [json.loads(record) for record in checkpoints.values()]
        return RunFacts(
            int(number or 0),
            int(stored or 0),
            run_state(self.client, run_id) in TERMINAL,
            min((int(record["step"]) for record in kept), default=0),
            min((int(record.get("weight_version", 0)) for record in kept), default=0),
        )

    def _is_over(self, run_id: str, facts: RunFacts) -> bool:
        """Whether an ended run needs no window: all is stored, nothing of it is under way, people had time to look."""
        if not (facts.has_ended and self.settings.store_experience and facts.stored >= facts.number):
            self._ended.pop(run_id, None)
            return False
        since = self._ended.setdefault(run_id, time.monotonic())
        return (
            time.monotonic() - since >= self.settings.ended_seconds
            and not self.client.hlen(redis_keys.entries_in_flight(run_id))
            and not self.client.xlen(redis_keys.prompts(run_id))
        )

    def _let_go(self, run_id: str) -> None:
        self.client.srem(own_keys.replay_untrimmed(), run_id)
        self._looked.pop(run_id, None)
        self._ended.pop(run_id, None)


def _trim_keys(run_id: str, source: str) -> list[str]:
    return [
        redis_keys.replay_ids(run_id),
        redis_keys.replay_facts(run_id),
        redis_keys.replay_prompts(run_id),
        redis_keys.replay_counters(run_id),
        redis_keys.replay_source(run_id, source),
        redis_keys.replay_trajectory(run_id, ""),
    ]
