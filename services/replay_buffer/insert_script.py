"""The call of `lua/insert.lua`, which inserts trajectories into a run's ledger and indices in one atomic step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from services.replay_buffer import redis_keys as own_keys
from services.replay_buffer.admission import content_digest
from services.replay_buffer.windows import SOURCES, fact_of, source_name
from spo import redis_keys
from spo.errors import NotFound
from spo.messaging.redis_client import RedisClient, RedisScript
from spo.spec.job_spec import JobSpec
from spo.spec.reward import has_succeeded
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory

# A script holds up every other client while it runs.
CHUNK_TRAJECTORIES = 256
CHUNK_BYTES = 2 << 20
# What the script returns for a trajectory that it inserted; anything else is a duplicate.
INSERTED = 1
# Place among the script's keys, from 1, of the first source's set.
FIRST_SOURCE_KEY = 13


class InsertScript:
    """Inserts trajectories of one run, each at most once."""

    def __init__(self, client: RedisClient) -> None:
        self._script: RedisScript[list[int]] = client.register_script(
            (Path(__file__).parent / "lua" / "insert.lua").read_text()
        )

    def insert(
        self, run_id: str, spec: JobSpec, trajectories: Sequence[Trajectory], payloads: Sequence[bytes]
    ) -> list[int]:
        """Insert trajectories with their payloads; returns one result per trajectory, INSERTED for the new ones.

        Raises NotFound (unknown_run) when the run is deleted, and writes nothing then.
        """
        results: list[int] = []
        for chunk in chunks(payloads):
            arguments = _arguments(spec, trajectories[chunk], payloads[chunk])
            inserted = self._script(keys=_keys(run_id), args=[run_id, _lately(spec), *arguments])
            if not inserted:
                raise NotFound(f"there is no run {run_id}", code="unknown_run")
            results += inserted
        return results


def chunks(payloads: Sequence[bytes]) -> Iterator[slice]:
    """Consecutive slices, each of at most so many payloads and, unless a single one is larger, bytes."""
    start = held = 0
    for at, payload in enumerate(payloads):
        if at > start and (at - start >= CHUNK_TRAJECTORIES or held + len(payload) > CHUNK_BYTES):
            yield slice(start, at)
            start, held = at, 0
        held += len(payload)
    if payloads:
        yield slice(start, len(payloads))


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
        own_keys.replay_unstored(),
        own_keys.replay_untrimmed(),
        redis_keys.replay_outcomes(run_id),
        redis_keys.replay_unsolved(run_id),
        *(redis_keys.replay_source(run_id, source) for source in map(source_name, SOURCES)),
        redis_keys.run_spec(run_id),
    ]


def _arguments(spec: JobSpec, trajectories: Sequence[Trajectory], payloads: Sequence[bytes]) -> list[str | int | bytes]:
    arguments: list[str | int | bytes] = []
    for trajectory, payload in zip(trajectories, payloads, strict=True):
        arguments += [
            trajectory.trajectory_id,
            FIRST_SOURCE_KEY + SOURCES.index(trajectory.source),
            content_digest(trajectory),
            fact_of(spec, trajectory),
            payload,
            _outcome(spec, trajectory),
        ]
    return arguments


def _lately(spec: JobSpec) -> int:
    """Wrong rollouts in a row after which a prompt that was solved counts as unsolved; 0: it never does again."""
    return spec.rollout.samples_per_prompt if spec.rollout.unsolved == "lately" else 0


def _outcome(spec: JobSpec, trajectory: Trajectory) -> Literal["", "right", "wrong", "known"]:
    """What a trajectory says of its prompt, in runs that want to know."""
    if not spec.counts_outcomes:
        return ""
    right = has_succeeded(trajectory, spec.tasks.reward)
    if trajectory.source == SOURCE_ONLINE:
        return "right" if right else "wrong"
    return "known" if right and source_name(trajectory.source) in spec.replay.memory.also else ""
