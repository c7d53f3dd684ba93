"""The buffer in Redis: a ledger of everything acknowledged, with the indices that sampling and listing need.

Nothing is ever evicted: payloads outside the online window stay listed, and a repeated batch may still name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from services.replay_buffer.admission import check_judged, check_scored, content_digest
from services.replay_buffer.payloads import Payloads, chunks
from services.replay_buffer.sampling_index import SamplingIndex
from services.replay_buffer.windows import fact_of, read_fact
from spo import redis_keys
from spo.errors import IntegrityError, NotFound
from spo.messaging.run_specs import RunSpecs
from spo.observability import metrics
from spo.spec.job_spec import JobSpec
from spo.v1.prompt_pb2 import SOURCE_UNSPECIFIED, Source
from spo.v1.trajectory_pb2 import Trajectory

MIRRORED_RUNS = 32
SOURCE_CODES = tuple(code for code in Source.values() if code != SOURCE_UNSPECIFIED)


def source_name(source: Source.ValueType) -> str:
    """`online` for SOURCE_ONLINE: the names a JobSpec uses."""
    return Source.Name(source).removeprefix("SOURCE_").lower()


class ReplayStore:
    """All runs' experience on one Redis; safe to use from many threads and processes."""

    def __init__(self, client: redis.Redis, payload_memory_bytes: int = 256 << 20) -> None:
        self.client = client
        self.payloads = Payloads(client, payload_memory_bytes)
        self.specs = RunSpecs(client)
        self._indices: dict[str, SamplingIndex] = {}
        self._insert = client.register_script((Path(__file__).parent / "lua" / "insert.lua").read_text())

    def spec(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound for a run nobody started."""
        return self.specs.of(run_id)

    def index(self, run_id: str) -> SamplingIndex:
        """The mirror of the run's candidates; the one longest out of use is given up for a new one."""
        spec = self.spec(run_id)
        found = self._indices.pop(run_id, None) or SamplingIndex(self.client, run_id, spec)
        # setdefault: of two threads that made one, both must use the same.
        found = self._indices.setdefault(run_id, found)
        for oldest in list(self._indices)[:-MIRRORED_RUNS]:
            self._indices.pop(oldest, None)
        return found

    def append(self, run_id: str, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
        """Enter trajectories, each at most once by id (offline ones also by content); returns (inserted, duplicates).

        All or none are refused: raises InvalidInput when any is unusable, NotFound for an unknown run.
        """
        spec = self.spec(run_id)
        for trajectory in trajectories:
            check_judged(run_id, spec, trajectory)
            check_scored(spec, trajectory)
        return self.enter(run_id, trajectories)

    def enter(self, run_id: str, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
        """As append, of trajectories that passed both checks already."""
        spec = self.spec(run_id)
        if not trajectories:
            return 0, 0
        payloads = [trajectory.SerializeToString() for trajectory in trajectories]
        results: list[Any] = []
        for chunk in chunks(payloads):
            arguments = _arguments(spec, trajectories[chunk], payloads[chunk])
            results += self._insert(keys=_keys(run_id), args=[run_id, *arguments])
        for trajectory, payload, result in zip(trajectories, payloads, results, strict=True):
            if result == 1:
                self.payloads.remember(run_id, trajectory.trajectory_id, payload)
        inserted = results.count(1)
        metrics.REPLAY_INSERTS.labels(result="inserted").inc(inserted)
        metrics.REPLAY_INSERTS.labels(result="duplicate").inc(len(results) - inserted)
        return inserted, len(results) - inserted

    def duplicates(self, run_id: str) -> int:
        """Acknowledged offline trajectories whose content was there before."""
        return int(self.client.hlen(redis_keys.replay_duplicates(run_id)))

    def prompts_of(self, run_id: str, trajectory_ids: Sequence[str]) -> list[str]:
        """The prompts of acknowledged trajectories. Raises IntegrityError when one is not in the ledger."""
        facts: Any = self.client.hmget(redis_keys.replay_facts(run_id), list(trajectory_ids))
        gone = [each for each, fact in zip(trajectory_ids, facts, strict=True) if fact is None]
        if gone:
            raise IntegrityError(f"run {run_id}: trajectory {gone[0]} is gone from the buffer")
        return [read_fact("", fact.decode())[0].prompt_id for fact in facts]

    def copies(self, run_id: str, trajectory_id: str) -> int:
        """Acknowledged trajectories with the same content, for which this one stands."""
        found: Any = self.client.hget(redis_keys.replay_copies(run_id), trajectory_id)
        return int(found or 0)

    def get(self, run_id: str, trajectory_ids: Sequence[str]) -> list[Trajectory | None]:
        """Trajectories by id, None where absent."""
        payloads = self.payloads.get(run_id, trajectory_ids)
        return [Trajectory.FromString(payload) if payload else None for payload in payloads]

    def one(self, run_id: str, trajectory_id: str) -> Trajectory:
        """A trajectory by id; a duplicate is answered by the one that stands for it. Raises NotFound."""
        stands: Any = self.client.hget(redis_keys.replay_duplicates(run_id), trajectory_id)
        (found,) = self.get(run_id, [stands.decode() if stands else trajectory_id])
        if found is None:
            raise NotFound(f"run {run_id} has no trajectory {trajectory_id}")
        return found

    def newest_first(self, run_id: str, prompt_id: str, after: str, count: int) -> tuple[list[Trajectory], str]:
        """A page of the ledger, newest first; `after` is the cursor of the page before ('' starts).

        prompt_id '' means all prompts.
        """
        page = self._of_prompt(run_id, prompt_id, after, count) if prompt_id else self._of_all(run_id, after, count)
        found = self.get(run_id, [trajectory_id for trajectory_id, _ in page])
        cursor = str(page[-1][1]) if len(page) == count else ""
        return [each for each in found if each is not None], cursor

    def note_policy_version(self, run_id: str, policy_version: int) -> None:
        """Remember the newest version a trainer has named: what is too stale for it is no supply for the limiter."""
        self.client.hset(redis_keys.replay_counters(run_id), "policy_version", policy_version)

    def _of_all(self, run_id: str, after: str, count: int) -> list[tuple[str, int]]:
        highest = f"({int(after)}" if after else "+inf"
        page: Any = self.client.zrevrangebyscore(
            redis_keys.replay_ids(run_id), highest, "-inf", start=0, num=count, withscores=True
        )
        return [(trajectory_id.decode(), int(number)) for trajectory_id, number in page]

    def _of_prompt(self, run_id: str, prompt_id: str, after: str, count: int) -> list[tuple[str, int]]:
        # ';' follows ':' and bounds the prompt's members; the number in them is padded, so bytes order as numbers.
        highest = f"({prompt_id}:{int(after):016d}:" if after else f"({prompt_id};"
        page: Any = self.client.zrevrangebylex(
            redis_keys.replay_prompts(run_id), highest, f"[{prompt_id}:", start=0, num=count
        )
        members = (member.decode().rsplit(":", 2) for member in page)
        return [(trajectory_id, int(number)) for _, number, trajectory_id in members]


def _keys(run_id: str) -> list[str]:
    return [
        redis_keys.replay_ids(run_id),
        redis_keys.replay_duplicates(run_id),
        redis_keys.replay_content(run_id),
        redis_keys.replay_facts(run_id),
        redis_keys.replay_prompts(run_id),
        redis_keys.replay_counters(run_id),
        redis_keys.replay_copies(run_id),
        redis_keys.replay_trajectory(run_id, ""),
        redis_keys.replay_unstored(),
        *(redis_keys.replay_source(run_id, source) for source in map(source_name, SOURCE_CODES)),
    ]


def _arguments(spec: JobSpec, trajectories: Sequence[Trajectory], payloads: Sequence[bytes]) -> list[str | int | bytes]:
    arguments: list[str | int | bytes] = []
    for trajectory, payload in zip(trajectories, payloads, strict=True):
        arguments += [
            trajectory.trajectory_id,
            10 + SOURCE_CODES.index(trajectory.source),
            content_digest(trajectory),
            fact_of(spec, trajectory),
            payload,
        ]
    return arguments
